//! The kernels on Vulkan in software: the host's layer, bit by bit. `./test` installs the device.
#![cfg(feature = "wgpu")]
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../../redsync-engine/tests/offload/pair.rs"]
mod pair;

use pair::{Bench, Far, config, event, noise, run, run_large};
use proptest::prelude::*;
use redsync_core::{Config, Momentum, Phase, Sparse, Values, Workspace, bf16, f16};
use redsync_engine::offload::{Digit, Edge, Found, Kernels, Offloaded, Seek};
use redsync_engine::{LayerCompressor, Source, Target, Update};
use redsync_gpu::{Gpu, GpuGradient, GpuLayer, GpuWeights};
use std::sync::LazyLock;

#[derive(Clone)]
struct Software(Gpu);

impl Software {
    fn open() -> Self {
        static OPENED: LazyLock<Software> =
            LazyLock::new(|| Software(Gpu::open("software").expect("mesa-vulkan-drivers is installed")));
        OPENED.clone()
    }
}

impl Bench for Software {
    type Layer = GpuLayer;

    fn layer(&self, n: usize) -> GpuLayer {
        GpuLayer::new(&self.0, n).unwrap()
    }

    fn source(&self, gradient: &Far) -> Box<dyn Source> {
        Box::new(GpuGradient::upload(&self.0, gradient.values()))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_layer_on_vulkan_is_the_hosts_layer(
        (n, events) in prop_oneof![3 => 0usize..40, 2 => 40usize..3000].prop_flat_map(|n| {
            (Just(n), proptest::collection::vec(event(n), 1..16))
        }),
        config in config(),
        room in prop_oneof![Just(None), Just(Some(0)), Just(Some(3))],
    ) {
        run(&Software::open(), n, config, room, events);
    }
}

#[test]
fn a_large_layer_is_the_hosts_layer_too_and_refuses_as_it_does() {
    run_large(&Software::open());
}

#[test]
fn a_gradient_that_is_no_whole_number_of_vectors_is_read_by_elements() {
    let bench = Software::open();
    let n = 1003;
    let mut layer = bench.layer(n);
    let padded = GpuGradient::upload(&bench.0, noise(n, 1)[..].into());
    let gradient = GpuGradient::new(padded.buffer().clone(), n);
    let pass =
        redsync_engine::offload::Pass { momentum: Momentum::None, scale: 0.5, carry: 1.0, save: false };
    let mut found = Found::default();
    assert!(layer.accumulate(&gradient, &pass, None, &mut found).unwrap());
    let expected: Vec<f32> = noise(n, 1).iter().map(|x| x * 0.5).collect();
    assert_eq!(layer.read_v().unwrap(), expected);
}

#[test]
fn every_half_is_widened_in_the_pass_as_on_the_host() {
    let bench = Software::open();
    let pass =
        redsync_engine::offload::Pass { momentum: Momentum::None, scale: 1.0, carry: 1.0, save: false };
    // By vectors, and by elements.
    for n in [65_536usize, 65_535] {
        let halves: Vec<u16> = (0..n).map(|half| half as u16).collect();
        let here: [Vec<f32>; 2] = [
            halves.iter().map(|half| f16::from_bits(*half).to_f32()).collect(),
            halves.iter().map(|half| bf16::from_bits(*half).to_f32()).collect(),
        ];
        let there = [
            Far::F16(halves.iter().map(|half| f16::from_bits(*half)).collect()),
            Far::Bf16(halves.iter().map(|half| bf16::from_bits(*half)).collect()),
        ];
        for (here, there) in here.iter().zip(&there) {
            let (mut layer, mut found) = (bench.layer(n), Found::default());
            let finite = layer.accumulate(&*bench.source(there), &pass, None, &mut found).unwrap();
            assert!(!finite, "infinities are among them");
            for (half, (got, expected)) in layer.read_v().unwrap().iter().zip(here).enumerate() {
                let same = (0.0 + expected).to_bits() == got.to_bits() || (got.is_nan() && expected.is_nan());
                assert!(same, "{half:04x} of {n}: {got}, {expected}");
            }
            let read = layer.gradient(&*bench.source(there)).unwrap();
            assert!(read.iter().zip(here).all(|(got, x)| got.to_bits() == x.to_bits()));
        }
    }
}

#[test]
fn weights_on_the_device_take_updates_as_those_of_the_host() {
    let bench = Software::open();
    let mut workspace = Workspace::new(1);
    for n in [1usize, 1003, 4096] {
        let before = noise(n, 1);
        // Ranks that mean the same elements, some of them all: every addition is rounded on its own.
        let message = |rank: usize| {
            let indices: Vec<u32> = (0..n as u32).filter(|i| i.is_multiple_of(rank as u32 + 2)).collect();
            let values = noise(indices.len(), 7 + rank as u64);
            Sparse::from_parts(n as u32, indices, values).unwrap()
        };
        let (messages, dense): (Vec<Sparse>, _) = ((0..5).map(message).collect(), noise(n, 99));
        for update in [Update::Sparse(&messages), Update::Sparse(&[]), Update::Dense(&dense)] {
            let mut here = before.clone();
            let mut there = GpuWeights::upload(&bench.0, &before);
            let shared = GpuWeights::new(&bench.0, there.buffer().clone(), n).unwrap();
            let apart = shared.copied();
            here.iter_mut().for_each(|w| *w *= 0.99);
            there.scale(0.99);
            Target::add(&mut &mut here[..], update, -0.1, &mut workspace).unwrap();
            there.add(update, -0.1, &mut workspace).unwrap();
            assert_eq!(there.read().unwrap(), here);
            assert_eq!(shared.read().unwrap(), here, "the buffer itself has changed");
            assert_eq!(apart.read().unwrap(), before, "a copy has not");
            Target::fill(&mut &mut here[..], update, 0.7, &mut workspace).unwrap();
            there.fill(update, 0.7, &mut workspace).unwrap();
            assert_eq!(there.read().unwrap(), here);
        }
        let mut zeros = GpuWeights::zeros(&bench.0, n);
        assert_eq!(zeros.read().unwrap(), vec![0.0; n]);
        let other = Sparse::from_parts(n as u32 + 1, vec![n as u32], vec![1.0]).unwrap();
        let refused = zeros.add(Update::Sparse(&[other]), 1.0, &mut workspace).unwrap_err().to_string();
        let expected =
            format!("the message of rank 0 is of a layer with {} elements, the target has {n}", n + 1);
        assert_eq!(refused, expected);
    }
}

#[test]
fn weights_made_by_another_thread_are_changed_for_it() {
    let bench = Software::open();
    let n = 20_000;
    let message = [Sparse::from_parts(n as u32, vec![3, 19_999], vec![1.0, 1.0]).unwrap()];
    for _ in 0..50 {
        let weights = GpuWeights::upload(&Gpu::on(bench.0.client().clone()), &vec![0.0; n]);
        let mut theirs = GpuWeights::new(&bench.0, weights.buffer().clone(), n).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut workspace = Workspace::new(1);
                (0..4).for_each(|_| theirs.add(Update::Sparse(&message), 0.5, &mut workspace).unwrap());
            });
        });
        // A kernel of this thread reads them, not only a copy to the host.
        let read = weights.copied().read().unwrap();
        assert!(read.iter().enumerate().all(|(i, x)| *x == if i == 3 || i == 19_999 { 2.0 } else { 0.0 }));
    }
}

#[test]
fn several_thresholds_are_counted_in_one_pass_and_edges_are_those_of_a_histogram() {
    let bench = Software::open();
    let n = 100_003;
    let mut layer = bench.layer(n);
    let v = noise(n, 7);
    layer.write(None, Some(&v)).unwrap();
    let thresholds = [0.0, 0.125, 0.5, 0.75, 0.99];
    for phase in [Phase::Both, Phase::Positive, Phase::Negative] {
        let seen: Vec<f32> = v.iter().map(|x| phase.lens().see(*x)).collect();
        let expected: Vec<usize> =
            thresholds.iter().map(|t| seen.iter().filter(|x| *x > t).count()).collect();
        assert_eq!(layer.count_above(phase, &thresholds).unwrap(), expected);
        for (keep, digit) in
            [1, 2, 700, expected[0], n + 1].into_iter().flat_map(|k| [(k, 0), (k, 1), (k, 2)])
        {
            // Of 0.5, where there are some; few have its second digit too.
            let (digit, prefix) = (Digit::ALL[digit], [0, 0x3f0, 0x3f0 << 11][digit]);
            let above = keep / 3;
            let (mut bins, mask) = (vec![0; 1 << digit.bits], (1 << digit.bits) - 1);
            for x in seen.iter().filter(|x| **x > 0.0).map(|x| x.to_bits()) {
                if x >> (digit.shift + digit.bits) == prefix {
                    bins[(x >> digit.shift) as usize & mask] += 1;
                }
            }
            assert!(bins.iter().any(|count| *count > 0) || digit.bits == 9);
            let edge = layer.edge(phase, digit, prefix, above, keep).unwrap();
            assert_eq!(edge, Edge::find(&bins, above, keep), "{phase:?}, {digit:?}, {keep}");
        }
        let mut found = Found::default();
        layer.collect(Seek { phase, floor: 0.75, capacity: n, enough: 0 }, &mut found).unwrap();
        assert_eq!((found.count, found.elements.len()), (expected[3], expected[3]));
    }
}

#[test]
fn in_the_usual_step_twelve_bytes_per_sent_element_cross() {
    // The same device, with counters of its own.
    let bench = Software(Gpu::on(Software::open().0.client().clone()));
    let n = 200_000;
    let config = Config { values: Values::Asq, momentum: Momentum::Nesterov(0.9), ..Config::default() };
    let config = Config { density: redsync_core::Density::new(0.005).unwrap(), ..config };
    let mut layer = Offloaded::new(0, "layer", n, config, bench.layer(n)).unwrap();
    let (mut workspace, mut message) = (Workspace::new(1), Sparse::new());
    let (mut bytes, mut elements) = (0, 0);
    for step in 0..64 {
        let gradient = bench.source(&Far::F32(noise(n, step)));
        bench.0.take_traffic();
        layer.accumulate(step, &*gradient, 1.0, &mut workspace).unwrap();
        layer.select(step, &mut message, &mut workspace).unwrap();
        if step >= 40 {
            (bytes, elements) = (bytes + bench.0.take_traffic().copied, elements + message.len() as u64);
        }
    }
    assert!(bytes <= 12 * elements, "{bytes} bytes for {elements} elements");
}

#[test]
fn work_keeps_its_order_whichever_thread_it_comes_from() {
    let bench = Software::open();
    let n = 50_000;
    let mut layer = bench.layer(n);
    for round in 0..50 {
        let values = vec![round as f32; n];
        layer = std::thread::spawn(move || {
            layer.write(None, Some(&values)).unwrap();
            layer.add(&[3], &[0.5]).unwrap();
            layer
        })
        .join()
        .unwrap();
        let v = layer.read_v().unwrap();
        assert!(v.iter().enumerate().all(|(i, x)| *x == round as f32 + if i == 3 { 0.5 } else { 0.0 }));
    }
}

#[test]
fn what_does_not_fit_and_what_there_is_not_is_told() {
    let bench = Software::open();
    let refused = GpuLayer::new(&bench.0, bench.0.capacity() + 1).err().unwrap().to_string();
    assert!(refused.contains("do not fit in one buffer of"), "{refused}");
    let unknown = Gpu::open("abacus").err().unwrap().to_string();
    assert_eq!(unknown, "there is no device abacus; there are wgpu, software, cuda, hip");
}

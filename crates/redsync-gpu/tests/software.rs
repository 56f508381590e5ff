//! The kernels on Vulkan in software: the host's layer, bit by bit. `./test` installs the device.
#![cfg(feature = "wgpu")]
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../../redsync-engine/tests/offload/pair.rs"]
mod pair;

use pair::{Bench, Far, config, event, noise, run, run_large};
use proptest::prelude::*;
use redsync_core::{Config, Momentum, Phase, Sparse, Values, Workspace};
use redsync_engine::offload::{Digit, Found, Kernels, Offloaded, Seek};
use redsync_engine::{LayerCompressor, Source};
use redsync_gpu::{Gpu, GpuGradient, GpuLayer};
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
fn several_thresholds_are_counted_in_one_pass_and_histograms_agree() {
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
        let bins = layer.histogram(phase, Digit::ALL[0], 0).unwrap();
        assert_eq!(bins.iter().map(|count| *count as usize).sum::<usize>(), expected[0]);
        let mut found = Found::default();
        layer.collect(Seek { phase, floor: 0.75, capacity: n }, &mut found).unwrap();
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

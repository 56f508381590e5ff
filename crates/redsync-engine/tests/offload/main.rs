//! A layer on a device is the host's layer: messages, u, v and what the selector remembers, bit by bit, whatever happens to it.

#![allow(missing_docs, clippy::unwrap_used)]

mod pair;
mod plain;

use pair::{Bench, Far, Pair, config, event, noise, run, run_large};
use plain::Plain;
use proptest::prelude::*;
use redsync_core::{
    Adam, Compressor, Config, ConfigError, Density, Momentum, Selector, Sending, Sparse, Values, Workspace,
};
use redsync_engine::offload::Offloaded;
use redsync_engine::{LayerCompressor, Source};

/// The plain kernels, which read gradients that are not of the host.
struct Reference;

impl Bench for Reference {
    type Layer = Plain;

    fn layer(&self, n: usize) -> Plain {
        Plain::new(n)
    }

    fn source(&self, gradient: &Far) -> Box<dyn Source> {
        Box::new(gradient.clone())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_layer_on_a_device_is_the_hosts_layer(
        (n, events) in prop_oneof![3 => 0usize..40, 2 => 40usize..3000].prop_flat_map(|n| {
            (Just(n), proptest::collection::vec(event(n), 1..16))
        }),
        config in config(),
        room in prop_oneof![Just(None), Just(Some(0)), Just(Some(3))],
    ) {
        run(&Reference, n, config, room, events);
    }
}

#[test]
fn a_large_layer_is_the_hosts_layer_too_and_refuses_as_it_does() {
    run_large(&Reference);
}

/// Their sum is more than an f32 holds, so the mean from which some selectors start.
#[test]
fn elements_of_any_magnitude_are_searched_by_a_number() {
    let gradient = Far::F32(noise(3000, 1).iter().map(|x| x.signum() * 3e38).collect());
    let selectors = [Selector::Exact, Selector::Trimmed, Selector::Threshold, Selector::Carried];
    let each = selectors.iter().flat_map(|selector| [(*selector, Values::F32), (*selector, Values::Asq)]);
    for (selector, values) in each.chain([(Selector::Sampled, Values::F32)]) {
        let config = Config { selector, values, ..Config::default() };
        let mut pair = Pair::new(&Reference, 3000, config, None);
        assert!(pair.accumulate(&gradient, 1.0));
        pair.select();
        pair.check();
    }
}

/// Bytes per sent element, on average over steps in which no pass but the accumulating one was needed.
fn bytes_per_element(n: usize, values: Values, steps: std::ops::Range<u64>) -> f64 {
    let config = Config { values, momentum: Momentum::Nesterov(0.9), ..Config::default() };
    let mut device = Offloaded::new(0, "layer", n, config, Plain::new(n)).unwrap();
    let (mut workspace, mut message) = (Workspace::new(1), Sparse::new());
    let (mut bytes, mut elements) = (0, 0);
    for step in 0..steps.end {
        let gradient = Far::F32(noise(n, step));
        device.accumulate(step, &gradient, 1.0, &mut workspace).unwrap();
        device.select(step, &mut message, &mut workspace).unwrap();
        let (copied, passes) = (device.kernels().copied.take(), device.kernels().passes.take());
        if steps.contains(&step) {
            assert_eq!(passes, 0, "{values:?}");
            (bytes, elements) = (bytes + copied, elements + message.len());
        }
    }
    bytes as f64 / elements as f64
}

#[test]
fn in_the_usual_step_twelve_bytes_per_sent_element_cross() {
    for values in [Values::F32, Values::Asq, Values::Bf16, Values::TwoBit, Values::EightBit] {
        let crossed = bytes_per_element(1_000_000, values, 60..72);
        // The 255 values of eight bits weigh with so few elements.
        let bound = if values == Values::EightBit { 13.0 } else { 12.0 };
        assert!(crossed <= bound, "{values:?}: {crossed}");
    }
}

/// A warm-up changes the density by four at once.
#[test]
fn a_jump_of_the_threshold_costs_one_look_through_the_layer_and_not_one_for_each_of_many_steps() {
    let n = 200_000;
    let config = Config { density: Density::new(0.016).unwrap(), ..Config::default() };
    let mut device = Offloaded::new(0, "layer", n, config, Plain::new(n)).unwrap();
    let (mut workspace, mut message) = (Workspace::new(1), Sparse::new());
    let mut looked = Vec::new();
    for step in 0..120 {
        if step == 60 || step == 90 {
            let density = Density::new(if step == 60 { 0.001 } else { 0.016 }).unwrap();
            device.set_sending(Sending { density, values: config.values, masking: config.masking });
        }
        device.accumulate(step, &Far::F32(noise(n, step)), 1.0, &mut workspace).unwrap();
        device.select(step, &mut message, &mut workspace).unwrap();
        looked.push(device.kernels().passes.take() > 0);
    }
    let times = |steps: std::ops::Range<usize>| looked[steps].iter().filter(|looked| **looked).count();
    assert!(times(60..90) <= 2 && times(90..120) <= 2, "{:?}, {:?}", &looked[60..90], &looked[90..120]);
}

#[test]
fn a_source_of_the_host_serves_as_well() {
    let config = Config::default();
    let mut device = Offloaded::new(0, "layer", 500, config, Plain::new(500)).unwrap();
    let mut host = Compressor::new(0, "layer", 500, config).unwrap();
    let mut workspace = Workspace::new(1);
    let gradient = noise(500, 3);
    device.accumulate(0, &gradient, 1.0, &mut workspace).unwrap();
    LayerCompressor::accumulate(&mut host, 0, &gradient, 1.0, &mut workspace).unwrap();
    assert_eq!(device.save().unwrap().v, host.save().unwrap().v);
    let short: &dyn Source = &vec![1f32; 499];
    let refused = device.accumulate(1, short, 1.0, &mut workspace).unwrap_err().to_string();
    assert_eq!(refused, "layer layer, step 1: the gradient has 499 elements, the layer has 500");
}

#[test]
fn adam_is_refused_in_words() {
    let config = Config { momentum: Momentum::Adam(Adam::default()), ..Config::default() };
    let refused = Offloaded::new(0, "layer", 5, config, Plain::new(5)).err().unwrap();
    assert_eq!(refused, ConfigError::AdamElsewhere);
    let words = "Adam's residual is kept on the host only: choose momentum, or keep the layers on the host";
    assert_eq!(refused.to_string(), words);
}

//! Ruling 16 and bad input in general: an exact error, and the state as it was.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{density, send};
use proptest::prelude::*;
use redsync_core::{
    Adam, Bad, Compressor, Config, ConfigError, FrameWriter, Gradient, LayerError, Memory, Momentum,
    Remembered, Sparse, Unfit, Workspace, apply,
};

fn state(layer: &Compressor) -> ([Vec<u32>; 3], Memory, u64) {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    let second = layer.residual().second();
    let (own, steps) = second.map_or((&[][..], 0), |second| (second.own, second.steps));
    ([layer.residual().u(), layer.residual().v(), own].map(bits), layer.memory(), steps)
}

fn layer(n: usize, momentum: Momentum, undo: bool) -> Compressor {
    let config = Config { momentum, undo, density: density(0.1), ..Config::default() };
    let mut layer = Compressor::new(7, "conv3.weight", n, config).unwrap();
    let mut workspace = Workspace::new(1);
    for step in 0..3u64 {
        let g: Vec<f32> =
            (0..n).map(|i| ((i as u64 * 7919 + step * 31) % 1009) as f32 * 1e-3 - 0.5).collect();
        send(&mut layer, step, &g, 0.25, &mut workspace);
    }
    layer
}

const ADAM: Momentum = Momentum::Adam(Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 });
const MOMENTA: [Momentum; 4] = [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9), ADAM];

proptest! {
    #[test]
    fn a_gradient_that_is_not_finite_is_named_and_changes_nothing(
        n in prop_oneof![4 => 1usize..9000, 1 => 32_000usize..34_000], at: prop::sample::Index, undo: bool, which in 0..MOMENTA.len(),
        bad in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
    ) {
        let mut layer = layer(n, MOMENTA[which], undo);
        let before = state(&layer);
        let mut g = vec![0.1f32; n];
        let index = at.index(n);
        g[index] = bad;
        let mut frame = FrameWriter::new();
        frame.begin(9, 0, 0);
        let length = frame.len();
        let error = layer.compress(9, Gradient::F32(&g), 0.25, &mut Workspace::new(1), &mut frame).unwrap_err();
        prop_assert_eq!(&error.layer, "conv3.weight");
        prop_assert_eq!(error.step, 9);
        let right = matches!(error.why, Bad::NotFinite { index: i, value } if i == index && value.to_bits() == bad.to_bits());
        prop_assert!(right, "{}", error);
        prop_assert_eq!(state(&layer), before);
        prop_assert_eq!((frame.len(), frame.messages()), (length, 0));
    }
}

/// Too large to be looked at first: exact with `undo`, else subtracted again.
#[test]
fn a_large_layer_is_restored() {
    let n = 600_000;
    for momentum in MOMENTA {
        // What others told of their second moments counts in what is subtracted.
        let told = matches!(momentum, Momentum::Adam(_));
        for (undo, threads, told) in
            [(true, 1, false), (false, 1, false), (true, 2, false), (false, 2, false), (false, 2, told)]
        {
            let mut layer = layer(n, momentum, undo);
            if told {
                layer.give_second(0, &vec![0.01; n]).unwrap();
            }
            let before = state(&layer);
            let q = |layer: &Compressor| layer.residual().second().map_or(Vec::new(), |all| all.own.to_vec());
            let (u, v, own) = (layer.residual().u().to_vec(), layer.residual().v().to_vec(), q(&layer));
            let mut g: Vec<f32> = (0..n).map(|i| (i % 113) as f32 * 1e-2).collect();
            g[n - 5] = f32::NAN;
            let error =
                layer.accumulate(9, Gradient::F32(&g), 0.25, &mut Workspace::new(threads)).unwrap_err();
            assert!(matches!(error.why, Bad::NotFinite { index, .. } if index == n - 5), "{error}");
            if undo {
                assert_eq!(state(&layer), before);
            }
            let near = |a: &[f32], b: &[f32], off: f32| {
                let near =
                    |(i, (a, b)): (usize, (&f32, &f32))| (a - b).abs() < off || (i == n - 5 && *a == 0.0);
                a.len() == b.len() && a.iter().zip(b).enumerate().all(near)
            };
            assert!(near(layer.residual().v(), &v, 1e-5), "v of {momentum:?}");
            assert!(near(layer.residual().u(), &u, 1e-5), "u of {momentum:?}");
            // Squares of these gradients enter q as up to a thousandth, of which the rounding is a ten-millionth.
            assert!(near(&q(&layer), &own, 1e-9), "q of {momentum:?}");
            assert_eq!(state(&layer).2, before.2, "the steps of {momentum:?}");
            assert_eq!(layer.roll_back(), Err(Unfit::NoStep));
            layer.accumulate(9, Gradient::F32(&v), 0.25, &mut Workspace::new(threads)).unwrap();
        }
    }
}

#[test]
fn an_overflowing_sum_is_an_error_too() {
    let config = Config { undo: true, density: density(0.4), ..Config::default() };
    let mut layer = Compressor::new(0, "l", 3, config).unwrap();
    let mut workspace = Workspace::new(1);
    send(&mut layer, 0, &[f32::MAX, f32::MAX, f32::MAX], 1.0, &mut workspace);
    let before = state(&layer);
    let error = layer.accumulate(1, Gradient::F32(&[0.0, 1.0, f32::MAX]), 1.0, &mut workspace).unwrap_err();
    assert_eq!(error, LayerError { layer: "l".into(), step: 1, why: Bad::Overflow { index: 2 } });
    assert_eq!(state(&layer), before);
}

/// Also without `undo`: a layer of this size is copied before each pass.
#[test]
fn a_small_layer_survives_an_overflow_or_huge_values_exactly() {
    for momentum in MOMENTA.into_iter().chain([Momentum::Plain(0.0)]) {
        let mut layer = layer(1000, momentum, false);
        let before = state(&layer);
        let mut g = vec![1e30f32; 1000];
        g[7] = f32::INFINITY;
        assert!(layer.accumulate(5, Gradient::F32(&g), 1.0, &mut Workspace::new(1)).is_err());
        assert_eq!(state(&layer), before);
        let most = vec![f32::MAX; 1000];
        let overflow = layer.accumulate(5, Gradient::F32(&most), 4.0, &mut Workspace::new(1)).unwrap_err();
        assert!(matches!(overflow.why, Bad::Overflow { .. }), "{overflow}");
        assert_eq!(state(&layer), before);
    }
}

/// Momentum of zero is no momentum: taking a gradient back must not divide by it.
#[test]
fn a_large_layer_without_momentum_in_effect_keeps_its_residual() {
    let n = 70_000;
    let mut layer = layer(n, Momentum::Plain(0.0), false);
    let v = layer.residual().v().to_vec();
    let mut g = vec![0.1f32; n];
    g[3] = f32::NAN;
    assert!(layer.accumulate(5, Gradient::F32(&g), 1.0, &mut Workspace::new(1)).is_err());
    let kept = layer.residual().v().iter().zip(&v).filter(|(a, b)| (*a - *b).abs() < 1e-5).count();
    assert!(kept >= n - 1, "{kept} of {n}");
}

#[test]
fn a_carried_threshold_stays_finite() {
    let config = Config { density: density(0.01), ..Config::default() };
    let mut layer = Compressor::new(0, "l", 1000, config).unwrap();
    for step in 0..3 {
        let mut workspace = Workspace::new(1);
        layer.accumulate(step, Gradient::F32(&[1e38; 1000]), 1.0, &mut workspace).unwrap();
        layer.select(step, &mut workspace);
        assert!(Memory::from_phases(layer.memory().phases()).is_some(), "{:?}", layer.memory());
    }
}

#[test]
fn wrong_lengths_scales_and_targets_are_refused() {
    let mut layer = layer(10, Momentum::None, false);
    let before = state(&layer);
    let mut workspace = Workspace::new(1);
    let error = layer.accumulate(1, Gradient::F32(&[1.0; 9]), 1.0, &mut workspace).unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer conv3.weight, step 1: the gradient has 9 elements, the layer has 10"
    );
    assert!(matches!(
        layer.accumulate(1, Gradient::F32(&[1.0; 10]), f32::NAN, &mut workspace).unwrap_err().why,
        Bad::Scale(_)
    ));
    assert_eq!(state(&layer), before);

    let messages = [Sparse::from_parts(4, vec![1], vec![1.0]).unwrap()];
    let mut target = [0.0; 5];
    let error = apply::add(&mut target, &messages, 1.0, &mut workspace).unwrap_err();
    assert_eq!((error.rank, error.theirs, error.ours), (0, 4, 5));
    assert_eq!(target, [0.0; 5]);

    for (n, indices, values) in [
        (3, vec![3], vec![1.0]),
        (3, vec![1, 1], vec![1.0; 2]),
        (3, vec![0], vec![]),
        (3, vec![0], vec![f32::NAN]),
    ] {
        assert!(Sparse::from_parts(n, indices, values).is_err());
    }
}

#[test]
fn nonsense_configurations_are_refused() {
    for m in [-0.1, 1.0, f32::NAN] {
        let config = Config { momentum: Momentum::Plain(m), ..Config::default() };
        assert!(matches!(Compressor::new(0, "l", 1, config), Err(ConfigError::Momentum(_))));
    }
    assert!(matches!(Compressor::new(0, "l", 1 << 32, Config::default()), Err(ConfigError::TooLong(_))));
}

#[test]
fn a_step_can_be_taken_back_exactly_once() {
    for momentum in MOMENTA {
        for n in [100, 100_000] {
            let mut layer = layer(n, momentum, true);
            let mut workspace = Workspace::new(1);
            let before = state(&layer);
            let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let first: Vec<_> = send(&mut layer, 3, &g, 0.5, &mut workspace).iter().collect();
            let after = state(&layer);
            layer.roll_back().unwrap();
            assert_eq!(state(&layer), before);
            assert_eq!(layer.roll_back(), Err(Unfit::NoStep));
            let again: Vec<_> = send(&mut layer, 3, &g, 0.5, &mut workspace).iter().collect();
            assert_eq!((again, state(&layer)), (first, after));
        }
    }
    assert_eq!(layer(10, Momentum::None, false).roll_back(), Err(Unfit::NoStep));
}

#[test]
fn saved_state_is_restored_or_refused() {
    let saved = layer(50, Momentum::Plain(0.9), false);
    let mut fresh = Compressor::new(7, "conv3.weight", 50, *saved.config()).unwrap();
    let (u, v) = (saved.residual().u(), saved.residual().v());
    let memory = Memory::from_phases(saved.memory().phases()).unwrap();
    fresh.restore(u, v, None, memory, None).unwrap();
    assert_eq!(state(&fresh), state(&saved));
    let refused = |outcome: Result<(), Unfit>| outcome.unwrap_err().to_string();
    assert_eq!(refused(fresh.restore(&u[1..], v, None, memory, None)), "u has 49 elements instead of 50");
    let mut poisoned = v.to_vec();
    poisoned[3] = f32::NAN;
    assert_eq!(refused(fresh.restore(u, &poisoned, None, memory, None)), "v is NaN at element 3");
    assert_eq!(
        refused(fresh.adopt_momentum(&u[1..], 2)),
        "the momentum buffer has 49 elements instead of 50"
    );
    let longer = Sparse::from_parts(51, vec![50], vec![1.0]).unwrap();
    assert_eq!(refused(fresh.give_back(&longer)), "what is given back has 51 elements instead of 50");
    assert_eq!(state(&fresh), state(&saved));
    let bad = Remembered { threshold: f32::NAN, ..Remembered::default() };
    assert!(Memory::from_phases([bad; 3]).is_none());
}

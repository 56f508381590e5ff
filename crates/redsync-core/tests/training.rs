//! Rulings 1 to 5, 7 and 21: what the ranks together do to the weights.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{density, send};
use proptest::prelude::*;
use redsync_core::{
    Compressor, Config, ConfigError, IndexCode, Momentum, Selector, Sparse, Values, Workspace, apply,
};

const LR: f32 = 0.1;

fn everything(momentum: Momentum, masking: bool) -> Config {
    Config { density: density(1.0), momentum, masking, ..Config::default() }
}

/// The mean gradient of the ranks, in f64.
fn mean(gradients: &[Vec<f32>], i: usize) -> f64 {
    gradients.iter().map(|g| f64::from(g[i])).sum::<f64>() / gradients.len() as f64
}

/// Dense SGD in f64, momentum as PyTorch defines it; returns the weights after every step, and the buffer.
fn dense(w0: &[f32], steps: &[Vec<Vec<f32>>], momentum: Momentum) -> (Vec<Vec<f64>>, Vec<f64>) {
    let (m, lr) = (f64::from(momentum.coefficient()), f64::from(LR));
    let mut w: Vec<f64> = w0.iter().map(|x| f64::from(*x)).collect();
    let mut b = vec![0f64; w.len()];
    let mut trajectory = Vec::new();
    for gradients in steps {
        for i in 0..w.len() {
            let g = mean(gradients, i);
            b[i] = m * b[i] + g;
            let update = if matches!(momentum, Momentum::Nesterov(_)) { g + m * b[i] } else { b[i] };
            w[i] -= lr * update;
        }
        trajectory.push(w.clone());
    }
    (trajectory, b)
}

/// The same with compressors; every rank applies what all sent. Returns the weights after every step.
fn compressed(w0: &[f32], steps: &[Vec<Vec<f32>>], layers: &mut [Compressor]) -> Vec<Vec<f32>> {
    let mut workspace = Workspace::new(1);
    let mut w = w0.to_vec();
    let scale = 1.0 / layers.len() as f32;
    let mut trajectory = Vec::new();
    for (step, gradients) in steps.iter().enumerate() {
        let messages: Vec<Sparse> = (layers.iter_mut().zip(gradients))
            .map(|(layer, g)| send(layer, step as u64, g, scale, &mut workspace))
            .collect();
        apply::add(&mut w, &messages, -LR, &mut workspace).unwrap();
        trajectory.push(w.clone());
    }
    trajectory
}

fn ranks(n: usize, size: usize, config: Config) -> Vec<Compressor> {
    (0..n).map(|_| Compressor::new(0, "l", size, config).unwrap()).collect()
}

fn close(a: &[Vec<f32>], b: &[Vec<f64>]) -> bool {
    let near = |a: &f32, b: &f64| (f64::from(*a) - b).abs() <= 1e-4 * (1.0 + b.abs());
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.iter().zip(b).all(|(a, b)| near(a, b)))
}

/// Weights, then steps of one gradient per rank.
fn runs() -> impl Strategy<Value = (Vec<f32>, Vec<Vec<Vec<f32>>>)> {
    (1usize..6, 1usize..20, 1usize..12).prop_flat_map(|(ranks, size, steps)| {
        let vector = || proptest::collection::vec(-1f32..1.0, size);
        (vector(), proptest::collection::vec(proptest::collection::vec(vector(), ranks), steps))
    })
}

fn momenta() -> impl Strategy<Value = Momentum> {
    prop_oneof![(0f32..0.95).prop_map(Momentum::Plain), (0f32..0.95).prop_map(Momentum::Nesterov)]
}

proptest! {
    #[test]
    fn density_one_is_dense_momentum_sgd((w, steps) in runs(), momentum in momenta()) {
        let mut layers = ranks(steps[0].len(), w.len(), everything(momentum, false));
        prop_assert!(close(&compressed(&w, &steps, &mut layers), &dense(&w, &steps, momentum).0));
    }

    #[test]
    fn without_momentum_masking_makes_no_difference((w, steps) in runs(), masking: bool) {
        for momentum in [Momentum::None, Momentum::Plain(0.0), Momentum::Nesterov(0.0)] {
            let mut layers = ranks(steps[0].len(), w.len(), everything(momentum, masking));
            prop_assert!(close(&compressed(&w, &steps, &mut layers), &dense(&w, &steps, momentum).0));
        }
    }

    #[test]
    fn compressed_training_takes_over_from_dense_momentum((w, steps) in runs(), momentum in momenta(), at in 0usize..12) {
        let at = at.min(steps.len());
        let (whole, _) = dense(&w, &steps, momentum);
        let (warm_up, b) = dense(&w, &steps[..at], momentum);
        let b: Vec<f32> = b.iter().map(|x| *x as f32).collect();
        let w: Vec<f32> = warm_up.last().map_or(w, |w| w.iter().map(|x| *x as f32).collect());
        let mut layers = ranks(steps[0].len(), w.len(), everything(momentum, false));
        for layer in &mut layers {
            layer.adopt_momentum(&b, steps[0].len()).unwrap();
        }
        prop_assert!(close(&compressed(&w, &steps[at..], &mut layers), &whole[at..]));
    }

    /// Whatever the rate does: what was sent, each at the rate of its step, and what waits, at the last one, are together what dense
    /// SGD moves. A step that is taken back takes the change of the rate back too.
    #[test]
    fn what_waits_keeps_the_rate_at_which_it_came(
        (w, steps) in runs(), momentum in momenta(), fraction in 0.01f64..1.0,
        rates in proptest::collection::vec(0.01f32..1.0, 12), again: bool,
    ) {
        let (size, n) = (w.len(), steps[0].len());
        let config = Config { density: density(fraction), momentum, masking: false, undo: again, ..Config::default() };
        let (mut layers, mut workspace) = (ranks(n, size, config), Workspace::new(1));
        let (mut moved, mut dense_moved, mut b) = (vec![0f64; size], vec![0f64; size], vec![0f64; size]);
        for (step, (gradients, rate)) in steps.iter().zip(&rates).enumerate() {
            for (layer, g) in layers.iter_mut().zip(gradients) {
                if again {
                    layer.set_rate(7.0 * rate).unwrap();
                    send(layer, step as u64, g, 1.0 / n as f32, &mut workspace);
                    layer.roll_back().unwrap();
                }
                layer.set_rate(*rate).unwrap();
                let sent = send(layer, step as u64, g, 1.0 / n as f32, &mut workspace);
                sent.iter().for_each(|(i, x)| moved[i as usize] += f64::from(rate * x));
            }
            let m = f64::from(momentum.coefficient());
            for i in 0..size {
                let g = mean(gradients, i);
                b[i] = m * b[i] + g;
                let update = if matches!(momentum, Momentum::Nesterov(_)) { g + m * b[i] } else { b[i] };
                dense_moved[i] += f64::from(*rate) * update;
            }
        }
        let last = f64::from(rates[steps.len() - 1]);
        for i in 0..size {
            let waits: f64 = layers.iter().map(|layer| f64::from(layer.residual().v()[i])).sum();
            prop_assert!((moved[i] + last * waits - dense_moved[i]).abs() < 1e-4, "{i}");
        }
    }

    /// Nothing is lost or sent twice: what is left is what was kept and what came in, without what was sent.
    #[test]
    fn sent_plus_rest_is_what_came_in(
        (_, steps) in runs(), fraction in 0.01f64..1.0,
        values in prop_oneof![Just(Values::F32), Just(Values::Bf16), Just(Values::Asq), Just(Values::TwoBit), Just(Values::EightBit)],
        selector in prop_oneof![Just(Selector::Exact), Just(Selector::Trimmed), Just(Selector::Carried)],
        keep in prop_oneof![Just(1f32), 0.3f32..1.0],
    ) {
        let n = steps[0][0].len();
        let config = Config { density: density(fraction), values, selector, keep, ..Config::default() };
        let mut layer = Compressor::new(0, "l", n, config).unwrap();
        let mut left = vec![0f64; n];
        for (step, gradients) in steps.iter().enumerate() {
            left.iter_mut().zip(&gradients[0]).for_each(|(left, g)| *left = f64::from(keep) * *left + f64::from(*g));
            for (index, value) in send(&mut layer, step as u64, &gradients[0], 1.0, &mut Workspace::new(1)).iter() {
                left[index as usize] -= f64::from(value);
            }
            for (i, v) in layer.residual().v().iter().enumerate() {
                prop_assert!((left[i] - f64::from(*v)).abs() < 1e-5, "element {i} at step {step}");
            }
        }
    }
}

#[test]
fn what_was_sent_is_zero_afterwards_and_its_momentum_too() {
    let g = [1.0f32, -3.0, 0.5, 2.5];
    for masking in [true, false] {
        let config =
            Config { density: density(0.5), momentum: Momentum::Plain(0.9), masking, ..Config::default() };
        let mut layer = Compressor::new(0, "l", 4, config).unwrap();
        send(&mut layer, 0, &g, 1.0, &mut Workspace::new(1));
        assert_eq!(layer.residual().v(), [1.0, 0.0, 0.5, 0.0]);
        assert_eq!(layer.residual().u(), if masking { [1.0, 0.0, 0.5, 0.0] } else { g });
    }
}

#[test]
fn the_error_of_quantization_stays_in_v_or_is_dropped() {
    let g = [1.0f32, 3.0, 0.5, -9.0];
    for (values, rest) in
        [(Values::Asq, [-1.0, 1.0, 0.5, -9.0]), (Values::AsqDropError, [0.0, 0.0, 0.5, -9.0])]
    {
        let config = Config { density: density(0.5), values, ..Config::default() };
        let mut layer = Compressor::new(0, "l", 4, config).unwrap();
        let sent = send(&mut layer, 0, &g, 1.0, &mut Workspace::new(1));
        assert_eq!(sent.iter().collect::<Vec<_>>(), [(0, 2.0), (1, 2.0)]);
        assert_eq!(layer.residual().v(), rest);
    }
}

/// Other systems zeroed v after rounding what they sent, and lost the error.
#[test]
fn the_error_of_rounding_to_bf16_stays_in_v() {
    let x = 1.0 + 1.0 / 512.0; // not a bf16
    let config = Config { values: Values::Bf16, ..Config::default() };
    let mut layer = Compressor::new(0, "l", 1, config).unwrap();
    let sent = send(&mut layer, 0, &[x], 1.0, &mut Workspace::new(1)).value(0).unwrap();
    assert!(sent != x && layer.residual().v() == [x - sent]);
}

#[test]
fn what_four_levels_leave_over_stays_in_v() {
    let g = [1.0f32, 3.0, 0.0, -9.0, 2.0, -0.25];
    let config = Config { density: density(1.0), values: Values::TwoBit, ..Config::default() };
    let mut layer = Compressor::new(0, "l", 6, config).unwrap();
    let sent = send(&mut layer, 0, &g, 1.0, &mut Workspace::new(1));
    // The mean magnitude is 3.05.
    assert_eq!(sent.iter().collect::<Vec<_>>(), [(0, 2.0), (1, 2.0), (3, -9.0), (4, 2.0), (5, -0.25)]);
    assert_eq!(layer.residual().v(), [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
}

/// All of a layer at eight bits, zeros included: the nearest of 255 values, and the difference is kept.
#[test]
fn what_eight_bits_leave_over_stays_in_v() {
    let g = [127.0f32, 1.4, 0.0, -127.0, -0.25];
    let config = Config { values: Values::EightBit, indices: IndexCode::Every, ..Config::default() };
    let mut layer = Compressor::new(0, "l", 5, config).unwrap();
    let sent = send(&mut layer, 0, &g, 1.0, &mut Workspace::new(1));
    assert_eq!(sent.iter().collect::<Vec<_>>(), [(0, 127.0), (1, 1.0), (2, 0.0), (3, -127.0), (4, 0.0)]);
    assert_eq!(layer.residual().v(), [0.0, 1.4 - 1.0, 0.0, 0.0, -0.25]);
    let config = Config { values: Values::Asq, ..config };
    assert_eq!(Compressor::new(0, "l", 5, config).unwrap_err(), ConfigError::EveryQuantized);
}

/// Local decay is as strong as decay inside dense momentum SGD.
#[test]
fn decay_is_as_strong_as_in_dense_momentum_sgd() {
    let (lr, wd, m) = (0.05, 5e-4, 0.9);
    let (mut w, mut b, mut local) = (1f64, 0f64, 1f64);
    for _ in 0..2000 {
        b = m * b + wd * w;
        w -= lr * b;
        local *= apply::decay(lr, wd, m);
    }
    assert!((w / local - 1.0).abs() < 0.01, "{w} against {local}");
    assert!(w < 0.65);
}

/// Indices travel as integers: f32 would be exact only up to 2^24.
#[test]
fn indices_above_2_to_the_24_arrive() {
    let n = (1 << 24) + 3;
    let mut g = vec![0f32; n];
    g[n - 1] = 1.0;
    g[n - 2] = -2.0;
    let mut layer = Compressor::new(0, "l", n, Config::default()).unwrap();
    let sent = send(&mut layer, 0, &g, 1.0, &mut Workspace::new(1));
    assert_eq!(sent.iter().collect::<Vec<_>>(), [(n as u32 - 2, -2.0), (n as u32 - 1, 1.0)]);
}

proptest! {
    #[test]
    fn apply_is_the_plain_sum_in_rank_order_for_any_number_of_threads(
        seed: u64, ranks in 0usize..9, fraction in prop_oneof![Just(0.0005), Just(0.02), Just(0.7)],
    ) {
        use rand::{RngExt, SeedableRng};
        let n = (1 << 19) + 77;
        let mut random = rand_xoshiro::Xoshiro256PlusPlus::seed_from_u64(seed);
        let messages: Vec<Sparse> = (0..ranks).map(|_| {
            let indices: Vec<u32> = (0..n).filter(|_| random.random::<f64>() < fraction).collect();
            let values = indices.iter().map(|_| random.random_range(-1f32..1.0)).collect();
            Sparse::from_parts(n, indices, values).unwrap()
        }).collect();
        let start: Vec<f32> = (0..n).map(|i| i as f32 * 1e-3).collect();
        let (mut added, mut filled) = (start.clone(), vec![0f32; n as usize]);
        for message in &messages {
            for (index, value) in message.iter() {
                added[index as usize] += -0.1 * value;
                filled[index as usize] += 0.5 * value;
            }
        }
        for threads in [1, 2, 3] {
            let mut workspace = Workspace::new(threads);
            let mut w = start.clone();
            apply::add(&mut w, &messages, -0.1, &mut workspace).unwrap();
            prop_assert!(w == added);
            w.fill(f32::NAN);
            apply::fill(&mut w, &messages, 0.5, &mut workspace).unwrap();
            prop_assert!(w == filled);
        }
    }
}

#[test]
fn a_momentum_that_changes_is_that_of_dense_sgd() {
    type Form = fn(f32) -> Momentum;
    let gradients = |step: usize| [0.5, -0.25, 1.0].map(|g: f32| g * (1.0 + step as f32).sin());
    for form in [Momentum::Plain as Form, Momentum::Nesterov as Form] {
        let coefficients = [0.9f32, 0.9, 0.5, 0.5, 0.8, 0.95, 0.95];
        let mut layer = Compressor::new(0, "l", 3, everything(form(0.9), false)).unwrap();
        let (mut workspace, mut w) = (Workspace::new(1), vec![1f32; 3]);
        let (mut expected, mut b) = (vec![1f64; 3], vec![0f64; 3]);
        for (step, m) in coefficients.into_iter().enumerate() {
            layer.set_momentum(form(m)).unwrap();
            let message = send(&mut layer, step as u64, &gradients(step), 1.0, &mut workspace);
            apply::add(&mut w, &[message], -LR, &mut workspace).unwrap();
            for (i, g) in gradients(step).map(f64::from).into_iter().enumerate() {
                b[i] = f64::from(m) * b[i] + g;
                let nesterov = matches!(form(m), Momentum::Nesterov(_));
                expected[i] -= f64::from(LR) * if nesterov { g + f64::from(m) * b[i] } else { b[i] };
            }
        }
        assert!(close(&[w], &[expected]), "{:?}", form(0.9));
    }
}

#[test]
fn momentum_can_begin_late_but_not_change_its_form() {
    let mut layer = Compressor::new(0, "l", 3, everything(Momentum::None, false)).unwrap();
    assert!(layer.residual().u().is_empty());
    layer.set_momentum(Momentum::Plain(0.0)).unwrap();
    assert!(layer.residual().u().is_empty());
    layer.set_momentum(Momentum::Plain(0.5)).unwrap();
    assert_eq!(layer.residual().u().len(), 3);
    layer.set_momentum(Momentum::Plain(0.0)).unwrap();
    for (refused, why) in [
        (Momentum::Nesterov(0.5), "momentum cannot change from plain momentum 0 to Nesterov momentum 0.5"),
        (Momentum::Plain(1.0), "momentum must be at least 0 and below 1, got 1"),
        (Momentum::Plain(f32::NAN), "momentum must be at least 0 and below 1, got NaN"),
    ] {
        assert_eq!(layer.set_momentum(refused).unwrap_err().to_string(), why);
    }
    assert_eq!(layer.config().momentum, Momentum::Plain(0.0));
}

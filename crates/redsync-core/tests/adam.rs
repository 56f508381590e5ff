//! Adam in the residual: what the ranks together do to the weights is what Adam does, and what waits is not lost.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{density, send};
use proptest::prelude::*;
use redsync_core::{
    Adam, Compressor, Config, ConfigError, Momentum, Second, Sparse, Unfit, Workspace, apply,
};

const LR: f32 = 0.01;

fn adam() -> impl Strategy<Value = Adam> {
    let eps = prop_oneof![Just(1e-8f32), Just(1e-3)];
    (0f32..0.95, 0f32..0.9995, eps).prop_map(|(beta1, beta2, eps)| Adam { beta1, beta2, eps })
}

fn config(adam: Adam, ranks: usize, fraction: f64) -> Config {
    Config { density: density(fraction), momentum: Momentum::Adam(adam), ranks, ..Config::default() }
}

fn layers(adam: Adam, ranks: usize, fraction: f64, n: usize) -> Vec<Compressor> {
    (0..ranks).map(|_| Compressor::new(0, "l", n, config(adam, ranks, fraction)).unwrap()).collect()
}

/// Adam as PyTorch has it, in f64.
struct Dense {
    adam: Adam,
    t: i32,
    w: Vec<f64>,
    m: Vec<f64>,
    q: Vec<f64>,
}

impl Dense {
    fn new(adam: Adam, w: &[f32]) -> Self {
        let zeros = vec![0.0; w.len()];
        Dense { adam, t: 0, w: w.iter().map(|x| f64::from(*x)).collect(), m: zeros.clone(), q: zeros }
    }

    fn step(&mut self, g: &[f32]) {
        let [b1, b2, eps] = [self.adam.beta1, self.adam.beta2, self.adam.eps].map(f64::from);
        self.t += 1;
        let unbias = |b: f64| 1.0 - b.powi(self.t);
        for (i, g) in g.iter().enumerate() {
            let g = f64::from(*g);
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * g;
            self.q[i] = b2 * self.q[i] + (1.0 - b2) * g * g;
            let root = (self.q[i] / unbias(b2)).sqrt() + eps;
            self.w[i] -= f64::from(LR) * (self.m[i] / unbias(b1)) / root;
        }
    }
}

/// A step of all ranks, each with its gradient.
fn step(
    w: &mut [f32],
    layers: &mut [Compressor],
    at: usize,
    gradients: &[&[f32]],
    workspace: &mut Workspace,
) {
    let scale = 1.0 / layers.len() as f32;
    let all = layers.iter_mut().zip(gradients);
    let messages: Vec<Sparse> = all.map(|(layer, g)| send(layer, at as u64, g, scale, workspace)).collect();
    apply::add(w, &messages, -LR, workspace).unwrap();
}

fn close(a: &[f32], b: &[f64]) -> bool {
    a.iter().zip(b).all(|(a, b)| (f64::from(*a) - b).abs() <= 1e-4 * (1.0 + b.abs()))
}

/// Gradients of so many steps. Their size changes from element to element, as Adam does not mind.
fn gradients(n: usize, steps: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..steps).map(|_| (0..n).map(|i| next() * 10f32.powi(i as i32 % 5 - 3)).collect()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn equal_batches_at_density_one_are_dense_adam(
        adam in adam(), ranks in 1usize..5, n in 1usize..70, seed: u64,
    ) {
        let (mut w, mut workspace) = (vec![0.5f32; n], Workspace::new(1));
        let (mut dense, mut layers) = (Dense::new(adam, &w), layers(adam, ranks, 1.0, n));
        for (at, g) in gradients(n, 200, seed).iter().enumerate() {
            dense.step(g);
            step(&mut w, &mut layers, at, &vec![&g[..]; ranks], &mut workspace);
            prop_assert!(close(&w, &dense.w), "step {}: {:?} {:?}", at, w, dense.w);
        }
    }

    #[test]
    fn it_takes_over_from_dense_adam(adam in adam(), ranks in 1usize..4, n in 1usize..40, at in 0usize..30, seed: u64) {
        let (gradients, mut workspace) = (gradients(n, 60, seed), Workspace::new(1));
        let mut dense = Dense::new(adam, &vec![0.5f32; n]);
        gradients[..at].iter().for_each(|g| dense.step(g));
        let single = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| *x as f32).collect() };
        let (mut w, mut layers) = (single(&dense.w), layers(adam, ranks, 1.0, n));
        for layer in &mut layers {
            layer.adopt_adam(&single(&dense.m), &single(&dense.q), at as u64).unwrap();
        }
        for (at, g) in gradients.iter().enumerate().skip(at) {
            dense.step(g);
            step(&mut w, &mut layers, at, &vec![&g[..]; ranks], &mut workspace);
        }
        prop_assert!(close(&w, &dense.w), "{:?} {:?}", w, dense.w);
    }

    /// What was sent and what waits are together what momentum, divided by the root of the mean over the ranks, has moved. What the
    /// others gave is of the step at which they gave it.
    #[test]
    fn nothing_is_lost(adam in adam(), n in 1usize..200, ranks in 1usize..5, told in 0usize..40, seed: u64) {
        let mut layer = Compressor::new(0, "l", n, config(adam, ranks, 0.1)).unwrap();
        let (mut sum, mut moved, mut m) = (vec![0f64; n], vec![0f64; n], vec![0f64; n]);
        let (mut q, mut given) = (vec![0f64; n], None::<Vec<f64>>);
        let mut workspace = Workspace::new(1);
        let [b1, b2, eps] = [adam.beta1, adam.beta2, adam.eps].map(f64::from);
        for (at, g) in gradients(n, 40, seed).iter().enumerate() {
            let sent = send(&mut layer, at as u64, g, 1.0 / ranks as f32, &mut workspace);
            sent.iter().for_each(|(i, x)| sum[i as usize] += f64::from(x));
            let unbias = |b: f64| 1.0 - b.powi(at as i32 + 1);
            for i in 0..n {
                let g = f64::from(g[i]);
                m[i] = b1 * m[i] + (1.0 - b1) * g / ranks as f64;
                q[i] = b2 * q[i] + (1.0 - b2) * g * g;
                let own = q[i] / unbias(b2);
                let second = given.as_ref().map_or(own, |given| own / ranks as f64 + given[i]);
                moved[i] += m[i] / unbias(b1) / (second.sqrt() + eps);
            }
            if at == told {
                // Half of them tell something else; of the rest nothing is known.
                let others: Vec<f32> = (0..n / 2).map(|i| 0.1 + (i % 7) as f32).collect();
                layer.give_second(n - n / 2, &others).unwrap();
                let like_own = |i: usize| q[i] / unbias(b2) * (1.0 - 1.0 / ranks as f64);
                let known = (0..n).map(|i| i.checked_sub(n - n / 2).map_or_else(|| like_own(i), |i| f64::from(others[i])));
                given = Some(known.collect());
            }
        }
        for (i, v) in layer.residual().v().iter().enumerate() {
            let off = (sum[i] + f64::from(*v) - moved[i]).abs();
            prop_assert!(off <= 2e-4 * (1.0 + moved[i].abs()), "{}: {}", i, off);
        }
    }

    #[test]
    fn what_was_given_can_be_withdrawn(n in 1usize..60, seed: u64, before: bool) {
        let (gradients, mut workspace) = (gradients(n, 4, seed), Workspace::new(1));
        let mut layer = Compressor::new(0, "l", n, config(Adam::default(), 2, 0.2)).unwrap();
        send(&mut layer, 0, &gradients[0], 0.5, &mut workspace);
        if before {
            layer.give_second(0, &vec![0.25; n]).unwrap();
        }
        let given = |layer: &Compressor| layer.residual().second().unwrap().given.to_vec();
        let old = given(&layer);
        let first = layer.give_second(n / 3, &vec![1.0; n - n / 3]).unwrap();
        let second = layer.give_second(0, &vec![2.0; n / 2]).unwrap();
        prop_assert_eq!(first.is_some(), before);
        layer.withdraw_second(0, second.as_deref()).unwrap();
        layer.withdraw_second(n / 3, first.as_deref()).unwrap();
        prop_assert_eq!(given(&layer), old);
    }

    #[test]
    fn a_state_comes_back_to_the_bit(adam in adam(), n in 1usize..100, given: bool, seed: u64) {
        let gradients = gradients(n, 12, seed);
        let mut workspace = Workspace::new(1);
        let mut layer = Compressor::new(0, "l", n, config(adam, 3, 0.1)).unwrap();
        let run = |layer: &mut Compressor, range: std::ops::Range<usize>, workspace: &mut Workspace| {
            for at in range {
                send(layer, at as u64, &gradients[at], 1.0 / 3.0, workspace);
            }
        };
        run(&mut layer, 0..6, &mut workspace);
        if given {
            layer.give_second(0, &vec![0.25; n]).unwrap();
            layer.give_second(n / 2, &vec![0.5; n - n / 2]).unwrap();
        }
        let mut other = Compressor::new(0, "l", n, *layer.config()).unwrap();
        let saved = layer.residual();
        other.restore(saved.u(), saved.v(), saved.second(), layer.memory(), layer.rate()).unwrap();
        run(&mut layer, 6..12, &mut workspace);
        run(&mut other, 6..12, &mut workspace);
        let bits = |layer: &Compressor| {
            let second = layer.residual().second().unwrap();
            let all = [layer.residual().u(), layer.residual().v(), second.own, second.given];
            (all.map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()), second.steps)
        };
        prop_assert_eq!(bits(&layer), bits(&other));
    }
}

/// Each rank's own gradients count for the second moment, not the shares that are added up.
#[test]
fn the_second_moment_is_that_of_whole_gradients() {
    let adam = Adam { beta1: 0.5, beta2: 0.5, eps: 1e-8 };
    let mut layer = Compressor::new(0, "l", 2, config(adam, 4, 1.0)).unwrap();
    send(&mut layer, 0, &[3.0, -1.0], 0.25, &mut Workspace::new(1));
    let Second { own, steps, .. } = layer.residual().second().unwrap();
    assert_eq!((own, steps), (&[4.5f32, 0.5][..], 1));
    assert_eq!(layer.residual().u(), [0.375, -0.125]);
}

#[test]
fn masking_leaves_its_momentum_alone() {
    let sent = Config { masking: true, ..config(Adam::default(), 1, 1.0) };
    let mut layer = Compressor::new(0, "l", 2, sent).unwrap();
    send(&mut layer, 0, &[1.0, 2.0], 1.0, &mut Workspace::new(1));
    assert!(layer.residual().u().iter().all(|u| *u > 0.0));
}

#[test]
fn coefficients_that_make_no_sense_are_refused() {
    let usual = Adam::default();
    for (adam, why, unfit) in [
        (Adam { beta1: 1.0, ..usual }, ConfigError::Momentum(1.0), Unfit::Coefficient(1.0)),
        (Adam { beta2: -0.1, ..usual }, ConfigError::Momentum(-0.1), Unfit::Coefficient(-0.1)),
        (Adam { eps: 0.0, ..usual }, ConfigError::Eps(0.0), Unfit::Eps(0.0)),
        (Adam { eps: f32::INFINITY, ..usual }, ConfigError::Eps(f32::INFINITY), Unfit::Eps(f32::INFINITY)),
    ] {
        assert_eq!(Compressor::new(0, "l", 2, config(adam, 1, 1.0)).unwrap_err(), why);
        let mut layer = Compressor::new(0, "l", 2, config(usual, 1, 1.0)).unwrap();
        assert_eq!(layer.set_momentum(Momentum::Adam(adam)), Err(unfit));
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut layer = Compressor::new(0, "l", 3, config(Adam::default(), 1, 1.0)).unwrap();
    let refused = |outcome: Result<(), Unfit>| outcome.unwrap_err().to_string();
    assert_eq!(
        refused(layer.give_second(0, &[1.0, -2.0, 0.0]).map(drop)),
        "the given second moment is -2 at element 1"
    );
    layer.give_second(0, &[1.0; 3]).unwrap();
    layer.give_second(2, &[4.0]).unwrap();
    assert_eq!(
        refused(layer.give_second(2, &[1.0, 1.0]).map(drop)),
        "the given second moment has 4 elements instead of 3"
    );
    assert_eq!(layer.residual().second().unwrap().given, [1.0, 1.0, 4.0]);
    assert_eq!(
        refused(layer.adopt_adam(&[0.0; 3], &[0.0; 2], 1)),
        "the second moment has 2 elements instead of 3"
    );
    let second = Second { own: &[1.0, -1.0, 0.0], given: &[], steps: 1 };
    let restored = layer.restore(&[0.0; 3], &[0.0; 3], Some(second), layer.memory(), None);
    assert_eq!(refused(restored), "the second moment is -1 at element 1");
    let other = layer.set_momentum(Momentum::Plain(0.5));
    assert_eq!(refused(other), "momentum cannot change from Adam 0.9, 0.999, 1e-8 to plain momentum 0.5");
    assert_eq!(layer.residual().second().unwrap().given, [1.0, 1.0, 4.0]);
    let mut plain = Compressor::new(0, "l", 3, Config::default()).unwrap();
    assert!(plain.give_second(0, &[1.0; 3]).is_err() && plain.residual().second().is_none());
    assert!(plain.set_momentum(Momentum::Adam(Adam::default())).is_err());
}

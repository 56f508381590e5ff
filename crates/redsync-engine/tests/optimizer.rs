//! The optimizer behind a synchronizer is ordinary training: the same weights as dense SGD and AdamW in f64, whether layers are dense,
//! compressed from the first step, or compressed after a warm-up.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use redsync_engine::{
    Adam, Config, Kind, Layer, Method, Momentum, Optimizer, SyncError, Synchronizer, WarmUp,
};

const STEPS: u64 = 12;
const DENSE: u64 = 5;
const DECAY: f32 = 0.02;

/// A rank whose loop is a user's: gradients, and the engine's optimizer.
struct Own {
    sync: Synchronizer,
    optimizer: Optimizer,
    weights: Vec<Vec<f32>>,
}

impl Own {
    fn new(layers: Vec<Layer>, config: Config, decay: f32, comm: Comm) -> Result<Self, SyncError> {
        let weights = initial_weights(&layers);
        let sync = Synchronizer::new(layers, config, comm)?;
        Ok(Own { optimizer: Optimizer::new(&sync, decay), sync, weights })
    }

    /// A step with the gradients of a rank.
    fn step(&mut self, rank: usize, rate: f32) -> Result<(), SyncError> {
        self.optimizer.begin(&self.sync, rate)?;
        for layer in (0..self.weights.len()).rev() {
            let of_rank = gradient(rank, self.sync.step(), layer, self.weights[layer].len());
            self.sync.submit(layer, of_rank)?;
        }
        self.sync.finish()?;
        self.optimizer.step(&mut self.sync, &mut self.weights, rate)
    }

    fn check(&self) -> Result<u64, SyncError> {
        self.sync.check_replicas(&self.weights.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// Dense training in f64, with the mean of all ranks' gradients; biases and norms do not decay.
fn dense(
    layers: &[Layer],
    ranks: usize,
    momentum: Momentum,
    decay: f32,
    rate: fn(u64) -> f32,
) -> Vec<Vec<f64>> {
    let wide = |w: &Vec<f32>| w.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let mut weights: Vec<_> = initial_weights(layers).iter().map(wide).collect();
    for (i, layer) in layers.iter().enumerate() {
        let decay = if layer.kind == Kind::BiasOrNorm { 0.0 } else { f64::from(decay) };
        for (at, w) in weights[i].iter_mut().enumerate() {
            let (mut first, mut second) = (0f64, 0f64);
            for step in 0..STEPS {
                let of = |rank| f64::from(gradient(rank, step, i, layer.size)[at]);
                let g = (0..ranks).map(of).sum::<f64>() / ranks as f64;
                let lr = f64::from(rate(step));
                if let Momentum::Adam(adam) = layer.momentum.unwrap_or(momentum) {
                    let [b1, b2, eps] = [adam.beta1, adam.beta2, adam.eps].map(f64::from);
                    first = b1 * first + (1.0 - b1) * g;
                    second = b2 * second + (1.0 - b2) * g * g;
                    let t = (step + 1) as i32;
                    let root = (second / (1.0 - b2.powi(t))).sqrt() + eps;
                    *w = *w * (1.0 - lr * decay) - lr * first / (1.0 - b1.powi(t)) / root;
                    continue;
                }
                let momentum = layer.momentum.unwrap_or(momentum);
                let (m, g) = (f64::from(momentum.coefficient()), g + decay * *w);
                first = m * first + g;
                *w -= lr * if matches!(momentum, Momentum::Nesterov(_)) { g + m * first } else { first };
            }
        }
    }
    weights
}

/// Few elements, since the reference computes each of them by itself.
fn few() -> Vec<Layer> {
    vec![
        Layer::new("first", 60, Kind::Weight),
        Layer::new("norm", 5, Kind::BiasOrNorm),
        Layer::new("out", 40, Kind::Output),
    ]
}

fn follows(ranks: usize, layers: Vec<Layer>, config: Config, decay: f32, rate: fn(u64) -> f32) {
    let what = format!("{ranks} ranks, {:?} {:?} {:?}", config.method, config.momentum, config.warm_up);
    let expected = dense(&layers, ranks, config.momentum, decay, rate);
    let all = run(ranks, move |rank, comm| {
        let mut own = Own::new(layers.clone(), config.clone(), decay, comm).unwrap();
        (0..STEPS).for_each(|step| own.step(rank, rate(step)).unwrap());
        own.check().unwrap();
        own.weights
    });
    assert_close(&all[0], &expected, &what);
}

fn falling(step: u64) -> f32 {
    LR / (1 + step) as f32
}

#[test]
fn dense_layers_are_trained_with_momentum_and_decay() {
    for momentum in
        [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9), Momentum::Adam(Adam::default())]
    {
        follows(2, few(), Config { momentum, ..config(Method::Sgd, 0.001) }, DECAY, falling);
    }
}

/// With density 1 a compressed layer gets everything at once, momentum from its residual; decay acts on the weights, which is the same
/// but for the first steps of momentum, so it is left out here.
#[test]
fn compressed_layers_of_density_1_are_trained_the_same() {
    for momentum in [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
        for ranks in [1, 2, 4] {
            follows(ranks, few(), everything(Method::Rgc, momentum), 0.0, |_| LR);
        }
    }
    // Of one rank, because several divide by the mean of their squares, not by the square of their mean.
    follows(1, few(), everything(Method::Rgc, Momentum::Adam(Adam::default())), DECAY, falling);
}

#[test]
fn momentum_is_handed_over_when_a_warm_up_ends() {
    for momentum in [Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
        let warm_up = WarmUp::Dense(DENSE);
        follows(4, few(), Config { warm_up, ..everything(Method::Rgc, momentum) }, 0.0, |_| LR);
    }
    let adam = everything(Method::Rgc, Momentum::Adam(Adam::default()));
    follows(1, few(), Config { warm_up: WarmUp::Dense(DENSE), ..adam }, DECAY, falling);
}

#[test]
fn a_layer_with_a_momentum_of_its_own_has_that() {
    let own = |layers: Vec<Layer>| {
        let momentum = [Momentum::Plain(0.5), Momentum::Nesterov(0.8), Momentum::None];
        layers.into_iter().zip(momentum).map(|(layer, m)| layer.with_momentum(m)).collect::<Vec<_>>()
    };
    follows(2, own(few()), config(Method::Sgd, 0.001), DECAY, falling);
    follows(2, own(few()), everything(Method::Rgc, Momentum::None), 0.0, |_| LR);
}

/// In the middle of a warm-up and behind it.
#[test]
fn a_run_goes_on_to_the_same_bits_with_the_moments_that_were_kept() {
    for momentum in [Momentum::Nesterov(0.9), Momentum::Adam(Adam::default())] {
        for stop in [3, 8] {
            let ended = run(2, move |rank, comm| {
                let config =
                    || Config { momentum, warm_up: WarmUp::Dense(DENSE), ..config(Method::RgcTwoBit, 0.1) };
                let mut own = Own::new(layers(), config(), DECAY, comm.clone()).unwrap();
                (0..stop).for_each(|step| own.step(rank, falling(step)).unwrap());
                let hash = own.check().unwrap();
                let moments = own.optimizer.moments().map(|(name, values)| (name, values.to_vec())).collect();
                let (saved, weights) = (own.sync.capture(hash, moments).unwrap(), own.weights.clone());
                (stop..STEPS).for_each(|step| own.step(rank, falling(step)).unwrap());

                let mut again = Own::new(layers(), config(), DECAY, comm).unwrap();
                let kept = again.sync.restore(Ok(saved)).unwrap();
                assert_eq!(kept.iter().any(|(name, _)| name == "momentum/first"), stop < DENSE);
                let find = |name: &str| kept.iter().find(|(kept, _)| kept == name).map(|kept| kept.1.clone());
                again.optimizer.restore(|name, _| Ok::<_, SyncError>(find(name))).unwrap();
                again.weights = weights;
                (stop..STEPS).for_each(|step| again.step(rank, falling(step)).unwrap());
                (bits(&own.weights), bits(&again.weights))
            });
            ended.iter().for_each(|(never_stopped, resumed)| assert_eq!(never_stopped, resumed));
            assert_eq!(ended[0], ended[1]);
        }
    }
}

#[test]
fn a_rank_alone_makes_the_steps_of_dense_training() {
    for momentum in
        [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9), Momentum::Adam(Adam::default())]
    {
        let layers = few();
        let (mut optimizer, mut weights) =
            (Optimizer::of(&layers, momentum, DECAY), initial_weights(&layers));
        for step in 0..STEPS {
            let all: Vec<_> = layers.iter().enumerate().map(|(i, l)| gradient(0, step, i, l.size)).collect();
            let all: Vec<&[f32]> = all.iter().map(Vec::as_slice).collect();
            optimizer.step_alone(&all, &mut weights, falling(step), step + 1).unwrap();
        }
        assert_close(&weights, &dense(&layers, 1, momentum, DECAY, falling), &format!("{momentum:?}"));
    }
}

#[test]
fn weights_and_calls_that_do_not_fit_are_refused_and_change_nothing() {
    run(1, |rank, comm| {
        let mut own = Own::new(few(), config(Method::Sgd, 0.001), DECAY, comm).unwrap();
        let early = own.optimizer.step(&mut own.sync, &mut own.weights, LR).unwrap_err();
        assert_eq!(early.to_string(), "layer first has no update: finish comes first");
        own.step(rank, LR).unwrap();
        let before = own.weights.clone();
        let (mut short, fewer) = (before.clone(), before[..2].to_vec());
        short[2].pop();
        for mut other in [short, fewer] {
            let kept = other.clone();
            let refused = own.optimizer.step(&mut own.sync, &mut other, LR).unwrap_err();
            assert_eq!(refused.to_string(), "these are not weights of the optimizer's layers");
            assert_eq!(other, kept);
        }
        let refused = own.optimizer.step_alone(&[&[1.0][..]; 3], &mut own.weights, LR, 1).unwrap_err();
        assert_eq!(refused.to_string(), "these are not gradients of the optimizer's layers");
        assert_eq!(own.weights, before);
    });
}

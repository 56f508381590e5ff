//! The optimizer behind the synchronizer: takes a layer's update, changes its weights.
//! What must hold: momentum, and what Adam divides it by, is applied once (in the residual for a sparse update, here for a dense
//! one), and weight decay has the same strength in both.

use super::TrainError;
use crate::net::{Spec, Weights};
use rayon::prelude::*;
use redsync_core::{Adam, Momentum, apply};
use redsync_engine::{Kind, Synchronizer, Update};

/// Below this many elements a layer is updated by one thread.
const PARALLEL_FROM: usize = 1 << 17;

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    /// Plain gradient descent.
    Sgd,
    /// With momentum.
    Momentum,
    /// With Nesterov's momentum.
    Nesterov,
    /// Adam with decay of the weights apart from the gradients.
    AdamW,
}

impl Optimizer {
    /// The names of all optimizers.
    pub const NAMES: [&str; 4] = ["sgd", "momentum", "nesterov", "adamw"];

    /// The optimizer of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Optimizer::Sgd, Optimizer::Momentum, Optimizer::Nesterov, Optimizer::AdamW]
            .into_iter()
            .find(|known| known.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Optimizer::Sgd => "sgd",
            Optimizer::Momentum => "momentum",
            Optimizer::Nesterov => "nesterov",
            Optimizer::AdamW => "adamw",
        }
    }

    /// The same with its coefficients, as residuals take it; only AdamW has a second.
    pub fn momentum(self, coefficient: f32, beta2: f32) -> Momentum {
        match self {
            Optimizer::Sgd => Momentum::None,
            Optimizer::Momentum => Momentum::Plain(coefficient),
            Optimizer::Nesterov => Momentum::Nesterov(coefficient),
            Optimizer::AdamW => Momentum::Adam(Adam { beta1: coefficient, beta2, ..Adam::default() }),
        }
    }
}

/// The optimizer of one rank.
pub(super) struct Descent {
    momentum: Momentum,
    decay: f32,
    /// For each parameter whether it decays: biases and norms do not.
    decays: Vec<bool>,
    /// Momentum of layers that are dense; empty for others and before the first step.
    pub buffers: Vec<Vec<f32>>,
    /// The same of second moments.
    pub squares: Vec<Vec<f32>>,
}

impl Descent {
    pub fn new(specs: &[Spec], momentum: Momentum, decay: f32) -> Self {
        let decays = specs.iter().map(|spec| decay > 0.0 && spec.layer.kind != Kind::BiasOrNorm).collect();
        let none = vec![Vec::new(); specs.len()];
        Descent { momentum, decay, decays, buffers: none.clone(), squares: none }
    }

    /// Applies the updates of a finished step, at a learning rate.
    pub fn update(
        &mut self,
        sync: &mut Synchronizer,
        weights: &mut Weights,
        rate: f32,
    ) -> Result<(), TrainError> {
        for layer in 0..self.buffers.len() {
            let values = weights.values_mut(layer);
            let decay = if self.decays[layer] { self.decay } else { 0.0 };
            match sync.update(layer) {
                Some(Update::Dense(gradient)) => match self.momentum {
                    Momentum::Adam(adam) => {
                        let moments = (&mut self.buffers[layer], &mut self.squares[layer]);
                        dense_adam(adam, sync.step(), decay, rate, values, gradient, moments);
                    }
                    momentum => dense(momentum, decay, rate, values, gradient, &mut self.buffers[layer]),
                },
                _ => {
                    if decay > 0.0 {
                        // Only a decay that is part of the gradient is enlarged by momentum.
                        let coefficient = match self.momentum {
                            Momentum::Adam(_) => 0.0,
                            momentum => f64::from(momentum.coefficient()),
                        };
                        let factor = apply::decay(f64::from(rate), f64::from(decay), coefficient) as f32;
                        values.par_iter_mut().with_min_len(PARALLEL_FROM).for_each(|w| *w *= factor);
                    }
                    sync.apply(layer, values, rate)?;
                }
            }
        }
        Ok(())
    }

    /// Before a step: layers learn the rate at which it will be applied, and those that have become sparse take their momentum
    /// along.
    pub fn hand_over(&mut self, sync: &Synchronizer, rate: f32) -> Result<(), TrainError> {
        for (layer, (buffer, square)) in self.buffers.iter_mut().zip(&mut self.squares).enumerate() {
            sync.set_rate(layer, rate)?;
            if sync.is_sparse(layer) && !buffer.is_empty() {
                match square.is_empty() {
                    true => sync.adopt_momentum(layer, buffer)?,
                    false => sync.adopt_adam(layer, buffer, square, sync.step())?,
                }
                (*buffer, *square) = (Vec::new(), Vec::new());
            }
        }
        Ok(())
    }
}

/// Ordinary momentum after averaging: b = m*b + g, w -= rate * b, or with Nesterov rate * (g + m*b).
fn dense(
    momentum: Momentum,
    decay: f32,
    rate: f32,
    weights: &mut [f32],
    gradient: &[f32],
    buffer: &mut Vec<f32>,
) {
    let m = momentum.coefficient();
    let nesterov = matches!(momentum, Momentum::Nesterov(_));
    if matches!(momentum, Momentum::None) {
        let pairs = weights.par_iter_mut().zip(gradient).with_min_len(PARALLEL_FROM);
        return pairs.for_each(|(w, g)| *w -= rate * (g + decay * *w));
    }
    if buffer.is_empty() {
        *buffer = vec![0.0; weights.len()];
    }
    let all = weights.par_iter_mut().zip(gradient).zip(buffer).with_min_len(PARALLEL_FROM);
    all.for_each(|((w, g), b)| {
        let g = g + decay * *w;
        *b = m * *b + g;
        *w -= rate * if nesterov { g + m * *b } else { *b };
    });
}

/// AdamW after averaging, at step `t`, counted from 1; all gradients came at every step.
fn dense_adam(
    Adam { beta1, beta2, eps }: Adam,
    t: u64,
    decay: f32,
    rate: f32,
    weights: &mut [f32],
    gradient: &[f32],
    (first, second): (&mut Vec<f32>, &mut Vec<f32>),
) {
    first.resize(weights.len(), 0.0);
    second.resize(weights.len(), 0.0);
    let unbias = |b: f32| 1.0 - f64::from(b).powf(t as f64);
    let (pace, root) = ((f64::from(rate) / unbias(beta1)) as f32, (1.0 / unbias(beta2)) as f32);
    let factor = (1.0 - f64::from(rate) * f64::from(decay)) as f32;
    let moments = first.par_iter_mut().zip(second);
    let all = weights.par_iter_mut().zip(gradient).zip(moments).with_min_len(PARALLEL_FROM);
    all.for_each(|((w, g), (m, q))| {
        *m = beta1 * *m + (1.0 - beta1) * g;
        *q = beta2 * *q + (1.0 - beta2) * (g * g);
        *w = *w * factor - pace * *m / ((*q * root).sqrt() + eps);
    });
}

//! The optimizer behind a synchronizer, for any loop of one's own. Comes in: the updates of a finished step, the weights, a rate. Goes
//! out: the weights as ordinary training with momentum and decay would have them.
//! What must hold: momentum, and what Adam divides it by, is applied once, in the residual for a sparse update, here for a dense one;
//! when a warm-up ends it is handed over; weight decay has the same strength in both.

use crate::error::SyncError;
use crate::layer::{Kind, Layer};
use crate::synchronizer::Synchronizer;
use crate::target::Update;
use rayon::prelude::*;
use redsync_core::{Adam, AdamW, Level, Momentum, apply};

/// Below this many elements a layer is updated by one thread.
const PARALLEL_FROM: usize = 1 << 17;

/// Gradient descent, plain or with momentum, and AdamW, over slices of weights, one for each layer.
///
/// ```
/// use redsync_comm::local;
/// use redsync_core::Momentum;
/// use redsync_engine::{Config, Kind, Layer, Optimizer, Synchronizer, WarmUp};
/// use std::sync::Arc;
///
/// let run = |(rank, comm)| {
///     std::thread::spawn(move || {
///         let layers = vec![Layer::new("weight", 2_000, Kind::Weight), Layer::new("bias", 10, Kind::BiasOrNorm)];
///         let config = Config { momentum: Momentum::Nesterov(0.9), warm_up: WarmUp::Dense(3), ..Config::default() };
///         let mut sync = Synchronizer::new(layers, config, Arc::new(comm))?;
///         let mut optimizer = Optimizer::new(&sync, 5e-4); // momentum is that of the configuration
///         let mut weights = [vec![1f32; 2_000], vec![1f32; 10]];
///         for step in 0..6 {
///             let rate = 0.1 / (1 + step) as f32;
///             optimizer.begin(&sync, rate)?;
///             sync.submit(1, vec![0.5; 10])?; // what a backward pass yields
///             sync.submit(0, vec![rank as f32; 2_000])?;
///             sync.finish()?;
///             optimizer.step(&mut sync, &mut weights, rate)?;
///         }
///         sync.check_replicas(&[&weights[0], &weights[1]])
///     })
/// };
/// let ranks: Vec<_> = local::group(2).into_iter().enumerate().map(run).collect();
/// let hashes: Vec<u64> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(hashes[0], hashes[1]);
/// # Ok::<(), redsync_engine::SyncError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Optimizer {
    layers: Vec<Own>,
}

/// What the optimizer knows of a layer.
#[derive(Clone, Debug)]
struct Own {
    name: String,
    size: usize,
    momentum: Momentum,
    /// 0 for biases and norms.
    decay: f32,
    /// Momentum of a layer that is dense; empty for others and before the first step.
    first: Vec<f32>,
    /// The same of Adam's second moment.
    second: Vec<f32>,
}

impl Optimizer {
    /// The optimizer of a synchronizer: with the momentum of its configuration and layers. Weights decay, but not biases and norms.
    pub fn new(sync: &Synchronizer, decay: f32) -> Self {
        Self::of(sync.layers(), sync.shared.config.momentum, decay)
    }

    /// An optimizer of one rank alone, as for local steps ([`Local`](crate::Local)); layers with a momentum of their own have that.
    pub fn of(layers: &[Layer], momentum: Momentum, decay: f32) -> Self {
        let own = |layer: &Layer| Own {
            name: layer.name.clone(),
            size: layer.size,
            momentum: layer.momentum.unwrap_or(momentum),
            decay: if layer.kind == Kind::BiasOrNorm { 0.0 } else { decay },
            first: Vec::new(),
            second: Vec::new(),
        };
        Optimizer { layers: layers.iter().map(own).collect() }
    }

    /// Before the first gradient of a step: residuals learn the rate at which it will be applied, and layers that are compressed from
    /// now on take their momentum along. All ranks say the same rate.
    pub fn begin(&mut self, sync: &Synchronizer, rate: f32) -> Result<(), SyncError> {
        for (layer, own) in self.layers.iter_mut().enumerate() {
            sync.set_rate(layer, rate)?;
            if sync.is_sparse(layer) && !own.first.is_empty() {
                match own.second.is_empty() {
                    true => sync.adopt_momentum(layer, &own.first)?,
                    false => sync.adopt_adam(layer, &own.first, &own.second, sync.step())?,
                }
                (own.first, own.second) = (Vec::new(), Vec::new());
            }
        }
        Ok(())
    }

    /// Behind [`Synchronizer::finish`]: updates the weights of all layers, at the rate with which the step began.
    pub fn step<W: AsMut<[f32]>>(
        &mut self,
        sync: &mut Synchronizer,
        weights: &mut [W],
        rate: f32,
    ) -> Result<(), SyncError> {
        self.check(weights)?;
        weights.iter_mut().enumerate().try_for_each(|(i, w)| self.step_layer(sync, i, w.as_mut(), rate))
    }

    /// [`Optimizer::step`] for one layer, to be called once for each in any order.
    pub fn step_layer(
        &mut self,
        sync: &mut Synchronizer,
        layer: usize,
        weights: &mut [f32],
        rate: f32,
    ) -> Result<(), SyncError> {
        let (own, steps) = (self.layers.get_mut(layer), sync.step());
        let own = own.filter(|own| own.size == weights.len()).ok_or_else(other_weights)?;
        match sync.update(layer) {
            Some(Update::Dense(gradient)) => {
                own.descend(gradient, weights, rate, steps);
                Ok(())
            }
            Some(Update::Sparse(_)) => {
                own.shrink(weights, rate);
                sync.apply(layer, weights, rate)
            }
            None => Err(SyncError::Order(format!("layer {} has no update: finish comes first", own.name))),
        }
    }

    /// By what the weights of a layer are multiplied before a sparse update, at a rate: for weights that are no slice, which take the update
    /// by [`Synchronizer::apply_to`] then. None if they do not decay.
    pub fn shrinkage(&self, layer: usize, rate: f32) -> Option<f32> {
        self.layers.get(layer).and_then(|own| own.shrinkage(rate))
    }

    /// A step of this rank alone, with gradients of its own; `t` counts steps from 1. A layer whose gradient is empty stays as it is.
    pub fn step_alone<W: AsMut<[f32]>>(
        &mut self,
        gradients: &[&[f32]],
        weights: &mut [W],
        rate: f32,
        t: u64,
    ) -> Result<(), SyncError> {
        self.check(weights)?;
        let fits = |(own, gradient): (&Own, &&[f32])| gradient.is_empty() || gradient.len() == own.size;
        if gradients.len() != self.layers.len() || !self.layers.iter().zip(gradients).all(fits) {
            return Err(SyncError::Order("these are not gradients of the optimizer's layers".into()));
        }
        for ((own, gradient), weights) in self.layers.iter_mut().zip(gradients).zip(weights) {
            if !gradient.is_empty() {
                own.descend(gradient, weights.as_mut(), rate, t);
            }
        }
        Ok(())
    }

    /// What lasts from step to step, by name: to be kept beside the weights, and given to [`Optimizer::restore`].
    pub fn moments(&self) -> impl Iterator<Item = (String, &[f32])> {
        let named = |kind: fn(&Own) -> (String, &[f32])| {
            self.layers.iter().map(kind).filter(|(_, values)| !values.is_empty())
        };
        named(|own| (own.first_name(), &own.first)).chain(named(|own| (own.second_name(), &own.second)))
    }

    /// Continues with what was kept: the function is asked for each name and gives a vector of that length, or None where none was kept.
    pub fn restore<E>(
        &mut self,
        mut take: impl FnMut(&str, usize) -> Result<Option<Vec<f32>>, E>,
    ) -> Result<(), E> {
        for own in &mut self.layers {
            own.first = take(&own.first_name(), own.size)?.unwrap_or_default();
            own.second = take(&own.second_name(), own.size)?.unwrap_or_default();
        }
        Ok(())
    }

    fn check<W: AsMut<[f32]>>(&self, weights: &mut [W]) -> Result<(), SyncError> {
        let mut pairs = self.layers.iter().zip(&mut *weights);
        let fits = pairs.all(|(own, weights)| own.size == weights.as_mut().len());
        if fits && weights.len() == self.layers.len() { Ok(()) } else { Err(other_weights()) }
    }
}

fn other_weights() -> SyncError {
    SyncError::Order("these are not weights of the optimizer's layers".into())
}

impl Own {
    fn first_name(&self) -> String {
        format!("momentum/{}", self.name)
    }

    fn second_name(&self) -> String {
        format!("second-moment/{}", self.name)
    }

    /// By a dense gradient; `t` counts steps from 1.
    fn descend(&mut self, gradient: &[f32], weights: &mut [f32], rate: f32, t: u64) {
        match self.momentum {
            Momentum::Adam(adam) => self.adam(adam, t, gradient, weights, rate),
            Momentum::None => {
                let decay = self.decay;
                let pairs = weights.par_iter_mut().zip(gradient).with_min_len(PARALLEL_FROM);
                pairs.for_each(|(w, g)| *w -= rate * (g + decay * *w));
            }
            Momentum::Plain(m) => self.momentum(m, false, gradient, weights, rate),
            Momentum::Nesterov(m) => self.momentum(m, true, gradient, weights, rate),
        }
    }

    /// Ordinary momentum after averaging: b = m*b + g, w -= rate * b, or with Nesterov rate * (g + m*b).
    fn momentum(&mut self, m: f32, nesterov: bool, gradient: &[f32], weights: &mut [f32], rate: f32) {
        let decay = self.decay;
        self.first.resize(weights.len(), 0.0);
        let all = weights.par_iter_mut().zip(gradient).zip(&mut self.first).with_min_len(PARALLEL_FROM);
        all.for_each(|((w, g), b)| {
            let g = g + decay * *w;
            *b = m * *b + g;
            *w -= rate * if nesterov { g + m * *b } else { *b };
        });
    }

    /// AdamW after averaging; all gradients came at every step.
    fn adam(&mut self, adam: Adam, t: u64, gradient: &[f32], weights: &mut [f32], rate: f32) {
        self.first.resize(weights.len(), 0.0);
        self.second.resize(weights.len(), 0.0);
        let (step, level) = (AdamW::new(adam, t, rate, self.decay), Level::best());
        let moments = self.first.par_chunks_mut(PARALLEL_FROM).zip(self.second.par_chunks_mut(PARALLEL_FROM));
        let all = weights.par_chunks_mut(PARALLEL_FROM).zip(gradient.par_chunks(PARALLEL_FROM)).zip(moments);
        all.for_each(|((w, g), (m, q))| step.update(level, w, m, q, g));
    }

    /// The decay of weights whose update is sparse.
    fn shrink(&self, weights: &mut [f32], rate: f32) {
        if let Some(factor) = self.shrinkage(rate) {
            weights.par_iter_mut().with_min_len(PARALLEL_FROM).for_each(|w| *w *= factor);
        }
    }

    fn shrinkage(&self, rate: f32) -> Option<f32> {
        // Only a decay that is part of the gradient is enlarged by momentum.
        let coefficient = match self.momentum {
            Momentum::Adam(_) => 0.0,
            momentum => f64::from(momentum.coefficient()),
        };
        let factor = apply::decay(f64::from(rate), f64::from(self.decay), coefficient) as f32;
        (self.decay > 0.0).then_some(factor)
    }
}

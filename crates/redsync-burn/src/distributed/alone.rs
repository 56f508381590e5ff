//! Steps of one rank alone, and now and then an exchange of weights: local steps. Comes in: the gradients of this rank. Goes out: the module
//! with its own step made, and when it is time with the weights of all ranks.
//! What must hold: after an exchange all ranks have the same weights.

use super::module::change_all;
use super::place::Values;
use super::{Distributed, DistributedError};
use burn::module::Module;
use burn::optim::GradientsParams;
use redsync_core::Gradient;
use redsync_engine::Local;

/// What local steps need from step to step, beside the optimizer.
pub(super) struct Alone {
    pub local: Local,
    /// The norm at which gradients are clipped.
    pub clip: Option<f32>,
    /// Steps that were made.
    pub steps: u64,
    /// All of it that changes results, in words.
    pub told: String,
}

impl Distributed {
    /// The local steps, if there are any: how many since the last exchange, and the weights on which the ranks agreed then.
    pub fn local(&self) -> Option<&Local> {
        self.alone.as_ref().map(|alone| &alone.local)
    }

    /// How many local steps were made in all.
    pub fn steps_alone(&self) -> Option<u64> {
        self.alone.as_ref().map(|alone| alone.steps)
    }

    /// Exchanges what the ranks found by local steps since the last exchange, though it is not time: before they are judged or saved. All
    /// ranks call this between two steps; without local steps, or right behind an exchange, nothing happens.
    pub fn agree<M: Module>(&mut self, model: M) -> Result<M, DistributedError> {
        let agreed = self.agreed(model);
        self.or_give_up(agreed)
    }

    fn agreed<M: Module>(&mut self, model: M) -> Result<M, DistributedError> {
        let (watch, sync) = (&self.watch, &mut self.sync);
        match &mut self.alone {
            Some(alone) if alone.local.since() > 0 => {
                change_all(model, watch, |weights| Ok(alone.local.agree(sync, weights)?))
            }
            _ => Ok(model),
        }
    }

    /// A step by the gradients of this rank, and an exchange if it is time.
    pub(super) fn stepped_alone<M: Module>(
        &mut self,
        rate: f32,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, DistributedError> {
        let rest = self.rest(&model, gradients)?;
        let mut all = self.watch.take_kept();
        rest.into_iter().for_each(|(layer, gradient)| all[layer] = gradient);
        let Distributed { watch, sync, optimizer, alone, .. } = self;
        let Some(Alone { local, clip, steps, .. }) = alone else { return Ok(model) };
        let gradients: Vec<&[f32]> =
            all.iter().map(|gradient| gradient.as_ref().and_then(Values::host).unwrap_or_default()).collect();
        let bad = |gradient: &&[f32]| Gradient::F32(gradient).first_not_finite().is_some();
        if let Some(layer) = gradients.iter().position(bad) {
            let why = format!("the gradient of layer {} is not finite", sync.layers()[layer].name);
            return Err(DistributedError::Model(why));
        }
        let clipped = clip.and_then(|limit| clipped(&gradients, limit));
        let gradients = match &clipped {
            Some(clipped) => clipped.iter().map(|gradient| &gradient[..]).collect(),
            None => gradients,
        };
        *steps += 1;
        change_all(model, watch, |weights| {
            optimizer.step_alone(&gradients, weights, rate, *steps)?;
            match local.step() {
                true => Ok(local.agree(sync, weights)?),
                false => Ok(()),
            }
        })
    }
}

/// Gradients of a norm that is too large, brought down to the limit.
fn clipped(gradients: &[&[f32]], limit: f32) -> Option<Vec<Vec<f32>>> {
    let squares = |gradient: &&[f32]| gradient.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
    let norm = gradients.iter().map(squares).sum::<f64>().sqrt();
    let factor = (f64::from(limit) / norm) as f32;
    let scaled = |gradient: &&[f32]| gradient.iter().map(|x| x * factor).collect();
    (norm > f64::from(limit)).then(|| gradients.iter().map(scaled).collect())
}

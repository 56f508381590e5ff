//! A step of one rank alone, and now and then an exchange of weights: local steps.
//! What must hold: after an exchange, and so at the end of every epoch, all ranks have the same weights.

use super::TrainError;
use super::task::Task;
use super::trainer::Trainer;
use crate::flex::BurnGradient;
use crate::hook::OnGradient;
use redsync_core::Gradient;
use redsync_engine::Source;
use std::sync::{Arc, Mutex, PoisonError};

/// The gradients of a backward pass, kept until all are there.
#[derive(Clone)]
pub(super) struct Own(Arc<Mutex<Vec<Option<BurnGradient>>>>);

impl Own {
    pub fn new(layers: usize) -> Self {
        Own(Arc::new(Mutex::new((0..layers).map(|_| None).collect())))
    }

    /// What puts gradients here.
    pub fn on_gradient(&self) -> OnGradient {
        let own = self.clone();
        Arc::new(move |layer, gradient| own.all()[layer] = Some(BurnGradient::new(gradient)))
    }

    fn all(&self) -> std::sync::MutexGuard<'_, Vec<Option<BurnGradient>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Task> Trainer<'_, T> {
    /// Updates the weights of this rank by its own gradients, and exchanges them if it is time, or an epoch ends; says whether it did.
    pub(super) fn update_alone(&mut self, own: Own, rate: f32, last: bool) -> Result<bool, TrainError> {
        let Some(local) = &mut self.local else { return Ok(false) };
        let all = own.all();
        let gradients: Vec<&[f32]> =
            all.iter().map(|gradient| gradient.as_ref().map_or(&[][..], values)).collect();
        let clipped = self.settings.clip.and_then(|limit| clipped(&gradients, limit));
        let gradients = match &clipped {
            Some(clipped) => clipped.iter().map(|gradient| &gradient[..]).collect(),
            None => gradients,
        };
        self.descent.step_alone(&gradients, &mut self.weights.all_mut(), rate, self.steps + 1)?;
        drop(gradients);
        drop(all);
        let exchanges = local.step() || last;
        if exchanges {
            local.agree(&mut self.sync, &mut self.weights.all_mut())?;
        }
        Ok(exchanges)
    }
}

fn values(gradient: &BurnGradient) -> &[f32] {
    match gradient.host() {
        Some(Gradient::F32(values)) => values,
        _ => &[],
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

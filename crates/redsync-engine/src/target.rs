//! Where updates go: weights that are changed by them, or gradients that are replaced by them.
//! What must hold: an update that does not fit changes nothing.

use redsync_core::apply::{self, ApplyError};
use redsync_core::{Sparse, Workspace};
use thiserror::Error;

/// What a step brings for one layer.
#[derive(Clone, Copy, Debug)]
pub enum Update<'a> {
    /// Sparse vectors, in rank order if there is one per rank; their sum is the averaged update, momentum included.
    Sparse(&'a [Sparse]),
    /// The averaged gradient; momentum is the optimizer's.
    Dense(&'a [f32]),
}

/// Why a target did not take an update.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum TargetError {
    /// It is of another size.
    #[error(transparent)]
    Size(#[from] ApplyError),
    /// Its device or framework refused, with a sentence.
    #[error("{0}")]
    Device(String),
}

/// Something that takes an update: memory of the host, a framework's tensor, a device.
pub trait Target: Send {
    /// `self += scale * update`.
    fn add(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError>;

    /// `self = scale * update`.
    fn fill(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError>;
}

impl Target for &mut [f32] {
    fn add(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError> {
        match update {
            Update::Sparse(messages) => Ok(apply::add(self, messages, scale, workspace)?),
            Update::Dense(values) => each(self, values, |to, x| *to += scale * x),
        }
    }

    fn fill(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError> {
        match update {
            Update::Sparse(messages) => Ok(apply::fill(self, messages, scale, workspace)?),
            Update::Dense(values) => each(self, values, |to, x| *to = scale * x),
        }
    }
}

fn each(target: &mut [f32], values: &[f32], put: impl Fn(&mut f32, f32)) -> Result<(), TargetError> {
    if values.len() != target.len() {
        return Err(ApplyError { rank: 0, theirs: values.len(), ours: target.len() }.into());
    }
    target.iter_mut().zip(values).for_each(|(to, x)| put(to, *x));
    Ok(())
}

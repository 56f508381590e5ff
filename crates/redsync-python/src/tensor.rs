//! A tensor of PyTorch as the engine's source and target: the gradient that goes in, and what it is replaced by.
//! What must hold: elements of the host are never copied; those of a device go through memory of the host, which the package's
//! staging provides.

use crate::memory::Tensor;
use pyo3::prelude::*;
use redsync_core::apply::{self, ApplyError};
use redsync_core::{Gradient, Workspace};
use redsync_engine::{Source, Target, TargetError, Update};

/// Elements of a bucket on their way to the compressor.
pub enum Given {
    /// On the host.
    Here(Tensor),
    /// On a device: the number of the layer, its elements, the moment from which they can be read, and the way to the host.
    There {
        layer: usize,
        len: usize,
        flat: Py<PyAny>,
        ready: Py<PyAny>,
        staging: Py<PyAny>,
        host: Option<Tensor>,
    },
}

impl Source for Given {
    fn len(&self) -> usize {
        match self {
            Given::Here(tensor) => tensor.len(),
            Given::There { len, .. } => *len,
        }
    }

    fn fetch(&mut self) -> Result<(), String> {
        let Given::There { layer, flat, ready, staging, host, .. } = self else { return Ok(()) };
        let fetched = Python::attach(|py| {
            staging.bind(py).call_method1("fetch", (*layer, flat.bind(py), ready.bind(py)))?.extract()
        });
        *host = Some(fetched.map_err(|error: PyErr| error.to_string())?);
        Ok(())
    }

    fn host(&self) -> Option<Gradient<'_>> {
        match self {
            Given::Here(tensor) => tensor.gradient(),
            Given::There { host, .. } => host.as_ref()?.gradient(),
        }
    }
}

/// Elements of a bucket that an update replaces.
pub enum Wanted {
    /// On the host.
    Here(Tensor),
    /// On a device; see [`Given::There`].
    There { layer: usize, flat: Py<PyAny>, staging: Py<PyAny> },
}

impl Target for Wanted {
    /// Gradients are replaced, never added to: `optimizer.step()` changes the weights.
    fn add(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError> {
        self.fill(update, scale, workspace)
    }

    fn fill(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError> {
        match self {
            Wanted::Here(tensor) => fill(tensor, update, scale, workspace),
            Wanted::There { layer, flat, staging } => {
                let lost = |error: PyErr| TargetError::Device(error.to_string());
                let target = Python::attach(|py| {
                    staging.bind(py).call_method1("target", (*layer, flat.bind(py)))?.extract::<Tensor>()
                });
                fill(&mut target.map_err(lost)?, update, scale, workspace)?;
                let stored = Python::attach(|py| {
                    staging.bind(py).call_method1("store", (*layer, flat.bind(py))).map(drop)
                });
                stored.map_err(lost)
            }
        }
    }
}

/// The update, rounded to what the elements are.
fn fill(
    tensor: &mut Tensor,
    update: Update<'_>,
    scale: f32,
    workspace: &mut Workspace,
) -> Result<(), TargetError> {
    if let Some(mut floats) = tensor.floats_mut() {
        return Target::fill(&mut floats, update, scale, workspace);
    }
    let ours = tensor.len();
    let mut values = vec![0.0; ours];
    match update {
        Update::Sparse(messages) => apply::fill(&mut values, messages, scale, workspace)?,
        Update::Dense(dense) => Target::fill(&mut &mut values[..], Update::Dense(dense), scale, workspace)?,
    }
    match tensor.write_rounded(&values) {
        true => Ok(()),
        false => Err(ApplyError { rank: 0, theirs: values.len(), ours }.into()),
    }
}

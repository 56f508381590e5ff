//! A tensor of PyTorch as the engine's source and target: the gradient that goes in, and what it is replaced by.
//! What must hold: elements of the host are never copied; those of a device go to the host only where they are wanted there, through
//! memory that the package's staging provides, and of an update only what is not zero goes back.

use crate::memory::{Tensor, lent};
use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use redsync_core::apply::{self, ApplyError};
use redsync_core::{Gradient, Sparse, Workspace};
use redsync_engine::{Source, Target, TargetError, Update};

/// Elements of a bucket on a device: the layer's number, how many they are, and what the package has of them.
pub struct Piece {
    layer: usize,
    len: usize,
    pub flat: Py<PyAny>,
    pub bucket: Py<PyAny>,
}

impl Piece {
    pub fn new(layer: usize, flat: &Bound<'_, PyAny>, bucket: &Py<PyAny>) -> PyResult<Piece> {
        let len = flat.call_method0("numel")?.extract()?;
        Ok(Piece { layer, len, flat: flat.clone().unbind(), bucket: bucket.clone_ref(flat.py()) })
    }

    /// Calls a method of the bucket.
    fn call<'py, A: PyCallArgs<'py>>(
        &self,
        py: Python<'py>,
        name: &str,
        arguments: A,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.bucket.bind(py).call_method1(name, arguments)
    }
}

/// Elements of a bucket on their way to the compressor.
pub enum Given {
    /// On the host.
    Here(Tensor),
    /// On a device, and on the host as well where all of them are needed there.
    There(Piece, Option<Tensor>),
}

impl Source for Given {
    fn len(&self) -> usize {
        match self {
            Given::Here(tensor) => tensor.len(),
            Given::There(piece, _) => piece.len,
        }
    }

    fn fetch(&mut self) -> Result<(), String> {
        let Given::There(piece, host) = self else { return Ok(()) };
        let fetched = Python::attach(|py| piece.call(py, "fetch", (piece.layer,))?.extract());
        *host = fetched.map_err(|error: PyErr| error.to_string())?;
        Ok(())
    }

    fn host(&self) -> Option<Gradient<'_>> {
        match self {
            Given::Here(tensor) => tensor.gradient(),
            Given::There(_, host) => host.as_ref()?.gradient(),
        }
    }
}

/// Elements of a bucket that an update replaces.
pub enum Wanted {
    /// On the host.
    Here(Tensor),
    /// On a device.
    There(Piece),
}

impl Target for Wanted {
    /// Gradients are replaced, never added to: `optimizer.step()` changes the weights.
    fn add(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError> {
        self.fill(update, scale, workspace)
    }

    fn fill(&mut self, update: Update<'_>, scale: f32, workspace: &mut Workspace) -> Result<(), TargetError> {
        let piece = match self {
            Wanted::Here(tensor) => return fill(tensor, update, scale, workspace),
            Wanted::There(piece) => piece,
        };
        let lost = |error: PyErr| TargetError::Device(error.to_string());
        if let Update::Sparse(messages) = update
            && DENSE_FROM * messages.iter().map(Sparse::len).sum::<usize>() < piece.len
        {
            let (indices, values) = merged(messages, piece.len, scale)?;
            let stored = Python::attach(|py| {
                let (indices, values) = (lent(py, &indices)?, lent(py, &values)?);
                piece.call(py, "scatter", (piece.layer, &piece.flat, indices, values)).map(drop)
            });
            return stored.map_err(lost);
        }
        let target =
            Python::attach(|py| piece.call(py, "target", (piece.layer, &piece.flat))?.extract::<Tensor>());
        fill(&mut target.map_err(lost)?, update, scale, workspace)?;
        let stored = Python::attach(|py| piece.call(py, "store", (piece.layer, &piece.flat)).map(drop));
        stored.map_err(lost)
    }
}

/// Two numbers of four bytes per element cross, or one for every element of the layer.
const DENSE_FROM: usize = 2;

/// `scale` times the sum of messages, in rank order, where it is not zero: indices, which rise, and values. The bits are those of
/// [`apply::fill`].
fn merged(messages: &[Sparse], ours: usize, scale: f32) -> Result<(Vec<u32>, Vec<f32>), ApplyError> {
    if let Some((rank, message)) =
        messages.iter().enumerate().find(|(_, message)| message.dense_len() != ours)
    {
        return Err(ApplyError { rank, theirs: message.dense_len(), ours });
    }
    let mut indices: Vec<u32> =
        messages.iter().flat_map(|message| message.iter().map(|(index, _)| index)).collect();
    indices.sort_unstable();
    indices.dedup();
    let mut values = vec![0.0; indices.len()];
    for message in messages {
        let mut places = indices.iter().zip(&mut values);
        for (index, value) in message.iter() {
            if let Some((_, sum)) = places.find(|(place, _)| **place == index) {
                *sum += scale * value;
            }
        }
    }
    Ok((indices, values))
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

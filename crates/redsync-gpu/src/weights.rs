//! Weights in the memory of a device, that take updates there. What must hold: they get the bits that weights in the memory of the host
//! would get: every element its contributions in rank order, one addition for each, and no two units change one element.

use crate::device::{Gpu, UNITS, cubes};
use crate::kernels;
use crate::layer::all;
use cubecl::prelude::*;
use cubecl::server::Handle;
use redsync_core::apply::ApplyError;
use redsync_core::{Sparse, Workspace};
use redsync_engine::offload::DeviceError;
use redsync_engine::{Target, TargetError, Update};

/// A tensor of f32 on a device, contiguous: its buffer is changed for all that share it. Everything is done in the order of the thread that
/// made the buffer, so that whoever reads it next finds the update.
pub struct GpuWeights {
    gpu: Gpu,
    buffer: Handle,
    n: usize,
}

impl GpuWeights {
    /// A buffer of at least so many elements.
    pub fn new(gpu: &Gpu, buffer: Handle, n: usize) -> Result<Self, DeviceError> {
        if !gpu.has(&buffer) {
            return Err(DeviceError("the weights are on another device".into()));
        }
        if buffer.size_in_used() < 4 * n as u64 {
            return Err(DeviceError(format!("the buffer of weights is shorter than {n} elements")));
        }
        Ok(GpuWeights { gpu: gpu.beside(&buffer), buffer, n })
    }

    /// A buffer of its own with these values.
    pub fn upload(gpu: &Gpu, values: &[f32]) -> Self {
        let buffer = gpu.upload_exactly(bytemuck::cast_slice(values));
        GpuWeights { gpu: gpu.clone(), buffer, n: values.len() }
    }

    /// A buffer of its own with zeros, which do not come from the host.
    pub fn zeros(gpu: &Gpu, n: usize) -> Self {
        let mut zeros = GpuWeights { gpu: gpu.clone(), buffer: gpu.empty(n), n };
        zeros.each(0.0, true);
        zeros
    }

    /// Where they are.
    pub fn buffer(&self) -> &Handle {
        &self.buffer
    }

    /// The buffer alone.
    pub fn into_buffer(self) -> Handle {
        self.buffer
    }

    /// A copy on the device, which nobody shares.
    pub fn copied(&self) -> Self {
        let buffer = self.gpu.empty(self.n);
        let copy = GpuWeights { gpu: self.gpu.clone(), buffer, n: self.n };
        if self.n > 0 {
            let (width, length) = self.vectors();
            self.gpu.moves(2 * self.n);
            self.gpu.in_order(|client| {
                // SAFETY: both buffers have `length` vectors of this width.
                unsafe {
                    kernels::copy::launch_unchecked(
                        client,
                        cubes(length, 1),
                        CubeDim::new_1d(UNITS),
                        width,
                        all(&self.buffer, length),
                        all(&copy.buffer, length),
                        length as u32,
                        1.0,
                        false,
                    );
                }
            });
        }
        copy
    }

    /// Other values, in a buffer of its own: whoever shared the old one keeps it.
    pub fn replace(&mut self, values: &[f32]) -> Result<(), DeviceError> {
        if values.len() != self.n {
            return Err(DeviceError(format!("there are {} values for {} weights", values.len(), self.n)));
        }
        self.buffer = self.gpu.upload_exactly(bytemuck::cast_slice(values));
        Ok(())
    }

    /// The values, copied to the host.
    pub fn read(&self) -> Result<Vec<f32>, DeviceError> {
        self.gpu.download_floats(&self.buffer, self.n)
    }

    /// Multiplies all, as a decay does.
    pub fn scale(&mut self, factor: f32) {
        self.each(factor, false);
    }

    /// The width of vectors that fit, and how many there are.
    fn vectors(&self) -> (usize, usize) {
        let width = if self.n.is_multiple_of(4) { 4 } else { 1 };
        (width, self.n / width)
    }

    fn each(&mut self, factor: f32, clears: bool) {
        if self.n == 0 {
            return;
        }
        let (width, length) = self.vectors();
        self.gpu.moves(self.n * if clears { 1 } else { 2 });
        self.gpu.in_order(|client| {
            // SAFETY: the buffer has `length` vectors of this width.
            unsafe {
                kernels::scale::launch_unchecked(
                    client,
                    cubes(length, 1),
                    CubeDim::new_1d(UNITS),
                    width,
                    all(&self.buffer, length),
                    length as u32,
                    factor,
                    clears,
                );
            }
        });
    }

    /// Adds values to all elements.
    fn add_all(&mut self, values: Vec<f32>) {
        if self.n == 0 {
            return;
        }
        let (width, length) = self.vectors();
        let values = self.gpu.upload(bytemuck::cast_slice(&values));
        self.gpu.moves(3 * self.n);
        self.gpu.in_order(|client| {
            // SAFETY: both buffers have `length` vectors of this width.
            unsafe {
                kernels::add::launch_unchecked(
                    client,
                    cubes(length, 1),
                    CubeDim::new_1d(UNITS),
                    width,
                    all(&values, length),
                    all(&self.buffer, length),
                    length as u32,
                    1,
                );
            }
        });
    }

    /// Adds values to some elements, each of which stands with all that it gets.
    fn add_merged(&mut self, indices: &[u32], values: &[f32]) {
        let count = indices.len();
        if count == 0 {
            return;
        }
        let at = self.gpu.upload(bytemuck::cast_slice(indices));
        let values = self.gpu.upload(bytemuck::cast_slice(values));
        self.gpu.moves(4 * count);
        self.gpu.in_order(|client| {
            // SAFETY: `merge` gives indices below `n`, which are those of messages for `n` elements, and as many values.
            unsafe {
                kernels::add_merged::launch_unchecked(
                    client,
                    cubes(count, 1),
                    CubeDim::new_1d(UNITS),
                    all(&self.buffer, self.n),
                    all(&at, count),
                    all(&values, count),
                    count as u32,
                );
            }
        });
    }

    /// Merges messages: what an element gets stands side by side, in rank order.
    fn merge(&self, messages: &[Sparse], scale: f32) -> Result<(Vec<u32>, Vec<f32>), ApplyError> {
        let ours = self.n;
        if let Some((rank, message)) = messages.iter().enumerate().find(|(_, m)| m.dense_len() != ours) {
            return Err(ApplyError { rank, theirs: message.dense_len(), ours });
        }
        let mut all: Vec<(u32, f32)> =
            messages.iter().flat_map(Sparse::iter).map(|(index, value)| (index, scale * value)).collect();
        // A stable order: ranks stay as they are.
        all.sort_by_key(|(index, _)| *index);
        Ok(all.into_iter().unzip())
    }
}

impl Target for GpuWeights {
    fn add(&mut self, update: Update<'_>, scale: f32, _: &mut Workspace) -> Result<(), TargetError> {
        match update {
            Update::Sparse(messages) => {
                let (indices, values) = self.merge(messages, scale)?;
                self.add_merged(&indices, &values);
            }
            Update::Dense(values) if values.len() != self.n => {
                return Err(ApplyError { rank: 0, theirs: values.len(), ours: self.n }.into());
            }
            Update::Dense(values) => self.add_all(values.iter().map(|x| scale * x).collect()),
        }
        Ok(())
    }

    fn fill(&mut self, update: Update<'_>, scale: f32, _: &mut Workspace) -> Result<(), TargetError> {
        match update {
            Update::Sparse(messages) => {
                let (indices, values) = self.merge(messages, scale)?;
                self.each(0.0, true);
                self.add_merged(&indices, &values);
            }
            Update::Dense(values) if values.len() != self.n => {
                return Err(ApplyError { rank: 0, theirs: values.len(), ours: self.n }.into());
            }
            Update::Dense(values) => {
                let values: Vec<f32> = values.iter().map(|x| scale * x).collect();
                self.gpu.write(&self.buffer, bytemuck::cast_slice(&values));
            }
        }
        Ok(())
    }
}

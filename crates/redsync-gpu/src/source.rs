//! Gradients in the memory of a device, for layers there.

use crate::device::Gpu;
use cubecl::server::Handle;
use redsync_core::Gradient;
use redsync_engine::Source;
use std::borrow::Cow;

/// How a gradient's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Single precision.
    F32,
    /// IEEE half precision, two to a word.
    F16,
    /// bfloat16, two to a word.
    Bf16,
}

/// A gradient on a device, contiguous. The buffer is shared, and must not be changed before the step has ended.
#[derive(Clone)]
pub struct GpuGradient {
    pub(crate) buffer: Handle,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
}

impl GpuGradient {
    /// A buffer of f32 of the device on which the layer is.
    pub fn new(buffer: Handle, len: usize) -> Self {
        GpuGradient { buffer, len, kind: Kind::F32 }
    }

    /// Where it is.
    pub fn buffer(&self) -> &Handle {
        &self.buffer
    }

    /// Copies a gradient of the host to a device.
    pub fn upload(gpu: &Gpu, gradient: Gradient<'_>) -> Self {
        let (kind, bytes): (Kind, Cow<'_, [u8]>) = match gradient {
            Gradient::F32(g) => (Kind::F32, bytemuck::cast_slice(g).into()),
            Gradient::F16(g) => (Kind::F16, bytemuck::cast_slice(g).into()),
            Gradient::Bf16(g) => (Kind::Bf16, bytemuck::cast_slice(g).into()),
        };
        GpuGradient { buffer: gpu.upload(&bytes), len: gradient.len(), kind }
    }
}

impl Source for GpuGradient {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<Gradient<'_>> {
        None
    }
}

//! Gradients in the memory of a device, for layers there.

use crate::device::Gpu;
use cubecl::server::Handle;
use half::{bf16, f16};
use redsync_core::Gradient;
use redsync_engine::Source;
use redsync_engine::offload::DeviceError;
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
    /// What copies it to the host, if it is wanted there.
    reader: Option<Gpu>,
    copy: Option<Vec<f32>>,
}

impl GpuGradient {
    /// A buffer of f32 of the device on which the layer is.
    pub fn new(buffer: Handle, len: usize) -> Self {
        Self::of(buffer, len, Kind::F32)
    }

    /// A buffer of values of some kind.
    pub fn of(buffer: Handle, len: usize, kind: Kind) -> Self {
        GpuGradient { buffer, len, kind, reader: None, copy: None }
    }

    /// The same for a layer that is dense at this step, or is clipped: the thread that takes the gradient copies it to the host.
    pub fn for_host(self, gpu: &Gpu) -> Self {
        GpuGradient { reader: Some(gpu.clone()), ..self }
    }

    /// Its values.
    pub(crate) fn read(&self, gpu: &Gpu) -> Result<Vec<f32>, DeviceError> {
        let half = |words: Vec<u32>, value: fn(u16) -> f32| {
            let halves = words.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]);
            halves.take(self.len).map(value).collect()
        };
        Ok(match self.kind {
            Kind::F32 => gpu.download_floats(&self.buffer, self.len)?,
            Kind::F16 => {
                half(gpu.download(&self.buffer, self.len.div_ceil(2))?, |h| f16::from_bits(h).to_f32())
            }
            Kind::Bf16 => {
                half(gpu.download(&self.buffer, self.len.div_ceil(2))?, |h| bf16::from_bits(h).to_f32())
            }
        })
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
        Self::of(gpu.upload(&bytes), gradient.len(), kind)
    }
}

impl Source for GpuGradient {
    fn len(&self) -> usize {
        self.len
    }

    fn fetch(&mut self) -> Result<(), String> {
        if let Some(gpu) = self.reader.take() {
            self.copy = Some(self.read(&gpu).map_err(|DeviceError(why)| why)?);
        }
        Ok(())
    }

    fn host(&self) -> Option<Gradient<'_>> {
        self.copy.as_deref().map(Gradient::F32)
    }
}

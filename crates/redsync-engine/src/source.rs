//! Gradients as they are handed over: owned or shared, never copied on the way to the compressing thread, and not
//! necessarily in the memory of the host.

use redsync_core::Gradient;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// A gradient that another thread can take. A compressor on a device finds its own kind of source behind `&dyn Any`.
pub trait Source: Any + Send {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there is no element.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Called once, on the compressing thread, before the values are read: waits for the device that computes them, or copies
    /// them to the host. The error is a sentence.
    fn fetch(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// The values, if they are in the memory of the host.
    fn host(&self) -> Option<Gradient<'_>>;
}

impl Source for Vec<f32> {
    fn len(&self) -> usize {
        self.len()
    }

    fn host(&self) -> Option<Gradient<'_>> {
        Some(Gradient::F32(self))
    }
}

impl Source for Arc<Vec<f32>> {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn host(&self) -> Option<Gradient<'_>> {
        Some(Gradient::F32(self))
    }
}

/// A part of a shared buffer.
#[derive(Clone, Debug)]
pub struct Window {
    /// The buffer.
    pub buffer: Arc<Vec<f32>>,
    /// The part. One that does not lie within the buffer has no elements, and is refused for its length.
    pub range: Range<usize>,
}

impl Window {
    fn values(&self) -> &[f32] {
        self.buffer.get(self.range.clone()).unwrap_or(&[])
    }
}

impl Source for Window {
    fn len(&self) -> usize {
        self.values().len()
    }

    fn host(&self) -> Option<Gradient<'_>> {
        Some(Gradient::F32(self.values()))
    }
}

//! Gradients as they are handed over: owned or shared, never copied on the way to the compressing thread.

use redsync_core::Gradient;
use std::ops::Range;
use std::sync::Arc;

/// A gradient that another thread can read.
pub trait Source: Send + 'static {
    /// The values.
    fn gradient(&self) -> Gradient<'_>;
}

impl Source for Vec<f32> {
    fn gradient(&self) -> Gradient<'_> {
        Gradient::F32(self)
    }
}

impl Source for Arc<Vec<f32>> {
    fn gradient(&self) -> Gradient<'_> {
        Gradient::F32(self)
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

impl Source for Window {
    fn gradient(&self) -> Gradient<'_> {
        Gradient::F32(self.buffer.get(self.range.clone()).unwrap_or(&[]))
    }
}

//! A vector of f32 that starts on a cache line, so that the passes may write around the cache.

use bytemuck::{Pod, Zeroable};
use std::ops::{Deref, DerefMut};

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// `len` floats, zero at first, aligned to 64 bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Field {
    lines: Vec<Line>,
    len: usize,
}

impl Field {
    pub fn zeros(len: usize) -> Self {
        Field { lines: bytemuck::allocation::zeroed_vec(len.div_ceil(16)), len }
    }
}

impl Deref for Field {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl DerefMut for Field {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

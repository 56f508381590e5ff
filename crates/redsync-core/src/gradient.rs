//! The gradient as a framework hands it over: a host slice of f32, f16 or bf16.
//! Goes out: f32, one chunk at a time, converted in the cache.

use crate::kernel::CHUNK;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A borrowed gradient.
///
/// ```
/// use redsync_core::Gradient;
/// assert_eq!(Gradient::from(&[1.0f32, 2.0][..]).len(), 2);
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Gradient<'a> {
    fn from(slice: &'a [f32]) -> Self {
        Gradient::F32(slice)
    }
}

impl<'a> From<&'a [f16]> for Gradient<'a> {
    fn from(slice: &'a [f16]) -> Self {
        Gradient::F16(slice)
    }
}

impl<'a> From<&'a [bf16]> for Gradient<'a> {
    fn from(slice: &'a [bf16]) -> Self {
        Gradient::Bf16(slice)
    }
}

impl<'a> Gradient<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Gradient::F32(g) => g.len(),
            Gradient::F16(g) => g.len(),
            Gradient::Bf16(g) => g.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One element as f32.
    pub fn get(&self, index: usize) -> Option<f32> {
        match self {
            Gradient::F32(g) => g.get(index).copied(),
            Gradient::F16(g) => g.get(index).map(|x| x.to_f32()),
            Gradient::Bf16(g) => g.get(index).map(|x| x.to_f32()),
        }
    }

    /// The first element that is NaN or infinite.
    ///
    /// ```
    /// use redsync_core::Gradient;
    /// assert_eq!(Gradient::F32(&[1.0, f32::INFINITY]).first_not_finite(), Some((1, f32::INFINITY)));
    /// ```
    pub fn first_not_finite(&self) -> Option<(usize, f32)> {
        let index = match self {
            Gradient::F32(g) => g.iter().position(|x| !x.is_finite()),
            Gradient::F16(g) => g.iter().position(|x| !x.is_finite()),
            Gradient::Bf16(g) => g.iter().position(|x| !x.is_finite()),
        }?;
        Some((index, self.get(index)?))
    }

    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        fn cut<'a, T>(
            slice: &'a [T],
            mid: usize,
            make: fn(&'a [T]) -> Gradient<'a>,
        ) -> (Gradient<'a>, Gradient<'a>) {
            let (a, b) = slice.split_at(mid);
            (make(a), make(b))
        }
        match self {
            Gradient::F32(g) => cut(g, mid, Gradient::F32),
            Gradient::F16(g) => cut(g, mid, Gradient::F16),
            Gradient::Bf16(g) => cut(g, mid, Gradient::Bf16),
        }
    }

    /// At most a chunk as f32, through `buffer` where it has to be converted.
    pub(crate) fn as_f32<'b>(&self, buffer: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        if let Gradient::F32(g) = self {
            return g;
        }
        buffer.resize(CHUNK, 0.0);
        let buffer = &mut buffer[..self.len()];
        match self {
            Gradient::F32(_) => {}
            Gradient::F16(g) => g.convert_to_f32_slice(buffer),
            Gradient::Bf16(g) => g.convert_to_f32_slice(buffer),
        }
        buffer
    }
}

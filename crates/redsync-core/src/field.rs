//! A long vector of f32 for a pass over memory: starts on a cache line, so that passes may write around the cache, and on
//! huge pages where the system has them, because page-table walks would otherwise cost as much as the data.

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// From this many elements on (two huge pages) memory is mapped.
const MAPPED_FROM: usize = 1 << 20;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

#[derive(Debug)]
enum Memory {
    Lines(Vec<Line>),
    Mapped(MmapMut),
}

/// `len` floats, zero at first, aligned to 64 bytes, on huge pages if there are many and the system allows it.
///
/// ```
/// let mut field = redsync_core::Field::zeros(3);
/// field[1] = 2.0;
/// assert_eq!(field[..], [0.0, 2.0, 0.0]);
/// ```
#[derive(Debug)]
pub struct Field {
    memory: Memory,
    len: usize,
}

impl Field {
    /// A field of zeros.
    pub fn zeros(len: usize) -> Self {
        let mapped = (len >= MAPPED_FROM).then(|| map_huge(len)).flatten();
        let lines = || Memory::Lines(bytemuck::allocation::zeroed_vec(len.div_ceil(16)));
        Field { memory: mapped.map_or_else(lines, Memory::Mapped), len }
    }
}

/// Anonymous memory for `len` floats; None where it cannot be had this way, and the heap has to do.
fn map_huge(len: usize) -> Option<MmapMut> {
    let map = MmapMut::map_anon(len.checked_mul(4)?).ok()?;
    // Advice only: a system without huge pages refuses it, and nothing is lost.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Some(map)
}

impl Deref for Field {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        match &self.memory {
            Memory::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len],
            Memory::Mapped(bytes) => bytemuck::cast_slice(bytes),
        }
    }
}

impl DerefMut for Field {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.memory {
            Memory::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
            Memory::Mapped(bytes) => bytemuck::cast_slice_mut(bytes),
        }
    }
}

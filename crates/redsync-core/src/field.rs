//! A long vector of f32 for a pass over memory: starts on a cache line, so that passes may write around the cache, and on
//! huge pages where the system has them, because page-table walks would otherwise cost as much as the data. No two of a pass start at places
//! that are alike.

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

/// From this many elements on (two huge pages) memory is mapped.
const MAPPED_FROM: usize = 1 << 20;

/// Fields start so many elements later than their memory, once to fifteen times in turn. Memory that is mapped starts at a multiple of a large power
/// of two, and places of two fields at a distance of such a power are in the same bank of memory, which has one row open at a time: `v += g`
/// over 64M elements took 23 ms where it takes 16 at any distance that is not one.
const SKEW: usize = 65 << 8;
const SKEWS: usize = 15;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

#[derive(Debug)]
enum Memory {
    Lines(Vec<Line>),
    /// The element at which the field starts.
    Mapped(MmapMut, usize),
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
        static FIELDS: AtomicUsize = AtomicUsize::new(0);
        let start = || SKEW * (1 + FIELDS.fetch_add(1, Ordering::Relaxed) % SKEWS);
        let mapped = (len >= MAPPED_FROM).then(start).and_then(|start| map_huge(len, start));
        let lines = || Memory::Lines(bytemuck::allocation::zeroed_vec(len.div_ceil(16)));
        Field { memory: mapped.unwrap_or_else(lines), len }
    }
}

/// Anonymous memory for `len` floats behind `start` others; None where it cannot be had this way, and the heap has to do.
fn map_huge(len: usize, start: usize) -> Option<Memory> {
    let map = MmapMut::map_anon(len.checked_add(start)?.checked_mul(4)?).ok()?;
    // Advice only: a system without huge pages refuses it, and nothing is lost.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Some(Memory::Mapped(map, start))
}

impl Deref for Field {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        match &self.memory {
            Memory::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len],
            Memory::Mapped(bytes, start) => &bytemuck::cast_slice(bytes)[*start..],
        }
    }
}

impl DerefMut for Field {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        match &mut self.memory {
            Memory::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
            Memory::Mapped(bytes, start) => &mut bytemuck::cast_slice_mut(bytes)[*start..],
        }
    }
}

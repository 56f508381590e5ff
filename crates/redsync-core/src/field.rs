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
        let start = || skew(FIELDS.fetch_add(1, Ordering::Relaxed));
        let mapped = (len >= MAPPED_FROM).then(start).and_then(|start| map_huge(len, start));
        let lines = || Memory::Lines(bytemuck::allocation::zeroed_vec(len.div_ceil(16)));
        Field { memory: mapped.unwrap_or_else(lines), len }
    }
}

/// The element of its memory at which the field of a number starts.
fn skew(number: usize) -> usize {
    SKEW * (1 + number % SKEWS)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_fields_are_zero_and_start_on_a_cache_line() {
        for len in [MAPPED_FROM, MAPPED_FROM + 1, 3 * MAPPED_FROM - 5] {
            let mut field = Field::zeros(len);
            assert_eq!(field.len(), len);
            assert!(field.iter().all(|x| x.to_bits() == 0));
            assert!(field.as_ptr().addr().is_multiple_of(64));
            field[len - 1] = 1.0;
            assert_eq!(field.iter().sum::<f32>(), 1.0);
        }
    }

    /// u, v and the moments of a layer are made one behind the other, and a gradient starts where its memory does.
    #[test]
    fn fields_that_are_made_one_behind_the_other_start_at_places_that_are_not_alike() {
        for first in 0..40 {
            let mut starts: Vec<usize> = (first..first + SKEWS).map(|i| 4 * skew(i) % (1 << 20)).collect();
            starts.push(0);
            starts.sort_unstable();
            assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 1 << 10), "{starts:?}");
        }
    }
}

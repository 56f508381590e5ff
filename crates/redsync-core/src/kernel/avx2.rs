//! The loops with AVX2, eight lanes at a time. Every function here is safe to call: it asserts the lengths it
//! relies on, and panics if the machine has no AVX2.
//!
//! The passes are bound by memory, and the fewer instructions they need per byte, the further ahead of memory they run.
//! So the loop has no branch that depends on data, and per vector only two operations besides the rule: a running maximum
//! of the magnitudes as integers, which shows both whether a block has a candidate and whether a value is not finite.
#![allow(unsafe_code)]

use super::portable::{self, StatLanes};
use super::{BLOCK, CHUNK, Key, Level, MOMENTUM, Outcome, PLAIN, Plan, Slices};
use crate::phase::Lens;
use std::arch::x86_64::*;

const VECTORS: usize = BLOCK / 8;
/// Blocks whose hits are looked at together, one bit in a word for each.
const GROUP: usize = u64::BITS as usize;
/// Groups that an accumulating pass walks through side by side. Prefetching by the machine ends at every page, and begins anew only
/// after some misses; two places keep memory busy then, which saves 0.05 of a plain pass. Eight take a third longer: equal
/// places of pages share a few lines of the nearest cache, and there are up to three slices.
const SIDES: usize = 2;

/// Magnitudes from here on, as integers, are those of infinity and NaN.
const NOT_FINITE: i32 = 0x7f80_0000;

/// Proof that AVX2 is there; the check is one load after the first.
fn require_avx2() {
    assert!(Level::best() == Level::Avx2, "this machine has no AVX2");
}

pub(super) fn pass<const KIND: u8, const STATS: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    require_avx2();
    let (n, save) = (slices.v.len(), !slices.saved_v.is_empty());
    assert!(n <= CHUNK && slices.gradient.len() == n, "slices of one pass differ");
    assert!(KIND == PLAIN || slices.u.len() == n, "slices of one pass differ");
    if save {
        let fits = |saved: &[f32]| saved.len() == n && saved.as_ptr().cast::<__m256>().is_aligned();
        assert!(fits(slices.saved_v) && (KIND == PLAIN || fits(slices.saved_u)), "saved slices do not fit");
    }
    // SAFETY: AVX2 is there, the lengths agree, and saved slices are aligned, all checked above.
    unsafe {
        if save {
            pass_lanes::<KIND, STATS, true>(plan, floor, slices, found)
        } else {
            pass_lanes::<KIND, STATS, false>(plan, floor, slices, found)
        }
    }
}

/// # Safety
/// Needs AVX2. All slices that KIND uses must be as long as `slices.v`, at most a chunk; with SAVE also the saved ones,
/// which must be aligned to 32 bytes.
#[target_feature(enable = "avx2")]
unsafe fn pass_lanes<const KIND: u8, const STATS: bool, const SAVE: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    let n = slices.v.len();
    let blocks = n / BLOCK;
    let v = slices.v.as_mut_ptr();
    let mut walk = Walk {
        gradient: slices.gradient.as_ptr(),
        u: slices.u.as_mut_ptr(),
        v,
        saved_u: slices.saved_u.as_mut_ptr(),
        saved_v: slices.saved_v.as_mut_ptr(),
        lens: Lanes::new(plan.lens),
        scale: _mm256_set1_ps(plan.scale),
        coefficient: _mm256_set1_ps(plan.rule.coefficient()),
        sum: _mm256_setzero_ps(),
        max: _mm256_setzero_ps(),
        count: _mm256_setzero_si256(),
    };
    let floor_lanes = _mm256_set1_epi32(floor.to_bits() as i32);
    let mut largest = _mm256_setzero_si256();
    let mut first = 0;
    while first < blocks {
        let left = blocks - first;
        // The sums of statistics depend on the order of the blocks.
        let one_side = STATS || left < SIDES * GROUP;
        let (sides, rows) = if one_side { (1, left.min(GROUP)) } else { (SIDES, GROUP) };
        let mut hits = [0u64; SIDES];
        for row in 0..rows {
            for (side, hits) in hits[..sides].iter_mut().enumerate() {
                // SAFETY: the block is one of `blocks`, which lie within every slice that KIND and SAVE use; alignment as promised.
                let largest_here = unsafe { walk.block::<KIND, STATS, SAVE>(first + side * rows + row) };
                *hits |= any_above(largest_here, floor_lanes) << row;
                largest = _mm256_max_epi32(largest, largest_here);
            }
        }
        // SAFETY: v has n elements, and nobody writes while these are read. From the pointer, since a new borrow of the slice would
        // end its right to write on.
        let written = unsafe { std::slice::from_raw_parts(v.cast_const(), n) };
        for hits in &hits[..sides] {
            push_hits(plan.lens, floor, written, slices.base, first, *hits, found);
            first += rows;
        }
    }
    let finite = any_above(largest, _mm256_set1_epi32(NOT_FINITE - 1)) == 0;
    let lanes = StatLanes {
        sum: bytemuck::cast(walk.sum),
        max: bytemuck::cast(walk.max),
        count: bytemuck::cast(walk.count),
    };
    let mut outcome = portable::pass_from::<KIND, STATS>(blocks * BLOCK, lanes, plan, floor, slices, found);
    outcome.finite &= finite;
    outcome
}

/// What an accumulating pass reads and writes, and its statistics so far.
struct Walk {
    gradient: *const f32,
    u: *mut f32,
    v: *mut f32,
    saved_u: *mut f32,
    saved_v: *mut f32,
    lens: Lanes,
    scale: __m256,
    coefficient: __m256,
    sum: __m256,
    max: __m256,
    count: __m256i,
}

impl Walk {
    /// Runs the rule over one block. Returns its largest magnitudes, as integers.
    ///
    /// # Safety
    /// Needs AVX2, and the block within every slice that KIND and SAVE use; the saved ones must be aligned to 32 bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn block<const KIND: u8, const STATS: bool, const SAVE: bool>(&mut self, block: usize) -> __m256i {
        let (zero, magnitude) = (_mm256_setzero_ps(), _mm256_set1_epi32(i32::MAX));
        let mut largest = _mm256_setzero_si256();
        for j in 0..VECTORS {
            let at = block * BLOCK + 8 * j;
            // SAFETY: at + 8 is not beyond the end of the block.
            let value = unsafe {
                let g = _mm256_mul_ps(_mm256_loadu_ps(self.gradient.add(at)), self.scale);
                let step = if KIND == PLAIN {
                    g
                } else {
                    let old = _mm256_loadu_ps(self.u.add(at));
                    if SAVE {
                        _mm256_stream_ps(self.saved_u.add(at), old);
                    }
                    let next = if KIND == MOMENTUM {
                        _mm256_add_ps(_mm256_mul_ps(self.coefficient, old), g)
                    } else {
                        _mm256_mul_ps(self.coefficient, _mm256_add_ps(old, g))
                    };
                    _mm256_storeu_ps(self.u.add(at), next);
                    if KIND == MOMENTUM { next } else { _mm256_add_ps(next, g) }
                };
                let old = _mm256_loadu_ps(self.v.add(at));
                if SAVE {
                    _mm256_stream_ps(self.saved_v.add(at), old);
                }
                let next = _mm256_add_ps(old, step);
                _mm256_storeu_ps(self.v.add(at), next);
                next
            };
            largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(value), magnitude));
            if STATS {
                let seen = _mm256_max_ps(self.lens.see(value), zero);
                self.sum = _mm256_add_ps(self.sum, seen);
                self.max = _mm256_max_ps(self.max, seen);
                let competes = _mm256_cmp_ps::<_CMP_GT_OQ>(seen, zero);
                self.count = _mm256_sub_epi32(self.count, _mm256_castps_si256(competes));
            }
        }
        largest
    }
}

pub(super) fn scan(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    require_avx2();
    assert!(v.len() <= CHUNK, "a pass takes at most a chunk");
    // SAFETY: AVX2 is there, checked above.
    unsafe { scan_lanes(lens, floor, v, base, found) }
}

#[target_feature(enable = "avx2")]
fn scan_lanes(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    let (rows, tail) = v.as_chunks::<BLOCK>();
    let (lanes, floor_lanes) = (Lanes::new(lens), _mm256_set1_epi32(floor.to_bits() as i32));
    for (group, rows) in rows.chunks(GROUP).enumerate() {
        let mut hits = 0u64;
        for (block, row) in rows.iter().enumerate() {
            let mut largest = _mm256_setzero_si256();
            for j in 0..VECTORS {
                // SAFETY: a row has BLOCK = 8 * VECTORS elements.
                let value = unsafe { _mm256_loadu_ps(row.as_ptr().add(8 * j)) };
                largest = _mm256_max_epi32(largest, _mm256_castps_si256(lanes.see(value)));
            }
            hits |= any_above(largest, floor_lanes) << block;
        }
        push_hits(lens, floor, v, base, group * GROUP, hits, found);
    }
    portable::scan(lens, floor, tail, base + (v.len() - tail.len()) as u32, found);
}

/// 1 if a lane of `sizes` is above, or else 0; floats that are not negative compare like integers.
#[inline]
#[target_feature(enable = "avx2")]
fn any_above(sizes: __m256i, floor: __m256i) -> u64 {
    let above = _mm256_cmpgt_epi32(sizes, floor);
    u64::from(_mm256_testz_si256(above, above) == 0)
}

/// Looks again at the blocks with a hit, counted from block `first` on, and appends their candidates, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn push_hits(
    lens: Lens,
    floor: f32,
    v: &[f32],
    base: u32,
    first: usize,
    mut hits: u64,
    found: &mut Vec<Key>,
) {
    let (rows, _) = v.as_chunks::<BLOCK>();
    let (lanes, floor_lanes) = (Lanes::new(lens), _mm256_set1_ps(floor));
    while hits != 0 {
        let block = first + hits.trailing_zeros() as usize;
        let mut above = 0u64;
        for j in 0..VECTORS {
            // SAFETY: a row has BLOCK = 8 * VECTORS elements.
            let value = unsafe { _mm256_loadu_ps(rows[block].as_ptr().add(8 * j)) };
            let mask = _mm256_cmp_ps::<_CMP_GT_OQ>(lanes.see(value), floor_lanes);
            above |= (_mm256_movemask_ps(mask) as u64) << (8 * j);
        }
        while above != 0 {
            let i = block * BLOCK + above.trailing_zeros() as usize;
            found.push(Key::new(v[i], base + i as u32));
            above &= above - 1;
        }
        hits &= hits - 1;
    }
}

/// A [`Lens`] for eight lanes.
#[derive(Clone, Copy)]
struct Lanes {
    keep: __m256,
    flip: __m256,
}

impl Lanes {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new(lens: Lens) -> Self {
        let all = |bits: u32| _mm256_castsi256_ps(_mm256_set1_epi32(bits as i32));
        Lanes { keep: all(lens.keep), flip: all(lens.flip) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn see(self, x: __m256) -> __m256 {
        _mm256_xor_ps(_mm256_and_ps(x, self.keep), self.flip)
    }
}

pub(super) fn add_assign(v: &mut [f32], g: &[f32]) {
    require_avx2();
    // SAFETY: AVX2 is there, checked above.
    unsafe { add_assign_lanes(v, g) }
}

#[target_feature(enable = "avx2")]
fn add_assign_lanes(v: &mut [f32], g: &[f32]) {
    portable::add_assign(v, g);
}

pub(super) fn fence() {
    // SAFETY: every x86-64 machine has SSE.
    unsafe { _mm_sfence() };
}

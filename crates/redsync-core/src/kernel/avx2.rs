//! The loops with AVX2, eight lanes at a time. Every function here is safe to call: it asserts the lengths it
//! relies on, and panics if the machine has no AVX2.
#![allow(unsafe_code)]

use super::portable::{self, StatLanes};
use super::{CHUNK, Key, LANES, Level, MOMENTUM, Outcome, PLAIN, Plan, Slices};
use crate::phase::Lens;
use std::arch::x86_64::*;

const VECTORS: usize = LANES / 8;
const BLOCKS: usize = CHUNK / LANES;

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
    let n = slices.v.len();
    assert!(
        n <= CHUNK && slices.gradient.len() == n && slices.saved_v.len() == n,
        "slices of one pass differ"
    );
    if KIND != PLAIN {
        assert!(slices.u.len() == n && slices.saved_u.len() == n, "slices of one pass differ");
    }
    let aligned = |p: *const f32| p.cast::<__m256>().is_aligned();
    let stream = plan.stream
        && aligned(slices.saved_v.as_ptr())
        && (KIND == PLAIN || aligned(slices.saved_u.as_ptr()));
    // SAFETY: AVX2 is there and the lengths agree, both checked above; STREAM only with aligned outputs.
    unsafe {
        if stream {
            pass_lanes::<KIND, STATS, true>(plan, floor, slices, found)
        } else {
            pass_lanes::<KIND, STATS, false>(plan, floor, slices, found)
        }
    }
}

/// # Safety
/// Needs AVX2. All slices that KIND uses must be as long as `slices.v`, at most a chunk; with STREAM, those that receive
/// saved values must be aligned to 32 bytes.
#[target_feature(enable = "avx2")]
unsafe fn pass_lanes<const KIND: u8, const STATS: bool, const STREAM: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    let n = slices.v.len();
    let whole = n - n % LANES;
    let lens = Lanes::new(plan.lens);
    let (floor_lanes, scale, m) =
        (_mm256_set1_ps(floor), _mm256_set1_ps(plan.scale), _mm256_set1_ps(plan.rule.coefficient()));
    let (g, u, v) = (slices.gradient.as_ptr(), slices.u.as_mut_ptr(), slices.v.as_mut_ptr());
    let (saved_u, saved_v) = (slices.saved_u.as_mut_ptr(), slices.saved_v.as_mut_ptr());
    let zero = _mm256_setzero_ps();
    let (mut sum, mut max, mut count) = (zero, zero, _mm256_setzero_si256());
    let mut bad = zero;
    let mut masks = [0u32; BLOCKS];
    for (block, mask) in masks[..whole / LANES].iter_mut().enumerate() {
        let mut above = [zero; VECTORS];
        for (j, above) in above.iter_mut().enumerate() {
            let at = block * LANES + 8 * j;
            // SAFETY: at + 8 <= whole <= the length of every slice that KIND uses; alignment as promised.
            let value = unsafe {
                let g = _mm256_mul_ps(_mm256_loadu_ps(g.add(at)), scale);
                let step = if KIND == PLAIN {
                    g
                } else {
                    let old = _mm256_loadu_ps(u.add(at));
                    store::<STREAM>(saved_u.add(at), old);
                    let next = if KIND == MOMENTUM {
                        _mm256_add_ps(_mm256_mul_ps(m, old), g)
                    } else {
                        _mm256_mul_ps(m, _mm256_add_ps(old, g))
                    };
                    _mm256_storeu_ps(u.add(at), next);
                    if KIND == MOMENTUM { next } else { _mm256_add_ps(next, g) }
                };
                let old = _mm256_loadu_ps(v.add(at));
                store::<STREAM>(saved_v.add(at), old);
                let next = _mm256_add_ps(old, step);
                _mm256_storeu_ps(v.add(at), next);
                next
            };
            // x - x is zero for a number and NaN for anything else.
            bad = _mm256_or_ps(bad, _mm256_sub_ps(value, value));
            let seen = lens.see(value);
            *above = _mm256_cmp_ps::<_CMP_GT_OQ>(seen, floor_lanes);
            if STATS {
                let seen = _mm256_max_ps(seen, zero);
                sum = _mm256_add_ps(sum, seen);
                max = _mm256_max_ps(max, seen);
                let competes = _mm256_cmp_ps::<_CMP_GT_OQ>(seen, zero);
                count = _mm256_sub_epi32(count, _mm256_castps_si256(competes));
            }
        }
        *mask = mask_of(&above);
    }
    push_found(slices.v, slices.base, &masks, found);
    let finite = _mm256_testz_si256(_mm256_castps_si256(bad), _mm256_castps_si256(bad)) == 1;
    let lanes =
        StatLanes { sum: bytemuck::cast(sum), max: bytemuck::cast(max), count: bytemuck::cast(count) };
    let mut outcome = portable::pass_from::<KIND, STATS>(whole, lanes, plan, floor, slices, found);
    outcome.finite &= finite;
    outcome
}

pub(super) fn scan(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    require_avx2();
    assert!(v.len() <= CHUNK, "a pass takes at most a chunk");
    // SAFETY: AVX2 is there, checked above.
    unsafe { scan_lanes(lens, floor, v, base, found) }
}

#[target_feature(enable = "avx2")]
fn scan_lanes(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    let (rows, tail) = v.as_chunks::<LANES>();
    let (lanes, floor_lanes) = (Lanes::new(lens), _mm256_set1_ps(floor));
    let mut masks = [0u32; BLOCKS];
    for (row, mask) in rows.iter().zip(&mut masks) {
        let mut above = [_mm256_setzero_ps(); VECTORS];
        for (j, above) in above.iter_mut().enumerate() {
            // SAFETY: a row has LANES = 8 * VECTORS elements.
            let value = unsafe { _mm256_loadu_ps(row.as_ptr().add(8 * j)) };
            *above = _mm256_cmp_ps::<_CMP_GT_OQ>(lanes.see(value), floor_lanes);
        }
        *mask = mask_of(&above);
    }
    push_found(v, base, &masks, found);
    portable::scan(lens, floor, tail, base + (v.len() - tail.len()) as u32, found);
}

/// One bit per lane, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn mask_of(above: &[__m256; VECTORS]) -> u32 {
    let bits = above.map(|lanes| _mm256_movemask_ps(lanes) as u32);
    bits[0] | bits[1] << 8 | bits[2] << 16 | bits[3] << 24
}

/// # Safety
/// `to` must be valid for writes of eight floats, and aligned to 32 bytes with STREAM.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store<const STREAM: bool>(to: *mut f32, value: __m256) {
    // SAFETY: as promised by the caller.
    unsafe { if STREAM { _mm256_stream_ps(to, value) } else { _mm256_storeu_ps(to, value) } }
}

/// Appends the elements marked in `masks`, in order. This comes after the loop, which so has no branch that depends on
/// the data: a wrong guess there would stall the stream from memory.
#[target_feature(enable = "avx2")]
fn push_found(v: &[f32], base: u32, masks: &[u32; BLOCKS], found: &mut Vec<Key>) {
    let (groups, _) = masks.as_chunks::<64>();
    for (group, masks) in groups.iter().enumerate() {
        let mut hit = !zeros_among(masks);
        while hit != 0 {
            let block = hit.trailing_zeros() as usize;
            let mut mask = masks[block];
            while mask != 0 {
                let i = (64 * group + block) * LANES + mask.trailing_zeros() as usize;
                found.push(Key::new(v[i], base + i as u32));
                mask &= mask - 1;
            }
            hit &= hit - 1;
        }
    }
}

/// One bit for every mask that is zero.
#[inline]
#[target_feature(enable = "avx2")]
fn zeros_among(masks: &[u32; 64]) -> u64 {
    let eights: &[[u32; 8]; 8] = bytemuck::cast_ref(masks);
    let mut bits = 0u64;
    for (i, eight) in eights.iter().enumerate() {
        let zero = _mm256_cmpeq_epi32(bytemuck::cast(*eight), _mm256_setzero_si256());
        bits |= (_mm256_movemask_ps(_mm256_castsi256_ps(zero)) as u64) << (8 * i);
    }
    bits
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

pub(super) fn prefetch(slice: &[f32]) {
    for line in slice.chunks(16) {
        // SAFETY: a prefetch is a hint and reads nothing; the address is that of a live element.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
}

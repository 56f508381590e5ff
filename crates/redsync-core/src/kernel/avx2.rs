//! The loops with AVX2, eight lanes at a time. Every function here is safe to call: it asserts the lengths it
//! relies on, and panics if the machine has no AVX2.
#![allow(unsafe_code)]

use super::portable::{self, StatLanes};
use super::{Key, LANES, Level, MOMENTUM, NESTEROV, PLAIN, Plan, READ, Slices, Stats, THRESHOLDS};
use crate::phase::Lens;
use std::arch::x86_64::*;

const VECTORS: usize = LANES / 8;

/// Proof that AVX2 is there; the check is one load after the first.
fn require_avx2() {
    assert!(Level::best() == Level::Avx2, "this machine has no AVX2");
}

pub(super) fn pass<const KIND: u8>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> bool {
    require_avx2();
    let n = slices.v.len();
    if KIND != READ {
        assert!(
            slices.gradient.len() == n && slices.v_next.len() == n,
            "slices of one pass differ in length"
        );
    }
    if KIND == MOMENTUM || KIND == NESTEROV {
        assert!(slices.u.len() == n && slices.u_next.len() == n, "slices of one pass differ in length");
    }
    let aligned = |p: *const f32| p.cast::<__m256>().is_aligned();
    let stream = plan.stream
        && KIND != READ
        && aligned(slices.v_next.as_ptr())
        && (KIND == PLAIN || aligned(slices.u_next.as_ptr()));
    // SAFETY: AVX2 is there and the lengths agree, both checked above; STREAM only with aligned outputs.
    unsafe {
        if stream {
            pass_lanes::<KIND, true>(plan, floor, slices, found)
        } else {
            pass_lanes::<KIND, false>(plan, floor, slices, found)
        }
    }
}

/// # Safety
/// Needs AVX2. All slices that KIND uses must be as long as `slices.v`; with STREAM, `u_next` and `v_next` must be
/// aligned to 32 bytes if used.
#[target_feature(enable = "avx2")]
unsafe fn pass_lanes<const KIND: u8, const STREAM: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> bool {
    let n = slices.v.len();
    let whole = n - n % LANES;
    let lens = Lanes::new(plan.lens);
    let (floor_lanes, scale, m) =
        (_mm256_set1_ps(floor), _mm256_set1_ps(plan.scale), _mm256_set1_ps(plan.rule.coefficient()));
    let mut bad = _mm256_setzero_ps();
    for begin in (0..whole).step_by(LANES) {
        let mut value = [_mm256_setzero_ps(); VECTORS];
        let mut above = [_mm256_setzero_ps(); VECTORS];
        for j in 0..VECTORS {
            let at = begin + 8 * j;
            // SAFETY: at + 8 <= whole <= the length of every slice that KIND uses; alignment as promised.
            value[j] = unsafe {
                let v = _mm256_loadu_ps(slices.v.as_ptr().add(at));
                if KIND == READ {
                    v
                } else {
                    let g = _mm256_mul_ps(_mm256_loadu_ps(slices.gradient.as_ptr().add(at)), scale);
                    let step = if KIND == PLAIN {
                        g
                    } else {
                        let u = _mm256_loadu_ps(slices.u.as_ptr().add(at));
                        let next = if KIND == MOMENTUM {
                            _mm256_add_ps(_mm256_mul_ps(m, u), g)
                        } else {
                            _mm256_mul_ps(m, _mm256_add_ps(u, g))
                        };
                        store::<STREAM>(slices.u_next.as_mut_ptr().add(at), next);
                        if KIND == MOMENTUM { next } else { _mm256_add_ps(next, g) }
                    };
                    let next = _mm256_add_ps(v, step);
                    store::<STREAM>(slices.v_next.as_mut_ptr().add(at), next);
                    next
                }
            };
            // x - x is zero for a number and NaN for anything else.
            bad = _mm256_or_ps(bad, _mm256_sub_ps(value[j], value[j]));
            above[j] = _mm256_cmp_ps::<_CMP_GT_OQ>(lens.see(value[j]), floor_lanes);
        }
        let any = _mm256_or_ps(_mm256_or_ps(above[0], above[1]), _mm256_or_ps(above[2], above[3]));
        if _mm256_movemask_ps(any) != 0 {
            push_found(&value, &above, slices.base + begin as u32, found);
        }
    }
    if STREAM {
        _mm_sfence();
    }
    let finite = _mm256_testz_si256(_mm256_castps_si256(bad), _mm256_castps_si256(bad)) == 1;
    portable::pass_from::<KIND>(whole, plan, floor, slices, found) && finite
}

/// # Safety
/// `to` must be valid for writes of eight floats, and aligned to 32 bytes with STREAM.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store<const STREAM: bool>(to: *mut f32, value: __m256) {
    // SAFETY: as promised by the caller.
    unsafe { if STREAM { _mm256_stream_ps(to, value) } else { _mm256_storeu_ps(to, value) } }
}

/// Appends the lanes marked in `above`, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn push_found(value: &[__m256; VECTORS], above: &[__m256; VECTORS], base: u32, found: &mut Vec<Key>) {
    let mut mask = 0u32;
    for (j, lanes) in above.iter().enumerate() {
        mask |= (_mm256_movemask_ps(*lanes) as u32) << (8 * j);
    }
    let values: &[f32; LANES] = bytemuck::cast_ref(value);
    while mask != 0 {
        let bit = mask.trailing_zeros();
        found.push(Key::new(values[bit as usize], base + bit));
        mask &= mask - 1;
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

pub(super) fn stats(lens: Lens, v: &[f32]) -> Stats {
    require_avx2();
    // SAFETY: AVX2 is there, checked above.
    unsafe { stats_lanes(lens, v) }
}

#[target_feature(enable = "avx2")]
fn stats_lanes(lens: Lens, v: &[f32]) -> Stats {
    let (rows, tail) = v.as_chunks::<LANES>();
    let lanes = Lanes::new(lens);
    let zero = _mm256_setzero_ps();
    let (mut sum, mut max, mut count) = ([zero; VECTORS], [zero; VECTORS], [_mm256_setzero_si256(); VECTORS]);
    for row in rows {
        for j in 0..VECTORS {
            // SAFETY: a row has LANES = 8 * VECTORS elements.
            let x = lanes.see(unsafe { _mm256_loadu_ps(row.as_ptr().add(8 * j)) });
            let x = _mm256_max_ps(x, zero);
            sum[j] = _mm256_add_ps(sum[j], x);
            max[j] = _mm256_max_ps(max[j], x);
            let positive = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(x, zero));
            count[j] = _mm256_sub_epi32(count[j], positive);
        }
    }
    let mut all =
        StatLanes { sum: bytemuck::cast(sum), max: bytemuck::cast(max), count: bytemuck::cast(count) };
    all.add(lens, tail);
    all.fold()
}

pub(super) fn count_above(lens: Lens, thresholds: &[f32; THRESHOLDS], v: &[f32]) -> [u64; THRESHOLDS] {
    require_avx2();
    // SAFETY: AVX2 is there, checked above.
    unsafe { count_above_lanes(lens, thresholds, v) }
}

#[target_feature(enable = "avx2")]
fn count_above_lanes(lens: Lens, thresholds: &[f32; THRESHOLDS], v: &[f32]) -> [u64; THRESHOLDS] {
    let (rows, tail) = v.as_chunks::<8>();
    let lanes = Lanes::new(lens);
    let floors = thresholds.map(|t| _mm256_set1_ps(t));
    let mut count = [_mm256_setzero_si256(); THRESHOLDS];
    for row in rows {
        // SAFETY: a row has eight elements.
        let x = lanes.see(unsafe { _mm256_loadu_ps(row.as_ptr()) });
        for (count, floor) in count.iter_mut().zip(floors) {
            let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(x, floor));
            *count = _mm256_sub_epi32(*count, above);
        }
    }
    let mut total = portable::count_above(lens, thresholds, tail);
    for (total, count) in total.iter_mut().zip(count) {
        let counts: [u32; 8] = bytemuck::cast(count);
        *total += counts.iter().map(|c| u64::from(*c)).sum::<u64>();
    }
    total
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

pub(super) fn prefetch(slice: &[f32]) {
    for line in slice.chunks(16) {
        // SAFETY: a prefetch is a hint and reads nothing; the address is that of a live element.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
}

//! AVX2: eight lanes. Its functions are safe to call, and panic if the machine has no AVX2.
#![allow(unsafe_code)]

use super::portable::{self, StatLanes};
use super::walk::{self, Registers};
use super::{AdamW, Key, Outcome, Plan, Slices};
use crate::phase::Lens;
use std::arch::x86_64::*;

/// Proof that the machine has AVX2.
#[derive(Clone, Copy)]
struct Avx2(());

impl Avx2 {
    /// The check is one load after the first.
    fn here() -> Self {
        assert!(std::arch::is_x86_feature_detected!("avx2"), "this machine has no AVX2");
        Avx2(())
    }
}

pub(super) fn pass<const KIND: u8, const STATS: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    #[target_feature(enable = "avx2")]
    fn lanes<const KIND: u8, const STATS: bool>(
        avx2: Avx2,
        plan: &Plan,
        floor: f32,
        slices: Slices<'_>,
        found: &mut Vec<Key>,
    ) -> Outcome {
        walk::pass::<_, KIND, STATS>(avx2, plan, floor, slices, found)
    }
    let avx2 = Avx2::here();
    // SAFETY: AVX2 is there.
    unsafe { lanes::<KIND, STATS>(avx2, plan, floor, slices, found) }
}

pub(super) fn scan(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    #[target_feature(enable = "avx2")]
    fn lanes(avx2: Avx2, lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
        walk::scan(avx2, lens, floor, v, base, found);
    }
    let avx2 = Avx2::here();
    // SAFETY: AVX2 is there.
    unsafe { lanes(avx2, lens, floor, v, base, found) }
}

pub(super) fn adamw(step: &AdamW, w: &mut [f32], m: &mut [f32], q: &mut [f32], g: &[f32]) {
    #[target_feature(enable = "avx2")]
    fn lanes(step: &AdamW, w: &mut [f32], m: &mut [f32], q: &mut [f32], g: &[f32]) {
        portable::adamw(step, w, m, q, g);
    }
    Avx2::here();
    // SAFETY: AVX2 is there.
    unsafe { lanes(step, w, m, q, g) }
}

pub(super) fn add_assign(v: &mut [f32], g: &[f32]) {
    #[target_feature(enable = "avx2")]
    fn lanes(v: &mut [f32], g: &[f32]) {
        portable::add_assign(v, g);
    }
    Avx2::here();
    // SAFETY: AVX2 is there.
    unsafe { lanes(v, g) }
}

/// An instruction of AVX2 on registers.
macro_rules! avx2 {
    ($call:expr) => {
        // SAFETY: nothing but AVX2 is needed, and `self` exists only where it is.
        unsafe { $call }
    };
}

impl Registers for Avx2 {
    const LANES: usize = 8;
    type Floats = __m256;
    type Bits = __m256i;
    type Stats = Stats256;

    #[inline(always)]
    fn floats(self, x: f32) -> __m256 {
        avx2!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn bits(self, x: u32) -> __m256i {
        avx2!(_mm256_set1_epi32(x as i32))
    }

    #[inline(always)]
    fn to_bits(self, x: __m256) -> __m256i {
        avx2!(_mm256_castps_si256(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: as promised.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m256) {
        // SAFETY: as promised.
        unsafe { _mm256_storeu_ps(to, x) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32, x: __m256) {
        // SAFETY: as promised.
        unsafe { _mm256_stream_ps(to, x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn sqrt(self, x: __m256) -> __m256 {
        avx2!(_mm256_sqrt_ps(x))
    }

    #[inline(always)]
    fn see(self, x: __m256, keep: __m256i, flip: __m256i) -> __m256 {
        avx2!(_mm256_xor_ps(_mm256_and_ps(x, _mm256_castsi256_ps(keep)), _mm256_castsi256_ps(flip)))
    }

    #[inline(always)]
    fn abs(self, x: __m256) -> __m256 {
        avx2!(_mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX))))
    }

    #[inline(always)]
    fn larger(self, a: __m256i, b: __m256i) -> __m256i {
        avx2!(_mm256_max_epi32(a, b))
    }

    #[inline(always)]
    fn any_above(self, x: __m256i, floor: __m256i) -> bool {
        avx2!(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x, floor))) != 0)
    }

    #[inline(always)]
    fn above(self, x: __m256, floor: __m256) -> u64 {
        avx2!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x, floor)) as u64)
    }

    #[inline(always)]
    fn no_stats(self) -> Stats256 {
        Stats256::zero()
    }

    #[inline(always)]
    fn add_stats(self, stats: Stats256, seen: __m256) -> Stats256 {
        avx2!(stats.add(seen))
    }

    #[inline(always)]
    fn stat_lanes(self, stats: Stats256) -> StatLanes {
        stats.lanes()
    }
}

/// Statistics of eight lanes.
#[derive(Clone, Copy)]
pub(super) struct Stats256 {
    sum: __m256,
    max: __m256,
    count: __m256i,
}

impl Stats256 {
    #[inline(always)]
    pub fn zero() -> Self {
        Stats256 {
            sum: bytemuck::Zeroable::zeroed(),
            max: bytemuck::Zeroable::zeroed(),
            count: bytemuck::Zeroable::zeroed(),
        }
    }

    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    pub unsafe fn add(self, seen: __m256) -> Self {
        // SAFETY: as promised.
        unsafe {
            let zero = _mm256_setzero_ps();
            let seen = _mm256_max_ps(seen, zero);
            let competes = _mm256_cmp_ps::<_CMP_GT_OQ>(seen, zero);
            Stats256 {
                sum: _mm256_add_ps(self.sum, seen),
                max: _mm256_max_ps(self.max, seen),
                count: _mm256_sub_epi32(self.count, _mm256_castps_si256(competes)),
            }
        }
    }

    #[inline(always)]
    pub fn lanes(self) -> StatLanes {
        StatLanes {
            sum: bytemuck::cast(self.sum),
            max: bytemuck::cast(self.max),
            count: bytemuck::cast(self.count),
        }
    }
}

pub(super) fn fence() {
    // SAFETY: every x86-64 machine has SSE.
    unsafe { _mm_sfence() };
}

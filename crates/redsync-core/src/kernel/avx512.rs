//! AVX-512: sixteen lanes. Its functions are safe to call, and panic if the machine has no AVX-512 F, or no AVX2, which
//! statistics in eight lanes need.
#![allow(unsafe_code)]

use super::avx2::Stats256;
use super::portable::{self, StatLanes};
use super::walk::{self, Registers};
use super::{AdamW, Key, Outcome, Plan, Slices};
use crate::phase::Lens;
use std::arch::x86_64::*;

/// Proof that the machine has AVX-512 F and AVX2.
#[derive(Clone, Copy)]
struct Avx512(());

/// Whether the machine has what this level needs; one load each after the first time.
pub(super) fn is_here() -> bool {
    std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx2")
}

impl Avx512 {
    fn here() -> Self {
        assert!(is_here(), "this machine has no AVX-512");
        Avx512(())
    }
}

pub(super) fn pass<const KIND: u8, const STATS: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    #[target_feature(enable = "avx512f,avx2")]
    fn lanes<const KIND: u8, const STATS: bool>(
        avx512: Avx512,
        plan: &Plan,
        floor: f32,
        slices: Slices<'_>,
        found: &mut Vec<Key>,
    ) -> Outcome {
        walk::pass::<_, KIND, STATS>(avx512, plan, floor, slices, found)
    }
    let avx512 = Avx512::here();
    // SAFETY: AVX-512 is there.
    unsafe { lanes::<KIND, STATS>(avx512, plan, floor, slices, found) }
}

pub(super) fn scan(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    #[target_feature(enable = "avx512f,avx2")]
    fn lanes(avx512: Avx512, lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
        walk::scan(avx512, lens, floor, v, base, found);
    }
    let avx512 = Avx512::here();
    // SAFETY: AVX-512 is there.
    unsafe { lanes(avx512, lens, floor, v, base, found) }
}

pub(super) fn adamw(step: &AdamW, w: &mut [f32], m: &mut [f32], q: &mut [f32], g: &[f32]) {
    #[target_feature(enable = "avx512f,avx2")]
    fn lanes(step: &AdamW, w: &mut [f32], m: &mut [f32], q: &mut [f32], g: &[f32]) {
        portable::adamw(step, w, m, q, g);
    }
    Avx512::here();
    // SAFETY: AVX-512 is there.
    unsafe { lanes(step, w, m, q, g) }
}

/// An instruction of AVX-512 F on registers.
macro_rules! avx512 {
    ($call:expr) => {
        // SAFETY: nothing but AVX-512 F and AVX2 is needed, and `self` exists only where they are.
        unsafe { $call }
    };
}

impl Registers for Avx512 {
    const LANES: usize = 16;
    type Floats = __m512;
    type Bits = __m512i;
    type Stats = Stats256;

    #[inline(always)]
    fn floats(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn bits(self, x: u32) -> __m512i {
        avx512!(_mm512_set1_epi32(x as i32))
    }

    #[inline(always)]
    fn to_bits(self, x: __m512) -> __m512i {
        avx512!(_mm512_castps_si512(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: as promised.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        // SAFETY: as promised.
        unsafe { _mm512_storeu_ps(to, x) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32, x: __m512) {
        // SAFETY: as promised.
        unsafe { _mm512_stream_ps(to, x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn sqrt(self, x: __m512) -> __m512 {
        avx512!(_mm512_sqrt_ps(x))
    }

    #[inline(always)]
    fn see(self, x: __m512, keep: __m512i, flip: __m512i) -> __m512 {
        avx512!(_mm512_castsi512_ps(_mm512_xor_si512(_mm512_and_si512(_mm512_castps_si512(x), keep), flip)))
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        avx512!(_mm512_abs_ps(x))
    }

    #[inline(always)]
    fn larger(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_max_epi32(a, b))
    }

    #[inline(always)]
    fn any_above(self, x: __m512i, floor: __m512i) -> bool {
        avx512!(_mm512_cmpgt_epi32_mask(x, floor) != 0)
    }

    #[inline(always)]
    fn above(self, x: __m512, floor: __m512) -> u64 {
        avx512!(u64::from(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, floor)))
    }

    #[inline(always)]
    fn no_stats(self) -> Stats256 {
        Stats256::zero()
    }

    #[inline(always)]
    fn add_stats(self, stats: Stats256, seen: __m512) -> Stats256 {
        avx512!({
            let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(seen));
            stats.add(_mm512_castps512_ps256(seen)).add(_mm256_castpd_ps(upper))
        })
    }

    #[inline(always)]
    fn stat_lanes(self, stats: Stats256) -> StatLanes {
        stats.lanes()
    }
}

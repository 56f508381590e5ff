//! NEON: eight lanes in two registers, as every machine of the architecture has them. Its functions are safe to call.
#![allow(unsafe_code)]

use super::portable::{self, StatLanes};
use super::walk::{self, Registers};
use super::{Key, Outcome, Plan, Slices};
use crate::phase::Lens;
use std::arch::aarch64::*;

/// NEON is part of the architecture, so there is nothing to prove.
#[derive(Clone, Copy)]
struct Neon;

pub(super) fn pass<const KIND: u8, const STATS: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    walk::pass::<_, KIND, STATS>(Neon, plan, floor, slices, found)
}

pub(super) fn scan(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    walk::scan(Neon, lens, floor, v, base, found);
}

pub(super) fn add_assign(v: &mut [f32], g: &[f32]) {
    portable::add_assign(v, g);
}

/// Instructions of NEON on registers.
macro_rules! neon {
    ($calls:expr) => {
        // SAFETY: nothing but NEON is needed, and every machine of the architecture has it.
        unsafe { $calls }
    };
}

impl Registers for Neon {
    const LANES: usize = 8;
    type Floats = [float32x4_t; 2];
    type Bits = [int32x4_t; 2];
    type Stats = Stats;

    #[inline(always)]
    fn floats(self, x: f32) -> Self::Floats {
        neon!([vdupq_n_f32(x); 2])
    }

    #[inline(always)]
    fn bits(self, x: u32) -> Self::Bits {
        neon!([vdupq_n_s32(x as i32); 2])
    }

    #[inline(always)]
    fn to_bits(self, [x, y]: Self::Floats) -> Self::Bits {
        neon!([vreinterpretq_s32_f32(x), vreinterpretq_s32_f32(y)])
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Floats {
        // SAFETY: as promised.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, [x, y]: Self::Floats) {
        // SAFETY: as promised.
        unsafe {
            vst1q_f32(to, x);
            vst1q_f32(to.add(4), y);
        }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut f32, x: Self::Floats) {
        // SAFETY: as promised.
        unsafe { self.store(to, x) }
    }

    #[inline(always)]
    fn add(self, [a, b]: Self::Floats, [c, d]: Self::Floats) -> Self::Floats {
        neon!([vaddq_f32(a, c), vaddq_f32(b, d)])
    }

    #[inline(always)]
    fn mul(self, [a, b]: Self::Floats, [c, d]: Self::Floats) -> Self::Floats {
        neon!([vmulq_f32(a, c), vmulq_f32(b, d)])
    }

    #[inline(always)]
    fn div(self, [a, b]: Self::Floats, [c, d]: Self::Floats) -> Self::Floats {
        neon!([vdivq_f32(a, c), vdivq_f32(b, d)])
    }

    #[inline(always)]
    fn sqrt(self, [x, y]: Self::Floats) -> Self::Floats {
        neon!([vsqrtq_f32(x), vsqrtq_f32(y)])
    }

    #[inline(always)]
    fn see(self, x: Self::Floats, keep: Self::Bits, flip: Self::Bits) -> Self::Floats {
        let [x, y] = self.to_bits(x);
        neon!([
            vreinterpretq_f32_s32(veorq_s32(vandq_s32(x, keep[0]), flip[0])),
            vreinterpretq_f32_s32(veorq_s32(vandq_s32(y, keep[1]), flip[1])),
        ])
    }

    #[inline(always)]
    fn abs(self, [x, y]: Self::Floats) -> Self::Floats {
        neon!([vabsq_f32(x), vabsq_f32(y)])
    }

    #[inline(always)]
    fn larger(self, [a, b]: Self::Bits, [c, d]: Self::Bits) -> Self::Bits {
        neon!([vmaxq_s32(a, c), vmaxq_s32(b, d)])
    }

    #[inline(always)]
    fn any_above(self, [x, y]: Self::Bits, [floor, _]: Self::Bits) -> bool {
        neon!(vmaxvq_u32(vcgtq_s32(vmaxq_s32(x, y), floor)) != 0)
    }

    #[inline(always)]
    fn above(self, [x, y]: Self::Floats, [floor, _]: Self::Floats) -> u64 {
        // One bit of its own for each lane, so that the sum is the mask. The arrays have four elements.
        neon!({
            let (low, high) = (vld1q_u32([1, 2, 4, 8].as_ptr()), vld1q_u32([16, 32, 64, 128].as_ptr()));
            let (x, y) = (vandq_u32(vcgtq_f32(x, floor), low), vandq_u32(vcgtq_f32(y, floor), high));
            u64::from(vaddvq_u32(vorrq_u32(x, y)))
        })
    }

    #[inline(always)]
    fn no_stats(self) -> Stats {
        Stats { sum: self.floats(0.0), max: self.floats(0.0), count: neon!([vdupq_n_u32(0); 2]) }
    }

    #[inline(always)]
    fn add_stats(self, stats: Stats, seen: Self::Floats) -> Stats {
        let Stats { mut sum, mut max, mut count } = stats;
        for i in 0..2 {
            neon!({
                let zero = vdupq_n_f32(0.0);
                let competes = vcgtq_f32(seen[i], zero);
                // What does not compete counts as zero, and so does NaN.
                let seen = vbslq_f32(competes, seen[i], zero);
                sum[i] = vaddq_f32(sum[i], seen);
                max[i] = vbslq_f32(vcgtq_f32(seen, max[i]), seen, max[i]);
                count[i] = vsubq_u32(count[i], competes);
            });
        }
        Stats { sum, max, count }
    }

    #[inline(always)]
    fn stat_lanes(self, Stats { sum, max, count }: Stats) -> StatLanes {
        let mut lanes = StatLanes::default();
        for i in 0..2 {
            // SAFETY: the lanes are eight, and four are written from the first or the fifth on.
            unsafe {
                vst1q_f32(lanes.sum[4 * i..].as_mut_ptr(), sum[i]);
                vst1q_f32(lanes.max[4 * i..].as_mut_ptr(), max[i]);
                vst1q_u32(lanes.count[4 * i..].as_mut_ptr(), count[i]);
            }
        }
        lanes
    }
}

/// Statistics of eight lanes.
#[derive(Clone, Copy)]
struct Stats {
    sum: [float32x4_t; 2],
    max: [float32x4_t; 2],
    count: [uint32x4_t; 2],
}

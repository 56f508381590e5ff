//! The loops in plain Rust. They define the result; the other levels are tested against them bit by bit.

use super::{Key, LANES, MOMENTUM, NESTEROV, PLAIN, Plan, READ, Slices, Stats, THRESHOLDS};
use crate::phase::Lens;

pub(super) fn pass<const KIND: u8>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> bool {
    pass_from::<KIND>(0, plan, floor, slices, found)
}

/// The pass from element `start` on: the whole of it here, the last few elements for the other levels.
pub(super) fn pass_from<const KIND: u8>(
    start: usize,
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> bool {
    let Slices { gradient, u, u_next, v, v_next, base } = slices;
    let (m, lens) = (plan.rule.coefficient(), plan.lens);
    let mut finite = true;
    let mut begin = start;
    while begin < v.len() {
        let end = v.len().min(begin + LANES);
        let mut block = [0f32; LANES];
        let block = &mut block[..end - begin];
        block.copy_from_slice(&v[begin..end]);
        if KIND != READ {
            for (j, value) in block.iter_mut().enumerate() {
                let g = gradient[begin + j] * plan.scale;
                *value += match KIND {
                    PLAIN => g,
                    MOMENTUM => {
                        let next = m * u[begin + j] + g;
                        u_next[begin + j] = next;
                        next
                    }
                    NESTEROV => {
                        let next = m * (u[begin + j] + g);
                        u_next[begin + j] = next;
                        next + g
                    }
                    _ => unreachable!("no other kind"),
                };
            }
            v_next[begin..end].copy_from_slice(block);
        }
        let mut any = false;
        for value in block.iter() {
            finite &= value.is_finite();
            any |= lens.see(*value) > floor;
        }
        if any {
            for (j, value) in block.iter().enumerate() {
                if lens.see(*value) > floor {
                    found.push(Key::new(*value, base + (begin + j) as u32));
                }
            }
        }
        begin = end;
    }
    finite
}

pub(super) fn stats(lens: Lens, v: &[f32]) -> Stats {
    let mut lanes = StatLanes::default();
    lanes.add(lens, v);
    lanes.fold()
}

/// The partial results of [`stats`], one per lane.
#[derive(Debug, Default)]
pub(super) struct StatLanes {
    pub sum: [f32; LANES],
    pub max: [f32; LANES],
    pub count: [u32; LANES],
}

impl StatLanes {
    /// Adds elements; the first goes into lane 0.
    pub fn add(&mut self, lens: Lens, v: &[f32]) {
        for row in v.chunks(LANES) {
            for (j, x) in row.iter().enumerate() {
                let x = lens.see(*x);
                let x = if x > 0.0 { x } else { 0.0 };
                self.sum[j] += x;
                self.max[j] = if x > self.max[j] { x } else { self.max[j] };
                self.count[j] += u32::from(x > 0.0);
            }
        }
    }

    pub fn fold(&self) -> Stats {
        Stats {
            sum: self.sum.iter().map(|x| f64::from(*x)).sum(),
            max: self.max.iter().copied().fold(0.0, f32::max),
            count: self.count.iter().map(|x| u64::from(*x)).sum(),
        }
    }
}

pub(super) fn count_above(lens: Lens, thresholds: &[f32; THRESHOLDS], v: &[f32]) -> [u64; THRESHOLDS] {
    thresholds.map(|t| {
        let mut count = 0u32;
        for x in v {
            count += u32::from(lens.see(*x) > t);
        }
        u64::from(count)
    })
}

#[inline(always)]
pub(super) fn add_assign(v: &mut [f32], g: &[f32]) {
    for (v, g) in v.iter_mut().zip(g) {
        *v += *g;
    }
}

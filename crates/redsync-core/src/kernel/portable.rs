//! The loops in plain Rust. They define the result; the other levels are tested against them bit by bit.

use super::{
    ADAM, AdamW, BLOCK, Coefficients, Key, MOMENTUM, NESTEROV, Outcome, PLAIN, Plan, STAT_LANES, Slices,
    Stats, squares,
};
use crate::phase::Lens;
use crate::residual::Adam;

pub(super) fn pass<const KIND: u8, const STATS: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    pass_from::<KIND, STATS>(0, StatLanes::default(), plan, floor, slices, found)
}

/// The rule for one element: the next u (meaningless without momentum) and the next v.
#[inline(always)]
fn rule<const KIND: u8>(plan: &Plan, g: f32, u: f32, v: f32) -> (f32, f32) {
    let (g, m, v) = (g * plan.scale, plan.rule.coefficient(), v * plan.carry);
    match KIND {
        PLAIN => (0.0, v + g),
        MOMENTUM => {
            let next = m * u + g;
            (next, v + next)
        }
        NESTEROV => {
            let next = m * (u + g);
            (next, v + (next + g))
        }
        _ => unreachable!("rules with a second moment have a function of their own"),
    }
}

/// The rule with a second moment for one element: the next u, the next second moment and the next v.
#[inline(always)]
fn adam<const KIND: u8>(plan: &Plan, g: f32, u: f32, q: f32, given: f32, v: f32) -> (f32, f32, f32) {
    let Coefficients { keep, enter, keep_square, enter_square, unbias, unbias_square, floor } =
        plan.rule.adam();
    let (g, v) = (g * plan.scale, v * plan.carry);
    let u = keep * u + enter * g;
    let q = keep_square * q + enter_square * (g * g);
    let own = q * unbias_square;
    let second = if KIND == ADAM { own } else { own + given };
    (u, q, v + (u * unbias) / (second.sqrt() + floor))
}

/// The pass from element `start` on: the whole of it here, the last few elements for the other levels.
pub(super) fn pass_from<const KIND: u8, const STATS: bool>(
    start: usize,
    mut lanes: StatLanes,
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    let Slices { gradient, u, v, q, given, saved_u, saved_v, saved_q, base } = slices;
    let mut finite = true;
    if !saved_v.is_empty() {
        saved_v[start..].copy_from_slice(&v[start..]);
        if KIND != PLAIN {
            saved_u[start..].copy_from_slice(&u[start..]);
        }
        if squares(KIND) {
            saved_q[start..].copy_from_slice(&q[start..]);
        }
    }
    for i in start..v.len() {
        if squares(KIND) {
            let given = if KIND == ADAM { 0.0 } else { given[i] };
            (u[i], q[i], v[i]) = adam::<KIND>(plan, gradient[i], u[i], q[i], given, v[i]);
            finite &= v[i].is_finite() && q[i].is_finite();
            continue;
        }
        let momentum = if KIND == PLAIN { 0.0 } else { u[i] };
        let (u_next, v_next) = rule::<KIND>(plan, gradient[i], momentum, v[i]);
        if KIND != PLAIN {
            u[i] = u_next;
        }
        v[i] = v_next;
        finite &= v_next.is_finite();
    }
    if STATS {
        lanes.add(v[start..].iter().map(|x| plan.lens.see(*x)));
    }
    scan(plan.lens, floor, &v[start..], base + start as u32, found);
    Outcome { finite, stats: lanes.fold() }
}

pub(super) fn scan(lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    for (block, values) in v.chunks(BLOCK).enumerate() {
        if values.iter().fold(false, |any, x| any | (lens.see(*x) > floor)) {
            let keys = values.iter().enumerate().filter(|(_, x)| lens.see(**x) > floor);
            found.extend(keys.map(|(j, x)| Key::new(*x, base + (block * BLOCK + j) as u32)));
        }
    }
}

/// Statistics of a chunk of [`StatLanes::CHUNK`] elements, as a phase sees them: an element's lane is its place modulo the number of
/// lanes, and each lane takes its elements in order. So the sums have the same bits on every machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StatLanes {
    /// Of the elements that compete.
    pub sum: [f32; STAT_LANES],
    /// The largest; zero where none competes.
    pub max: [f32; STAT_LANES],
    /// How many compete.
    pub count: [u32; STAT_LANES],
}

impl StatLanes {
    /// Elements of a chunk; the last one of a layer may have fewer.
    pub const CHUNK: usize = super::CHUNK;
    /// Number of lanes.
    pub const LANES: usize = STAT_LANES;

    /// Adds elements as the lens shows them; the first goes into lane 0.
    fn add(&mut self, seen: impl Iterator<Item = f32>) {
        for (i, x) in seen.enumerate() {
            let (j, x) = (i % STAT_LANES, if x > 0.0 { x } else { 0.0 });
            self.sum[j] += x;
            self.max[j] = if x > self.max[j] { x } else { self.max[j] };
            self.count[j] += u32::from(x > 0.0);
        }
    }

    pub(crate) fn fold(&self) -> Stats {
        Stats {
            sum: self.sum.iter().map(|x| f64::from(*x)).sum(),
            max: self.max.iter().copied().fold(0.0, f32::max),
            count: self.count.iter().map(|x| u64::from(*x)).sum(),
        }
    }
}

#[inline(always)]
pub(super) fn adamw(step: &AdamW, w: &mut [f32], m: &mut [f32], q: &mut [f32], g: &[f32]) {
    let AdamW { adam: Adam { beta1, beta2, eps }, pace, root, factor } = *step;
    for (((w, g), m), q) in w.iter_mut().zip(g).zip(m).zip(q) {
        *m = beta1 * *m + (1.0 - beta1) * g;
        *q = beta2 * *q + (1.0 - beta2) * (g * g);
        *w = *w * factor - pace * *m / ((*q * root).sqrt() + eps);
    }
}

#[inline(always)]
pub(super) fn add_assign(v: &mut [f32], g: &[f32]) {
    for (v, g) in v.iter_mut().zip(g) {
        *v += *g;
    }
}

//! The inner loops: one pass over memory each, over slices of at most [`CHUNK`] elements.
//! Comes in: slices of gradient, u and v. Goes out: the next u and v, and the keys of elements above a floor.
//! What must hold: every level gives the same bits; `unsafe` lives in `walk` and the rooms of the machines only.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod walk;

pub use portable::StatLanes;

use crate::phase::Lens;
use crate::residual::Adam;

/// Elements per call, so that a caller can bound what one call finds. A multiple of [`BLOCK`].
pub(crate) const CHUNK: usize = 1 << 15;
/// Elements per turn of the loops, which look for hits one block at a time.
const BLOCK: usize = 64;
/// Partial results of [`Stats`] within a chunk.
const STAT_LANES: usize = 8;

/// The instructions that the loops may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Plain Rust, for any machine.
    Portable,
    /// AVX2, on x86-64 machines that have it.
    Avx2,
    /// AVX-512 F, on x86-64 machines that have it.
    Avx512,
    /// NEON, on 64-bit ARM machines.
    Neon,
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Level {
    /// All levels, those of one machine from the worst to the best.
    pub const ALL: [Level; 4] = [Level::Portable, Level::Avx2, Level::Avx512, Level::Neon];

    /// The best level of the machine that runs this.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.is_here()).unwrap_or(Level::Portable)
    }

    /// Whether the machine that runs this has it.
    pub fn is_here(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::is_here(),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            _ => false,
        }
    }

    /// The name by which it is asked for.
    pub fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
        }
    }
}

/// What a pass does to u and v before it compares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// v = c*v + s*g
    Plain,
    /// u = m*u + s*g; v = c*v + u
    Momentum(f32),
    /// u = m*(u + s*g); v = c*v + (u + s*g)
    Nesterov(f32),
    /// Momentum divided by the root of the second moment q that the rank has itself.
    Adam(Coefficients),
    /// The same with what other ranks gave of theirs added to q.
    AdamGiven(Coefficients),
}

/// The numbers of Adam at a step: u = keep*u + enter*(s*g); q = keep_square*q + enter_square*(s*g)^2;
/// v = c*v + (u*unbias)/(sqrt(q*unbias_square) + floor), or with what was given added to q*unbias_square.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub(crate) struct Coefficients {
    pub keep: f32,
    pub enter: f32,
    pub keep_square: f32,
    pub enter_square: f32,
    pub unbias: f32,
    pub unbias_square: f32,
    pub floor: f32,
}

const PLAIN: u8 = 1;
const MOMENTUM: u8 = 2;
const NESTEROV: u8 = 3;
const ADAM: u8 = 4;
const ADAM_GIVEN: u8 = 5;

/// Whether a kind of rule has a second moment.
const fn squares(kind: u8) -> bool {
    matches!(kind, ADAM | ADAM_GIVEN)
}

impl Rule {
    fn coefficient(self) -> f32 {
        match self {
            Rule::Plain => 0.0,
            Rule::Momentum(m) | Rule::Nesterov(m) => m,
            Rule::Adam(adam) | Rule::AdamGiven(adam) => adam.keep,
        }
    }

    fn adam(self) -> Coefficients {
        match self {
            Rule::Adam(adam) | Rule::AdamGiven(adam) => adam,
            _ => Coefficients::default(),
        }
    }
}

/// Everything that one pass needs besides its slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub level: Level,
    pub rule: Rule,
    /// Multiplies the gradient as it enters (s above: 1/N).
    pub scale: f32,
    /// Multiplies what v held before (c above).
    pub carry: f32,
    pub lens: Lens,
    /// Whether [`Stats`] are wanted.
    pub stats: bool,
}

/// The slices of one pass, all of one length; those that the rule does not use are empty.
#[derive(Debug)]
pub(crate) struct Slices<'a> {
    pub gradient: &'a [f32],
    /// Changed in place.
    pub u: &'a mut [f32],
    /// Changed in place.
    pub v: &'a mut [f32],
    /// The second moment; changed in place.
    pub q: &'a mut [f32],
    /// What is added to the second moment.
    pub given: &'a [f32],
    /// Receives u as it was, unless `saved_v` is empty.
    pub saved_u: &'a mut [f32],
    /// Receives v as it was, unless it is empty.
    pub saved_v: &'a mut [f32],
    /// Receives q as it was, unless `saved_v` is empty.
    pub saved_q: &'a mut [f32],
    /// Index of the first element in its tensor.
    pub base: u32,
}

/// Makes what passes saved around the cache visible to other threads. To be called once after the last pass of a thread:
/// after every chunk it would cost half as much as the pass itself.
pub(crate) fn fence(level: Level) {
    #[cfg(target_arch = "x86_64")]
    if level != Level::Portable {
        avx2::fence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = level;
}

/// What a pass over a chunk found out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Whether all results are finite.
    pub finite: bool,
    /// Zeros where they were not wanted.
    pub stats: Stats,
}

/// Sum, maximum and number of the elements that compete. Within a chunk the order of the additions is fixed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Stats {
    pub sum: f64,
    pub max: f32,
    pub count: u64,
}

impl Stats {
    pub fn join(self, next: Stats) -> Stats {
        let max = if next.max > self.max { next.max } else { self.max };
        Stats { sum: self.sum + next.sum, max, count: self.count + next.count }
    }
}

/// Runs the rule over the slices and appends a [`Key`] for every element greater than `floor`, in index order.
pub(crate) fn pass(plan: &Plan, floor: f32, slices: Slices<'_>, found: &mut Vec<Key>) -> Outcome {
    match (plan.rule, plan.stats) {
        (Rule::Plain, false) => pass_as::<PLAIN, false>(plan, floor, slices, found),
        (Rule::Plain, true) => pass_as::<PLAIN, true>(plan, floor, slices, found),
        (Rule::Momentum(_), false) => pass_as::<MOMENTUM, false>(plan, floor, slices, found),
        (Rule::Momentum(_), true) => pass_as::<MOMENTUM, true>(plan, floor, slices, found),
        (Rule::Nesterov(_), false) => pass_as::<NESTEROV, false>(plan, floor, slices, found),
        (Rule::Nesterov(_), true) => pass_as::<NESTEROV, true>(plan, floor, slices, found),
        (Rule::Adam(_), false) => pass_as::<ADAM, false>(plan, floor, slices, found),
        (Rule::Adam(_), true) => pass_as::<ADAM, true>(plan, floor, slices, found),
        (Rule::AdamGiven(_), false) => pass_as::<ADAM_GIVEN, false>(plan, floor, slices, found),
        (Rule::AdamGiven(_), true) => pass_as::<ADAM_GIVEN, true>(plan, floor, slices, found),
    }
}

fn pass_as<const KIND: u8, const STATS: bool>(
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    match plan.level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::pass::<KIND, STATS>(plan, floor, slices, found),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::pass::<KIND, STATS>(plan, floor, slices, found),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => neon::pass::<KIND, STATS>(plan, floor, slices, found),
        _ => portable::pass::<KIND, STATS>(plan, floor, slices, found),
    }
}

/// Appends a [`Key`] for every element of at most a chunk that is greater than `floor`, in index order.
pub(crate) fn scan(level: Level, lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::scan(lens, floor, v, base, found),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::scan(lens, floor, v, base, found),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => neon::scan(lens, floor, v, base, found),
        _ => portable::scan(lens, floor, v, base, found),
    }
}

/// Plain `v += g` in place, at the speed of memory: what every stage is compared with.
pub fn add_assign(level: Level, v: &mut [f32], g: &[f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // Of two loops the faster one: with registers of 512 bits the same took a tenth longer.
        Level::Avx2 | Level::Avx512 => avx2::add_assign(v, g),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => neon::add_assign(v, g),
        _ => portable::add_assign(v, g),
    }
}

/// One step of AdamW, dense: its coefficients, the rate over the bias of the first moment, what makes the second free of bias, and what
/// decay leaves of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    adam: Adam,
    pace: f32,
    root: f32,
    factor: f32,
}

impl AdamW {
    /// Step `t`, counted from 1.
    pub fn new(adam: Adam, t: u64, rate: f32, decay: f32) -> Self {
        let unbias = |b: f32| 1.0 - f64::from(b).powf(t as f64);
        AdamW {
            adam,
            pace: (f64::from(rate) / unbias(adam.beta1)) as f32,
            root: (1.0 / unbias(adam.beta2)) as f32,
            factor: (1.0 - f64::from(rate) * f64::from(decay)) as f32,
        }
    }

    /// Updates weights and both moments by a gradient, in one plain pass; slices have one length.
    ///
    /// ```
    /// use redsync_core::{Adam, AdamW, Level};
    /// let (mut w, mut m, mut q) = ([1.0f32], [0.0], [0.0]);
    /// AdamW::new(Adam::default(), 1, 0.1, 0.0).update(Level::best(), &mut w, &mut m, &mut q, &[3.0]);
    /// assert!((w[0] - 0.9).abs() < 1e-6); // the first step is as long as the rate
    /// ```
    pub fn update(&self, level: Level, w: &mut [f32], m: &mut [f32], q: &mut [f32], g: &[f32]) {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::adamw(self, w, m, q, g),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::adamw(self, w, m, q, g),
            _ => portable::adamw(self, w, m, q, g),
        }
    }
}

/// One found element in one word, ordered as selection orders: by magnitude, then the smaller index first.
/// Bits 63..33 hold the magnitude, 32..1 the complement of the index, 0 the sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u64);

impl Key {
    #[inline(always)]
    pub fn new(value: f32, index: u32) -> Self {
        let bits = value.to_bits();
        Key(u64::from(bits & 0x7fff_ffff) << 33 | u64::from(!index) << 1 | u64::from(bits >> 31))
    }

    #[inline(always)]
    pub fn index(self) -> u32 {
        !((self.0 >> 1) as u32)
    }

    #[inline(always)]
    pub fn magnitude(self) -> f32 {
        f32::from_bits((self.0 >> 33) as u32)
    }

    #[inline(always)]
    pub fn value(self) -> f32 {
        f32::from_bits((self.0 >> 33) as u32 | (self.0 as u32) << 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::Field;
    use crate::phase::Phase;
    use proptest::prelude::*;

    #[test]
    fn a_key_gives_back_what_went_in_and_orders_by_magnitude_then_index() {
        for (value, index) in [(1.5f32, 0u32), (-2.0, 7), (0.0, u32::MAX), (-f32::MAX, 1 << 31)] {
            let key = Key::new(value, index);
            assert_eq!((key.value(), key.index(), key.magnitude()), (value, index, value.abs()));
        }
        assert!(Key::new(-2.0, 9) > Key::new(1.0, 0));
        assert!(Key::new(-1.0, 3) > Key::new(1.0, 4));
    }

    /// The levels of this machine.
    fn here() -> impl Iterator<Item = Level> {
        Level::ALL.into_iter().filter(|level| level.is_here())
    }

    fn rules() -> impl Strategy<Value = Rule> {
        prop_oneof![
            Just(Rule::Plain),
            (0f32..1.0).prop_map(Rule::Momentum),
            (0f32..1.0).prop_map(Rule::Nesterov),
            adam().prop_map(Rule::Adam),
            adam().prop_map(Rule::AdamGiven),
        ]
    }

    fn adam() -> impl Strategy<Value = Coefficients> {
        let some = || (0f32..1.0, 0f32..1.0, 1f32..10.0);
        (some(), some(), 1e-8f32..1e-3).prop_map(|((keep, enter, unbias), (b2, a2, unbias_square), floor)| {
            Coefficients { keep, enter, keep_square: b2, enter_square: a2, unbias, unbias_square, floor }
        })
    }

    /// Any bit pattern: NaN, infinities, subnormals and negative zero are inputs too.
    fn floats(len: usize) -> impl Strategy<Value = Vec<f32>> {
        let any = prop_oneof![4 => -1e3f32..1e3, 1 => any::<u32>().prop_map(f32::from_bits)];
        proptest::collection::vec(any, len)
    }

    /// What a pass reads.
    #[derive(Clone, Debug)]
    struct Inputs {
        g: Vec<f32>,
        u: Vec<f32>,
        v: Vec<f32>,
        q: Vec<f32>,
        given: Vec<f32>,
    }

    fn inputs() -> impl Strategy<Value = Inputs> {
        let all = |n| (floats(n), floats(n), floats(n), floats(n), floats(n));
        (0usize..200).prop_flat_map(all).prop_map(|(g, u, v, q, given)| {
            let squares = |x: Vec<f32>| x.into_iter().map(f32::abs).collect();
            Inputs { g, u, v, q: squares(q), given: squares(given) }
        })
    }

    /// Everything a pass gives, comparable bit by bit; NaN counts as one value.
    fn run(plan: &Plan, save: bool, floor: f32, inputs: &Inputs) -> impl PartialEq + std::fmt::Debug + use<> {
        let Inputs { g, mut u, mut v, mut q, given } = inputs.clone();
        let room = || Field::zeros(if save { v.len() } else { 0 });
        let (mut saved_u, mut saved_v, mut saved_q) = (room(), room(), room());
        let mut found = Vec::new();
        let slices = Slices {
            gradient: &g,
            u: &mut u,
            v: &mut v,
            q: &mut q,
            given: &given,
            saved_u: &mut saved_u,
            saved_v: &mut saved_v,
            saved_q: &mut saved_q,
            base: 5,
        };
        let Outcome { finite, stats } = pass(plan, floor, slices, &mut found);
        fence(plan.level);
        let mut scanned = Vec::new();
        scan(plan.level, plan.lens, floor, &v, 5, &mut scanned);
        // Keys and statistics of what is not finite mean nothing.
        let meaningful = finite.then_some((found, scanned, stats));
        let bits = |x: &[f32]| -> Vec<u32> {
            x.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect()
        };
        let saved = [saved_u, saved_v, saved_q].map(|saved| bits(&saved));
        (finite, meaningful, bits(&u), bits(&v), bits(&q), saved)
    }

    /// Long enough for every way in which a pass walks through blocks.
    #[test]
    fn every_level_gives_the_same_bits_in_long_slices() {
        let mut state = 1u32;
        let mut draw = |len: usize| -> Vec<f32> {
            let next = |state: &mut u32| {
                *state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                (*state >> 8) as f32 / 8192.0 - 1024.0
            };
            (0..len).map(|_| next(&mut state)).collect()
        };
        for n in [CHUNK, CHUNK - 1, CHUNK / 4, CHUNK / 4 + 3 * BLOCK + 5, CHUNK / 4 - 1] {
            let squares = |x: Vec<f32>| x.into_iter().map(f32::abs).collect();
            let inputs =
                Inputs { g: draw(n), u: draw(n), v: draw(n), q: squares(draw(n)), given: squares(draw(n)) };
            let adam = Coefficients {
                keep: 0.9,
                enter: 0.1,
                keep_square: 0.95,
                enter_square: 0.05,
                unbias: 1.5,
                unbias_square: 3.0,
                floor: 1e-8,
            };
            for rule in [
                Rule::Plain,
                Rule::Momentum(0.9),
                Rule::Nesterov(0.9),
                Rule::Adam(adam),
                Rule::AdamGiven(adam),
            ] {
                for (phase, stats, save) in [
                    (Phase::Both, false, false),
                    (Phase::Positive, true, false),
                    (Phase::Negative, false, true),
                ] {
                    let plan =
                        |level| Plan { level, rule, scale: 0.3, carry: 1.25, lens: phase.lens(), stats };
                    let portable = run(&plan(Level::Portable), save, 900.0, &inputs);
                    for level in here() {
                        let result = run(&plan(level), save, 900.0, &inputs);
                        assert!(portable == result, "{level:?} {n} {rule:?} {phase:?}");
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_level_gives_the_same_bits(
            rule in rules(), inputs in inputs(), floor in 0f32..500.0, scale in 0.1f32..2.0,
            phase in prop_oneof![Just(Phase::Both), Just(Phase::Positive), Just(Phase::Negative)],
            save: bool, stats: bool, carry in prop_oneof![Just(1f32), 0.1f32..4.0],
        ) {
            let plan = |level| Plan { level, rule, scale, carry, lens: phase.lens(), stats };
            let portable = run(&plan(Level::Portable), save, floor, &inputs);
            for level in here() {
                prop_assert_eq!(&portable, &run(&plan(level), save, floor, &inputs), "{:?}", level);
            }
        }

        #[test]
        fn a_pass_finds_what_is_above_the_floor_and_its_statistics(
            v in proptest::collection::vec(-10f32..10.0, 0..300), floor in 0f32..10.0,
            phase in prop_oneof![Just(Phase::Both), Just(Phase::Positive), Just(Phase::Negative)],
        ) {
            let (lens, zeros) = (phase.lens(), vec![0.0; v.len()]);
            let level = Level::best();
            let plan = Plan { level, rule: Rule::Plain, scale: 1.0, carry: 1.0, lens, stats: true };
            let (mut changed, mut saved, mut found) = (v.clone(), Field::zeros(v.len()), Vec::new());
            let slices = Slices {
                gradient: &zeros, u: &mut [], v: &mut changed, q: &mut [], given: &[],
                saved_u: &mut [], saved_v: &mut saved, saved_q: &mut [], base: 0
            };
            let Outcome { finite, stats } = pass(&plan, floor, slices, &mut found);
            prop_assert_eq!(&saved[..], &v[..]);
            let mut scanned = Vec::new();
            scan(Level::best(), lens, floor, &v, 0, &mut scanned);
            prop_assert_eq!(&scanned, &found);
            prop_assert!(finite);
            let above = (0..v.len()).filter(|i| lens.see(v[*i]) > floor).map(|i| Key::new(v[i], i as u32));
            prop_assert_eq!(found, above.collect::<Vec<_>>());
            let seen: Vec<f32> = v.iter().map(|x| lens.see(*x)).filter(|x| *x > 0.0).collect();
            prop_assert_eq!(stats.count, seen.len() as u64);
            prop_assert_eq!(stats.max, seen.iter().copied().fold(0.0, f32::max));
            let sum: f64 = seen.iter().map(|x| f64::from(*x)).sum();
            prop_assert!((stats.sum - sum).abs() <= 1e-4 * sum.max(1.0));
        }

        #[test]
        fn adamw_has_the_same_bits_at_every_level(inputs in inputs(), t in 1u64..1_000_000) {
            let step = AdamW::new(Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, t, 1e-3, 0.1);
            let run = |level| {
                let Inputs { g, u: mut w, v: mut m, mut q, .. } = inputs.clone();
                step.update(level, &mut w, &mut m, &mut q, &g);
                [w, m, q].map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            };
            let plain = run(Level::Portable);
            for level in Level::ALL.into_iter().filter(|level| level.is_here()) {
                prop_assert!(run(level) == plain, "{}", level.name());
            }
        }

        #[test]
        fn add_assign_adds(
            (g, v) in (0usize..100).prop_flat_map(|n| {
                let values = || proptest::collection::vec(-1e3f32..1e3, n);
                (values(), values())
            })
        ) {
            for level in here() {
                let mut sum = v.clone();
                add_assign(level, &mut sum, &g);
                prop_assert!(sum.iter().zip(v.iter().zip(&g)).all(|(s, (v, g))| *s == v + g));
            }
        }
    }
}

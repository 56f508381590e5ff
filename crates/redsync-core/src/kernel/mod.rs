//! The inner loops: one pass over memory each, over slices of at most [`CHUNK`] elements.
//! Comes in: slices of gradient, u and v. Goes out: the next u and v, and the keys of elements above a floor.
//! What must hold: every level gives the same bits; `unsafe` lives in `avx2` only.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod portable;

use crate::phase::Lens;

/// Elements per call, so that a caller can bound what one call finds. A multiple of [`LANES`].
pub(crate) const CHUNK: usize = 4096;
/// Elements per turn of the loops; also the number of partial sums of [`stats`].
pub(crate) const LANES: usize = 32;
/// Thresholds that [`count_above`] counts in one pass.
pub(crate) const THRESHOLDS: usize = 7;

/// The instructions that the loops may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Plain Rust, for any machine.
    Portable,
    /// AVX2, on x86-64 machines that have it.
    Avx2,
}

impl Level {
    /// The best level of the machine that runs this.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Level::Avx2;
        }
        Level::Portable
    }
}

/// What a pass does to u and v before it compares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// Nothing: v is only read.
    Read,
    /// v += s*g
    Plain,
    /// u = m*u + s*g; v += u
    Momentum(f32),
    /// u = m*(u + s*g); v += u + s*g
    Nesterov(f32),
}

pub(crate) const READ: u8 = 0;
pub(crate) const PLAIN: u8 = 1;
pub(crate) const MOMENTUM: u8 = 2;
pub(crate) const NESTEROV: u8 = 3;

impl Rule {
    fn coefficient(self) -> f32 {
        match self {
            Rule::Read | Rule::Plain => 0.0,
            Rule::Momentum(m) | Rule::Nesterov(m) => m,
        }
    }
}

/// Everything that one pass needs besides its slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub level: Level,
    pub rule: Rule,
    /// Multiplies the gradient as it enters (1/N).
    pub scale: f32,
    pub lens: Lens,
    /// The results will not be read soon: write around the cache where the machine can.
    pub stream: bool,
}

/// The slices of one pass, all of one length; those that the rule does not use are empty.
#[derive(Debug)]
pub(crate) struct Slices<'a> {
    pub gradient: &'a [f32],
    pub u: &'a [f32],
    pub u_next: &'a mut [f32],
    pub v: &'a [f32],
    pub v_next: &'a mut [f32],
    /// Index of the first element in its tensor.
    pub base: u32,
}

/// Runs the rule over the slices and appends a [`Key`] for every element greater than `floor`, in index order.
/// Returns false if a value that is not finite came out.
pub(crate) fn pass(plan: &Plan, floor: f32, slices: Slices<'_>, found: &mut Vec<Key>) -> bool {
    match plan.rule {
        Rule::Read => pass_as::<READ>(plan, floor, slices, found),
        Rule::Plain => pass_as::<PLAIN>(plan, floor, slices, found),
        Rule::Momentum(_) => pass_as::<MOMENTUM>(plan, floor, slices, found),
        Rule::Nesterov(_) => pass_as::<NESTEROV>(plan, floor, slices, found),
    }
}

fn pass_as<const KIND: u8>(plan: &Plan, floor: f32, slices: Slices<'_>, found: &mut Vec<Key>) -> bool {
    match plan.level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::pass::<KIND>(plan, floor, slices, found),
        _ => portable::pass::<KIND>(plan, floor, slices, found),
    }
}

/// Sum, maximum and number of the elements that compete.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Stats {
    pub sum: f64,
    pub max: f32,
    pub count: u64,
}

/// [`Stats`] of at most [`CHUNK`] elements. The order of the additions is fixed: [`LANES`] partial sums, then those
/// in order.
pub(crate) fn stats(level: Level, lens: Lens, v: &[f32]) -> Stats {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::stats(lens, v),
        _ => portable::stats(lens, v),
    }
}

/// How many of at most [`CHUNK`] elements are greater than each threshold.
pub(crate) fn count_above(
    level: Level,
    lens: Lens,
    thresholds: &[f32; THRESHOLDS],
    v: &[f32],
) -> [u64; THRESHOLDS] {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::count_above(lens, thresholds, v),
        _ => portable::count_above(lens, thresholds, v),
    }
}

/// Plain `v += g` in place, at the speed of memory: what every stage is compared with.
pub fn add_assign(level: Level, v: &mut [f32], g: &[f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::add_assign(v, g),
        _ => portable::add_assign(v, g),
    }
}

/// Asks the machine to bring a slice near, one cache line after the other; does nothing where it cannot.
pub(crate) fn prefetch(slice: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    avx2::prefetch(slice);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
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

    fn rules() -> impl Strategy<Value = Rule> {
        prop_oneof![
            Just(Rule::Read),
            Just(Rule::Plain),
            (0f32..1.0).prop_map(Rule::Momentum),
            (0f32..1.0).prop_map(Rule::Nesterov)
        ]
    }

    /// Any bit pattern: NaN, infinities, subnormals and negative zero are inputs too.
    fn floats(len: usize) -> impl Strategy<Value = Vec<f32>> {
        let any = prop_oneof![4 => -1e3f32..1e3, 1 => any::<u32>().prop_map(f32::from_bits)];
        proptest::collection::vec(any, len)
    }

    fn inputs() -> impl Strategy<Value = (Vec<f32>, Vec<f32>, Vec<f32>)> {
        (0usize..200).prop_flat_map(|n| (floats(n), floats(n), floats(n)))
    }

    #[derive(Debug, PartialEq)]
    struct Outcome {
        finite: bool,
        found: Vec<Key>,
        u: Vec<u32>,
        v: Vec<u32>,
    }

    fn run(plan: &Plan, floor: f32, g: &[f32], u: &[f32], v: &[f32]) -> Outcome {
        let (mut u_next, mut v_next) = (vec![0.0; g.len()], vec![0.0; g.len()]);
        let mut found = Vec::new();
        let slices = Slices { gradient: g, u, u_next: &mut u_next, v, v_next: &mut v_next, base: 5 };
        let finite = pass(plan, floor, slices, &mut found);
        let bits = |x: &[f32]| x.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect();
        if !finite {
            found.clear();
        }
        Outcome { finite, found, u: bits(&u_next), v: bits(&v_next) }
    }

    proptest! {
        #[test]
        fn every_level_gives_the_same_bits(
            rule in rules(), (g, u, v) in inputs(), floor in 0f32..500.0, scale in 0.1f32..2.0,
            phase in prop_oneof![Just(Phase::Both), Just(Phase::Positive), Just(Phase::Negative)], stream: bool,
        ) {
            let plan = |level| Plan { level, rule, scale, lens: phase.lens(), stream };
            let portable = run(&plan(Level::Portable), floor, &g, &u, &v);
            prop_assert_eq!(&portable, &run(&plan(Level::best()), floor, &g, &u, &v));
            if v.iter().all(|x| x.is_finite()) {
                let lens = phase.lens();
                let (a, b) = (stats(Level::Portable, lens, &v), stats(Level::best(), lens, &v));
                prop_assert_eq!(a, b);
                let t = [0.0, 1.0, 10.0, 100.0, 500.0, 1e9, f32::INFINITY];
                let counts = count_above(Level::best(), lens, &t, &v);
                prop_assert_eq!(count_above(Level::Portable, lens, &t, &v), counts);
                for (t, count) in t.iter().zip(counts) {
                    prop_assert_eq!(v.iter().filter(|x| lens.see(**x) > *t).count() as u64, count);
                }
            }
        }

        #[test]
        fn add_assign_adds(
            (g, v) in (0usize..100).prop_flat_map(|n| {
                let values = || proptest::collection::vec(-1e3f32..1e3, n);
                (values(), values())
            })
        ) {
            for level in [Level::Portable, Level::best()] {
                let mut sum = v.clone();
                add_assign(level, &mut sum, &g);
                prop_assert!(sum.iter().zip(v.iter().zip(&g)).all(|(s, (v, g))| *s == v + g));
            }
        }
    }
}

//! Buffers that the stages reuse from layer to layer and step to step, and how many threads they may use.
//! After the first few steps nothing here grows.

use crate::candidates::{Candidates, Span, gather, largest};
use crate::kernel::{self, CHUNK, Key, Level, Plan, Rule, Stats, THRESHOLDS};
use crate::phase::Phase;
use crate::sparse::Sparse;

/// Below this many elements one thread is faster than two (`redsync bench select --threads 2`).
pub(crate) const PARALLEL_FROM: usize = 1 << 18;
/// Elements in one leaf of a reduction. Fixed: the shape of the tree, and so every rounding, depends on n alone.
const LEAF: usize = 1 << 16;

/// Scratch memory and thread count of one compressing thread; serves any number of layers, one at a time.
///
/// ```
/// use redsync_core::Workspace;
/// let mut workspace = Workspace::new(1); // never leaves the calling thread
/// # let _ = &mut workspace;
/// ```
#[derive(Debug)]
pub struct Workspace {
    pub(crate) level: Level,
    parts: Vec<Candidates>,
    /// The chosen keys, in index order, once a selector has finished.
    pub(crate) keys: Vec<Key>,
    pub(crate) scratch: Vec<Key>,
    pub(crate) message: Sparse,
    /// One place per thread and message, for `apply`.
    pub(crate) cursors: Vec<usize>,
}

impl Workspace {
    /// A workspace whose passes over large tensors use `threads` threads of the rayon pool they are called in (at
    /// least one). Results do not depend on the number.
    pub fn new(threads: usize) -> Self {
        Self::with_level(threads, Level::best())
    }

    /// A workspace that uses the given instructions, for comparisons. Results do not depend on them.
    ///
    /// # Panics
    /// The passes panic if this machine does not have them.
    pub fn with_level(threads: usize, level: Level) -> Self {
        let parts = (0..threads.max(1)).map(|_| Candidates::default()).collect();
        Workspace {
            level,
            parts,
            keys: Vec::new(),
            scratch: Vec::new(),
            message: Sparse::new(),
            cursors: Vec::new(),
        }
    }

    /// What the last [`Compressor::select`](crate::Compressor::select) chose.
    pub fn message(&self) -> &Sparse {
        &self.message
    }

    pub(crate) fn threads(&self) -> usize {
        self.parts.len()
    }

    /// One pass over a span: applies the rule and collects what is greater than `floor`, and at least the largest
    /// `keep` of that. Returns false if a value that is not finite came out.
    pub(crate) fn gather(&mut self, plan: &Plan, floor: f32, keep: usize, span: Span<'_>) -> bool {
        let threads = if span.v.len() < PARALLEL_FROM { 1 } else { self.parts.len() };
        for idle in &mut self.parts[threads..] {
            idle.keys.clear();
        }
        gather(plan, floor, keep, span, &mut self.parts[..threads])
    }

    /// Collects what is greater than `floor` in a tensor that is only read.
    pub(crate) fn scan(&mut self, v: &[f32], phase: Phase, floor: f32, keep: usize) {
        let plan =
            Plan { level: self.level, rule: Rule::Read, scale: 1.0, lens: phase.lens(), stream: false };
        self.gather(&plan, floor, keep, Span::read(v));
    }

    /// How many candidates the last pass left.
    pub(crate) fn found(&self) -> usize {
        self.parts.iter().map(|part| part.keys.len()).sum()
    }

    /// Chooses the largest `most` candidates of the last pass, or all if they are fewer. Returns the least of them; if
    /// there were more, the others stand first in `scratch`, in no order.
    pub(crate) fn choose(&mut self, most: usize) -> Option<Key> {
        self.keys.clear();
        for part in &self.parts {
            self.keys.extend_from_slice(&part.keys);
        }
        if most > 0 && self.keys.len() > most {
            return Some(largest(&mut self.keys, most, &mut self.scratch));
        }
        self.keys.truncate(most);
        self.keys.iter().min().copied()
    }

    /// Statistics of the elements that compete.
    pub(crate) fn stats(&self, v: &[f32], phase: Phase) -> Stats {
        let (level, lens) = (self.level, phase.lens());
        let leaf = |v: &[f32]| {
            v.chunks(CHUNK).map(|v| kernel::stats(level, lens, v)).fold(Stats::default(), join_stats)
        };
        tree(v, self.parts.len() > 1, &leaf, &join_stats)
    }

    /// How many elements are greater than each threshold.
    pub(crate) fn count_above(&self, v: &[f32], phase: Phase, at: &[f32; THRESHOLDS]) -> [u64; THRESHOLDS] {
        let (level, lens) = (self.level, phase.lens());
        let join = |a: [u64; THRESHOLDS], b: [u64; THRESHOLDS]| std::array::from_fn(|i| a[i] + b[i]);
        let leaf = |v: &[f32]| {
            v.chunks(CHUNK).map(|v| kernel::count_above(level, lens, at, v)).fold([0; THRESHOLDS], join)
        };
        tree(v, self.parts.len() > 1, &leaf, &join)
    }
}

fn join_stats(a: Stats, b: Stats) -> Stats {
    Stats { sum: a.sum + b.sum, max: a.max.max(b.max), count: a.count + b.count }
}

/// Reduces a slice along a tree whose shape depends on its length alone.
fn tree<T: Send>(
    v: &[f32],
    parallel: bool,
    leaf: &(impl Fn(&[f32]) -> T + Sync),
    join: &(impl Fn(T, T) -> T + Sync),
) -> T {
    if v.len() <= LEAF {
        return leaf(v);
    }
    let leaves = v.len().div_ceil(LEAF);
    let (a, b) = v.split_at(leaves / 2 * LEAF);
    let (a, b) = if parallel && v.len() >= PARALLEL_FROM {
        rayon::join(|| tree(a, parallel, leaf, join), || tree(b, parallel, leaf, join))
    } else {
        (tree(a, parallel, leaf, join), tree(b, parallel, leaf, join))
    };
    join(a, b)
}

//! Buffers that the stages reuse from layer to layer and step to step, and how many threads they may use.
//! After the first few steps nothing here grows.

use crate::candidates::{Candidates, Read, Split, gather};
use crate::kernel::{Key, Level, StatLanes, Stats};
use crate::largest::largest;
use crate::phase::Phase;
use crate::sparse::Sparse;

/// From this many elements on two threads are not slower than one; at 1M they take 0.8, at 2M 0.63 of its time (`redsync bench
/// select --n 1M --threads 2`).
pub(crate) const PARALLEL_FROM: usize = 1 << 19;

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
    /// Of what the candidates in `parts` are, if they are of anything.
    pub(crate) found_in: Option<View>,
    /// The chosen keys, in index order, once a selector has finished.
    pub(crate) keys: Vec<Key>,
    pub(crate) scratch: Vec<Key>,
    pub(crate) message: Sparse,
    /// v and u of a small layer as they were before a pass.
    pub(crate) copies: Vec<f32>,
    /// One place per thread and message, for `apply`.
    pub(crate) cursors: Vec<usize>,
}

/// A residual as it was when it was passed over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct View {
    /// Whose it is.
    pub sender: u64,
    /// How often it had changed.
    pub changes: u64,
    /// Which signs were looked at.
    pub phase: Phase,
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
            found_in: None,
            keys: Vec::new(),
            scratch: Vec::new(),
            message: Sparse::new(),
            copies: Vec::new(),
            cursors: Vec::new(),
        }
    }

    /// What the last [`Compressor::select`](crate::Compressor::select) chose.
    pub fn message(&self) -> &Sparse {
        &self.message
    }

    /// Takes what the last selection chose, and leaves another vector whose buffers the next one fills.
    pub fn swap_message(&mut self, other: &mut Sparse) {
        std::mem::swap(&mut self.message, other);
    }

    /// What the last selection chose, before anything was rounded: index and value, in index order.
    pub fn chosen(&self) -> impl ExactSizeIterator<Item = (u32, f32)> + Clone + '_ {
        self.keys.iter().map(|key| (key.index(), key.value()))
    }

    /// The least of it: every candidate that is larger in magnitude, or as large at a smaller index, was chosen too.
    pub fn least_chosen(&self) -> Option<(u32, f32)> {
        self.keys.iter().min().map(|key| (key.index(), key.value()))
    }

    /// What was found elsewhere takes the place of what a pass found: elements in index order, every one greater than `floor` among
    /// them.
    pub fn put_candidates(&mut self, floor: f32, elements: impl Iterator<Item = (u32, f32)>) {
        let [part, idle @ ..] = &mut self.parts[..] else { return };
        idle.iter_mut().for_each(Candidates::clear);
        part.keys.clear();
        part.keys.extend(elements.map(|(index, value)| Key::new(value, index)));
        part.floor = floor;
    }

    /// Statistics that were taken elsewhere, one per chunk of the layer, take the place of those of a pass.
    pub fn put_stats(&mut self, chunks: impl Iterator<Item = StatLanes>) {
        self.parts.iter_mut().for_each(|part| part.stats.clear());
        self.parts[0].stats.extend(chunks.map(|lanes| lanes.fold()));
    }

    pub(crate) fn threads(&self) -> usize {
        self.parts.len()
    }

    /// One pass over a span, which collects what is greater than `floor`, and at least the largest `keep` of that.
    /// Returns the parts that worked on it.
    pub(crate) fn gather<S: Split>(
        &mut self,
        floor: f32,
        keep: usize,
        span: S,
        run: &(impl Fn(S, &mut Candidates) + Sync),
    ) -> &mut [Candidates] {
        let threads = if span.len() < PARALLEL_FROM { 1 } else { self.parts.len() };
        let (busy, idle) = self.parts.split_at_mut(threads);
        idle.iter_mut().for_each(Candidates::clear);
        gather(floor, keep, span, busy, run);
        busy
    }

    /// Collects what is greater than `floor` in a tensor that is only read.
    pub(crate) fn scan(&mut self, v: &[f32], phase: Phase, floor: f32, keep: usize) {
        let (level, lens) = (self.level, phase.lens());
        self.gather(floor, keep, Read { v, base: 0 }, &|span, into| span.scan(level, lens, into));
    }

    /// Every element greater than this was found by the last pass.
    pub(crate) fn floor(&self) -> f32 {
        self.parts.iter().map(|part| part.floor).fold(0.0, f32::max)
    }

    /// How many candidates the last pass left.
    pub(crate) fn found(&self) -> usize {
        self.parts.iter().map(|part| part.keys.len()).sum()
    }

    /// Chooses the largest `most` (not zero) candidates of the last pass, or all if they are fewer. Returns the least of them; if
    /// there were more, the others stand first in `scratch`, in no order.
    pub(crate) fn choose(&mut self, most: usize) -> Option<Key> {
        self.keys.clear();
        match &mut self.parts[..] {
            [part] => std::mem::swap(&mut self.keys, &mut part.keys),
            parts => parts.iter().for_each(|part| self.keys.extend_from_slice(&part.keys)),
        }
        if self.keys.len() > most {
            return Some(largest(&mut self.keys, most, &mut self.scratch));
        }
        self.keys.iter().min().copied()
    }

    /// How many candidates of the last pass are greater than `threshold`.
    pub(crate) fn found_above(&self, threshold: f32) -> usize {
        let keys = self.parts.iter().flat_map(|part| &part.keys);
        keys.filter(|key| key.magnitude() > threshold).count()
    }

    /// Chooses the candidates of the last pass that are greater than `threshold`.
    pub(crate) fn choose_above(&mut self, threshold: f32) {
        self.keys.clear();
        let keys = self.parts.iter().flat_map(|part| &part.keys);
        self.keys.extend(keys.filter(|key| key.magnitude() > threshold));
    }

    /// Statistics of the last accumulating pass.
    pub(crate) fn stats(&self) -> Stats {
        self.parts.iter().flat_map(|part| &part.stats).copied().fold(Stats::default(), Stats::join)
    }
}

//! Elements above a floor, found in a pass over memory, in index order.
//! Comes in: slices of a tensor. Goes out: keys. What must hold: the largest `keep` elements of what was passed over
//! are among the keys, whatever the floor was raised to, and memory stays bounded by twice `keep` and two chunks.

use crate::kernel::{self, CHUNK, Key, Level, Stats};
use crate::largest::largest;
use crate::phase::Lens;

/// What one thread finds in its part of a tensor.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    pub keys: Vec<Key>,
    /// Every element greater than this is among the keys.
    pub floor: f32,
    /// Statistics of each chunk, where they are wanted.
    pub stats: Vec<Stats>,
    /// Whether all values of the last accumulating pass are finite.
    pub finite: bool,
    /// A chunk of a gradient that had to be converted.
    pub converted: Vec<f32>,
    scratch: Vec<Key>,
    keep: usize,
}

impl Candidates {
    fn begin(&mut self, floor: f32, keep: usize, len: usize) {
        self.clear();
        (self.floor, self.keep) = (floor, keep);
        if floor < f32::INFINITY {
            // With the place that a pass wants beside its candidates.
            self.keys.reserve((self.limit() + CHUNK).min(len) + 1);
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.stats.clear();
        (self.floor, self.finite) = (0.0, true);
    }

    fn limit(&self) -> usize {
        2 * self.keep + CHUNK
    }

    /// Before the next chunk: with too many keys, only the largest `keep` stay, and the floor rises to the smallest of
    /// them. What comes later has a larger index, so an equal magnitude loses, as it should.
    pub fn bound(&mut self) {
        if self.keys.len() > self.limit() {
            let least = largest(&mut self.keys, self.keep, &mut self.scratch);
            self.floor = least.magnitude();
        }
    }
}

/// Something with a length that can be cut in two for two threads.
pub(crate) trait Split: Sized + Send {
    fn len(&self) -> usize;
    fn split_at(self, mid: usize) -> (Self, Self);
}

/// Runs a pass over a span with one thread per element of `parts`, each collecting what it finds above `floor` and at
/// least its largest `keep`.
pub(crate) fn gather<S: Split>(
    floor: f32,
    keep: usize,
    span: S,
    parts: &mut [Candidates],
    run: &(impl Fn(S, &mut Candidates) + Sync),
) {
    if let [part] = parts {
        part.begin(floor, keep, span.len());
        return run(span, part);
    }
    // Cuts between chunks: each chunk's statistics, and so their sum, are the same for any number of threads.
    let half = parts.len() / 2;
    let mid = span.len() * half / parts.len() / CHUNK * CHUNK;
    let (left, right) = span.split_at(mid);
    let (left_parts, right_parts) = parts.split_at_mut(half);
    rayon::join(
        || gather(floor, keep, left, left_parts, run),
        || gather(floor, keep, right, right_parts, run),
    );
}

/// A part of a tensor that is only read, from element `base` on.
pub(crate) struct Read<'a> {
    pub v: &'a [f32],
    pub base: u32,
}

impl Split for Read<'_> {
    fn len(&self) -> usize {
        self.v.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (left, right) = self.v.split_at(mid);
        (Read { v: left, base: self.base }, Read { v: right, base: self.base + mid as u32 })
    }
}

impl Read<'_> {
    /// One thread's pass.
    pub fn scan(self, level: Level, lens: Lens, into: &mut Candidates) {
        let mut base = self.base;
        for chunk in self.v.chunks(CHUNK) {
            into.bound();
            kernel::scan(level, lens, into.floor, chunk, base, &mut into.keys);
            base += chunk.len() as u32;
        }
    }
}

//! Elements above a floor, found in a pass over memory, in index order.
//! Comes in: slices of a tensor. Goes out: keys. What must hold: the largest `keep` elements of what was passed over
//! are among the keys, whatever the floor was raised to, and memory stays bounded by about twice `keep`.

use crate::gradient::Gradient;
use crate::kernel::{self, CHUNK, Key, Plan, Slices};

/// What one thread finds in its part of a tensor.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    pub keys: Vec<Key>,
    scratch: Vec<Key>,
    floor: f32,
    keep: usize,
}

impl Candidates {
    fn begin(&mut self, floor: f32, keep: usize, len: usize) {
        self.keys.clear();
        (self.floor, self.keep) = (floor, keep);
        if floor < f32::INFINITY {
            self.keys.reserve((self.limit() + CHUNK).min(len));
        }
    }

    fn limit(&self) -> usize {
        2 * self.keep + CHUNK
    }

    /// Before the next chunk: with too many keys, only the largest `keep` stay, and the floor rises to the smallest of
    /// them. What comes later has a larger index, so an equal magnitude loses, as it should.
    fn bound(&mut self) {
        if self.keys.len() > self.limit() {
            let least = largest(&mut self.keys, self.keep, &mut self.scratch);
            self.floor = least.magnitude();
        }
    }
}

/// Keeps the `k` largest keys, in the order they have, and returns the smallest of them. There must be at least `k`,
/// and `k` must not be zero. Afterwards `scratch` holds the others, smaller, in its first places.
pub(crate) fn largest(keys: &mut Vec<Key>, k: usize, scratch: &mut Vec<Key>) -> Key {
    scratch.clear();
    scratch.extend_from_slice(keys);
    let (_, least, _) = scratch.select_nth_unstable(keys.len() - k);
    let least = *least;
    keys.retain(|key| *key >= least);
    least
}

/// A part of a tensor on its way through a pass; u and the next values are empty where the rule has no use for them.
#[derive(Debug)]
pub(crate) struct Span<'a> {
    pub gradient: Gradient<'a>,
    pub u: &'a [f32],
    pub u_next: &'a mut [f32],
    pub v: &'a [f32],
    pub v_next: &'a mut [f32],
    pub base: u32,
}

impl<'a> Span<'a> {
    /// A span that is only read.
    pub fn read(v: &'a [f32]) -> Self {
        Span { gradient: Gradient::F32(&[]), u: &[], u_next: &mut [], v, v_next: &mut [], base: 0 }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let cut = |len: usize| mid.min(len);
        let (g0, g1) = self.gradient.split_at(cut(self.gradient.len()));
        let (u0, u1) = self.u.split_at(cut(self.u.len()));
        let at = cut(self.u_next.len());
        let (un0, un1) = self.u_next.split_at_mut(at);
        let (v0, v1) = self.v.split_at(mid);
        let at = cut(self.v_next.len());
        let (vn0, vn1) = self.v_next.split_at_mut(at);
        (
            Span { gradient: g0, u: u0, u_next: un0, v: v0, v_next: vn0, base: self.base },
            Span { gradient: g1, u: u1, u_next: un1, v: v1, v_next: vn1, base: self.base + mid as u32 },
        )
    }

    /// One thread's pass.
    fn run(mut self, plan: &Plan, into: &mut Candidates) -> bool {
        let mut buffer = [0f32; CHUNK];
        let mut finite = true;
        while !self.v.is_empty() {
            let mid = self.v.len().min(CHUNK);
            let (Span { gradient, u, u_next, v, v_next, base }, rest) = self.split_at(mid);
            let slices = Slices { gradient: gradient.as_f32(&mut buffer), u, u_next, v, v_next, base };
            into.bound();
            finite &= kernel::pass(plan, into.floor, slices, &mut into.keys);
            self = rest;
        }
        finite
    }
}

/// Runs a pass over a span with one thread per element of `parts`, each collecting what it finds above `floor` and at
/// least its largest `keep`. Returns false if a value that is not finite came out.
pub(crate) fn gather(plan: &Plan, floor: f32, keep: usize, span: Span<'_>, parts: &mut [Candidates]) -> bool {
    if let [part] = parts {
        part.begin(floor, keep, span.v.len());
        return span.run(plan, part);
    }
    // Cuts on cache lines keep the writes of neighbours apart and aligned.
    let half = parts.len() / 2;
    let mid = (span.v.len() * half / parts.len()) & !63;
    let (left, right) = span.split_at(mid);
    let (left_parts, right_parts) = parts.split_at_mut(half);
    let (a, b) = rayon::join(
        || gather(plan, floor, keep, left, left_parts),
        || gather(plan, floor, keep, right, right_parts),
    );
    a && b
}

//! The residual of one layer: momentum u and accumulated, unsent gradient v.
//! Comes in: a gradient. Goes out: v, and what in it is greater than a floor, found in the same pass over memory.
//! What must hold: a gradient that is not finite is refused and taken out again.
//!
//! The pass works in place: anything else costs a fifth more. What it overwrites it saves, by default in a buffer that
//! stays in the cache and holds the last chunk, or all of a layer of up to 65,536 elements. So after a refusal such a
//! layer is exactly as before; in a larger one the chunks before the bad one are subtracted again, which leaves them as
//! before up to one rounding. With `undo` all is saved: exact for any size, and the last step can be taken back.

use crate::candidates::{Candidates, Split};
use crate::error::Bad;
use crate::field::Field;
use crate::gradient::Gradient;
use crate::kernel::{self, CHUNK, Plan, Rule, Slices};
use crate::phase::Phase;
use crate::select::Wanted;
use crate::workspace::Workspace;

/// Layers up to this size are saved whole in the workspace.
const SAVED_WHOLE: usize = 1 << 16;

/// How gradients enter the residual.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Momentum {
    /// v += g
    #[default]
    None,
    /// u = m*u + g; v += u
    Plain(f32),
    /// u = m*(u + g); v += u + g
    Nesterov(f32),
}

impl Momentum {
    /// The coefficient m, 0 without momentum.
    pub fn coefficient(self) -> f32 {
        match self {
            Momentum::None => 0.0,
            Momentum::Plain(m) | Momentum::Nesterov(m) => m,
        }
    }

    fn rule(self) -> Rule {
        match self {
            Momentum::None => Rule::Plain,
            Momentum::Plain(m) => Rule::Momentum(m),
            Momentum::Nesterov(m) => Rule::Nesterov(m),
        }
    }
}

/// u and v of one layer.
#[derive(Debug)]
pub struct Residual {
    momentum: Momentum,
    u: Field,
    v: Field,
    /// u and v before the last step, if steps can be taken back.
    before: Option<Before>,
}

#[derive(Debug)]
struct Before {
    u: Field,
    v: Field,
    /// Whether they are those of the last step.
    valid: bool,
}

impl Residual {
    /// A residual of zeros. With `undo` the last step can be taken back, at the price of a second u and v.
    pub fn new(n: usize, momentum: Momentum, undo: bool) -> Self {
        let u = || Field::zeros(if momentum == Momentum::None { 0 } else { n });
        let v = || Field::zeros(n);
        let before = undo.then(|| Before { u: u(), v: v(), valid: false });
        Residual { momentum, u: u(), v: v(), before }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.v.len()
    }

    /// Whether the layer has no elements.
    pub fn is_empty(&self) -> bool {
        self.v.is_empty()
    }

    /// The accumulated gradient that was not sent yet.
    pub fn v(&self) -> &[f32] {
        &self.v
    }

    /// The local momentum; empty without momentum.
    pub fn u(&self) -> &[f32] {
        &self.u
    }

    /// Replaces u and v, as read from a checkpoint. Returns false, and changes nothing, if a length is wrong or a value
    /// is not finite.
    pub fn restore(&mut self, u: &[f32], v: &[f32]) -> bool {
        let fits = u.len() == self.u.len() && v.len() == self.v.len();
        if !fits || !u.iter().chain(v).all(|x| x.is_finite()) {
            return false;
        }
        self.u.copy_from_slice(u);
        self.v.copy_from_slice(v);
        self.forget_before();
        true
    }

    /// Takes over from dense training: u starts from this rank's share of the dense momentum buffer `b` (as PyTorch
    /// keeps it: b = m*b + g), v from zero, so that the sum over the ranks carries on where dense momentum stopped.
    /// Returns false, and changes nothing, if the length is wrong or a value is not finite.
    pub fn adopt_momentum(&mut self, b: &[f32], ranks: usize) -> bool {
        if b.len() != self.v.len() || !b.iter().all(|x| x.is_finite()) {
            return false;
        }
        let share = match self.momentum {
            Momentum::Nesterov(m) => m / ranks as f32,
            _ => 1.0 / ranks as f32,
        };
        for (u, b) in self.u.iter_mut().zip(b) {
            *u = b * share;
        }
        self.v.fill(0.0);
        self.forget_before();
        true
    }

    /// Accumulates `scale` times the gradient, and in the same pass collects in the workspace what the selection wants to
    /// know of the result.
    pub(crate) fn accumulate(
        &mut self,
        gradient: Gradient<'_>,
        scale: f32,
        phase: Phase,
        wanted: Wanted,
        workspace: &mut Workspace,
    ) -> Result<(), Bad> {
        if gradient.len() != self.len() {
            return Err(Bad::Length { expected: self.len(), got: gradient.len() });
        }
        let plan = Plan {
            level: workspace.level,
            rule: self.momentum.rule(),
            scale,
            lens: phase.lens(),
            stream: self.before.is_some(),
            stats: wanted.stats,
        };
        self.forget_before();
        let before = self.before.as_mut();
        let (saved_u, saved_v) =
            before.map_or((&mut [][..], &mut [][..]), |before| (&mut before.u, &mut before.v));
        let span = Span { gradient, u: &mut self.u, v: &mut self.v, saved_u, saved_v, base: 0 };
        let parts = workspace.gather(wanted.floor, wanted.keep, span, &|span, into| span.run(&plan, into));
        if parts.iter().any(|part| part.progress.failed) {
            let why = self.blame(gradient);
            parts.iter().for_each(|part| self.take_back(&part.progress, gradient, scale));
            return Err(why);
        }
        if let Some(before) = &mut self.before {
            before.valid = true;
        }
        Ok(())
    }

    /// Which element made a pass fail: the gradient's own, or else one whose sum grew too large.
    fn blame(&self, gradient: Gradient<'_>) -> Bad {
        let own = (0..gradient.len()).find_map(|index| {
            let value = gradient.get(index).filter(|g| !g.is_finite())?;
            Some(Bad::NotFinite { index, value })
        });
        own.unwrap_or_else(|| {
            let index = self.v.iter().position(|v| !v.is_finite()).unwrap_or(0);
            Bad::Overflow { index }
        })
    }

    /// Undoes what one thread did before the pass failed.
    fn take_back(&mut self, progress: &Progress, gradient: Gradient<'_>, scale: f32) {
        let Progress { begin, end, saved_from, .. } = *progress;
        for i in begin..saved_from {
            let g = gradient.get(i).unwrap_or(0.0) * scale;
            match self.momentum {
                Momentum::None => self.v[i] -= g,
                Momentum::Plain(m) => {
                    self.v[i] -= self.u[i];
                    self.u[i] = if m > 0.0 { (self.u[i] - g) / m } else { 0.0 };
                }
                Momentum::Nesterov(m) => {
                    self.v[i] -= self.u[i] + g;
                    self.u[i] = if m > 0.0 { self.u[i] / m - g } else { 0.0 };
                }
            }
        }
        let range = saved_from..end;
        let momentum = !self.u.is_empty();
        let (u, v) = match &self.before {
            Some(before) => {
                (&before.u[if momentum { range.clone() } else { 0..0 }], &before.v[range.clone()])
            }
            None => (
                &progress.saved_u[..if momentum { range.len() } else { 0 }],
                &progress.saved_v[..range.len()],
            ),
        };
        self.v[range.clone()].copy_from_slice(v);
        if momentum {
            self.u[range].copy_from_slice(u);
        }
    }

    fn forget_before(&mut self) {
        if let Some(before) = &mut self.before {
            before.valid = false;
        }
    }

    /// Leaves at each index the given rest of v, and, with masking, no momentum.
    pub(crate) fn remove(&mut self, sent: impl Iterator<Item = (u32, f32)>, masking: bool) {
        let (u, v) = (&mut self.u[..], &mut self.v[..]);
        let masking = masking && !u.is_empty();
        for (index, rest) in sent {
            v[index as usize] = rest;
            if masking {
                u[index as usize] = 0.0;
            }
        }
    }

    /// Takes the last accumulated step back, with everything that was removed after it. Returns false if there is none:
    /// one step can be taken back, once, and only with `undo`.
    pub fn roll_back(&mut self) -> bool {
        let Some(before) = self.before.as_mut().filter(|before| before.valid) else {
            return false;
        };
        before.valid = false;
        std::mem::swap(&mut self.u, &mut before.u);
        std::mem::swap(&mut self.v, &mut before.v);
        true
    }
}

/// How far one thread came, and what it overwrote last.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    failed: bool,
    /// The elements that were changed: `begin..end`.
    begin: usize,
    end: usize,
    /// From here on they are saved.
    saved_from: usize,
    saved_u: Vec<f32>,
    saved_v: Vec<f32>,
}

/// A part of the residual on its way through a pass; what the rule has no use for is empty.
struct Span<'a> {
    gradient: Gradient<'a>,
    u: &'a mut [f32],
    v: &'a mut [f32],
    /// Empty without `undo`, as is `saved_v`.
    saved_u: &'a mut [f32],
    saved_v: &'a mut [f32],
    base: u32,
}

impl Split for Span<'_> {
    fn len(&self) -> usize {
        self.v.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let cut = |slice: &[f32]| mid.min(slice.len());
        let (g0, g1) = self.gradient.split_at(mid);
        let (u0, u1) = self.u.split_at_mut(cut(self.u));
        let (v0, v1) = self.v.split_at_mut(mid);
        let (su0, su1) = self.saved_u.split_at_mut(cut(self.saved_u));
        let (sv0, sv1) = self.saved_v.split_at_mut(cut(self.saved_v));
        let base = self.base + mid as u32;
        (
            Span { gradient: g0, u: u0, v: v0, saved_u: su0, saved_v: sv0, base: self.base },
            Span { gradient: g1, u: u1, v: v1, saved_u: su1, saved_v: sv1, base },
        )
    }
}

impl Span<'_> {
    /// One thread's pass; it ends at the first chunk that is not finite.
    fn run(mut self, plan: &Plan, into: &mut Candidates) {
        let (begin, len, undo) = (self.base as usize, self.len(), !self.saved_v.is_empty());
        let whole = len <= SAVED_WHOLE;
        let mut progress = std::mem::take(&mut into.progress);
        if !undo {
            let room = if whole { len } else { CHUNK };
            progress.saved_v.resize(progress.saved_v.len().max(room), 0.0);
            progress
                .saved_u
                .resize(progress.saved_u.len().max(if self.u.is_empty() { 0 } else { room }), 0.0);
        }
        (progress.failed, progress.begin, progress.end, progress.saved_from) = (false, begin, begin, begin);
        let mut buffer = [0f32; CHUNK];
        while !progress.failed && self.len() > 0 {
            let mid = self.len().min(CHUNK);
            let (Span { gradient, u, v, saved_u, saved_v, base }, rest) = self.split_at(mid);
            if !undo && !whole {
                progress.saved_from = base as usize;
            }
            let at = base as usize - progress.saved_from;
            let (saved_u, saved_v) = match undo {
                true => (saved_u, saved_v),
                false => (&mut progress.saved_u[at..][..u.len()], &mut progress.saved_v[at..][..mid]),
            };
            into.bound();
            let slices = Slices { gradient: gradient.as_f32(&mut buffer), u, v, saved_u, saved_v, base };
            let outcome = kernel::pass(plan, into.floor, slices, &mut into.keys);
            progress.failed = !outcome.finite;
            progress.end += mid;
            if plan.stats {
                into.stats.push(outcome.stats);
            }
            self = rest;
        }
        kernel::fence(plan);
        into.progress = progress;
    }
}

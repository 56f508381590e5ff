//! The residual of one layer: momentum u and accumulated, unsent gradient v.
//! Comes in: a gradient. Goes out: v, and what in it is greater than a floor, found in the same pass over memory.
//! What must hold: a gradient that is not finite is refused and taken out again.
//!
//! The pass works in place: anything else costs a fifth more. So what a refused gradient did has to be undone. A layer of up
//! to 65,536 elements is copied before, in the cache, and is afterwards exactly what it was. From a larger one the gradient
//! is subtracted again: what was there before comes back up to the rounding of the sum, which is nothing where the gradient
//! was of its size, and much where it was huge; where it was not finite, zero stays. With `undo` the pass saves what it
//! overwrites: then a layer of any size is exactly what it was, and the last step can be taken back.

use crate::candidates::{Candidates, Split};
use crate::error::{Bad, Unfit};
use crate::field::Field;
use crate::gradient::Gradient;
use crate::kernel::{self, CHUNK, Plan, Rule, Slices};
use crate::phase::Phase;
use crate::select::Wanted;
use crate::workspace::Workspace;

/// Layers up to this size are copied before each pass.
const COPIED: usize = 1 << 16;

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

    /// Its form without the coefficient.
    pub fn form(self) -> &'static str {
        match self {
            Momentum::None => "no momentum",
            Momentum::Plain(_) => "plain momentum",
            Momentum::Nesterov(_) => "Nesterov momentum",
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

impl std::fmt::Display for Momentum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Momentum::None => f.write_str(self.form()),
            Momentum::Plain(m) | Momentum::Nesterov(m) => write!(f, "{} {m}", self.form()),
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
        let momentum = if momentum.coefficient() == 0.0 { Momentum::None } else { momentum };
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

    /// Replaces u and v, as read from a checkpoint.
    pub fn restore(&mut self, u: &[f32], v: &[f32]) -> Result<(), Unfit> {
        check("u", u, self.u.len())?;
        check("v", v, self.v.len())?;
        self.u.copy_from_slice(u);
        self.v.copy_from_slice(v);
        self.forget_before();
        Ok(())
    }

    /// Takes over from dense training: u starts from this rank's share of the dense momentum buffer `b` (as PyTorch
    /// keeps it: b = m*b + g), v from zero, so that the sum over the ranks carries on where dense momentum stopped.
    pub fn adopt_momentum(&mut self, b: &[f32], ranks: usize) -> Result<(), Unfit> {
        check("the momentum buffer", b, self.v.len())?;
        let share = match self.momentum {
            Momentum::Nesterov(m) => m / ranks as f32,
            _ => 1.0 / ranks as f32,
        };
        for (u, b) in self.u.iter_mut().zip(b) {
            *u = b * share;
        }
        self.v.fill(0.0);
        self.forget_before();
        Ok(())
    }

    /// Changes the coefficient of the momentum, as schedules do; its form stays. u is made where there was none, and in the
    /// Nesterov form, where it is the coefficient times the usual buffer, it is rescaled.
    pub fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit> {
        let (old, new) = (self.momentum.coefficient(), momentum.coefficient());
        let other = std::mem::discriminant(&self.momentum) != std::mem::discriminant(&momentum);
        if self.momentum == momentum || (self.u.is_empty() && new == 0.0) {
            return Ok(());
        }
        if !self.u.is_empty() && other {
            return Err(Unfit::Form { from: self.momentum, to: momentum });
        }
        if self.u.is_empty() {
            self.u = Field::zeros(self.v.len());
            if let Some(before) = &mut self.before {
                before.u = Field::zeros(self.v.len());
            }
        } else if matches!(momentum, Momentum::Nesterov(_)) {
            let factor = if old == 0.0 { 0.0 } else { new / old };
            self.u.iter_mut().for_each(|u| *u *= factor);
        }
        self.momentum = momentum;
        self.forget_before();
        Ok(())
    }

    /// Adds elements that were removed and not used.
    pub(crate) fn give_back(&mut self, elements: impl Iterator<Item = (u32, f32)>) {
        elements.for_each(|(index, value)| self.v[index as usize] += value);
        self.forget_before();
    }

    /// Accumulates `scale` times the gradient onto `carry` times what is there, and in the same pass collects in the workspace
    /// what the selection wants to know of the result.
    pub(crate) fn accumulate(
        &mut self,
        gradient: Gradient<'_>,
        scale: f32,
        carry: f32,
        phase: Phase,
        wanted: Wanted,
        workspace: &mut Workspace,
    ) -> Result<(), Bad> {
        if gradient.len() != self.len() {
            return Err(Bad::Length { expected: self.len(), got: gradient.len() });
        }
        let copied = self.before.is_none() && self.len() <= COPIED;
        if copied {
            workspace.copies.clear();
            workspace.copies.extend_from_slice(&self.v);
            workspace.copies.extend_from_slice(&self.u);
        }
        let plan = Plan {
            level: workspace.level,
            rule: self.momentum.rule(),
            scale,
            carry,
            lens: phase.lens(),
            stats: wanted.stats,
        };
        self.forget_before();
        let before = self.before.as_mut();
        let (saved_u, saved_v) =
            before.map_or((&mut [][..], &mut [][..]), |before| (&mut before.u, &mut before.v));
        let span = Span { gradient, u: &mut self.u, v: &mut self.v, saved_u, saved_v, base: 0 };
        let parts = workspace.gather(wanted.floor, wanted.keep, span, &|span, into| span.run(&plan, into));
        if parts.iter().any(|part| !part.finite) {
            let overflow =
                || Bad::Overflow { index: self.v.iter().position(|v| !v.is_finite()).unwrap_or(0) };
            let own = gradient.first_not_finite().map(|(index, value)| Bad::NotFinite { index, value });
            let why = own.unwrap_or_else(overflow);
            match copied {
                true => {
                    let (v, u) = workspace.copies.split_at(self.v.len());
                    self.v.copy_from_slice(v);
                    self.u.copy_from_slice(u);
                }
                false => self.take_back(gradient, scale, carry),
            }
            return Err(why);
        }
        if let Some(before) = &mut self.before {
            before.valid = true;
        }
        Ok(())
    }

    /// Undoes a pass that turned out not to be finite.
    fn take_back(&mut self, gradient: Gradient<'_>, scale: f32, carry: f32) {
        if let Some(before) = &mut self.before {
            std::mem::swap(&mut self.u, &mut before.u);
            std::mem::swap(&mut self.v, &mut before.v);
            return;
        }
        let (momentum, mut no_u) = (self.momentum, 0.0);
        let nesterov = matches!(momentum, Momentum::Nesterov(_));
        for i in 0..self.v.len() {
            let g = gradient.get(i).unwrap_or(0.0) * scale;
            let (u, v) = (self.u.get_mut(i).unwrap_or(&mut no_u), &mut self.v[i]);
            let m = momentum.coefficient();
            (*u, *v) = match momentum {
                Momentum::None => (0.0, *v - g),
                // Nothing is left of the momentum before a step with coefficient 0.
                Momentum::Plain(0.0) | Momentum::Nesterov(0.0) => {
                    (0.0, *v - *u - if nesterov { g } else { 0.0 })
                }
                Momentum::Plain(_) => ((*u - g) / m, *v - *u),
                Momentum::Nesterov(_) => (*u / m - g, *v - (*u + g)),
            };
            *v /= carry;
            if !u.is_finite() || !v.is_finite() {
                (*u, *v) = (0.0, 0.0);
            }
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

    /// Takes the last accumulated step back, with everything that was removed after it: one step, once, and only with `undo`.
    pub fn roll_back(&mut self) -> Result<(), Unfit> {
        let before = self.before.as_mut().filter(|before| before.valid).ok_or(Unfit::NoStep)?;
        before.valid = false;
        std::mem::swap(&mut self.u, &mut before.u);
        std::mem::swap(&mut self.v, &mut before.v);
        Ok(())
    }
}

fn check(what: &'static str, values: &[f32], expected: usize) -> Result<(), Unfit> {
    if values.len() != expected {
        return Err(Unfit::Length { what, expected, got: values.len() });
    }
    match values.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(Unfit::NotFinite { what, index, value: values[index] }),
        None => Ok(()),
    }
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
    /// One thread's pass.
    fn run(mut self, plan: &Plan, into: &mut Candidates) {
        let mut buffer = std::mem::take(&mut into.converted);
        let save = !self.saved_v.is_empty();
        while self.len() > 0 {
            let mid = self.len().min(CHUNK);
            let (Span { gradient, u, v, saved_u, saved_v, base }, rest) = self.split_at(mid);
            into.bound();
            let slices = Slices { gradient: gradient.as_f32(&mut buffer), u, v, saved_u, saved_v, base };
            let outcome = kernel::pass(plan, into.floor, slices, &mut into.keys);
            into.finite &= outcome.finite;
            if plan.stats {
                into.stats.push(outcome.stats);
            }
            self = rest;
        }
        into.converted = buffer;
        if save {
            kernel::fence(plan.level);
        }
    }
}

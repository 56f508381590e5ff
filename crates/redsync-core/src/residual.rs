//! The residual of one layer: momentum u and accumulated, unsent gradient v; for Adam also a second moment q, and v holds momentum that
//! was divided by the root of one.
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
use crate::kernel::{self, CHUNK, Coefficients, Plan, Rule, Slices};
use crate::phase::Phase;
use crate::select::Wanted;
use crate::workspace::Workspace;

/// Layers up to this size are copied before each pass.
pub const COPIED: usize = 1 << 16;

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
    /// u = b1*u + (1-b1)*g; q = b2*q + (1-b2)*g^2; v += u/(1-b1^t) / (sqrt(S) + eps), where S is q/(1-b2^t), or,
    /// once the other ranks have told theirs, the mean over the ranks, of which only this rank's part is of today. For a given S all is
    /// linear in the gradients, so that what waits is not lost, as with momentum alone.
    Adam(Adam),
}

/// The coefficients of Adam. Decay of weights is not its business: that is applied to the weights, locally and whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Of the momentum.
    pub beta1: f32,
    /// Of the second moment.
    pub beta2: f32,
    /// What is added to the root of the second moment.
    pub eps: f32,
}

fn check_coefficient(b: f32) -> Result<(), Unfit> {
    if (0.0..1.0).contains(&b) { Ok(()) } else { Err(Unfit::Coefficient(b)) }
}

impl Default for Adam {
    /// Those of the usual libraries.
    fn default() -> Self {
        Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    }
}

impl Adam {
    /// What is wrong with them, if anything.
    fn check(self) -> Result<(), Unfit> {
        check_coefficient(self.beta1)?;
        check_coefficient(self.beta2)?;
        match self.eps >= f32::MIN_POSITIVE && self.eps.is_finite() {
            true => Ok(()),
            false => Err(Unfit::Eps(self.eps)),
        }
    }

    /// The numbers of step `t`, counted from 1, on one of `ranks` ranks, whose gradients carry 1/ranks. The second moment of this rank
    /// is `share` of the one that counts.
    fn at(self, t: u64, ranks: usize, share: f64) -> Coefficients {
        let (b1, b2) = (f64::from(self.beta1), f64::from(self.beta2));
        let unbias = |b: f64| 1.0 / (1.0 - b.powf(t as f64));
        Coefficients {
            keep: self.beta1,
            enter: (1.0 - b1) as f32,
            keep_square: self.beta2,
            enter_square: ((1.0 - b2) * (ranks as f64) * (ranks as f64)) as f32,
            unbias: unbias(b1) as f32,
            unbias_square: (share * unbias(b2)) as f32,
            floor: self.eps,
        }
    }
}

impl Momentum {
    /// The coefficient m, 0 without momentum.
    pub fn coefficient(self) -> f32 {
        match self {
            Momentum::None => 0.0,
            Momentum::Plain(m) | Momentum::Nesterov(m) => m,
            Momentum::Adam(adam) => adam.beta1,
        }
    }

    /// Its form without the coefficient.
    pub fn form(self) -> &'static str {
        match self {
            Momentum::None => "no momentum",
            Momentum::Plain(_) => "plain momentum",
            Momentum::Nesterov(_) => "Nesterov momentum",
            Momentum::Adam(_) => "Adam",
        }
    }

    /// Refuses the first number of it that makes no sense.
    pub fn check(self) -> Result<(), Unfit> {
        match self {
            Momentum::Adam(adam) => adam.check(),
            Momentum::None | Momentum::Plain(_) | Momentum::Nesterov(_) => {
                check_coefficient(self.coefficient())
            }
        }
    }

    /// No momentum where it is one that leaves no trace: nothing need be kept for it.
    pub fn traced(self) -> Self {
        match self {
            Momentum::None | Momentum::Plain(0.0) | Momentum::Nesterov(0.0) => Momentum::None,
            some => some,
        }
    }

    /// What a change of the coefficient means for the u of a residual, if it has one.
    pub fn change(self, to: Momentum, has_u: bool) -> Result<Change, Unfit> {
        let (old, new) = (self.coefficient(), to.coefficient());
        let other = std::mem::discriminant(&self) != std::mem::discriminant(&to);
        let adam = matches!(to, Momentum::Adam(_)) || matches!(self, Momentum::Adam(_));
        if other && (adam || has_u) {
            return Err(Unfit::Form { from: self, to });
        }
        Ok(match to {
            _ if self == to || (!has_u && new == 0.0) => Change::Nothing,
            _ if !has_u => Change::Begins,
            Momentum::Nesterov(_) => Change::Rescaled(if old == 0.0 { 0.0 } else { new / old }),
            _ => Change::Coefficient,
        })
    }

    /// What a rank's u starts from, as a part of a dense momentum buffer; see [`Residual::adopt_momentum`].
    pub fn share(self, ranks: usize) -> f32 {
        match self {
            Momentum::Nesterov(m) => m / ranks as f32,
            _ => 1.0 / ranks as f32,
        }
    }
}

impl std::fmt::Display for Momentum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Momentum::None => f.write_str(self.form()),
            Momentum::Plain(m) | Momentum::Nesterov(m) => write!(f, "{} {m}", self.form()),
            Momentum::Adam(Adam { beta1, beta2, eps }) => {
                write!(f, "{} {beta1}, {beta2}, {eps:e}", self.form())
            }
        }
    }
}

/// What another coefficient of the momentum means for u.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// It is the same momentum, or none as before.
    Nothing,
    /// There was no u: it starts from zeros.
    Begins,
    /// Only the coefficient is another.
    Coefficient,
    /// u, which is the coefficient times the usual buffer, is multiplied by this.
    Rescaled(f32),
}

/// The second moment of a layer with Adam, as it is saved and restored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Second<'a> {
    /// That of this rank's gradients.
    pub own: &'a [f32],
    /// What the other ranks gave of theirs last: their sum over the number of ranks, free of bias; empty if nothing was given.
    pub given: &'a [f32],
    /// Steps that were accumulated.
    pub steps: u64,
}

/// u and v of one layer.
#[derive(Debug)]
pub struct Residual {
    momentum: Momentum,
    ranks: usize,
    u: Field,
    v: Field,
    /// The second moment; empty but for Adam.
    q: Field,
    /// What was given of the others' second moments; empty if nothing was.
    given: Field,
    /// Steps of Adam.
    steps: u64,
    /// u and v before the last step, if steps can be taken back.
    before: Option<Before>,
}

#[derive(Debug)]
struct Before {
    u: Field,
    v: Field,
    q: Field,
    /// Whether they are those of the last step.
    valid: bool,
}

impl Residual {
    /// A residual of zeros, of one of `ranks` ranks. With `undo` the last step can be taken back, at the price of a second u and v.
    pub fn new(n: usize, momentum: Momentum, ranks: usize, undo: bool) -> Self {
        let momentum = momentum.traced();
        let some = |needed: bool| Field::zeros(if needed { n } else { 0 });
        let u = || some(momentum != Momentum::None);
        let q = || some(matches!(momentum, Momentum::Adam(_)));
        let before = undo.then(|| Before { u: u(), v: some(true), q: q(), valid: false });
        Residual { momentum, ranks, u: u(), v: some(true), q: q(), given: some(false), steps: 0, before }
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

    /// The second moment; None without Adam.
    pub fn second(&self) -> Option<Second<'_>> {
        let adam = matches!(self.momentum, Momentum::Adam(_));
        adam.then(|| Second { own: &self.q, given: &self.given, steps: self.steps })
    }

    /// Replaces u, v and the second moment, as read from a checkpoint. After an error nothing has changed.
    pub fn restore(&mut self, u: &[f32], v: &[f32], second: Option<Second<'_>>) -> Result<(), Unfit> {
        let Second { own, given, steps } = second.unwrap_or(Second { own: &[], given: &[], steps: 0 });
        check("u", u, self.u.len())?;
        check("v", v, self.v.len())?;
        check_squares("the second moment", own, self.q.len())?;
        if !given.is_empty() {
            check_squares("the given second moment", given, self.q.len())?;
        }
        self.u.copy_from_slice(u);
        self.v.copy_from_slice(v);
        self.q.copy_from_slice(own);
        if self.given.len() != given.len() {
            self.given = Field::zeros(given.len());
        }
        self.given.copy_from_slice(given);
        self.steps = steps;
        self.forget_before();
        Ok(())
    }

    /// Takes over from Adam: `m` and `q` as the usual libraries keep them after so many steps, the same on every rank. v starts from
    /// zero.
    pub fn adopt_adam(&mut self, m: &[f32], q: &[f32], steps: u64) -> Result<(), Unfit> {
        check("the momentum buffer", m, self.u.len())?;
        check_squares("the second moment", q, self.q.len())?;
        let share = 1.0 / self.ranks as f32;
        self.u.iter_mut().zip(m).for_each(|(u, m)| *u = m * share);
        self.q.copy_from_slice(q);
        self.v.fill(0.0);
        self.given = Field::zeros(0);
        self.steps = steps;
        self.forget_before();
        Ok(())
    }

    /// This rank's second moment free of bias, for others to be told; nothing without Adam or before the first step.
    pub fn unbiased_second(
        &self,
        range: std::ops::Range<usize>,
    ) -> impl ExactSizeIterator<Item = f32> + Clone + '_ {
        let factor = self.unbias_square() as f32;
        self.q.get(range).unwrap_or_default().iter().map(move |q| q * factor)
    }

    fn unbias_square(&self) -> f64 {
        match self.momentum {
            Momentum::Adam(adam) if self.steps > 0 => {
                1.0 / (1.0 - f64::from(adam.beta2).powf(self.steps as f64))
            }
            _ => 0.0,
        }
    }

    /// What the other ranks tell of their second moments, from element `begin` on: their sum over the number of ranks, free of bias. It
    /// counts from the next step on. Of whom nothing was heard yet is taken to have what this rank has. Returns what
    /// stood there before; None if nothing was given yet.
    pub fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<Option<Vec<f32>>, Unfit> {
        check_squares("the given second moment", values, values.len())?;
        let (expected, end) = (self.q.len(), begin.saturating_add(values.len()));
        if end > expected {
            return Err(Unfit::Length { what: "the given second moment", expected, got: end });
        }
        let had_given = !self.given.is_empty();
        if !had_given {
            let others = (self.unbias_square() * (1.0 - 1.0 / self.ranks as f64)) as f32;
            self.given = Field::zeros(expected);
            self.given.iter_mut().zip(&self.q[..]).for_each(|(given, q)| *given = q * others);
        }
        let old = had_given.then(|| self.given[begin..end].to_vec());
        self.given[begin..end].copy_from_slice(values);
        Ok(old)
    }

    /// Takes back what was given from element `begin` on: what stood there, or that there was nothing at all.
    pub fn withdraw_second(&mut self, begin: usize, old: Option<&[f32]>) -> Result<(), Unfit> {
        match old {
            Some(old) => self.give_second(begin, old).map(drop),
            None => {
                self.given = Field::zeros(0);
                Ok(())
            }
        }
    }

    /// Takes over from dense training: u starts from this rank's share of the dense momentum buffer `b` (as PyTorch
    /// keeps it: b = m*b + g), v from zero, so that the sum over the ranks carries on where dense momentum stopped.
    pub fn adopt_momentum(&mut self, b: &[f32], ranks: usize) -> Result<(), Unfit> {
        check("the momentum buffer", b, self.v.len())?;
        let share = self.momentum.share(ranks);
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
        match self.momentum.change(momentum, !self.u.is_empty())? {
            Change::Nothing => return Ok(()),
            Change::Begins => {
                self.u = Field::zeros(self.v.len());
                if let Some(before) = &mut self.before {
                    before.u = Field::zeros(self.v.len());
                }
            }
            Change::Coefficient => {}
            Change::Rescaled(factor) => self.u.iter_mut().for_each(|u| *u *= factor),
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
            workspace.copies.extend_from_slice(&self.q);
        }
        let rule = self.rule();
        let plan =
            Plan { level: workspace.level, rule, scale, carry, lens: phase.lens(), stats: wanted.stats };
        self.forget_before();
        let (saved_u, saved_v, saved_q) = match &mut self.before {
            Some(before) => (&mut before.u[..], &mut before.v[..], &mut before.q[..]),
            None => Default::default(),
        };
        let span = Span {
            gradient,
            u: &mut self.u,
            v: &mut self.v,
            q: &mut self.q,
            given: &self.given,
            saved_u,
            saved_v,
            saved_q,
            base: 0,
        };
        let parts = workspace.gather(wanted.floor, wanted.keep, span, &|span, into| span.run(&plan, into));
        if parts.iter().any(|part| !part.finite) {
            let first = |values: &[f32]| values.iter().position(|x| !x.is_finite());
            let overflow = || Bad::Overflow { index: first(&self.v).or(first(&self.q)).unwrap_or(0) };
            let own = gradient.first_not_finite().map(|(index, value)| Bad::NotFinite { index, value });
            let why = own.unwrap_or_else(overflow);
            match copied {
                true => {
                    let (v, more) = workspace.copies.split_at(self.v.len());
                    let (u, q) = more.split_at(self.u.len());
                    self.v.copy_from_slice(v);
                    self.u.copy_from_slice(u);
                    self.q.copy_from_slice(q);
                }
                false => self.take_back(gradient, scale, carry, rule),
            }
            return Err(why);
        }
        if let Some(before) = &mut self.before {
            before.valid = true;
        }
        self.steps += 1;
        Ok(())
    }

    /// The rule of the next step.
    fn rule(&self) -> Rule {
        match self.momentum {
            Momentum::None => Rule::Plain,
            Momentum::Plain(m) => Rule::Momentum(m),
            Momentum::Nesterov(m) => Rule::Nesterov(m),
            Momentum::Adam(adam) if self.given.is_empty() => {
                Rule::Adam(adam.at(self.steps + 1, self.ranks, 1.0))
            }
            Momentum::Adam(adam) => {
                Rule::AdamGiven(adam.at(self.steps + 1, self.ranks, 1.0 / self.ranks as f64))
            }
        }
    }

    /// Undoes a pass that turned out not to be finite.
    fn take_back(&mut self, gradient: Gradient<'_>, scale: f32, carry: f32, rule: Rule) {
        if let Some(before) = &mut self.before {
            std::mem::swap(&mut self.u, &mut before.u);
            std::mem::swap(&mut self.v, &mut before.v);
            std::mem::swap(&mut self.q, &mut before.q);
            return;
        }
        if let Rule::Adam(at) | Rule::AdamGiven(at) = rule {
            return self.take_back_adam(gradient, scale, carry, at);
        }
        subtract(self.momentum, &mut self.u, &mut self.v, gradient, scale, carry);
    }

    /// The same for a second moment. What is left of a moment after a step with coefficient 0 is nothing.
    fn take_back_adam(&mut self, gradient: Gradient<'_>, scale: f32, carry: f32, at: Coefficients) {
        let divide = |x: f32, by: f32| if by == 0.0 { 0.0 } else { x / by };
        for i in 0..self.v.len() {
            let g = gradient.get(i).unwrap_or(0.0) * scale;
            let (u, q, v) = (&mut self.u[i], &mut self.q[i], &mut self.v[i]);
            let second = *q * at.unbias_square + self.given.get(i).copied().unwrap_or(0.0);
            *v = (*v - (*u * at.unbias) / (second.sqrt() + at.floor)) / carry;
            *u = divide(*u - at.enter * g, at.keep);
            *q = divide(*q - at.enter_square * (g * g), at.keep_square).max(0.0);
            if !u.is_finite() || !v.is_finite() || !q.is_finite() {
                (*u, *q, *v) = (0.0, 0.0, 0.0);
            }
        }
    }

    fn forget_before(&mut self) {
        if let Some(before) = &mut self.before {
            before.valid = false;
        }
    }

    /// Leaves at each index the given rest of v, and, with masking, no momentum. That of Adam stays: it decays by itself within a few
    /// steps, and in trainings with it clearing cost two percent of the loss.
    pub(crate) fn remove(&mut self, sent: impl Iterator<Item = (u32, f32)>, masking: bool) {
        let (u, v) = (&mut self.u[..], &mut self.v[..]);
        let masking = masking && !u.is_empty() && !matches!(self.momentum, Momentum::Adam(_));
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
        std::mem::swap(&mut self.q, &mut before.q);
        self.steps -= 1;
        Ok(())
    }
}

/// Takes a gradient out of u (empty without momentum) and v again, with the rounding of f32; zero stays where it was not finite.
/// Adam's has to be taken out otherwise.
pub fn subtract(
    momentum: Momentum,
    u: &mut [f32],
    v: &mut [f32],
    gradient: Gradient<'_>,
    scale: f32,
    carry: f32,
) {
    let mut no_u = 0.0;
    let (m, nesterov) = (momentum.coefficient(), matches!(momentum, Momentum::Nesterov(_)));
    for (i, v) in v.iter_mut().enumerate() {
        let g = gradient.get(i).unwrap_or(0.0) * scale;
        let u = u.get_mut(i).unwrap_or(&mut no_u);
        (*u, *v) = match momentum {
            Momentum::None | Momentum::Adam(_) => (0.0, *v - g),
            // Nothing is left of the momentum before a step with coefficient 0.
            Momentum::Plain(0.0) | Momentum::Nesterov(0.0) => (0.0, *v - *u - if nesterov { g } else { 0.0 }),
            Momentum::Plain(_) => ((*u - g) / m, *v - *u),
            Momentum::Nesterov(_) => (*u / m - g, *v - (*u + g)),
        };
        *v /= carry;
        if !u.is_finite() || !v.is_finite() {
            (*u, *v) = (0.0, 0.0);
        }
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

/// The same for squares, which are not negative.
fn check_squares(what: &'static str, values: &[f32], expected: usize) -> Result<(), Unfit> {
    check(what, values, expected)?;
    match values.iter().position(|x| *x < 0.0) {
        Some(index) => Err(Unfit::NotFinite { what, index, value: values[index] }),
        None => Ok(()),
    }
}

/// A part of the residual on its way through a pass; what the rule has no use for is empty.
struct Span<'a> {
    gradient: Gradient<'a>,
    u: &'a mut [f32],
    v: &'a mut [f32],
    q: &'a mut [f32],
    given: &'a [f32],
    /// Empty without `undo`, as are those below.
    saved_u: &'a mut [f32],
    saved_v: &'a mut [f32],
    saved_q: &'a mut [f32],
    base: u32,
}

impl Split for Span<'_> {
    fn len(&self) -> usize {
        self.v.len()
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let cut = |slice: &[f32]| mid.min(slice.len());
        let (gradient, gradient_1) = self.gradient.split_at(mid);
        let (u, u_1) = self.u.split_at_mut(cut(self.u));
        let (v, v_1) = self.v.split_at_mut(mid);
        let (q, q_1) = self.q.split_at_mut(cut(self.q));
        let (given, given_1) = self.given.split_at(cut(self.given));
        let (saved_u, saved_u_1) = self.saved_u.split_at_mut(cut(self.saved_u));
        let (saved_v, saved_v_1) = self.saved_v.split_at_mut(cut(self.saved_v));
        let (saved_q, saved_q_1) = self.saved_q.split_at_mut(cut(self.saved_q));
        let right = Span {
            gradient: gradient_1,
            u: u_1,
            v: v_1,
            q: q_1,
            given: given_1,
            saved_u: saved_u_1,
            saved_v: saved_v_1,
            saved_q: saved_q_1,
            base: self.base + mid as u32,
        };
        (Span { gradient, u, v, q, given, saved_u, saved_v, saved_q, base: self.base }, right)
    }
}

impl Span<'_> {
    /// One thread's pass.
    fn run(mut self, plan: &Plan, into: &mut Candidates) {
        let mut buffer = std::mem::take(&mut into.converted);
        let save = !self.saved_v.is_empty();
        while self.len() > 0 {
            let mid = self.len().min(CHUNK);
            let (Span { gradient, u, v, q, given, saved_u, saved_v, saved_q, base }, rest) =
                self.split_at(mid);
            into.bound();
            let gradient = gradient.as_f32(&mut buffer);
            let slices = Slices { gradient, u, v, q, given, saved_u, saved_v, saved_q, base };
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

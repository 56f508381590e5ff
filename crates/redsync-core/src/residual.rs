//! The residual of one layer: momentum u and accumulated, unsent gradient v.
//! Comes in: a gradient. Goes out: v, and what in it is greater than a floor, found in the same pass over memory.
//! What must hold: a gradient that is not finite changes nothing, and the last step can be taken back, because the pass
//! writes into a second pair of fields (around the cache, which costs what writing in place costs).

use crate::candidates::Span;
use crate::error::Bad;
use crate::field::Field;
use crate::gradient::Gradient;
use crate::kernel::{Plan, Rule};
use crate::phase::Phase;
use crate::workspace::Workspace;

/// Tensors of this many elements and more are written around the cache: they do not fit into it anyway.
const STREAM_FROM: usize = 1 << 20;

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

/// u and v of one layer, and those before the last step.
#[derive(Debug)]
pub struct Residual {
    momentum: Momentum,
    u: Field,
    v: Field,
    u_before: Field,
    v_before: Field,
    can_roll_back: bool,
}

impl Residual {
    /// A residual of zeros.
    pub fn new(n: usize, momentum: Momentum) -> Self {
        let u = Field::zeros(if momentum == Momentum::None { 0 } else { n });
        let v = Field::zeros(n);
        Residual { momentum, u_before: u.clone(), v_before: v.clone(), u, v, can_roll_back: false }
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
        self.can_roll_back = false;
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
        self.can_roll_back = false;
        true
    }

    /// Accumulates `scale` times the gradient, and in the same pass collects in the workspace what is then greater
    /// than `floor` in this phase: at least the largest `keep` of it.
    pub(crate) fn accumulate(
        &mut self,
        gradient: Gradient<'_>,
        scale: f32,
        phase: Phase,
        floor: f32,
        keep: usize,
        workspace: &mut Workspace,
    ) -> Result<(), Bad> {
        if gradient.len() != self.len() {
            return Err(Bad::Length { expected: self.len(), got: gradient.len() });
        }
        let stream = self.len() >= STREAM_FROM;
        let plan =
            Plan { level: workspace.level, rule: self.momentum.rule(), scale, lens: phase.lens(), stream };
        let span = Span {
            gradient,
            u: &self.u,
            u_next: &mut self.u_before,
            v: &self.v,
            v_next: &mut self.v_before,
            base: 0,
        };
        let finite = workspace.gather(&plan, floor, keep, span);
        if !finite {
            self.can_roll_back = false;
            return Err(self.blame(gradient));
        }
        std::mem::swap(&mut self.u, &mut self.u_before);
        std::mem::swap(&mut self.v, &mut self.v_before);
        self.can_roll_back = true;
        Ok(())
    }

    /// Which element made a pass fail: the gradient's own, or else one whose sum grew too large.
    fn blame(&self, gradient: Gradient<'_>) -> Bad {
        let own = (0..gradient.len()).find_map(|index| {
            let value = gradient.get(index).filter(|g| !g.is_finite())?;
            Some(Bad::NotFinite { index, value })
        });
        own.unwrap_or_else(|| {
            let index = self.v_before.iter().position(|v| !v.is_finite()).unwrap_or(0);
            Bad::Overflow { index }
        })
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
    /// one step can be taken back, once.
    pub fn roll_back(&mut self) -> bool {
        let possible = std::mem::take(&mut self.can_roll_back);
        if possible {
            std::mem::swap(&mut self.u, &mut self.u_before);
            std::mem::swap(&mut self.v, &mut self.v_before);
        }
        possible
    }
}

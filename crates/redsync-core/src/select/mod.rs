//! Selection of the communication-set: which elements of a residual are sent.
//! Comes in: v, a phase and k. Goes out: the chosen elements, in index order, in the workspace. What must hold: zero is
//! never chosen, ties go to the smaller index, and the choice is the same for any number of threads.
//!
//! A selection has two halves. [`Selector::floor`] says, before the gradient is accumulated, above which value the
//! accumulating pass should collect elements; [`Selector::finish`] chooses, from what the pass found or with further
//! passes.

mod carried;
mod exact;
mod sampled;
mod threshold;
mod trimmed;

use crate::phase::Phase;
use crate::workspace::Workspace;

/// A selection algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Selector {
    /// Full selection over all elements, the reference: exactly k.
    Exact,
    /// Trimmed top-k (Algorithm 2 of the paper): exactly k.
    Trimmed,
    /// Threshold binary search (Algorithm 3 of the paper): between k and 2k.
    Threshold,
    /// Threshold binary search every fifth step, the threshold reused in between: between k/2 and 2k.
    Sampled,
    /// The threshold is carried from step to step and compared while accumulating: exactly k, in about one pass over
    /// memory.
    #[default]
    Carried,
}

impl Selector {
    /// Every selector, for comparisons.
    pub const ALL: [Selector; 5] =
        [Selector::Exact, Selector::Trimmed, Selector::Threshold, Selector::Sampled, Selector::Carried];

    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Selector::Exact => "exact",
            Selector::Trimmed => "trimmed",
            Selector::Threshold => "threshold",
            Selector::Sampled => "sampled",
            Selector::Carried => "carried",
        }
    }

    /// The selector of a name.
    ///
    /// ```
    /// use redsync_core::Selector;
    /// assert_eq!(Selector::from_name("trimmed"), Some(Selector::Trimmed));
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|selector| selector.name() == name)
    }

    /// Whether it chooses exactly k elements wherever there are k that are not zero.
    pub fn is_exact(self) -> bool {
        matches!(self, Selector::Exact | Selector::Trimmed | Selector::Carried)
    }

    /// The value above which the accumulating pass collects; infinity where the selector makes passes of its own.
    pub(crate) fn floor(self, memory: &Memory, phase: Phase) -> f32 {
        match self {
            Selector::Exact | Selector::Trimmed | Selector::Threshold => f32::INFINITY,
            Selector::Sampled => memory.of(phase).reusable_threshold(),
            Selector::Carried => memory.of(phase).threshold,
        }
    }

    /// How many of the largest elements the accumulating pass must not lose.
    pub(crate) fn keep(self, k: usize) -> usize {
        match self {
            Selector::Exact | Selector::Trimmed | Selector::Threshold => 0,
            Selector::Sampled | Selector::Carried => 2 * k,
        }
    }

    /// Chooses elements of `v`; `floor` is what the accumulating pass was given.
    pub(crate) fn finish(
        self,
        memory: &mut Memory,
        v: &[f32],
        phase: Phase,
        k: usize,
        floor: f32,
        workspace: &mut Workspace,
    ) {
        match self {
            Selector::Exact => exact::choose(v, phase, k, workspace),
            Selector::Trimmed => trimmed::choose(v, phase, k, workspace),
            Selector::Threshold => {
                threshold::choose(v, phase, k, workspace);
            }
            Selector::Sampled => sampled::finish(memory.of_mut(phase), v, phase, k, workspace),
            Selector::Carried => carried::finish(memory.of_mut(phase), v, phase, k, floor, workspace),
        }
    }
}

/// What a selector remembers of a layer from one step to the next, for each phase on its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory([Remembered; 3]);

/// What is remembered of one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Remembered {
    /// The threshold to compare with at the next step; zero before the first.
    pub threshold: f32,
    /// The smallest magnitude chosen at the last step (carried).
    pub least: f32,
    /// The change of that from the step before (carried).
    pub growth: f32,
    /// Steps that have used the threshold (sampled).
    pub searched: u32,
}

impl Memory {
    fn of(&self, phase: Phase) -> &Remembered {
        &self.0[phase.code() as usize]
    }

    fn of_mut(&mut self, phase: Phase) -> &mut Remembered {
        &mut self.0[phase.code() as usize]
    }

    /// The three phases (both signs, positive, negative), to be saved.
    pub fn phases(&self) -> [Remembered; 3] {
        self.0
    }

    /// From saved phases; None if a number is not one that a residual can have.
    pub fn from_phases(phases: [Remembered; 3]) -> Option<Self> {
        let sane =
            |r: &Remembered| [r.threshold, r.least, r.growth].iter().all(|x| x.is_finite() && *x >= 0.0);
        phases.iter().all(sane).then_some(Memory(phases))
    }
}

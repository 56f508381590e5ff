//! Selection of the communication-set: which elements of a residual are sent.
//! Comes in: v, a phase and k. Goes out: the chosen elements, in index order, in the workspace. What must hold: zero is
//! never chosen, ties go to the smaller index, and the choice is the same for any number of threads.
//!
//! A selection has two halves. [`Selector::wants`] says, before the gradient is accumulated, what the accumulating pass
//! should find out on its way; [`Selector::finish`] chooses, from what the pass found or with further passes.

mod carried;
pub(crate) mod exact;
mod sampled;
mod threshold;
mod trimmed;

use crate::elements::Elements;
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

    /// What the accumulating pass should find out.
    pub(crate) fn wants(self, memory: &Memory, phase: Phase, k: usize) -> Wanted {
        let nothing = Wanted { floor: f32::INFINITY, keep: 0, enough: 0, stats: false };
        match self {
            Selector::Exact => nothing,
            Selector::Trimmed | Selector::Threshold => Wanted { stats: true, ..nothing },
            Selector::Sampled => sampled::wants(memory.of(phase), k),
            Selector::Carried => carried::wants(memory.of(phase), k),
        }
    }

    /// Chooses elements of `v`, after the pass that found out what was wanted.
    pub(crate) fn finish<E: Elements>(
        self,
        memory: &mut Memory,
        v: &mut E,
        phase: Phase,
        k: usize,
        workspace: &mut Workspace,
    ) -> Result<(), E::Error> {
        let memory = memory.of_mut(phase);
        if k == 0 {
            workspace.keys.clear();
            return Ok(());
        }
        match self {
            Selector::Exact => v.largest(phase, k, workspace),
            Selector::Trimmed => trimmed::choose(memory, v, phase, k, workspace),
            Selector::Threshold => threshold::choose(memory, v, phase, k, workspace),
            Selector::Sampled => sampled::choose(memory, v, phase, k, workspace),
            Selector::Carried => carried::choose(memory, v, phase, k, workspace),
        }
    }
}

/// What an accumulating pass finds out on its way.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Elements greater than this are collected; infinity collects nothing.
    pub floor: f32,
    /// How many of the largest of them must not be lost.
    pub keep: usize,
    /// Fewer of them are of no use: all will be looked through then.
    pub enough: usize,
    /// Mean and maximum.
    pub stats: bool,
}

impl Wanted {
    /// Whether the pass has to collect anything.
    pub fn collects(&self) -> bool {
        self.floor < f32::INFINITY
    }
}

/// What a selector remembers of a layer from one step to the next, for each phase on its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory([Remembered; 3]);

/// What is remembered of one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Remembered {
    /// The threshold of the last step, or the one for the next (carried); zero before the first.
    pub threshold: f32,
    /// The smallest magnitude that was chosen, as a mean over steps in which the last counts most (carried).
    pub least: f32,
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

    /// What it would remember if v had been `factor` times as large.
    pub(crate) fn scaled(self, factor: f32) -> Self {
        let times = |x: f32| (x * factor).min(f32::MAX);
        let scaled = |m: Remembered| Remembered { threshold: times(m.threshold), least: times(m.least), ..m };
        Memory(self.0.map(scaled))
    }

    /// The three phases (both signs, positive, negative), to be saved.
    pub fn phases(&self) -> [Remembered; 3] {
        self.0
    }

    /// The same as plain numbers, which come back as they are: for each phase the bits of both thresholds, and the count.
    ///
    /// ```
    /// use redsync_core::Memory;
    /// assert_eq!(Memory::from_bits(Memory::default().bits()), Some(Memory::default()));
    /// assert_eq!(Memory::from_bits([[f32::NAN.to_bits(), 0, 0]; 3]), None);
    /// ```
    pub fn bits(&self) -> [[u32; 3]; 3] {
        self.0.map(|r| [r.threshold.to_bits(), r.least.to_bits(), r.searched])
    }

    /// From such numbers; None if one is not what a residual can have.
    pub fn from_bits(bits: [[u32; 3]; 3]) -> Option<Self> {
        Self::from_phases(bits.map(|[threshold, least, searched]| Remembered {
            threshold: f32::from_bits(threshold),
            least: f32::from_bits(least),
            searched,
        }))
    }

    /// From saved phases; None if a number is not one that a residual can have.
    pub fn from_phases(phases: [Remembered; 3]) -> Option<Self> {
        let sane = |r: &Remembered| [r.threshold, r.least].iter().all(|x| x.is_finite() && *x >= 0.0);
        phases.iter().all(sane).then_some(Memory(phases))
    }
}

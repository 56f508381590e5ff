//! A v that can be looked through, wherever it is: what a selection asks of it.
//! What must hold: what is found is the same for every kind of memory.

use crate::phase::Phase;
use crate::select::exact;
use crate::workspace::Workspace;
use std::borrow::Cow;
use std::convert::Infallible;

/// The accumulated gradient of a layer, for a selection.
pub trait Elements {
    /// Why it could not be read.
    type Error;

    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there is no element.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Leaves in the workspace ([`Workspace::put_candidates`]) every element that competes in the phase and is greater than `floor`;
    /// if those are very many, at least the largest `keep` of them, and a higher floor.
    fn scan(
        &mut self,
        phase: Phase,
        floor: f32,
        keep: usize,
        workspace: &mut Workspace,
    ) -> Result<(), Self::Error>;

    /// How many elements that compete are greater than each of some thresholds, in one pass; None where [`Elements::scan`] is no
    /// dearer.
    fn count_above(&mut self, phase: Phase, thresholds: &[f32]) -> Result<Option<Vec<usize>>, Self::Error> {
        let _ = (phase, thresholds);
        Ok(None)
    }

    /// Chooses the largest `k` (not zero).
    fn largest(&mut self, phase: Phase, k: usize, workspace: &mut Workspace) -> Result<(), Self::Error> {
        self.scan(phase, 0.0, k, workspace)?;
        workspace.choose(k);
        Ok(())
    }

    /// All of them.
    fn whole(&mut self) -> Result<Cow<'_, [f32]>, Self::Error>;
}

/// The memory of the host.
impl Elements for &[f32] {
    type Error = Infallible;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn scan(
        &mut self,
        phase: Phase,
        floor: f32,
        keep: usize,
        workspace: &mut Workspace,
    ) -> Result<(), Infallible> {
        workspace.scan(self, phase, floor, keep);
        Ok(())
    }

    fn largest(&mut self, phase: Phase, k: usize, workspace: &mut Workspace) -> Result<(), Infallible> {
        exact::choose(self, phase, k, workspace);
        Ok(())
    }

    fn whole(&mut self) -> Result<Cow<'_, [f32]>, Infallible> {
        Ok(Cow::Borrowed(self))
    }
}

//! Trimmed top-k (Algorithm 2 of the paper, ruling 11): mean and maximum give a threshold, which is lowered until at
//! least k elements are above it; an exact top-k of those survivors follows.

use super::Remembered;
use super::threshold::{Range, Survivors};
use crate::elements::Elements;
use crate::phase::Phase;
use crate::workspace::Workspace;

/// The paper's 1 - eps, 1 - 2*eps, ... with eps = 0.2.
const RATIOS: [f32; 5] = [0.8, 0.6, 0.4, 0.2, 0.0];

pub(super) fn choose<E: Elements>(
    memory: &mut Remembered,
    v: &mut E,
    phase: Phase,
    k: usize,
    workspace: &mut Workspace,
) -> Result<(), E::Error> {
    let range = Range::of(v.len(), phase, workspace);
    let mut survivors = Survivors::above(memory.threshold, v, phase, k, workspace)?;
    let enough = survivors.first_with(RATIOS.map(|ratio| range.at(ratio)))?;
    if enough.is_none() {
        // Constant tensors, or an outlier that pulls the mean above the k-th element, have no such threshold: then
        // nothing is trimmed.
        survivors.rescan(0.0)?;
    }
    memory.threshold = enough.unwrap_or(0.0);
    workspace.choose(k);
    Ok(())
}

//! Trimmed top-k (Algorithm 2 of the paper, ruling 11): mean and maximum give a threshold, which is lowered until at
//! least k elements are above it; an exact top-k of those survivors follows.

use super::threshold::Range;
use crate::phase::Phase;
use crate::workspace::Workspace;

/// The paper's 1 - eps, 1 - 2*eps, ... with eps = 0.2: all are counted in one pass, which costs what one count costs.
const RATIOS: [f32; 7] = [0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0];

pub(super) fn choose(v: &[f32], phase: Phase, k: usize, workspace: &mut Workspace) {
    let range = Range::of(v, phase, workspace);
    let thresholds = RATIOS.map(|ratio| range.at(ratio));
    let counts = workspace.count_above(v, phase, &thresholds);
    // Constant tensors, or an outlier that pulls the mean above the k-th element, have no such threshold: then nothing
    // is trimmed.
    let enough = counts.iter().position(|count| *count >= k as u64);
    let floor = enough.map_or(0.0, |i| thresholds[i]);
    workspace.scan(v, phase, floor, k);
    workspace.choose(k);
}

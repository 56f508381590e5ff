//! Sampled threshold (ruling 13): the binary search runs every fifth step; in between its threshold is compared while
//! accumulating, in the same pass over memory. A stale threshold can neither make messages explode (2k at most, the
//! largest) nor starve them (below k/2 the search runs at once).

use super::{Remembered, threshold};
use crate::phase::Phase;
use crate::workspace::Workspace;

/// Steps that share one search.
const INTERVAL: u32 = 5;

impl Remembered {
    pub(super) fn reusable_threshold(&self) -> f32 {
        if self.threshold > 0.0 && self.searched < INTERVAL { self.threshold } else { f32::INFINITY }
    }
}

pub(super) fn finish(memory: &mut Remembered, v: &[f32], phase: Phase, k: usize, workspace: &mut Workspace) {
    let reused = memory.reusable_threshold() < f32::INFINITY;
    if reused && 2 * workspace.found() >= k {
        workspace.choose(2 * k);
        memory.searched += 1;
    } else {
        let found = threshold::choose(v, phase, k, workspace);
        *memory = Remembered { threshold: found.unwrap_or(0.0), searched: 1, ..Remembered::default() };
    }
}

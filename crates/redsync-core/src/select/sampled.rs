//! Sampled threshold (ruling 13): the binary search runs every fifth step; in between its threshold is compared while
//! accumulating, in the same pass over memory. A stale threshold can neither make messages explode (2k at most, the
//! largest) nor starve them (below k/2 the search runs at once).

use super::{Remembered, Wanted, threshold};
use crate::elements::Elements;
use crate::phase::Phase;
use crate::workspace::Workspace;

/// Steps that share one search.
const INTERVAL: u32 = 5;

fn reuses(memory: &Remembered) -> bool {
    memory.threshold > 0.0 && memory.searched < INTERVAL
}

pub(super) fn wants(memory: &Remembered, k: usize) -> Wanted {
    let floor = if reuses(memory) { memory.threshold } else { f32::INFINITY };
    // Statistics always: the reused threshold may turn out to starve.
    Wanted { floor, keep: 2 * k, enough: 0, stats: true }
}

pub(super) fn choose<E: Elements>(
    memory: &mut Remembered,
    v: &mut E,
    phase: Phase,
    k: usize,
    workspace: &mut Workspace,
) -> Result<(), E::Error> {
    if reuses(memory) && 2 * workspace.found() >= k {
        workspace.choose(2 * k);
        memory.searched += 1;
    } else {
        threshold::choose(memory, v, phase, k, workspace)?;
        memory.searched = 1;
    }
    Ok(())
}

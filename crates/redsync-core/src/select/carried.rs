//! Carried threshold (ruling 14): the accumulating pass compares with a threshold carried from the last step and set a
//! little low, so that it finds somewhat more than k candidates; an exact top-k of those few finishes. Only when fewer
//! than k are found a second pass, read only, is made.

use super::{Remembered, Wanted};
use crate::elements::Elements;
use crate::phase::Phase;
use crate::workspace::Workspace;

/// How far the threshold falls when there were too few candidates to see the rank it should have.
const LOWER: f32 = 0.99;

/// Candidates wanted besides the k chosen, for what changes from step to step and for chance: an eighth, or half where the
/// last threshold turned out too high.
fn margin(k: usize, too_high: bool) -> usize {
    (if too_high { k / 2 } else { k / 8 }) + 3 * k.isqrt() / 2
}

pub(super) fn wants(memory: &Remembered, k: usize) -> Wanted {
    let floor = memory.threshold;
    // Those must not be lost among which the rank of the next threshold is; where the floor is too high, others are looked for.
    Wanted { floor, keep: k + margin(k, false), enough: if floor > 0.0 { k } else { 0 }, stats: false }
}

pub(super) fn choose<E: Elements>(
    memory: &mut Remembered,
    v: &mut E,
    phase: Phase,
    k: usize,
    workspace: &mut Workspace,
) -> Result<(), E::Error> {
    let floor = memory.threshold;
    let too_high = workspace.found() < k && floor > 0.0;
    if too_high {
        v.scan(phase, 0.0, k + margin(k, true), workspace)?;
    }
    let found = workspace.found();
    let least = workspace.choose(k).map_or(0.0, |key| key.magnitude());
    let margin = margin(k, too_high);
    let wanted = if found >= k + margin {
        // The candidates that were not chosen stand first in the scratch, in no order.
        let rest = &mut workspace.scratch[..found - k];
        let at = rest.len() - margin;
        rest.select_nth_unstable(at).1.magnitude()
    } else if too_high {
        // All elements that compete were found, and they are hardly more than k.
        0.0
    } else {
        floor * LOWER
    };
    // What is remembered of the least chosen is a mean over the steps, of its logarithm, in which each counts half as much as the next: it
    // is a step behind a steady growth, and halves the chance in a single one. A jump, as when the density changes, is no growth: the mean
    // begins anew.
    let ratio = if memory.least > 0.0 { least / memory.least } else { 1.0 };
    let (growth, least) = match (0.5..=2.0).contains(&ratio) {
        true if memory.least > 0.0 => (ratio.sqrt(), memory.least.sqrt() * least.sqrt()),
        _ => (1.0, least),
    };
    // While a residual fills up its threshold rises from step to step, ever more slowly: three quarters of the rise are safe to expect. A
    // fall is expected to go on.
    let trend = if growth > 1.0 { 1.0 + 0.75 * (growth - 1.0) } else { growth };
    *memory = Remembered { threshold: (wanted * trend).min(f32::MAX), least, searched: 0 };
    Ok(())
}

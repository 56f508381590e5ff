//! Threshold binary search (Algorithm 3 of the paper, corrected by ruling 12): a threshold between mean and maximum
//! above which k to 2k elements lie. Fewer than k lower it, more than 2k raise it.

use super::Remembered;
use crate::elements::Elements;
use crate::phase::Phase;
use crate::workspace::Workspace;

/// The search ends when its interval is this small a part of the range: the paper's epsilon.
const EPSILON: f32 = 1.0 / 4096.0;
/// Thresholds move a little from step to step: the survivors of a somewhat lower one can answer for the next.
const SLACK: f32 = 0.95;

/// From the mean to the maximum of the elements that compete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    mean: f32,
    max: f32,
}

impl Range {
    /// From the statistics of the accumulating pass. With one sign, they are those of that sign only.
    pub fn of(n: usize, phase: Phase, workspace: &Workspace) -> Self {
        let stats = workspace.stats();
        let count = if phase == Phase::Both { n as u64 } else { stats.count };
        // The sums of large elements may overflow where no element does.
        let mean = (stats.sum / count.max(1) as f64) as f32;
        Range { mean: mean.min(stats.max), max: stats.max }
    }

    pub fn at(&self, ratio: f32) -> f32 {
        self.mean + ratio * (self.max - self.mean)
    }
}

/// The elements above a threshold, which answer how many are above any higher one without another pass over memory.
pub(super) struct Survivors<'a, E> {
    v: &'a mut E,
    phase: Phase,
    k: usize,
    workspace: &'a mut Workspace,
}

impl<'a, E: Elements> Survivors<'a, E> {
    /// Those above the threshold of the last step, made a little lower; without one the first question brings them.
    pub fn above(
        last: f32,
        v: &'a mut E,
        phase: Phase,
        k: usize,
        workspace: &'a mut Workspace,
    ) -> Result<Self, E::Error> {
        let mut survivors = Survivors { v, phase, k, workspace };
        if last > 0.0 {
            survivors.rescan(last * SLACK)?;
        }
        Ok(survivors)
    }

    /// One pass over memory. More than 2k survivors are never needed: what is found is cut there.
    pub fn rescan(&mut self, floor: f32) -> Result<(), E::Error> {
        self.v.scan(self.phase, floor, 2 * self.k + 1, self.workspace)
    }

    /// How many elements are greater than `threshold`: precisely, or more than 2k where that is so.
    pub fn count(&mut self, threshold: f32) -> Result<usize, E::Error> {
        let known = |workspace: &Workspace| threshold >= workspace.floor();
        if !known(self.workspace) && self.workspace.found() <= 2 * self.k {
            self.rescan(threshold)?;
        }
        let known = known(self.workspace);
        Ok(if known { self.workspace.found_above(threshold) } else { self.workspace.found() })
    }

    /// The first of falling thresholds with at least k elements above it; those are then among the survivors.
    pub fn first_with<const N: usize>(&mut self, thresholds: [f32; N]) -> Result<Option<f32>, E::Error> {
        let looked = self.workspace.floor() < f32::INFINITY;
        if !looked && let Some(counts) = self.v.count_above(self.phase, &thresholds)? {
            let enough = thresholds.into_iter().zip(counts).find(|(_, count)| *count >= self.k);
            let threshold = enough.map(|(threshold, _)| threshold);
            threshold.map_or(Ok(()), |threshold| self.rescan(threshold))?;
            return Ok(threshold);
        }
        for threshold in thresholds {
            if self.count(threshold)? >= self.k {
                return Ok(Some(threshold));
            }
        }
        Ok(None)
    }
}

pub(super) fn choose<E: Elements>(
    memory: &mut Remembered,
    v: &mut E,
    phase: Phase,
    k: usize,
    workspace: &mut Workspace,
) -> Result<(), E::Error> {
    let range = Range::of(v.len(), phase, workspace);
    let mut survivors = Survivors::above(memory.threshold, v, phase, k, workspace)?;
    let threshold = search(range, k, &mut survivors)?;
    match threshold {
        Some(threshold) => workspace.choose_above(threshold),
        // Ties or an extreme outlier leave no such threshold within reach: then exactly k.
        None => {
            survivors.rescan(0.0)?;
            workspace.choose(k);
        }
    }
    *memory = Remembered { threshold: threshold.unwrap_or(0.0), ..Remembered::default() };
    Ok(())
}

/// The first midpoint of the binary search with k to 2k elements above it.
fn search<E: Elements>(
    range: Range,
    k: usize,
    survivors: &mut Survivors<'_, E>,
) -> Result<Option<f32>, E::Error> {
    let (mut left, mut right) = (0f32, 1f32);
    while right - left > EPSILON {
        let ratio = left + (right - left) / 2.0;
        let threshold = range.at(ratio);
        match survivors.count(threshold)? {
            count if count < k => right = ratio,
            count if count > 2 * k => left = ratio,
            _ => return Ok(Some(threshold)),
        }
    }
    Ok(None)
}

//! Threshold binary search (Algorithm 3 of the paper, corrected by ruling 12): a threshold between mean and maximum
//! above which k to 2k elements lie. Fewer than k lower it, more than 2k raise it.

use crate::kernel::THRESHOLDS;
use crate::phase::Phase;
use crate::workspace::Workspace;

/// Passes over memory, each of which settles three halvings; 2^-12 of the range is the paper's epsilon.
const PASSES: usize = 4;

/// From the mean to the maximum of the elements that compete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    mean: f32,
    max: f32,
}

impl Range {
    pub fn of(v: &[f32], phase: Phase, workspace: &Workspace) -> Self {
        let stats = workspace.stats(v, phase);
        // With one sign, the statistics are those of that sign only.
        let count = if phase == Phase::Both { v.len() as u64 } else { stats.count };
        Range { mean: (stats.sum / count.max(1) as f64) as f32, max: stats.max }
    }

    pub fn at(&self, ratio: f32) -> f32 {
        self.mean + ratio * (self.max - self.mean)
    }
}

/// Chooses, and returns the threshold that it found.
pub(super) fn choose(v: &[f32], phase: Phase, k: usize, workspace: &mut Workspace) -> Option<f32> {
    let threshold = search(v, phase, k, workspace);
    match threshold {
        Some(threshold) => {
            workspace.scan(v, phase, threshold, 2 * k);
            workspace.choose(2 * k);
        }
        // Ties or an extreme outlier leave no such threshold within reach: then exactly k.
        None => {
            workspace.scan(v, phase, 0.0, k);
            workspace.choose(k);
        }
    }
    threshold
}

/// The first midpoint of the binary search with k to 2k elements above it.
fn search(v: &[f32], phase: Phase, k: usize, workspace: &Workspace) -> Option<f32> {
    let range = Range::of(v, phase, workspace);
    let (mut left, mut right) = (0f32, 1f32);
    for _ in 0..PASSES {
        let eighth = (right - left) / 8.0;
        let ratios: [f32; THRESHOLDS] = std::array::from_fn(|i| left + eighth * (i + 1) as f32);
        let thresholds = ratios.map(|ratio| range.at(ratio));
        let counts = workspace.count_above(v, phase, &thresholds);
        let (mut low, mut high) = (0, THRESHOLDS + 1);
        while high - low > 1 {
            let middle = (low + high) / 2;
            let count = counts[middle - 1];
            if count < k as u64 {
                high = middle;
            } else if count > 2 * k as u64 {
                low = middle;
            } else {
                return Some(thresholds[middle - 1]);
            }
        }
        (left, right) = (left + eighth * low as f32, left + eighth * high as f32);
    }
    None
}

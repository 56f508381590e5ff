//! What a network is trained for. A task deals out this rank's batches, says what their loss is, and judges the network.
//! What must hold: all that a task keeps from step to step are its rows, so that a checkpoint with them goes on to the same bits.

use crate::net::Pass;
use burn::module::Module;
use burn::tensor::Tensor;

/// One rank among all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub rank: usize,
    pub ranks: usize,
}

/// Sums over what was judged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Score {
    pub loss: f64,
    pub correct: f64,
    pub count: f64,
}

impl Score {
    /// Adds a batch, of which the mean loss is known.
    pub fn add(&mut self, mean: f32, correct: usize, count: usize) {
        self.loss += f64::from(mean) * count as f64;
        self.correct += correct as f64;
        self.count += count as f64;
    }

    pub fn mean_loss(&self) -> f64 {
        self.loss / self.count.max(1.0)
    }
}

/// Images or words, for a network.
pub(super) trait Task {
    /// The network.
    type Net: Module;

    /// What [`Task::metric`] is.
    const METRIC: &'static str;
    /// Whether words go through, not images.
    const WORDS: bool;
    /// Whether the end is judged by data that no epoch was judged by.
    const HELD_BACK: bool;

    fn steps_per_epoch(&self) -> u64;

    /// Images or words that a rank takes in one step.
    fn samples(&self) -> usize;

    /// The loss of this rank's batch at a step of an epoch.
    fn loss(&mut self, net: &Self::Net, pass: &mut Pass, epoch: u32, at: usize) -> Tensor<1>;

    /// This rank's share in the score of the network, at the end of an epoch or at the end of all.
    fn judge(&self, net: &Self::Net, last: bool) -> Score;

    /// The metric, from the score of all ranks.
    fn metric(score: &Score) -> f64;

    /// What passes from one step to the next besides weights and statistics, by name: equally many values for each sample of this
    /// rank's batch, in the order of samples over all ranks.
    fn rows(&mut self) -> Vec<(String, &mut [f32])> {
        Vec::new()
    }
}

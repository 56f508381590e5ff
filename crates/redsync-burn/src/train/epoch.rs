//! The end of an epoch: the ranks agree on running statistics and the loss, judge the network together, and keep a checkpoint.

use super::ranks::Op;
use super::task::{Score, Task};
use super::trainer::Trainer;
use super::{EpochRecord, Observer, TrainError};
use burn::module::Module;
use redsync_engine::{Choice, Traffic};

impl<T: Task> Trainer<'_, T> {
    /// An epoch is over. The network comes back with the statistics of all ranks.
    pub(super) fn end_epoch(
        &mut self,
        net: T::Net,
        epoch: u32,
        observer: &mut dyn Observer,
    ) -> Result<T::Net, TrainError> {
        let sums = std::mem::take(&mut self.epoch);
        let (ranks, seconds) = (self.ranks.seat().ranks, sums.seconds.total);
        let own = vec![(sums.loss / sums.steps.max(1) as f64) as f32];
        let all = self.ranks.sum(self.steps, Op::Loss, "the training loss", own)?;
        let net = self.average_statistics(net)?;
        let score = self.judge(&net, false)?;
        let test_loss = score.mean_loss();
        self.pace.judge(test_loss);
        let samples = self.task.samples() * ranks * sums.steps as usize;
        let record = EpochRecord {
            epoch: epoch + 1,
            train_loss: f64::from(all[0]) / ranks as f64,
            test_loss,
            metric: T::metric(&score),
            metric_name: T::METRIC.into(),
            seconds,
            images_per_second: samples as f64 / seconds.max(1e-9),
            bytes_sent: self.traffic.sent(),
            dense_bytes: self.traffic.dense,
        };
        let layers = self.layer_records(epoch + 1);
        observer.epoch(&record, &layers)?;
        self.records.push(record);
        let due = u64::from(epoch + 1).is_multiple_of(self.settings.checkpoint_every)
            || epoch + 1 == self.settings.epochs;
        if let Some(dir) = self.settings.checkpoint_dir.as_ref().filter(|_| due) {
            self.save(&net, dir)?;
        }
        Ok(net)
    }

    fn average_statistics(&mut self, net: T::Net) -> Result<T::Net, TrainError> {
        let own = self.distributed.statistics(&net)?;
        if own.is_empty() {
            return Ok(net);
        }
        let (joined, step, what) = (own.concat(), self.steps, "running statistics");
        let dense = 4 * joined.len() as u64;
        // Not as f32 where biases and norms are not either.
        let rounded = |choice: &Choice| matches!(choice, Choice::DenseEightBit | Choice::DenseTwoBit);
        let (sum, sent) = match self.sync().choices().iter().any(rounded) {
            true => self.ranks.sum_as_bf16(step, Op::Statistics, what, joined)?,
            false => (self.ranks.sum(step, Op::Statistics, what, joined)?, dense),
        };
        self.traffic.add(&Traffic { rest: sent, dense, ..Traffic::default() });
        let (share, mut rest) = (1.0 / self.ranks.seat().ranks as f32, &sum[..]);
        let means = own.iter().map(|own| {
            let (mine, behind) = rest.split_at(own.len());
            rest = behind;
            mine.iter().map(|sum| sum * share).collect()
        });
        Ok(self.distributed.with_statistics(net, means.collect())?)
    }

    /// The score of the network by all ranks, at the end of an epoch or at the end of all.
    pub(super) fn judge(&self, net: &T::Net, last: bool) -> Result<Score, TrainError> {
        let own = self.task.judge(&net.valid(), last);
        let own = vec![own.loss as f32, own.correct as f32, own.count as f32];
        let all = self.ranks.sum(self.steps, Op::Score, "the score", own)?;
        let [loss, correct, count] = [0, 1, 2].map(|at| f64::from(all[at]));
        Ok(Score { loss, correct, count })
    }
}

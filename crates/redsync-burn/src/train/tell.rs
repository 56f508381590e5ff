//! What a trainer tells of itself: records of the run, of steps and of layers, and the summary at its end.

use super::metrics::{EpochSummary, Final, Way};
use super::task::Task;
use super::trainer::Trainer;
use super::{EpochRecord, LayerRecord, Optimizer, RunRecord, Settings, StepRecord, Summary, TrainError};
use redsync_engine::{Choice, Layer};

impl<T: Task> Trainer<'_, T> {
    pub(super) fn parameters(&self) -> usize {
        self.sync().layers().iter().map(|layer| layer.size).sum()
    }

    fn layers(&self) -> impl Iterator<Item = (&Layer, Choice)> {
        self.sync().layers().iter().zip(self.sync().choices().iter().copied())
    }

    fn way(&self) -> Way {
        let Settings { optimizer, lr, momentum, density, every, .. } = *self.settings;
        let momentum = if optimizer == Optimizer::Sgd { 0.0 } else { momentum };
        Way { optimizer: optimizer.name(), lr, momentum, density, every: every.unwrap_or(1) }
    }

    pub(super) fn run_record(&self) -> RunRecord {
        let settings = self.settings;
        RunRecord {
            model: settings.model.clone(),
            data: settings.data.clone(),
            method: settings.method.name(),
            workers: self.ranks.seat().ranks,
            comm: self.ranks.comm.name(),
            seed: settings.seed,
            parameters: self.parameters(),
            compressed: self
                .layers()
                .filter(|(_, choice)| choice.is_sparse())
                .map(|(layer, _)| layer.size)
                .sum(),
            way: self.way(),
            batch: settings.batch_size,
            epochs: settings.epochs,
            steps_per_epoch: self.task.steps_per_epoch(),
            step: self.steps,
            metric_name: T::METRIC,
            words: T::WORDS,
        }
    }

    /// The steps since the last record.
    pub(super) fn step_record(&mut self, epoch: u32, step: u64) -> StepRecord {
        let sums = std::mem::take(&mut self.recent);
        let share = 1.0 / sums.steps.max(1) as f64;
        let seconds = sums.seconds.times(share);
        let samples = self.task.samples() * self.ranks.seat().ranks;
        StepRecord {
            epoch: epoch + 1,
            step,
            loss: sums.loss * share,
            lr: self.pace.at(step - 1),
            seconds,
            exposed_ms: 1e3 * seconds.exchange,
            bytes_sent: (sums.bytes_sent as f64 * share) as u64,
            dense_bytes: 4 * self.parameters() as u64,
            per_second: samples as f64 / seconds.total.max(1e-12),
        }
    }

    pub(super) fn layer_records(&self, epoch: u32) -> Vec<LayerRecord> {
        let stats = self.sync().stats();
        let record = |(number, (layer, choice)): (usize, (&Layer, Choice))| {
            let sent = stats.layers.get(number).copied().unwrap_or_default();
            LayerRecord {
                epoch,
                name: layer.name.clone(),
                size: layer.size,
                choice: choice.to_string(),
                density: sent.elements as f64 / layer.size.max(1) as f64,
                residual_norm: self.sync().residual_norm(number),
                bytes_sent: sent.bytes_sent,
            }
        };
        self.layers().enumerate().map(record).collect()
    }

    /// The end of a whole run.
    pub(super) fn summary(&self, net: &T::Net) -> Result<Summary, TrainError> {
        // Unless data were held back, what the last epoch said is said of the same data and weights.
        if !T::HELD_BACK {
            return self.interim_summary(net);
        }
        let score = self.judge(net, true)?;
        self.summarize(net, Final { loss: score.mean_loss(), metric: T::metric(&score) })
    }

    /// The end of a run that was interrupted; the last epoch's judgement says nothing of data that were held back.
    pub(super) fn interim_summary(&self, net: &T::Net) -> Result<Summary, TrainError> {
        let last = self.records.last().filter(|_| !T::HELD_BACK);
        let (loss, metric) = last.map_or((f64::NAN, f64::NAN), |last| (last.test_loss, last.metric));
        self.summarize(net, Final { loss, metric })
    }

    fn summarize(&self, net: &T::Net, end: Final) -> Result<Summary, TrainError> {
        let hash = self.distributed.check(net)?;
        let (settings, steps) = (self.settings, self.steps);
        let epoch = |record: &EpochRecord| EpochSummary {
            epoch: record.epoch,
            loss: record.train_loss,
            metric: record.metric,
        };
        Ok(Summary {
            model: settings.model.clone(),
            data: settings.data.clone(),
            method: settings.method.name(),
            workers: self.ranks.seat().ranks,
            seed: settings.seed,
            way: self.way(),
            metric_name: T::METRIC,
            epochs: self.records.iter().map(epoch).collect(),
            end,
            bytes_sent: self.traffic.sent(),
            dense_bytes: self.traffic.dense,
            traffic: self.traffic,
            steps,
            seconds: self.seconds,
            replica_hash: format!("{hash:016x}"),
        })
    }
}

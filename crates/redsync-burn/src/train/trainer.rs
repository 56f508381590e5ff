//! One rank's training, from the first step or a checkpoint to the last step or an interruption.
//! What must hold: collectives of the trainer are started only between `finish` and the next backward pass, so that all ranks
//! start them in the same order as those of the synchronizer.

use super::checkpoint::{self, Tensors};
use super::metrics::{EpochSummary, Final, RunRecord};
use super::optimizer::Descent;
use super::{EpochRecord, LayerRecord, Observer, Pace, Seconds, Settings, StepRecord, Summary, TrainError};
use crate::flex::{BurnGradient, tensor, untape, untracked, values};
use crate::hook::OnGradient;
use crate::net::{Architecture, Buffers, Input, Net, Pass, Purpose, State, Weights};
use crate::ops::loss::cross_entropy;
use burn::tensor::Tensor;
use redsync_comm::{Communicator, Pending, Tag};
use redsync_data::order::{Epochs, Streams};
use redsync_data::{DataSet, ImageSet, TextSet};
use redsync_engine::cost::Compute;
use redsync_engine::{Choice, Figures, Layer, Method, SyncError, Synchronizer, measure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The trainer's collectives count down from here; the synchronizer's own are above and at the bottom.
const OPS: u32 = u32::MAX - 100;
const STOP: u32 = OPS;
const SCORE: u32 = OPS - 1;
const BUFFERS: u32 = OPS - 2;
const SAVED: u32 = OPS - 3;
const CLEAR: u32 = OPS - 4;
const LOSS: u32 = OPS - 5;

/// Steps between two questions whether to stop.
const ASK_EVERY: u64 = 8;
/// Images in a batch when judging.
const JUDGE_BATCH: usize = 100;
/// Streams of a rank when judging text.
const JUDGE_STREAMS: usize = 10;

/// How a training ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What came out.
    pub summary: Summary,
    /// If it was interrupted: the step, and where the checkpoint is.
    pub interrupted: Option<(u64, Option<PathBuf>)>,
}

/// Trains as one rank among those of a communicator, in the rayon pool of the caller, on data that [`Settings::open`] gave. When `stop` is set on any rank, all end
/// soon after, with a checkpoint.
pub fn train(
    settings: &Settings,
    data: &DataSet,
    comm: Arc<dyn Communicator>,
    observer: &mut dyn Observer,
    stop: &AtomicBool,
) -> Result<Ended, TrainError> {
    settings.check()?;
    let feed = match data {
        DataSet::Images(set) => Feed::images(set, settings, &*comm)?,
        DataSet::Text(text) => Feed::words(text, settings, &*comm)?,
    };
    let mut trainer = Trainer::new(settings, feed, comm)?;
    trainer.resume_or_begin()?;
    observer.begin(&trainer.run_record())?;
    trainer.run(observer, stop)
}

/// Where batches come from.
enum Feed<'a> {
    Images { set: &'a ImageSet, epochs: Epochs },
    Words { text: &'a TextSet, streams: Streams<'a>, state: State },
}

impl<'a> Feed<'a> {
    fn images(set: &'a ImageSet, settings: &Settings, comm: &dyn Communicator) -> Result<Self, TrainError> {
        let epochs = Epochs::new(set.train_len(), comm.size(), settings.batch_size, settings.seed)?;
        Ok(Feed::Images { set, epochs })
    }

    fn words(text: &'a TextSet, settings: &Settings, comm: &dyn Communicator) -> Result<Self, TrainError> {
        // Too short a text to judge by is better known now than after an epoch.
        for text in [&text.valid, &text.test] {
            Streams::new(text, comm.size(), JUDGE_STREAMS, settings.bptt)?;
        }
        let streams = Streams::new(&text.train, comm.size(), settings.batch_size, settings.bptt)?;
        Ok(Feed::Words { text, streams, state: State::new() })
    }

    fn input(&self) -> Input {
        match self {
            Feed::Images { set, .. } => Input::Images { shape: set.shape, classes: set.classes },
            Feed::Words { text, .. } => Input::Words { vocabulary: text.vocabulary },
        }
    }

    fn steps_per_epoch(&self) -> u64 {
        match self {
            Feed::Images { epochs, .. } => epochs.steps_per_epoch() as u64,
            Feed::Words { streams, .. } => streams.steps_per_epoch() as u64,
        }
    }

    /// Images or words that a worker takes in one step.
    fn samples(&self, settings: &Settings) -> usize {
        match self {
            Feed::Images { .. } => settings.batch_size,
            Feed::Words { .. } => settings.batch_size * settings.bptt,
        }
    }
}

/// Sums since a record was last made.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    steps: u64,
    loss: f64,
    ms: Seconds,
    exposed_ms: f64,
    bytes_sent: u64,
}

struct Trainer<'a> {
    settings: &'a Settings,
    comm: Arc<dyn Communicator>,
    feed: Feed<'a>,
    net: Net,
    weights: Weights,
    buffers: Buffers,
    sync: Synchronizer,
    descent: Descent,
    pace: Pace,
    /// Of the epoch that is under way, and since the last record.
    epoch: Sums,
    recent: Sums,
    /// Of the whole run.
    seconds: Seconds,
    bytes_sent: u64,
    records: Vec<EpochRecord>,
}

impl<'a> Trainer<'a> {
    fn new(settings: &'a Settings, feed: Feed<'a>, comm: Arc<dyn Communicator>) -> Result<Self, TrainError> {
        let net = Architecture::named(&settings.model)?.build(&settings.model, feed.input())?;
        let layers: Vec<Layer> = net.specs().iter().map(|spec| spec.layer.clone()).collect();
        let per_epoch = feed.steps_per_epoch();
        let mut config = settings.config(per_epoch);
        if settings.auto && settings.method != Method::Sgd {
            // What a run once decided stays: another choice of layers would be another run.
            match kept_choice(settings)? {
                Some(dense_below) => config.dense_below = dense_below,
                None => {
                    let platform = measure::platform(comm.clone(), &config, &mut |_| ())?;
                    config.figures = Some(Figures { platform, compute: Compute::default() });
                }
            }
        }
        let sync = Synchronizer::new(layers, config, comm.clone())?;
        let momentum = settings.optimizer.momentum(settings.momentum);
        let lr_warm_up = (settings.lr_warm_up_epochs * per_epoch as f64).round() as u64;
        Ok(Trainer {
            weights: Weights::new(net.specs(), settings.seed),
            buffers: net.buffers(),
            descent: Descent::new(net.specs(), momentum, settings.weight_decay),
            pace: Pace::new(
                settings.lr,
                settings.schedule,
                lr_warm_up,
                per_epoch * u64::from(settings.epochs),
            ),
            settings,
            comm,
            feed,
            net,
            sync,
            epoch: Sums::default(),
            recent: Sums::default(),
            seconds: Seconds::default(),
            bytes_sent: 0,
            records: Vec::new(),
        })
    }

    fn metric_name(&self) -> &'static str {
        if matches!(self.net, Net::Words(_)) { "perplexity" } else { "accuracy" }
    }

    fn run_record(&self) -> RunRecord {
        let pairs = self.sync.layers().iter().zip(self.sync.choices());
        RunRecord {
            model: self.settings.model.clone(),
            data: self.settings.data.clone(),
            method: self.settings.method.name(),
            workers: self.comm.size(),
            comm: self.comm.name(),
            seed: self.settings.seed,
            parameters: self.net.parameters(),
            compressed: pairs
                .filter(|(_, choice)| **choice != Choice::Dense)
                .map(|(layer, _)| layer.size)
                .sum(),
            density: self.settings.density,
            batch: self.settings.batch_size,
            epochs: self.settings.epochs,
            steps_per_epoch: self.feed.steps_per_epoch(),
            step: self.sync.step(),
            metric_name: self.metric_name(),
            words: matches!(self.net, Net::Words(_)),
        }
    }

    fn run(mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Ended, TrainError> {
        let per_epoch = self.feed.steps_per_epoch();
        let total = per_epoch * u64::from(self.settings.epochs);
        let mut question = None;
        while self.sync.step() < total {
            let step = self.sync.step();
            let (epoch, at) = ((step / per_epoch) as u32, step % per_epoch);
            let mut stops = self.step(epoch, at as usize, question.take())?;
            stops |= self.settings.stop_after == Some(step + 1);
            observer.tick(step + 1);
            if (step + 1).is_multiple_of(self.settings.log_every) {
                let record = self.step_record(epoch, step + 1);
                observer.step(&record)?;
            }
            let ended = (step + 1).is_multiple_of(per_epoch);
            if ended || (step + 1).is_multiple_of(self.settings.check_every) {
                self.sync.check_replicas(&self.weights.all())?;
            }
            if ended {
                self.end_epoch(epoch, observer)?;
            }
            if stops && step + 1 < total {
                return self.interrupt();
            }
            if (step + 1).is_multiple_of(ASK_EVERY) && step + 1 < total {
                let asked = if stop.load(Ordering::Relaxed) { 1.0 } else { 0.0 };
                question = Some(self.comm.allreduce(Tag { step, op: STOP }, vec![asked]));
            }
        }
        let summary = self.summary()?;
        observer.end(&summary)?;
        Ok(Ended { summary, interrupted: None })
    }

    /// Whether some rank was asked to stop.
    fn answer(&self, question: Pending<Vec<f32>>) -> Result<bool, TrainError> {
        let answer = question.wait(self.settings.deadline);
        let answer = answer.map_err(|source| TrainError::Comm { what: "asking whether to stop", source })?;
        Ok(answer.first().is_some_and(|asked| *asked > 0.0))
    }

    /// One step. Returns whether the question that was under way was answered with stop.
    fn step(
        &mut self,
        epoch: u32,
        at: usize,
        question: Option<Pending<Vec<f32>>>,
    ) -> Result<bool, TrainError> {
        let step = self.sync.step();
        let rate = self.pace.at(step);
        self.descent.hand_over(&self.sync);
        let begin = Instant::now();
        let failure = Arc::new(Mutex::new(None));
        let loss = self.forward(epoch, at, self.on_gradient(&failure))?;
        let value = values(&untape(loss.clone()))[0];
        if !value.is_finite() {
            return Err(TrainError::Diverged { step, loss: value, rate });
        }
        let stops = question.map_or(Ok(false), |question| self.answer(question))?;
        let forward = begin.elapsed();
        drop(loss.backward());
        drop(loss);
        let backward = begin.elapsed() - forward;
        if let Some(error) = failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error.into());
        }
        self.sync.finish()?;
        let waited = begin.elapsed();
        self.descent.update(&mut self.sync, &mut self.weights, rate)?;
        let stats = self.sync.stats();
        let (all, total) = (stats.total(), begin.elapsed());
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let spent = Seconds {
            forward: ms(forward),
            backward: ms(backward),
            select: all.select_ms,
            encode: all.encode_ms,
            exchange: stats.exposed_ms,
            decode: all.decode_ms,
            apply: all.apply_ms,
            update: (ms(total - waited) - all.apply_ms).max(0.0),
            total: ms(total),
        };
        for sums in [&mut self.epoch, &mut self.recent] {
            sums.steps += 1;
            sums.loss += f64::from(value);
            sums.ms.add(&spent, 1.0);
            sums.exposed_ms += stats.exposed_ms;
            sums.bytes_sent += all.bytes_sent;
        }
        self.bytes_sent += all.bytes_sent;
        self.seconds.add(&spent, 1e-3);
        Ok(stops)
    }

    /// What hands gradients on; the first failure is kept for the step.
    fn on_gradient(&self, failure: &Arc<Mutex<Option<SyncError>>>) -> OnGradient {
        let (submitter, failure) = (self.sync.submitter(), failure.clone());
        Arc::new(move |layer, gradient| {
            if let Err(error) = submitter.submit(layer, BurnGradient::new(gradient)) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        })
    }

    /// The loss of this rank's part of a step.
    fn forward(&mut self, epoch: u32, at: usize, on_gradient: OnGradient) -> Result<Tensor<1>, TrainError> {
        let (rank, step) = (self.comm.rank() as u64, self.sync.step());
        let random = mix(self.settings.seed ^ mix(step ^ mix(rank)));
        let mut pass = Pass::new(&self.weights, &mut self.buffers, Purpose::Train { on_gradient, random });
        Ok(match (&mut self.feed, &self.net) {
            (Feed::Images { set, epochs }, Net::Images(net)) => {
                let (mut pixels, mut labels) = (Vec::new(), Vec::new());
                let seed = epochs.epoch_seed(u64::from(epoch));
                let indices = epochs.indices(u64::from(epoch), at, rank as usize);
                set.train_batch(indices, seed, &mut pixels, &mut labels);
                let [channels, height, width] = set.shape;
                let images = untracked(tensor(pixels, &[labels.len(), channels, height, width]));
                cross_entropy(net.run(&mut pass, images), &labels).0
            }
            (Feed::Words { streams, state, .. }, Net::Words(net)) => {
                if at == 0 {
                    *state = net.blank(self.settings.batch_size);
                }
                let (words, next) = streams.window(at, rank as usize);
                cross_entropy(net.run(&mut pass, &words, state), &next).0
            }
            _ => unreachable!("the network was built for these data"),
        })
    }

    fn step_record(&mut self, epoch: u32, step: u64) -> StepRecord {
        let sums = std::mem::take(&mut self.recent);
        let share = 1.0 / sums.steps.max(1) as f64;
        let mut ms = Seconds::default();
        ms.add(&sums.ms, share);
        let samples = self.feed.samples(self.settings) * self.comm.size();
        StepRecord {
            epoch: epoch + 1,
            step,
            loss: sums.loss * share,
            lr: self.pace.at(step - 1),
            ms,
            exposed_ms: sums.exposed_ms * share,
            bytes_sent: (sums.bytes_sent as f64 * share) as u64,
            dense_bytes: 4 * self.net.parameters() as u64,
            per_second: samples as f64 * 1e3 / ms.total.max(1e-9),
        }
    }

    /// The ranks agree on running statistics and the loss, judge the network together, and keep a checkpoint.
    fn end_epoch(&mut self, epoch: u32, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let sums = std::mem::take(&mut self.epoch);
        let seconds = sums.ms.total / 1e3;
        let own = vec![(sums.loss / sums.steps.max(1) as f64) as f32];
        let train_loss = f64::from(self.sum(LOSS, "the training loss", own)?[0]) / self.comm.size() as f64;
        self.average_buffers()?;
        let (test_loss, metric) = self.judge(false)?;
        self.pace.judge(test_loss);
        let samples = self.feed.samples(self.settings) * self.comm.size() * sums.steps as usize;
        let images_per_second = samples as f64 / seconds.max(1e-9);
        let record = EpochRecord {
            epoch: epoch + 1,
            train_loss,
            test_loss,
            metric,
            metric_name: self.metric_name().into(),
            seconds,
            images_per_second,
        };
        let layers = self.layer_records(epoch + 1);
        observer.epoch(&record, &layers)?;
        self.records.push(record);
        let due = u64::from(epoch + 1).is_multiple_of(self.settings.checkpoint_every)
            || epoch + 1 == self.settings.epochs;
        match &self.settings.checkpoint_dir {
            Some(dir) if due => self.save(dir),
            _ => Ok(()),
        }
    }

    fn layer_records(&self, epoch: u32) -> Vec<LayerRecord> {
        let stats = self.sync.stats();
        let record = |(number, (layer, choice)): (usize, (&Layer, &Choice))| {
            let sent = stats.layers.get(number).copied().unwrap_or_default();
            LayerRecord {
                epoch,
                name: layer.name.clone(),
                size: layer.size,
                choice: if *choice == Choice::Dense { "dense" } else { "sparse" },
                density: sent.elements as f64 / layer.size.max(1) as f64,
                residual_norm: self.sync.residual_norm(number),
                bytes_sent: sent.bytes_sent,
            }
        };
        self.sync.layers().iter().zip(self.sync.choices()).enumerate().map(record).collect()
    }

    fn sum(&self, op: u32, what: &'static str, values: Vec<f32>) -> Result<Vec<f32>, TrainError> {
        let pending = self.comm.allreduce(Tag { step: self.sync.step(), op }, values);
        pending.wait(self.settings.deadline).map_err(|source| TrainError::Comm { what, source })
    }

    fn barrier(&self, op: u32) -> Result<(), TrainError> {
        let pending = self.comm.barrier(Tag { step: self.sync.step(), op });
        pending
            .wait(self.settings.deadline)
            .map_err(|source| TrainError::Comm { what: "a checkpoint", source })
    }

    fn average_buffers(&mut self) -> Result<(), TrainError> {
        if self.buffers.is_empty() {
            return Ok(());
        }
        let sum = self.sum(BUFFERS, "running statistics", self.buffers.concat())?;
        let (share, mut rest) = (1.0 / self.comm.size() as f32, &sum[..]);
        for buffer in &mut self.buffers {
            let (mine, behind) = rest.split_at(buffer.len());
            buffer.iter_mut().zip(mine).for_each(|(value, sum)| *value = sum * share);
            rest = behind;
        }
        Ok(())
    }

    /// Mean loss and metric on the test data; of text, on the validation data unless `last`.
    fn judge(&mut self, last: bool) -> Result<(f64, f64), TrainError> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let [mut loss, mut correct, mut count] = [0f64; 3];
        let mut pass = Pass::new(&self.weights, &mut self.buffers, Purpose::Judge);
        match (&self.feed, &self.net) {
            (Feed::Images { set, .. }, Net::Images(net)) => {
                let (begin, end) = (set.test_len() * rank / ranks, set.test_len() * (rank + 1) / ranks);
                let [channels, height, width] = set.shape;
                for from in (begin..end).step_by(JUDGE_BATCH) {
                    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
                    set.test_batch(from..end.min(from + JUDGE_BATCH), &mut pixels, &mut labels);
                    let images = untracked(tensor(pixels, &[labels.len(), channels, height, width]));
                    let (mean, right) = cross_entropy(net.run(&mut pass, images), &labels);
                    loss += f64::from(values(&untape(mean))[0]) * labels.len() as f64;
                    correct += right as f64;
                    count += labels.len() as f64;
                }
            }
            (Feed::Words { text, .. }, Net::Words(net)) => {
                let words = if last { &text.test } else { &text.valid };
                let streams = Streams::new(words, ranks, JUDGE_STREAMS, self.settings.bptt)?;
                let mut state = net.blank(JUDGE_STREAMS);
                for at in 0..streams.steps_per_epoch() {
                    let (words, next) = streams.window(at, rank);
                    let (mean, _) = cross_entropy(net.run(&mut pass, &words, &mut state), &next);
                    loss += f64::from(values(&untape(mean))[0]) * next.len() as f64;
                    count += next.len() as f64;
                }
            }
            _ => unreachable!("the network was built for these data"),
        }
        let all = self.sum(SCORE, "the score", vec![loss as f32, correct as f32, count as f32])?;
        let [loss, correct, count] = [0, 1, 2].map(|at| f64::from(all[at]));
        let loss = loss / count.max(1.0);
        match self.net {
            Net::Images(_) => Ok((loss, correct / count.max(1.0))),
            Net::Words(_) => Ok((loss, loss.exp())),
        }
    }

    fn summary(&mut self) -> Result<Summary, TrainError> {
        let (loss, metric) = match self.net {
            // What the last epoch said is said of the same data and weights.
            Net::Images(_) => {
                self.records.last().map_or((f64::NAN, f64::NAN), |last| (last.test_loss, last.metric))
            }
            Net::Words(_) => self.judge(true)?,
        };
        self.summarize(Final { loss, metric })
    }

    fn summarize(&self, end: Final) -> Result<Summary, TrainError> {
        let hash = self.sync.check_replicas(&self.weights.all())?;
        let steps = self.sync.step();
        let epoch = |record: &EpochRecord| EpochSummary {
            epoch: record.epoch,
            loss: record.train_loss,
            metric: record.metric,
        };
        Ok(Summary {
            model: self.settings.model.clone(),
            data: self.settings.data.clone(),
            method: self.settings.method.name(),
            workers: self.comm.size(),
            seed: self.settings.seed,
            metric_name: self.metric_name(),
            epochs: self.records.iter().map(epoch).collect(),
            end,
            bytes_sent: self.bytes_sent,
            dense_bytes: steps * 4 * self.net.parameters() as u64,
            steps,
            seconds: self.seconds,
            replica_hash: format!("{hash:016x}"),
        })
    }

    fn interrupt(mut self) -> Result<Ended, TrainError> {
        let dir = self.settings.checkpoint_dir.as_ref().or(self.settings.rescue_dir.as_ref()).cloned();
        if let Some(dir) = &dir {
            self.save(dir)?;
        }
        // Epochs of text are judged by the validation text, which says nothing about the test text.
        let last = self.records.last().filter(|_| !matches!(self.net, Net::Words(_)));
        let last = last.map_or((f64::NAN, f64::NAN), |last| (last.test_loss, last.metric));
        let summary = self.summarize(Final { loss: last.0, metric: last.1 })?;
        Ok(Ended { summary, interrupted: Some((self.sync.step(), dir)) })
    }
}

/// What must be the same for a run to go on as if it had never stopped.
impl Trainer<'_> {
    fn identity(&self) -> Value {
        let s = self.settings;
        json!({
            "model": s.model, "data": s.data, "method": s.method, "density": s.density, "seed": s.seed,
            "global-batch": s.batch_size * self.comm.size(), "bptt": s.bptt, "epochs": s.epochs,
            "optimizer": s.optimizer, "momentum": s.momentum, "lr": s.lr, "schedule": s.schedule,
            "lr-warm-up-epochs": s.lr_warm_up_epochs, "weight-decay": s.weight_decay, "clip": s.clip,
            "auto": s.auto, "train-limit": s.train_limit, "test-limit": s.test_limit, "warm-up": s.warm_up, "warm-up-epochs": s.warm_up_epochs,
        })
    }

    /// Continues from a checkpoint if told to; otherwise sees to it that none is overwritten.
    fn resume_or_begin(&mut self) -> Result<(), TrainError> {
        let Some(dir) = &self.settings.checkpoint_dir else { return Ok(()) };
        let wrong = |why: &str| TrainError::Checkpoint { path: dir.clone(), why: why.into() };
        match (checkpoint::latest(dir)?, self.settings.resume) {
            (Some(place), true) => self.load(&place),
            (None, true) => Err(wrong("there is none to resume from")),
            (Some(_), false) => {
                Err(wrong("is there already: continue it with --resume, or give another --checkpoint-dir"))
            }
            (None, false) => Ok(()),
        }
    }

    fn save(&mut self, dir: &Path) -> Result<(), TrainError> {
        let step = self.sync.step();
        let place = checkpoint::place(dir, step);
        std::fs::create_dir_all(&place)
            .map_err(|source| TrainError::Write { path: place.clone(), source })?;
        let hash = self.sync.check_replicas(&self.weights.all())?;
        let rank = self.comm.rank();
        if rank == 0 {
            self.write_model(&place, hash)?;
        }
        let about = json!({
            "loss": self.epoch.loss.to_bits(), "steps": self.epoch.steps, "ms": self.epoch.ms.total.to_bits(),
            "bytes": self.bytes_sent, "step": step, "replica_hash": format!("{hash:016x}"),
            "ranks": self.comm.size(), "batch": self.settings.batch_size,
        });
        let mut tensors: Tensors = Vec::new();
        for (number, buffer) in self.buffers.iter().enumerate() {
            tensors.push((format!("running/{number}"), buffer.clone()));
        }
        if let Feed::Words { state, .. } = &self.feed {
            for (depth, (h, c)) in state.iter().enumerate() {
                tensors.extend([(format!("h/{depth}"), h.clone()), (format!("c/{depth}"), c.clone())]);
            }
        }
        checkpoint::write_tensors(&place.join(worker_file(rank)), &tensors, &about)?;
        self.sync.save(&place, hash, Vec::new())?;
        self.barrier(SAVED)?;
        if rank == 0 {
            self.check_shared(&place)?;
            checkpoint::complete(dir, step)?;
        }
        self.barrier(CLEAR)
    }

    /// Rank 0 must see what all others wrote, or nobody could resume.
    fn check_shared(&self, place: &Path) -> Result<(), TrainError> {
        match (0..self.comm.size()).find(|rank| !place.join(worker_file(*rank)).is_file()) {
            None => Ok(()),
            Some(rank) => {
                let why = format!("is not shared by all workers: what rank {rank} wrote is not there");
                Err(TrainError::Checkpoint { path: place.to_path_buf(), why })
            }
        }
    }

    fn write_model(&self, place: &Path, hash: u64) -> Result<(), TrainError> {
        let mut tensors: Tensors = Vec::new();
        for (number, layer) in self.sync.layers().iter().enumerate() {
            tensors.push((layer.name.clone(), self.weights.values(number).to_vec()));
            if !self.descent.buffers[number].is_empty() {
                tensors.push((format!("momentum/{}", layer.name), self.descent.buffers[number].clone()));
            }
        }
        let (factor, best) = self.pace.plateau;
        let about = json!({
            "run": self.identity(), "dense-below": self.sync.dense_below(), "step": self.sync.step(), "replica_hash": format!("{hash:016x}"),
            "plateau": [factor.to_bits(), best.to_bits()], "epochs": checkpoint::write_epochs(&self.records), "seconds": self.seconds,
        });
        checkpoint::write_tensors(&place.join(checkpoint::MODEL_FILE), &tensors, &about)
    }

    fn load(&mut self, place: &Path) -> Result<(), TrainError> {
        let path = place.join(checkpoint::MODEL_FILE);
        let wrong = |why: &str| TrainError::Checkpoint { path: path.clone(), why: why.into() };
        let (mut tensors, about) = checkpoint::read_tensors(&path)?;
        checkpoint::same_run(&path, &self.identity(), &about["run"])?;
        let mut weights = Vec::new();
        let mut momentum = Vec::new();
        for layer in self.sync.layers() {
            weights.push(checkpoint::take(&path, &mut tensors, &layer.name, layer.size)?);
            let name = format!("momentum/{}", layer.name);
            let there = tensors.contains_key(&name);
            momentum.push(if there {
                checkpoint::take(&path, &mut tensors, &name, layer.size)?
            } else {
                Vec::new()
            });
        }
        if let Some(name) = tensors.keys().min() {
            return Err(wrong(&format!("has {name}, which is not of this model")));
        }
        let records = checkpoint::read_epochs(&about["epochs"]);
        let seconds = serde_json::from_value(about["seconds"].clone());
        let bits = |at: usize| about["plateau"][at].as_u64().map(f64::from_bits);
        let hash = about["replica_hash"].as_str().and_then(|hash| u64::from_str_radix(hash, 16).ok());
        let all = (records, seconds, bits(0), bits(1), hash);
        let (Some(records), Ok(seconds), Some(factor), Some(best), Some(saved_hash)) = all else {
            return Err(wrong("is damaged: its description is incomplete"));
        };
        self.load_worker(place, &about)?;
        self.sync.load_for(place, saved_hash)?;
        (self.records, self.seconds, self.pace.plateau) = (records, seconds, (factor, best));
        for (number, values) in weights.into_iter().enumerate() {
            self.weights.values_mut(number).copy_from_slice(&values);
        }
        self.descent.buffers = momentum;
        let hash = self.sync.check_replicas(&self.weights.all())?;
        match hash == saved_hash && about["step"] == json!(self.sync.step()) {
            true => Ok(()),
            false => Err(wrong("does not belong to the residuals beside it")),
        }
    }

    /// This rank's own part; with another number of ranks, running statistics of the first and the rows of the text that are now its own.
    fn load_worker(&mut self, place: &Path, model: &Value) -> Result<(), TrainError> {
        let first = place.join(worker_file(0));
        let wrong = |path: &Path, why: &str| TrainError::Checkpoint { path: path.into(), why: why.into() };
        let (_, about) = checkpoint::read_tensors(&first)?;
        let ranks =
            about["ranks"].as_u64().ok_or_else(|| wrong(&first, "does not say of how many ranks it is"))?
                as usize;
        let global = self.settings.batch_size * self.comm.size();
        if ranks == 0 || !global.is_multiple_of(ranks) || about["batch"] != json!(global / ranks) {
            return Err(wrong(&first, "is of another number of workers than it says"));
        }
        let (same, old_batch) = (ranks == self.comm.size(), global / ranks);
        let path = place.join(worker_file(if same { self.comm.rank() } else { 0 }));
        let (mut tensors, about) = checkpoint::read_tensors(&path)?;
        if about["step"] != model["step"] || about["replica_hash"] != model["replica_hash"] {
            return Err(wrong(&path, "does not belong to the weights beside it"));
        }
        for (number, buffer) in self.buffers.iter_mut().enumerate() {
            *buffer = checkpoint::take(&path, &mut tensors, &format!("running/{number}"), buffer.len())?;
        }
        let number = |key: &str| about[key].as_u64().ok_or_else(|| wrong(&path, &format!("has no {key}")));
        self.epoch.loss = f64::from_bits(number("loss")?);
        self.epoch.steps = number("steps")?;
        self.epoch.ms.total = f64::from_bits(number("ms")?);
        self.bytes_sent = number("bytes")?;
        if let (Feed::Words { state, .. }, Net::Words(net)) = (&mut self.feed, &self.net) {
            *state = net.blank(self.settings.batch_size);
            let batch = self.settings.batch_size;
            for (depth, (h, c)) in state.iter_mut().enumerate() {
                for (name, part) in [("h", h), ("c", c)] {
                    let units = part.len() / batch;
                    let mut rows = Vec::new();
                    for rank in if same { vec![self.comm.rank()] } else { (0..ranks).collect() } {
                        let path = place.join(worker_file(rank));
                        let (mut tensors, _) = checkpoint::read_tensors(&path)?;
                        let name = format!("{name}/{depth}");
                        rows.extend(checkpoint::take(&path, &mut tensors, &name, old_batch * units)?);
                    }
                    let begin = if same { 0 } else { self.comm.rank() * batch * units };
                    let mine = rows.get(begin..begin + part.len());
                    part.copy_from_slice(mine.ok_or_else(|| wrong(&path, "has too few rows of text"))?);
                }
            }
        }
        Ok(())
    }
}

/// The size below which layers are dense, of the run that is to be resumed.
fn kept_choice(settings: &Settings) -> Result<Option<usize>, TrainError> {
    let Some(dir) = settings.checkpoint_dir.as_ref().filter(|_| settings.resume) else { return Ok(None) };
    let Some(place) = checkpoint::latest(dir)? else { return Ok(None) };
    let path = place.join(checkpoint::MODEL_FILE);
    let (_, about) = checkpoint::read_tensors(&path)?;
    match about["dense-below"].as_u64().and_then(|bytes| usize::try_from(bytes).ok()) {
        Some(dense_below) => Ok(Some(dense_below)),
        None => Err(TrainError::Checkpoint { path, why: "does not say which layers it compresses".into() }),
    }
}

fn worker_file(rank: usize) -> String {
    format!("worker-{rank:04}.safetensors")
}

/// Spreads the bits of a number: neighbours get unlike results.
fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

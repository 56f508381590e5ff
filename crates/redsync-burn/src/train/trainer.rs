//! One rank's training, from the first step or a checkpoint to the last step or an interruption: the loop of steps.
//! What must hold: every rank makes the same steps, checks, judgements and checkpoints in the same order.

use super::images::Images;
use super::ranks::Ranks;
use super::resume::{self, Kept};
use super::task::{Seat, Task};
use super::words::Words;
use super::{EpochRecord, Observer, Pace, Seconds, Settings, Summary, TrainError};
use crate::Distributed;
use crate::flex::{untape, values};
use crate::net::{Architecture, Net, Pass};
use burn::optim::GradientsParams;
use redsync_comm::{Communicator, Pending};
use redsync_data::DataSet;
use redsync_engine::cost::Compute;
use redsync_engine::{Config, Figures, Method, StepStats, Synchronizer, Traffic, host_of, measure};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Steps between two questions whether to stop.
const ASK_EVERY: u64 = 8;

/// How a training ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What came out.
    pub summary: Summary,
    /// If it was interrupted: the step, and where the checkpoint is.
    pub interrupted: Option<(u64, Option<PathBuf>)>,
}

/// Trains as one rank among those of a communicator, in the rayon pool of the caller, on data that [`Settings::open`] gave. When
/// `stop` is set on any rank, all end soon after, with a checkpoint.
pub fn train(
    settings: &Settings,
    data: &DataSet,
    comm: Arc<dyn Communicator>,
    observer: &mut dyn Observer,
    stop: &AtomicBool,
) -> Result<Ended, TrainError> {
    train_network(&Architecture::named(&settings.model)?, settings, data, comm, observer, stop)
}

/// [`train`] for a network of one's own; the model's name in the settings is only told.
pub fn train_network(
    architecture: &Architecture,
    settings: &Settings,
    data: &DataSet,
    comm: Arc<dyn Communicator>,
    observer: &mut dyn Observer,
    stop: &AtomicBool,
) -> Result<Ended, TrainError> {
    let seat = Seat { rank: comm.rank(), ranks: comm.size() };
    let trained = settings.check().and_then(|()| match data {
        DataSet::Images(set) => {
            let net = architecture.classifier(&settings.model, set.shape, set.classes, settings.seed)?;
            run(Images::new(set, settings, seat)?, net, settings, comm.clone(), observer, stop)
        }
        DataSet::Text(text) => {
            let net = architecture.language(&settings.model, text.vocabulary, settings.seed)?;
            run(Words::new(text, &net, settings, seat)?, net, settings, comm.clone(), observer, stop)
        }
    });
    // Nobody has to wait for a rank that will not come; where others are the cause, they have said so first.
    trained.inspect_err(|error| comm.give_up(&error.to_string()))
}

fn run<T: Task>(
    task: T,
    net: T::Net,
    settings: &Settings,
    comm: Arc<dyn Communicator>,
    observer: &mut dyn Observer,
    stop: &AtomicBool,
) -> Result<Ended, TrainError> {
    let kept = resume::find(settings, comm.size())?;
    let (mut net, mut trainer) = Trainer::new(settings, task, net, comm, kept.as_ref())?;
    if let Some(kept) = kept {
        net = trainer.resume(net, kept)?;
    }
    observer.begin(&trainer.run_record())?;
    trainer.run(net, observer, stop)
}

/// What came of a step besides its loss.
struct Made<N> {
    /// The network with its weights updated.
    net: N,
    /// Whether the question that was under way was answered with stop.
    stops: bool,
    /// Whether the ranks exchanged anything.
    exchanged: bool,
}

/// Sums over some steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub steps: u64,
    pub loss: f64,
    pub seconds: Seconds,
    pub bytes_sent: u64,
}

impl Sums {
    fn add(&mut self, loss: f32, seconds: &Seconds, bytes_sent: u64) {
        self.steps += 1;
        self.loss += f64::from(loss);
        self.seconds.add(seconds);
        self.bytes_sent += bytes_sent;
    }
}

pub(super) struct Trainer<'a, T> {
    pub settings: &'a Settings,
    pub ranks: Ranks,
    pub task: T,
    pub distributed: Distributed,
    /// Steps that were made.
    pub steps: u64,
    pub pace: Pace,
    /// Of the epoch that is under way, and since the last record.
    pub epoch: Sums,
    pub recent: Sums,
    /// Of the whole run.
    pub seconds: Seconds,
    pub traffic: Traffic,
    pub records: Vec<EpochRecord>,
}

/// What the ranks are told, which with `auto` takes a measurement, unless the run to be resumed has decided already:
/// another choice of layers would be another run.
fn config(
    settings: &Settings,
    steps_per_epoch: u64,
    comm: &Arc<dyn Communicator>,
    kept: Option<&Kept>,
) -> Result<Config, TrainError> {
    let mut config = settings.config(steps_per_epoch);
    config.host = host_of(&**comm, settings.ranks_per_host);
    config.agree = resume::identity(settings, comm.size());
    if settings.auto && settings.method != Method::Sgd {
        match (kept, &settings.figures) {
            (Some(kept), _) => {
                (config.dense_below, config.exchange) = (Some(kept.dense_below()?), Some(kept.exchange()));
            }
            (None, Some(figures)) => config.figures = Some(figures.clone()),
            (None, None) => {
                let platform = measure::platform(comm.clone(), &config, &mut |_| ())?;
                config.figures = Some(Figures { platform, compute: Compute::default() });
            }
        }
    }
    Ok(config)
}

impl<'a, T: Task> Trainer<'a, T> {
    fn new(
        settings: &'a Settings,
        task: T,
        net: T::Net,
        comm: Arc<dyn Communicator>,
        kept: Option<&Kept>,
    ) -> Result<(T::Net, Self), TrainError> {
        let per_epoch = task.steps_per_epoch();
        // All ranks have made the same network from the seed.
        let setup = Distributed::setup(config(settings, per_epoch, &comm, kept)?).layers(Net::layer).alike();
        let setup = match settings.every {
            Some(every) => setup.local_steps(every, settings.outer_rate),
            None => setup,
        };
        let (net, distributed) = setup.make(net, comm.clone())?;
        let lr_warm_up = (settings.lr_warm_up_epochs * per_epoch as f64).round() as u64;
        let steps = per_epoch * u64::from(settings.epochs);
        let trainer = Trainer {
            distributed: distributed.with_weight_decay(settings.weight_decay),
            steps: 0,
            pace: Pace::new(settings.lr, settings.schedule, lr_warm_up, steps),
            ranks: Ranks { comm, deadline: settings.deadline },
            settings,
            task,
            epoch: Sums::default(),
            recent: Sums::default(),
            seconds: Seconds::default(),
            traffic: Traffic::default(),
            records: Vec::new(),
        };
        Ok((net, trainer))
    }

    /// What is below: layers, choices, statistics of a step.
    pub(super) fn sync(&self) -> &Synchronizer {
        self.distributed.synchronizer()
    }

    fn run(
        mut self,
        mut net: T::Net,
        observer: &mut dyn Observer,
        stop: &AtomicBool,
    ) -> Result<Ended, TrainError> {
        let per_epoch = self.task.steps_per_epoch();
        let total = per_epoch * u64::from(self.settings.epochs);
        let mut question = None;
        while self.steps < total {
            let step = self.steps;
            let (epoch, at) = ((step / per_epoch) as u32, step % per_epoch);
            let ended = (step + 1).is_multiple_of(per_epoch);
            let made = self.step(net, epoch, at as usize, ended, question.take())?;
            let exchanged = made.exchanged;
            net = made.net;
            let stops = made.stops || self.settings.stop_after == Some(step + 1);
            observer.tick(step + 1);
            if (step + 1).is_multiple_of(self.settings.log_every) {
                let record = self.step_record(epoch, step + 1);
                observer.step(&record)?;
            }
            // With local steps the ranks have something to compare, and time to talk, when they exchange.
            let exchanges = self.sync().step();
            if ended || (exchanged && exchanges.is_multiple_of(self.settings.check_every)) {
                self.distributed.check(&net)?;
            }
            if ended {
                net = self.end_epoch(net, epoch, observer)?;
            }
            if stops && step + 1 < total {
                return self.interrupt(&net);
            }
            let asks = self.settings.every.is_some() || exchanges.is_multiple_of(ASK_EVERY);
            if exchanged && asks && step + 1 < total {
                question = Some(self.ranks.ask(step, stop.load(Ordering::Relaxed)));
            }
        }
        let summary = self.summary(&net)?;
        observer.end(&summary)?;
        Ok(Ended { summary, interrupted: None })
    }

    /// One step, which may be the last of an epoch.
    fn step(
        &mut self,
        net: T::Net,
        epoch: u32,
        at: usize,
        last: bool,
        question: Option<Pending<Vec<f32>>>,
    ) -> Result<Made<T::Net>, TrainError> {
        let (rank, step) = (self.ranks.seat().rank as u64, self.steps);
        let rate = self.pace.at(step);
        self.distributed.begin(rate.into())?;
        let begin = Instant::now();
        let watch = self.distributed.watch();
        let mut pass = Pass::training(mix(self.settings.seed ^ mix(step ^ mix(rank)))).watched(&watch);
        let loss = self.task.loss(&net, &mut pass, epoch, at);
        let value = values(&untape(loss.clone()))[0];
        if !value.is_finite() {
            return Err(TrainError::Diverged { step, loss: value, rate });
        }
        let stops = question.map_or(Ok(false), |question| self.ranks.answer(question))?;
        let forward = begin.elapsed();
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        drop(loss);
        let backward = begin.elapsed() - forward;
        let behind = Instant::now();
        let mut net = self.distributed.step(rate.into(), net, gradients)?;
        if last {
            net = self.distributed.agree(net)?;
        }
        let exchanged = self.distributed.local().is_none_or(|local| local.since() == 0);
        self.steps += 1;
        self.count(value, [forward, backward, behind.elapsed(), begin.elapsed()], exchanged);
        Ok(Made { net, stops, exchanged })
    }

    /// Adds a finished step to all sums.
    fn count(&mut self, loss: f32, times: [Duration; 4], exchanged: bool) {
        let nothing = StepStats::default();
        let stats = if exchanged { self.distributed.synchronizer().stats() } else { &nothing };
        let all = stats.total();
        let [forward, backward, behind, total] = times.map(|time| time.as_secs_f64());
        let seconds = Seconds {
            forward,
            backward,
            select: all.select_ms / 1e3,
            encode: all.encode_ms / 1e3,
            exchange: stats.exposed_ms / 1e3,
            decode: all.decode_ms / 1e3,
            apply: all.apply_ms / 1e3,
            update: (behind - (all.apply_ms + stats.exposed_ms) / 1e3).max(0.0),
            total,
        };
        self.epoch.add(loss, &seconds, all.bytes_sent);
        self.recent.add(loss, &seconds, all.bytes_sent);
        self.seconds.add(&seconds);
        self.traffic.add(&stats.traffic);
    }

    fn interrupt(mut self, net: &T::Net) -> Result<Ended, TrainError> {
        let dir = self.settings.checkpoint_dir.as_ref().or(self.settings.rescue_dir.as_ref()).cloned();
        if let Some(dir) = &dir {
            self.save(net, dir)?;
        }
        let summary = self.interim_summary(net)?;
        Ok(Ended { summary, interrupted: Some((self.steps, dir)) })
    }
}

/// Spreads the bits of a number: neighbours get unlike results.
fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

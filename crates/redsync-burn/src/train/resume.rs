//! What of a training is kept in a checkpoint, and how it goes on from one.
//! What must hold: a run goes on to the bits of one that never stopped; with another number of ranks it goes on with the same
//! weights, statistics and rows. What is of another run is refused, and what differs is named.

use super::checkpoint::{self, Contents, MODEL, WORKER};
use super::ranks::Op;
use super::task::{Seat, Task};
use super::trainer::Trainer;
use super::{Settings, TrainError};
use crate::Lasting;
use redsync_engine::file::About;
use redsync_engine::state::{Identity, difference};
use redsync_engine::{Exchange, Local, Traffic};
use std::path::{Path, PathBuf};

/// Stands before what a run is in the description of its weights.
const RUN: &str = "run/";

/// In which order a transformer sees the windows of a text.
const WINDOWS: &str = "windows";

/// A checkpoint to go on from: its place, and the file that is the same for all ranks, read and found to be of this run.
pub(super) struct Kept {
    place: PathBuf,
    model: Contents,
}

impl Kept {
    /// The size below which layers are dense.
    pub fn dense_below(&self) -> Result<usize, TrainError> {
        self.model.number("dense-below")
    }

    /// How messages travel; an older run gathered them.
    pub fn exchange(&self) -> Exchange {
        let name = self.model.about().get("exchange");
        name.and_then(|name| Exchange::from_name(name)).unwrap_or(Exchange::Gather)
    }
}

/// The checkpoint to go on from, if told to; otherwise sees to it that none is overwritten.
pub(super) fn find(settings: &Settings, ranks: usize) -> Result<Option<Kept>, TrainError> {
    let Some(dir) = &settings.checkpoint_dir else { return Ok(None) };
    match (checkpoint::latest(dir)?, settings.resume) {
        (Some(place), true) => {
            let model = Contents::read(place.join(checkpoint::MODEL_FILE), MODEL)?;
            check_identity(settings, ranks, &model)?;
            Ok(Some(Kept { place, model }))
        }
        (None, true) => Err(checkpoint::wrong(dir, "there is none to resume from")),
        (Some(_), false) => {
            let why = "is there already: continue it with --resume, or give another --checkpoint-dir";
            Err(checkpoint::wrong(dir, why))
        }
        (None, false) => Ok(None),
    }
}

/// What must be the same on all ranks, and for a run to go on as if it had never stopped. The first that differs is named, and
/// another model or other data bring other values of their own. Which layers are compressed, and how, the synchronizer compares.
pub(super) fn identity(settings: &Settings, ranks: usize) -> Identity {
    let s = settings;
    let limit = |limit: Option<usize>| limit.map_or("none".into(), |limit| limit.to_string());
    let windows = s.takes_bytes().then(|| (WINDOWS, "in random order".into()));
    let all = [
        ("model", s.model.clone()),
        ("data", s.data.clone()),
        ("method", s.method.name().into()),
        ("density", s.density.to_string()),
        ("auto", s.auto.to_string()),
        ("every", s.every.map_or("none".into(), |every| every.to_string())),
        ("outer-rate", s.outer_rate.to_string()),
        ("keep", s.keep.to_string()),
        ("warm-up", s.warm_up.name().into()),
        ("warm-up-epochs", s.warm_up.epochs().to_string()),
        ("seed", s.seed.to_string()),
        ("global-batch", (s.batch_size * ranks).to_string()),
        ("bptt", s.bptt.to_string()),
        ("epochs", s.epochs.to_string()),
        ("optimizer", s.optimizer.name().into()),
        ("momentum", s.momentum.to_string()),
        ("beta2", s.beta2.to_string()),
        ("lr", s.lr.to_string()),
        ("schedule", s.schedule.name().into()),
        ("lr-warm-up-epochs", s.lr_warm_up_epochs.to_string()),
        ("weight-decay", s.weight_decay.to_string()),
        ("clip", s.clip.map_or("none".into(), |clip| clip.to_string())),
        ("train-limit", limit(s.train_limit)),
        ("test-limit", limit(s.test_limit)),
    ];
    all.into_iter().chain(windows).map(|(name, value)| (name.to_string(), value)).collect()
}

fn check_identity(settings: &Settings, ranks: usize, model: &Contents) -> Result<(), TrainError> {
    let entry = |(key, value): (&String, &String)| Some((key.strip_prefix(RUN)?.to_string(), value.clone()));
    let mut was: Identity = model.about().iter().filter_map(entry).collect();
    // Where it is not said, the run is older than another order than that of the text.
    if !was.iter().any(|(name, _)| name == WINDOWS) {
        was.push((WINDOWS.into(), "in the order of the text".into()));
    }
    match difference(&was, &identity(settings, ranks)) {
        None => Ok(()),
        Some(difference) => Err(model.wrong(format!("is of another run: {difference}"))),
    }
}

/// A description.
fn about<const N: usize>(entries: [(&str, String); N]) -> About {
    entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

impl<T: Task> Trainer<'_, T> {
    /// Keeps a checkpoint. All ranks call this at the same step.
    pub(super) fn save(&mut self, net: &T::Net, dir: &Path) -> Result<(), TrainError> {
        let step = self.steps;
        let place = checkpoint::place(dir, step);
        std::fs::create_dir_all(&place)
            .map_err(|source| TrainError::Write { path: place.clone(), source })?;
        let hash = self.distributed.check(net)?;
        let Seat { rank, ranks } = self.ranks.seat();
        if rank == 0 {
            self.write_model(net, &place, hash)?;
        }
        self.write_worker(net, &place, hash)?;
        self.sync().save(&place, hash, Vec::new())?;
        self.ranks.barrier(step, Op::Saved)?;
        if rank == 0 {
            check_shared(&place, ranks)?;
            checkpoint::complete(dir, step)?;
        }
        self.ranks.barrier(step, Op::Clear)
    }

    fn write_model(&self, net: &T::Net, place: &Path, hash: u64) -> Result<(), TrainError> {
        let (factor, best) = self.pace.plateau;
        let mut about = about([
            ("dense-below", self.sync().dense_below().to_string()),
            ("exchange", self.sync().exchange().name().to_string()),
            ("step", self.steps.to_string()),
            ("exchanges", self.sync().step().to_string()),
            ("replica-hash", format!("{hash:016x}")),
            ("plateau-factor", factor.to_string()),
            ("plateau-best", best.to_string()),
            ("records", checkpoint::write_epochs(&self.records)),
            ("seconds", serde_json::json!(self.seconds).to_string()),
        ]);
        let identity = identity(self.settings, self.ranks.seat().ranks);
        about.extend(identity.into_iter().map(|(key, value)| (format!("{RUN}{key}"), value)));
        // Weights that are the same on all ranks, and moments where these are.
        let write = |shared: &[&[f32]], moments: &[(String, &[f32])]| {
            let names = self.sync().layers().iter().map(|layer| layer.name.clone());
            let tensors: Vec<_> = names.zip(shared.iter().copied()).chain(moments.iter().cloned()).collect();
            checkpoint::write(&place.join(checkpoint::MODEL_FILE), MODEL, &about, &tensors)
        };
        match self.distributed.local() {
            Some(local) => write(&local.shared(), &[]),
            None => {
                let moments: Vec<_> = self.distributed.optimizer().moments().collect();
                self.distributed.read(net, |weights| write(weights, &moments))?
            }
        }
    }

    /// Steps since the ranks had the same weights.
    fn since_exchange(&self) -> u64 {
        self.distributed.local().map_or(0, Local::since)
    }

    fn write_worker(&mut self, net: &T::Net, place: &Path, hash: u64) -> Result<(), TrainError> {
        let Seat { rank, ranks } = self.ranks.seat();
        let about = about([
            ("ranks", ranks.to_string()),
            ("samples", self.settings.batch_size.to_string()),
            ("step", self.steps.to_string()),
            ("since-exchange", self.since_exchange().to_string()),
            ("replica-hash", format!("{hash:016x}")),
            ("epoch-steps", self.epoch.steps.to_string()),
            ("epoch-loss", self.epoch.loss.to_string()),
            ("epoch-seconds", self.epoch.seconds.total.to_string()),
            ("sent-bytes", self.traffic.sent().to_string()),
            ("traffic", serde_json::json!(self.traffic).to_string()),
        ]);
        let between = self.since_exchange() > 0;
        let statistics = self.distributed.statistics(net)?;
        let (distributed, rows) = (&self.distributed, self.task.rows());
        let rows: Vec<(String, &[f32])> = rows.into_iter().map(|(name, values)| (name, &*values)).collect();
        let write = |weights: &[&[f32]]| {
            let statistics = statistics.iter().enumerate();
            let mut tensors: Vec<(String, &[f32])> =
                statistics.map(|(number, values)| (format!("running/{number}"), &values[..])).collect();
            if distributed.local().is_some() {
                tensors.extend(distributed.optimizer().moments());
            }
            if between {
                let names = distributed.synchronizer().layers().iter().map(|layer| &layer.name);
                tensors.extend(names.zip(weights).map(|(name, values)| (format!("own/{name}"), *values)));
            }
            tensors.extend(rows.iter().cloned());
            checkpoint::write(&checkpoint::worker_file(place, rank), WORKER, &about, &tensors)
        };
        distributed.read(net, write)?
    }

    /// Goes on from a checkpoint, with the weights of which the network comes back.
    pub(super) fn resume(&mut self, net: T::Net, kept: Kept) -> Result<T::Net, TrainError> {
        let Kept { place, mut model } = kept;
        let layers = self.sync().layers().iter();
        let weights = layers.map(|layer| model.take(&layer.name, layer.size));
        let weights = weights.collect::<Result<Vec<_>, _>>()?;
        self.distributed.restore(|Lasting { optimizer, .. }| {
            optimizer.restore(|name, size| mean(name, size, std::slice::from_mut(&mut model)))
        })?;
        model.check_empty()?;
        let damaged = |what: &str| model.wrong(format!("is damaged: its {what} cannot be read"));
        let hash = model.text("replica-hash")?;
        let hash = u64::from_str_radix(hash, 16).map_err(|_| damaged("replica-hash"))?;
        let records = checkpoint::read_epochs(model.text("records")?).ok_or_else(|| damaged("records"))?;
        let seconds = serde_json::from_str(model.text("seconds")?).map_err(|_| damaged("seconds"))?;
        let plateau = (model.number("plateau-factor")?, model.number("plateau-best")?);
        self.steps = model.number("step")?;
        let net = self.distributed.write(net, &weights)?;
        let net = self.resume_worker(net, &place, &model, weights)?;
        self.distributed.restore(|Lasting { synchronizer, .. }| synchronizer.load_for(&place, hash))?;
        (self.records, self.seconds, self.pace.plateau) = (records, seconds, plateau);
        // Older files are of runs that exchanged at every step.
        let exchanges = if model.about().contains_key("exchanges") { "exchanges" } else { "step" };
        let exchanges: u64 = model.number(exchanges)?;
        match self.distributed.check(&net)? == hash && exchanges == self.sync().step() {
            true => Ok(net),
            false => Err(model.wrong("does not belong to the residuals beside it")),
        }
    }

    /// This rank's own part; with another number of ranks, the counters and statistics of the first, the mean loss, and of the rows
    /// of all ranks, one behind the other, those that are its own.
    fn resume_worker(
        &mut self,
        net: T::Net,
        place: &Path,
        model: &Contents,
        shared: Vec<Vec<f32>>,
    ) -> Result<T::Net, TrainError> {
        let (Seat { rank, ranks }, batch) = (self.ranks.seat(), self.settings.batch_size);
        let first = Contents::read(checkpoint::worker_file(place, 0), WORKER)?;
        let (old_ranks, old_batch): (usize, usize) = (first.number("ranks")?, first.number("samples")?);
        if old_ranks == 0 || old_batch == 0 || old_ranks.checked_mul(old_batch) != Some(ranks * batch) {
            return Err(first.wrong("is of another number of workers than it says"));
        }
        let mut files = match old_ranks == ranks {
            true => vec![own_or_first(first, place, rank)?],
            false => all_of_them(first, place, old_ranks)?,
        };
        for file in &files {
            for key in ["step", "replica-hash"] {
                if file.text(key)? != model.text(key)? {
                    return Err(file.wrong("does not belong to the weights beside it"));
                }
            }
        }
        let begin = if old_ranks == ranks { 0 } else { rank * batch };
        for (name, part) in self.task.rows() {
            let row = part.len() / batch;
            let mut rows = Vec::new();
            for file in &mut files {
                rows.extend(file.take(&name, old_batch * row)?);
            }
            part.copy_from_slice(&rows[begin * row..][..part.len()]);
        }
        let mut net = net;
        if self.distributed.local().is_some() {
            let since = files[0].number("since-exchange")?;
            if since > 0 && old_ranks != ranks {
                let why =
                    "was kept between two exchanges of local steps: resume with the same number of workers";
                return Err(files[0].wrong(why));
            }
            if since > 0 {
                let layers = self.sync().layers().iter();
                let own = layers.map(|layer| files[0].take(&format!("own/{}", layer.name), layer.size));
                net = self.distributed.write(net, &own.collect::<Result<Vec<_>, _>>()?)?;
            }
            let made = self.steps;
            self.distributed.restore(|Lasting { optimizer, local, .. }| -> Result<(), TrainError> {
                if let Some((local, steps)) = local {
                    local.restore(shared, since)?;
                    *steps = made;
                }
                optimizer.restore(|name, size| mean(name, size, &mut files))
            })?;
        }
        let own = &mut files[0];
        let statistics = self.distributed.statistics(&net)?.into_iter().enumerate();
        let statistics = statistics.map(|(at, values)| own.take(&format!("running/{at}"), values.len()));
        net = self.distributed.with_statistics(net, statistics.collect::<Result<_, _>>()?)?;
        own.check_empty()?;
        self.epoch.steps = own.number("epoch-steps")?;
        self.epoch.seconds.total = own.number("epoch-seconds")?;
        self.traffic = match own.about().get("traffic") {
            Some(text) => {
                serde_json::from_str(text).map_err(|_| own.wrong("is damaged: its traffic cannot be read"))?
            }
            // An older file says how much was sent, not of what.
            None => Traffic {
                messages: own.number("sent-bytes")?,
                dense: own.number::<u64>("step")? * 4 * self.parameters() as u64,
                ..Traffic::default()
            },
        };
        let losses = files.iter().map(|file| file.number("epoch-loss")).collect::<Result<Vec<f64>, _>>()?;
        self.epoch.loss = losses.iter().sum::<f64>() / losses.len() as f64;
        Ok(net)
    }
}

/// The mean of what several ranks have gathered under a name; None if they have nothing.
fn mean(name: &str, size: usize, files: &mut [Contents]) -> Result<Option<Vec<f32>>, TrainError> {
    let share = 1.0 / files.len() as f32;
    let mut sum: Option<Vec<f32>> = None;
    for file in files.iter_mut().filter(|file| file.has(name)) {
        let more = file.take(name, size)?;
        match &mut sum {
            None => sum = Some(more),
            Some(sum) => sum.iter_mut().zip(&more).for_each(|(sum, x)| *sum += x),
        }
    }
    sum.iter_mut().flatten().for_each(|x| *x *= share);
    Ok(sum)
}

/// This rank's file, of which the first one is read already.
fn own_or_first(first: Contents, place: &Path, rank: usize) -> Result<Contents, TrainError> {
    if rank == 0 { Ok(first) } else { Contents::read(checkpoint::worker_file(place, rank), WORKER) }
}

/// The files of all ranks, of which the first one is read already.
fn all_of_them(first: Contents, place: &Path, ranks: usize) -> Result<Vec<Contents>, TrainError> {
    let rest = (1..ranks).map(|rank| Contents::read(checkpoint::worker_file(place, rank), WORKER));
    std::iter::once(Ok(first)).chain(rest).collect()
}

/// Rank 0 must see what all others wrote, or nobody could resume.
fn check_shared(place: &Path, ranks: usize) -> Result<(), TrainError> {
    match (0..ranks).find(|rank| !checkpoint::worker_file(place, *rank).is_file()) {
        None => Ok(()),
        Some(rank) => {
            let why = format!("is not shared by all workers: what rank {rank} wrote is not there");
            Err(checkpoint::wrong(place, why))
        }
    }
}

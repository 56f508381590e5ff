//! `redsync bench sync`: steps of a whole synchronizer among ranks, on threads or on MPI.

use super::{data, grouped, median, parse_density, print_json, progress, table};
use crate::plan::measured;
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use rand_distr::{Distribution, StandardNormal};
use redsync_comm::{Communicator, local, mpi};
use redsync_core::Density;
use redsync_engine::cost::Compute;
use redsync_engine::models::Model;
use redsync_engine::{
    Choice, Config, Fault, Figures, Kind, Layer, LayerStats, Method, Mode, Preset, StepStats, Synchronizer,
    Window, replica_hash,
};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Gradients are windows of one buffer of noise, at offsets up to this: fresh at every step, for free.
const OFFSETS: u64 = 1 << 20;
const LEARNING_RATE: f32 = 0.01;

#[derive(Clone, Copy, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Comm {
    /// Threads of this process
    Local,
    /// Processes started by mpirun
    Mpi,
}

#[derive(Clone, Debug, Args)]
pub struct Sync {
    /// What the ranks are
    #[arg(long, value_enum, default_value_t = Comm::Local)]
    comm: Comm,
    /// Ranks, with --comm local [default: 4]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: Option<u16>,
    /// Model whose layer sizes are used: vgg16-cifar, resnet44, alexnet, vgg16, resnet50, lstm-ptb, lstm-wiki2
    #[arg(long, default_value = "vgg16-cifar", value_parser = parse_model)]
    model: String,
    /// sgd, rgc, rgc+asq or rgc-naive
    #[arg(long, default_value = "rgc+asq", value_parser = parse_method)]
    method: Method,
    /// Treat layers as in the paper: trimmed or threshold selection, 32-bit indices
    #[arg(long)]
    paper: bool,
    /// Measure machine and network first, and compress only what is then predicted to be faster so
    #[arg(long, conflicts_with = "paper")]
    auto: bool,
    /// Fraction of a compressed layer that is sent
    #[arg(long, default_value = "0.001", value_parser = parse_density)]
    density: Density,
    /// Steps that are measured
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps before the measured ones, in which buffers grow and thresholds settle
    #[arg(long, default_value_t = 3)]
    settle: u64,
    /// Length of the backward pass that is played, in milliseconds
    #[arg(long, default_value_t = 0.0, value_parser = parse_ms)]
    compute_ms: f64,
    /// Longest wait for other ranks, in seconds
    #[arg(long, default_value_t = 60.0, value_parser = parse_ms)]
    deadline: f64,
    /// Compare the replicas of all ranks every so many steps; always at the end
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    check_every: u64,
    /// Directory for checkpoints
    #[arg(long)]
    checkpoint_dir: Option<PathBuf>,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    /// Continue from the last checkpoint in --checkpoint-dir; --steps counts from the very beginning
    #[arg(long, requires = "checkpoint_dir")]
    resume: bool,
    /// For fault tests: rank 1 damages its frames at this step
    #[arg(long, hide = true)]
    damage_at: Option<u64>,
    /// For fault tests: rank 1 says that it speaks another version of the wire format
    #[arg(long, hide = true)]
    other_version: bool,
    /// Seed of the gradients
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    ranks: usize,
    model: String,
    method: &'static str,
    auto: bool,
    compressed_layers: usize,
    comm: Comm,
    /// Of one rank: its messages and its dense gradients, each counted once.
    bytes_sent_per_step: u64,
    dense_bytes_per_step: u64,
    /// The part of both that compressed layers have.
    compressed_bytes_sent: u64,
    compressed_dense_bytes: u64,
    sync_ms: f64,
    step_ms: f64,
    hidden_fraction: f64,
    breakdown: Breakdown,
    steps: u64,
    replica_hash: String,
}

#[derive(Debug, Serialize)]
struct Breakdown {
    select: f64,
    encode: f64,
    /// What is left of the step: waiting for the network.
    exchange: f64,
    decode: f64,
    apply: f64,
}

pub(crate) fn parse_model(name: &str) -> Result<String, String> {
    Model::named(name).map(|model| model.name.to_string()).map_err(|error| error.to_string())
}

fn parse_method(name: &str) -> Result<Method, String> {
    let names = || Method::ALL.map(Method::name).join(", ");
    Method::from_name(name).ok_or_else(|| format!("expected one of {}", names()))
}

pub(crate) fn parse_ms(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_string())?;
    if (0.0..=1e9).contains(&value) {
        Ok(value)
    } else {
        Err("expected a number that is not negative".into())
    }
}

impl Sync {
    pub fn run(self) -> Result<()> {
        let report = match self.comm {
            Comm::Local => self.run_local()?,
            Comm::Mpi => self.run_mpi()?,
        };
        match report {
            Some(report) if self.json => print_json(&report),
            Some(report) => {
                self.print(&report);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// All ranks are threads; the first error that has a cause of its own is the one that is told.
    fn run_local(&self) -> Result<Option<Report>> {
        let noise = self.noise()?;
        let ranks = usize::from(self.ranks.unwrap_or(4));
        let threads: Vec<_> = local::group(ranks)
            .into_iter()
            .map(|comm| {
                let (bench, noise) = (self.clone(), noise.clone());
                std::thread::spawn(move || bench.run_rank(Arc::new(comm), noise))
            })
            .collect();
        let join = |thread: std::thread::JoinHandle<Result<Option<Report>>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked")))
        };
        let mut report = None;
        let mut errors = Vec::new();
        for (rank, outcome) in threads.into_iter().map(join).enumerate() {
            match outcome {
                Ok(outcome) => report = report.or(outcome),
                Err(error) => errors.push(format!("rank {rank}: {error:#}")),
            }
        }
        if errors.is_empty() { Ok(report) } else { bail!(errors.join("\nredsync: ")) }
    }

    fn run_mpi(&self) -> Result<Option<Report>> {
        let comm: Arc<dyn Communicator> = Arc::new(mpi::world()?);
        if let Some(ranks) = self.ranks.filter(|ranks| usize::from(*ranks) != comm.size()) {
            bail!(
                "mpirun started {} ranks, --ranks says {ranks}: is it the mpirun of another MPI?",
                comm.size()
            );
        }
        let rank = comm.rank();
        let outcome = self.noise().and_then(|noise| self.run_rank(comm.clone(), noise));
        if let Err(error) = outcome {
            // Before the communicator goes: mpirun ends the other ranks when the first one fails.
            crate::complain(&format!("rank {rank}: {error:#}"));
            drop(comm);
            std::process::exit(1);
        }
        outcome
    }

    /// One buffer of noise, longer than the largest layer by the range of offsets.
    fn noise(&self) -> Result<Arc<Vec<f32>>> {
        let largest = Model::named(&self.model)?.layers.iter().map(|layer| layer.size).max().unwrap_or(0);
        let mut random = data::generator(self.seed, 0, 0);
        Ok(Arc::new((0..largest + OFFSETS as usize).map(|_| StandardNormal.sample(&mut random)).collect()))
    }

    fn config(&self, rank: usize, recurrent: bool) -> Config {
        Config {
            method: self.method,
            preset: if self.paper { Preset::Paper } else { Preset::Auto },
            density: self.density.fraction(),
            mode: if recurrent { Mode::Rnn { clip: Some(0.25) } } else { Mode::Cnn },
            deadline: Duration::from_secs_f64(self.deadline),
            fault: self.fault().filter(|_| rank == 1),
            ..Config::default()
        }
    }

    fn fault(&self) -> Option<Fault> {
        self.damage_at.map(Fault::DamageAt).or(self.other_version.then_some(Fault::OtherVersion))
    }

    /// Everything that one rank does; rank 0 gets a report.
    fn run_rank(&self, comm: Arc<dyn Communicator>, noise: Arc<Vec<f32>>) -> Result<Option<Report>> {
        let model = Model::named(&self.model)?;
        let (rank, ranks) = (comm.rank(), comm.size());
        let mut config = self.config(rank, model.recurrent);
        if self.auto {
            let platform = measured(comm.clone(), &config)?;
            let backward = self.compute_ms / 1e3;
            config.figures = Some(Figures { platform, compute: Compute { backward, ..Compute::default() } });
        }
        let sync = Synchronizer::new(model.layers.clone(), config, comm)?;
        let weights = model.layers.iter().map(|layer| vec![0.0; layer.size]).collect();
        let mut player = Player { bench: self, sync, weights, noise, rank };
        if self.resume {
            player.resume()?;
        }
        let played = if self.compute_ms > 0.0 { 2 } else { 1 };
        let bar = progress((self.settle + self.steps) * played, "synchronizing");
        if rank != 0 {
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
        let alone = player.steps(self.settle + self.steps, Duration::ZERO, &bar)?;
        let compute = Duration::from_secs_f64(self.compute_ms / 1e3);
        let overlapped = match played {
            2 => Some(player.steps(2 * (self.settle + self.steps), compute, &bar)?),
            _ => None,
        };
        bar.finish_and_clear();
        let hash = player.check()?;
        let choices = player.sync.choices().to_vec();
        Ok((rank == 0)
            .then(|| self.report(ranks, &model.layers, &choices, &alone, overlapped.as_deref(), hash)))
    }

    fn report(
        &self,
        ranks: usize,
        layers: &[Layer],
        choices: &[Choice],
        alone: &[Measured],
        overlapped: Option<&[Measured]>,
        hash: u64,
    ) -> Report {
        let middle = |of: &dyn Fn(&Measured) -> f64, steps: &[Measured]| {
            median(&mut steps.iter().map(of).collect::<Vec<_>>())
        };
        let part = |of: fn(&LayerStats) -> f64| middle(&|m| of(&m.stats.total()), alone);
        let sync_ms = middle(&|m| m.ms, alone);
        let step_ms = overlapped.map_or(sync_ms, |steps| middle(&|m| m.ms, steps));
        let exposed = (step_ms - self.compute_ms).max(0.0);
        let hidden_fraction =
            if overlapped.is_some() { (1.0 - exposed / sync_ms).clamp(0.0, 1.0) } else { 0.0 };
        let [select, encode, decode, apply] =
            [part(|s| s.select_ms), part(|s| s.encode_ms), part(|s| s.decode_ms), part(|s| s.apply_ms)];
        let exchange = (sync_ms - select - encode - decode - apply).max(0.0);
        let last = alone.last().map(|m| &m.stats.layers[..]).unwrap_or(&[]);
        let compressed = |i: &usize| choices[*i] != Choice::Dense;
        Report {
            ranks,
            model: self.model.clone(),
            method: self.method.name(),
            auto: self.auto,
            compressed_layers: (0..layers.len()).filter(compressed).count(),
            comm: self.comm,
            bytes_sent_per_step: last.iter().map(|s| s.bytes_sent).sum(),
            dense_bytes_per_step: layers.iter().map(|layer| 4 * layer.size as u64).sum(),
            compressed_bytes_sent: (0..last.len()).filter(compressed).map(|i| last[i].bytes_sent).sum(),
            compressed_dense_bytes: (0..layers.len())
                .filter(compressed)
                .map(|i| 4 * layers[i].size as u64)
                .sum(),
            sync_ms,
            step_ms,
            hidden_fraction,
            breakdown: Breakdown { select, encode, exchange, decode, apply },
            steps: self.steps,
            replica_hash: format!("{hash:016x}"),
        }
    }

    fn print(&self, report: &Report) {
        let ratio = report.dense_bytes_per_step as f64 / report.bytes_sent_per_step.max(1) as f64;
        crate::say!(
            "{} on {} {:?} ranks with {}: {} bytes sent per step, dense {} ({ratio:.0} times as much)",
            report.model,
            report.ranks,
            report.comm,
            report.method,
            grouped(report.bytes_sent_per_step as usize),
            grouped(report.dense_bytes_per_step as usize),
        );
        let mut out = table(&["phase", "median"]);
        let Breakdown { select, encode, exchange, decode, apply } = &report.breakdown;
        for (name, ms) in [
            ("select", select),
            ("encode", encode),
            ("wait for exchange", exchange),
            ("decode", decode),
            ("apply", apply),
            ("synchronization in all", &report.sync_ms),
        ] {
            out.add_row([name.to_string(), format!("{ms:.2} ms")]);
        }
        if self.compute_ms > 0.0 {
            let name = format!("step with {} ms of backward pass", self.compute_ms);
            out.add_row([name, format!("{:.2} ms", report.step_ms)]);
            out.add_row(["hidden behind it".to_string(), format!("{:.0}%", 100.0 * report.hidden_fraction)]);
        }
        crate::say!("{out}\nreplicas are equal on all ranks: {}", report.replica_hash);
    }
}

/// One measured step.
struct Measured {
    ms: f64,
    stats: StepStats,
}

/// One rank at work.
struct Player<'a> {
    bench: &'a Sync,
    sync: Synchronizer,
    weights: Vec<Vec<f32>>,
    noise: Arc<Vec<f32>>,
    rank: usize,
}

impl Player<'_> {
    /// Steps until so many were made since the beginning; the measured ones.
    fn steps(
        &mut self,
        until: u64,
        compute: Duration,
        bar: &indicatif::ProgressBar,
    ) -> Result<Vec<Measured>> {
        let mut measured = Vec::new();
        let begin = self.sync.step();
        while self.sync.step() < until {
            let step = self.sync.step();
            let start = Instant::now();
            self.step(step, compute)?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            if step >= begin + self.bench.settle {
                measured.push(Measured { ms, stats: self.sync.stats().clone() });
            }
            self.between(step + 1)?;
            bar.inc(1);
        }
        Ok(measured)
    }

    fn step(&mut self, step: u64, compute: Duration) -> Result<()> {
        let layers = self.sync.layers().to_vec();
        let computing = layers.iter().filter(|layer| layer.kind != Kind::BiasOrNorm).count();
        let share = compute.div_f64(computing.max(1) as f64);
        let start = Instant::now();
        let mut due = Duration::ZERO;
        for (number, layer) in layers.iter().enumerate().rev() {
            if layer.kind != Kind::BiasOrNorm {
                due += share;
                std::thread::sleep(due.saturating_sub(start.elapsed()));
            }
            let place = [step, number as u64, self.rank as u64].iter().fold(self.bench.seed, |hash, x| {
                (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
            });
            let offset = (place % OFFSETS) as usize;
            let range = offset..offset + layer.size;
            self.sync.submit(number, Window { buffer: self.noise.clone(), range })?;
        }
        self.sync.finish()?;
        for (number, weights) in self.weights.iter_mut().enumerate() {
            self.sync.apply(number, weights, LEARNING_RATE)?;
        }
        Ok(())
    }

    /// What is due between two steps, outside the measured time.
    fn between(&mut self, step: u64) -> Result<()> {
        if step.is_multiple_of(self.bench.check_every) {
            self.check()?;
        }
        match &self.bench.checkpoint_dir {
            Some(dir) if step.is_multiple_of(self.bench.checkpoint_every) => self.checkpoint(dir, step),
            _ => Ok(()),
        }
    }

    fn check(&self) -> Result<u64> {
        let weights: Vec<&[f32]> = self.weights.iter().map(Vec::as_slice).collect();
        Ok(self.sync.check_replicas(&weights)?)
    }

    /// A directory per step; `latest` names the last complete one.
    fn checkpoint(&self, dir: &Path, step: u64) -> Result<()> {
        let name = format!("step-{step:08}");
        let here = dir.join(&name);
        std::fs::create_dir_all(&here).with_context(|| format!("cannot create {}", here.display()))?;
        let weights: Vec<&[f32]> = self.weights.iter().map(Vec::as_slice).collect();
        let names = self.sync.layers().iter().map(|layer| layer.name.clone());
        self.sync.save(&here, replica_hash(&weights), names.zip(self.weights.iter().cloned()).collect())?;
        // When the replicas were compared, every rank has written its file.
        self.check()?;
        if self.rank == 0 {
            let (new, latest) = (dir.join(".latest.new"), dir.join("latest"));
            let old = std::fs::read_to_string(&latest).ok();
            let write = || {
                let mut file = std::fs::File::create(&new)?;
                file.write_all(name.as_bytes())?;
                file.sync_all()?;
                std::fs::rename(&new, &latest)?;
                // The new name has to be on the disk before the old checkpoint goes.
                std::fs::File::open(dir)?.sync_all()
            };
            write().with_context(|| format!("cannot write {}", latest.display()))?;
            if let Some(old) = old.filter(|old| *old != name && old.starts_with("step-")) {
                // An old checkpoint that cannot be removed costs space, nothing else.
                let _ = std::fs::remove_dir_all(dir.join(old));
            }
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<()> {
        let dir = self.bench.checkpoint_dir.as_deref().context("--resume needs --checkpoint-dir")?;
        let latest = dir.join("latest");
        let name =
            std::fs::read_to_string(&latest).with_context(|| format!("cannot read {}", latest.display()))?;
        let extra = self.sync.load(&dir.join(name.trim()))?;
        for ((name, values), (layer, weights)) in
            extra.into_iter().zip(self.sync.layers().iter().zip(&mut self.weights))
        {
            if name != layer.name || values.len() != weights.len() {
                bail!("layer {name} of the checkpoint does not fit layer {}", layer.name);
            }
            *weights = values;
        }
        Ok(())
    }
}

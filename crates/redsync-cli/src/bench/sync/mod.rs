//! `redsync bench sync`: steps of a whole synchronizer among ranks, on threads or on MPI. Options go in, each rank plays its steps,
//! rank 0 reports.

mod damage;
mod player;
mod report;

use super::{data, parse_density, print_json, progress};
use crate::plan::measured;
use crate::ranks;
use anyhow::Result;
use clap::{Args, ValueEnum};
use damage::{Damage, Damaging};
use player::{OFFSETS, Player};
use rand_distr::{Distribution, StandardNormal};
use redsync_comm::{Communicator, Tag};
use redsync_core::Density;
use redsync_engine::cost::Compute;
use redsync_engine::models::Model;
use redsync_engine::{Config, Exchange, Figures, Method, Preset, Synchronizer, host_of};
use report::Report;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

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
    /// Model whose layer sizes are used: digits-cnn, vgg16-cifar, resnet44, alexnet, vgg16, resnet50, lstm-ptb, lstm-wiki2,
    /// gpt-tiny, gpt-small
    #[arg(long, default_value = "vgg16-cifar", value_parser = parse_model)]
    model: String,
    /// sgd, rgc, rgc+2bit, rgc+asq or rgc-naive
    #[arg(long, default_value = "rgc+asq", value_parser = parse_method)]
    method: Method,
    /// How messages travel: gather (every rank receives every rank's), owners (every element has an owner, who adds what all sent and
    /// sends on the largest: what a rank receives does not grow with the number of ranks) or hosts (ranks of one host sum their
    /// gradients densely, and a host sends what a single rank would)
    /// [default: gather; with --auto what is predicted to be faster]
    #[arg(long, value_parser = parse_exchange)]
    exchange: Option<Exchange>,
    /// With --exchange hosts: ranks on each host, one after the other [default: those on the same machine]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks_per_host: Option<u16>,
    /// Treat layers as in the paper: trimmed or threshold selection, 32-bit indices
    #[arg(long)]
    paper: bool,
    /// Measure machine and network first, and compress only the layers for which that is predicted to be faster
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

pub(crate) fn parse_model(name: &str) -> Result<String, String> {
    Model::named(name).map(|model| model.name.to_string()).map_err(|error| error.to_string())
}

fn parse_method(name: &str) -> Result<Method, String> {
    let names = || Method::ALL.map(Method::name).join(", ");
    Method::from_name(name).ok_or_else(|| format!("expected one of {}", names()))
}

pub(crate) fn parse_exchange(name: &str) -> Result<Exchange, String> {
    let names = || Exchange::ALL.map(Exchange::name).join(", ");
    Exchange::from_name(name).ok_or_else(|| format!("expected one of {}", names()))
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
        let noise = self.noise()?;
        let ranks = self.ranks.map(usize::from);
        let bench = self.clone();
        let work = move |comm| bench.run_rank(comm, noise.clone());
        let report = match self.comm {
            Comm::Local => ranks::on_threads(ranks.unwrap_or(4), work)?,
            Comm::Mpi => ranks::on_mpi("ranks", ranks, work)?.flatten(),
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

    /// One buffer of noise, longer than the largest layer by the range of offsets.
    fn noise(&self) -> Result<Arc<Vec<f32>>> {
        let largest = Model::named(&self.model)?.layers.iter().map(|layer| layer.size).max().unwrap_or(0);
        let mut random = data::generator(self.seed, 0, 0);
        Ok(Arc::new((0..largest + OFFSETS as usize).map(|_| StandardNormal.sample(&mut random)).collect()))
    }

    fn config(&self, recurrent: bool) -> Config {
        Config {
            method: self.method,
            preset: if self.paper { Preset::Paper { recurrent } } else { Preset::Carried },
            exchange: self.exchange,
            density: self.density.fraction(),
            clip: recurrent.then_some(0.25),
            deadline: Duration::from_secs_f64(self.deadline),
            ..Config::default()
        }
    }

    /// What this rank speaks through: rank 1 does wrong what the hidden options tell it to.
    fn speaker(&self, comm: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        let damage = self.damage_at.map(Damage::At).or(self.other_version.then_some(Damage::OtherVersion));
        match damage.filter(|_| comm.rank() == 1) {
            Some(damage) => Arc::new(Damaging::new(comm, damage)),
            None => comm,
        }
    }

    /// Everything that one rank does; rank 0 gets a report.
    fn run_rank(&self, comm: Arc<dyn Communicator>, noise: Arc<Vec<f32>>) -> Result<Option<Report>> {
        let (model, comm) = (Model::named(&self.model)?, self.speaker(comm));
        let (rank, ranks) = (comm.rank(), comm.size());
        let mut config = self.config(model.recurrent);
        config.host = host_of(&*comm, self.ranks_per_host.map(usize::from));
        if self.auto {
            let platform = measured(comm.clone(), &config)?;
            let backward = self.compute_ms / 1e3;
            config.figures = Some(Figures { platform, compute: Compute { backward, ..Compute::default() } });
        }
        let speaker = comm.clone();
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
        let exchange = player.sync.exchange().name();
        let own = alone.last().map_or(0, |measured| measured.stats.total().bytes_received);
        let received = most(&*speaker, own, Duration::from_secs_f64(self.deadline))?;
        Ok((rank == 0).then(|| {
            self.report(
                ranks,
                &model.layers,
                &choices,
                &alone,
                overlapped.as_deref(),
                (exchange, received, hash),
            )
        }))
    }
}

/// The largest of a number that every rank has.
fn most(comm: &dyn Communicator, own: u64, deadline: Duration) -> Result<u64> {
    let all = comm.allgather(Tag { step: 0, op: u32::MAX - 4 }, own.to_le_bytes().to_vec()).wait(deadline)?;
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    Ok(all.iter().map(number).max().unwrap_or(own))
}

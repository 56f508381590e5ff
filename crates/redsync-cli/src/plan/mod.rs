//! `redsync plan`: will compression help here, for which layers, and by how much?
//! Comes in: a model, and a network that is measured through an engine or described. Goes out: a choice per layer with its
//! reason, predicted step times, a verdict.

mod layers;
pub mod predict;

use crate::bench::{
    Comm, grouped, parse_density, parse_exchange, parse_model, parse_ms, print_json, progress, table,
};
use crate::{platform, ranks};
use anyhow::Result;
use clap::Args;
use predict::{Answer, Question};
use redsync_comm::Communicator;
use redsync_core::{Adam, Density, Momentum};
use redsync_engine::cost::{Compute, Platform};
use redsync_engine::models::Model;
use redsync_engine::{Config, Exchange, Layer, Method, Preset, Rest, measure};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// The model, as several commands take it.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model whose layer sizes are used: digits-cnn, vgg16-cifar, resnet44, alexnet, vgg16, resnet50, lstm-ptb, lstm-wiki2,
    /// gpt-tiny, gpt-small
    #[arg(long, default_value = "vgg16-cifar", value_parser = parse_model)]
    pub model: String,
    /// File with one line per parameter tensor, its name and its shape, instead of --model; in PyTorch:
    /// for name, p in model.named_parameters(): print(name, *(p.shape or (1,)))
    #[arg(long, conflicts_with = "model")]
    pub layers: Option<PathBuf>,
    /// Fraction of a compressed layer that is sent [default: 0.001; 0.01 with adamw]
    #[arg(long, value_parser = parse_density)]
    pub density: Option<Density>,
    /// Optimizer of the training; adamw sends values in two bits each, and the output layer whole where that is cheap
    #[arg(long, value_enum, default_value_t = OptimizerArg::Sgd)]
    pub optimizer: OptimizerArg,
    /// How messages travel: gather, owners or hosts [default: what is predicted to be faster]
    #[arg(long, value_parser = parse_exchange)]
    pub exchange: Option<Exchange>,
    /// Ranks that share a host and its link, where the network is described and not measured [default: as the platform says, or 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub ranks_per_host: Option<u16>,
}

/// Optimizers that differ in what they send; momentum does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OptimizerArg {
    Sgd,
    Adamw,
}

impl OptimizerArg {
    /// The method that suits it.
    pub fn method(self) -> Method {
        match self {
            OptimizerArg::Sgd => Method::RgcAsq,
            OptimizerArg::Adamw => Method::RgcTwoBit,
        }
    }
}

impl ModelArgs {
    /// Its name, its layers, and whether it is recurrent.
    pub fn resolve(&self) -> Result<(String, Vec<Layer>, bool)> {
        match &self.layers {
            Some(path) => Ok((path.display().to_string(), layers::read(path).map_err(refused)?, false)),
            None => {
                let model = Model::named(&self.model)?;
                Ok((self.model.clone(), model.layers, model.recurrent))
            }
        }
    }

    /// The fraction that is sent.
    pub fn fraction(&self) -> f64 {
        let usual = if self.optimizer == OptimizerArg::Adamw { 0.01 } else { 0.001 };
        self.density.map_or(usual, Density::fraction)
    }

    /// A described platform, on whose hosts there are as many ranks as was said.
    pub fn on_hosts(&self, platform: Platform) -> Platform {
        let ranks_per_host = self.ranks_per_host.map_or(platform.ranks_per_host, usize::from);
        Platform { ranks_per_host, ..platform }
    }

    /// The configuration that predictions start from.
    pub fn config(&self, recurrent: bool, paper: bool) -> Config {
        let preset = if paper { Preset::Paper { recurrent } } else { Preset::Carried };
        let clip = recurrent.then_some(0.25);
        let momentum = match self.optimizer {
            OptimizerArg::Sgd => Momentum::None,
            OptimizerArg::Adamw => Momentum::Adam(Adam::default()),
        };
        let (method, exchange) = (self.optimizer.method(), self.exchange);
        let density = self.fraction();
        let rest = Rest::usual(self.optimizer == OptimizerArg::Adamw, density);
        Config { method, exchange, density, rest, clip, preset, momentum, ..Config::default() }
    }
}

#[derive(Clone, Debug, Args)]
pub struct Plan {
    #[command(flatten)]
    model: ModelArgs,
    /// Measure the network among these ranks
    #[arg(long, value_enum)]
    comm: Option<Comm>,
    /// The network, if it is not measured: 100mbit, 1gbe, 10gbe, 25gbe, 100gbe, home-fibre, home-cable, a platform file, or
    /// alpha=SECONDS,beta=SECONDS_PER_BYTE (latency, and the inverse of the bandwidth)
    #[arg(long, default_value = "1gbe", conflicts_with = "comm")]
    network: String,
    /// Machines and network as saved before or as described, instead of any measurement: a platform's name or file
    #[arg(long, conflicts_with_all = ["comm", "network"])]
    platform: Option<String>,
    /// Ranks [default: 4; with --comm mpi those that mpirun started]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// Length of the backward pass of one step, in milliseconds
    #[arg(long, default_value_t = 0.0, value_parser = parse_ms)]
    backward_ms: f64,
    /// Length of the forward pass of one step, in milliseconds
    #[arg(long, default_value_t = 0.0, value_parser = parse_ms)]
    forward_ms: f64,
    /// The model is computed on the cores that compress, not on a device of its own
    #[arg(long)]
    on_cores: bool,
    /// Save what was measured as a platform file
    #[arg(long)]
    save: Option<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    platform: &'a Platform,
    #[serde(flatten)]
    answer: &'a Answer,
}

impl Plan {
    pub fn run(self) -> Result<()> {
        let (name, layers, recurrent) = self.model.resolve()?;
        let (platform, ranks, paper) = match (&self.platform, self.comm) {
            (Some(which), _) => {
                let described = platform::load(which).map_err(refused)?;
                (self.model.on_hosts(described.platform), self.described_ranks(), described.paper)
            }
            (None, Some(Comm::Local)) => (self.measure_local(recurrent)?, self.described_ranks(), false),
            (None, Some(Comm::Mpi)) => match self.measure_mpi(recurrent)? {
                Some((platform, ranks)) => (platform, ranks, false),
                None => return Ok(()),
            },
            (None, None) => {
                let network = platform::network(&self.network).map_err(refused)?;
                let config = self.model.config(recurrent, false);
                let bar = progress(100, "measuring this machine");
                let platform =
                    measure::machine(&config, network, &mut |done| bar.set_position((100.0 * done) as u64))?;
                bar.finish_and_clear();
                (self.model.on_hosts(platform), self.described_ranks(), false)
            }
        };
        if let Some(path) = &self.save {
            platform::save(path, &platform)?;
        }
        let question = Question {
            layers: &layers,
            config: self.model.config(recurrent, paper),
            platform: &platform,
            ranks,
            compute: self.compute(),
        };
        let answer = question.answer()?;
        if self.json {
            return print_json(&Report { model: &name, platform: &platform, answer: &answer });
        }
        self.print(&name, &platform, &answer);
        Ok(())
    }

    fn compute(&self) -> Compute {
        let (forward, backward) = (self.forward_ms / 1e3, self.backward_ms / 1e3);
        Compute { forward, backward, on_cores: self.on_cores }
    }

    fn described_ranks(&self) -> usize {
        self.ranks.unwrap_or(4) as usize
    }

    fn measure_local(&self, recurrent: bool) -> Result<Platform> {
        let ranks = self.described_ranks();
        let config = self.model.config(recurrent, false);
        if ranks > 256 {
            return Err(crate::usage("--comm local wants at most 256 ranks: each is a thread".into()));
        }
        ranks::on_threads(ranks, move |comm| measured(comm, &config))
    }

    /// The platform on rank 0.
    fn measure_mpi(&self, recurrent: bool) -> Result<Option<(Platform, usize)>> {
        let config = self.model.config(recurrent, false);
        ranks::on_mpi("ranks", self.ranks.map(|said| said as usize), |comm| {
            let ranks = comm.size();
            Ok((measured(comm, &config)?, ranks))
        })
    }

    fn print(&self, name: &str, platform: &Platform, answer: &Answer) {
        let mut out = table(&["layer", "elements", "choice", "why"]);
        if let Some(column) = out.column_mut(3) {
            column.set_cell_alignment(comfy_table::CellAlignment::Left);
        }
        // What is always sent whole would only make the table long.
        let always = |why: &str| why.starts_with(predict::ALWAYS_WHOLE);
        for layer in answer.layers.iter().filter(|layer| !always(&layer.why)) {
            out.add_row([layer.name.clone(), grouped(layer.size), layer.choice.into(), layer.why.clone()]);
        }
        let rest = answer.layers.iter().filter(|layer| always(&layer.why)).count();
        crate::say!("{name} on {} ranks, {}\n{out}", answer.ranks, platform.name);
        crate::say!("and {rest} biases and norms, which are always sent whole");
        let mut out = table(&["method", "predicted step", "against sgd"]);
        let p = &answer.predicted_ms;
        for (method, ms) in [
            ("sgd", p.sgd),
            ("rgc", p.rgc),
            ("rgc+2bit", p.rgc_2bit),
            ("rgc+asq", p.rgc_asq),
            ("auto (the plan above)", p.auto),
        ] {
            out.add_row([method.to_string(), format!("{ms:.2} ms"), format!("{:.2} x", p.sgd / ms)]);
        }
        let from = answer.owners_win_from_ranks.map_or(String::new(), |ranks| {
            format!(" Owners are faster than gathering from {ranks} ranks on.")
        });
        crate::say!("{out}\n{} Messages travel by {}.{from}", answer.verdict, answer.exchange);
        let mut out =
            table(&["way, the better its loss the earlier", "average step", "sent per step", "of dense"]);
        let dense = answer.ways.first().map_or(0.0, |way| way.bytes_per_step);
        for way in &answer.ways {
            out.add_row([
                way.name.clone(),
                format!("{:.2} ms", way.step_ms),
                format!("{:.1} KB", way.bytes_per_step / 1e3),
                format!("1/{:.0}", dense / way.bytes_per_step.max(1.0)),
            ]);
        }
        crate::say!("{out}\n{}", answer.advice);
    }
}

/// What the user gave cannot be used.
pub fn refused(error: anyhow::Error) -> anyhow::Error {
    crate::usage(format!("{error:#}"))
}

/// Measures with a bar on rank 0.
pub fn measured(comm: Arc<dyn Communicator>, config: &Config) -> Result<Platform> {
    let bar = progress(100, "measuring machine and network");
    if comm.rank() != 0 {
        bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
    }
    let platform = measure::platform(comm, config, &mut |done| bar.set_position((100.0 * done) as u64))?;
    bar.finish_and_clear();
    Ok(platform)
}

//! `redsync plan`: will compression help here, for which layers, and by how much?
//! Comes in: a model, and a network that is measured through an engine or described. Goes out: a choice per layer with its
//! reason, predicted step times, a verdict.

mod layers;
pub mod predict;

use crate::bench::{Comm, grouped, parse_density, parse_model, parse_ms, print_json, progress, table};
use crate::{platform, ranks};
use anyhow::Result;
use clap::Args;
use predict::{Answer, Question};
use redsync_comm::Communicator;
use redsync_core::Density;
use redsync_engine::cost::{Compute, Platform};
use redsync_engine::models::Model;
use redsync_engine::{Config, Layer, Preset, measure};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// The model, as several commands take it.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model whose layer sizes are used: vgg16-cifar, resnet44, alexnet, vgg16, resnet50, lstm-ptb, lstm-wiki2,
    /// gpt-tiny, gpt-small
    #[arg(long, default_value = "vgg16-cifar", value_parser = parse_model)]
    pub model: String,
    /// File with one line per parameter tensor, its name and its shape, instead of --model
    #[arg(long, conflicts_with = "model")]
    pub layers: Option<PathBuf>,
    /// Fraction of a compressed layer that is sent
    #[arg(long, default_value = "0.001", value_parser = parse_density)]
    pub density: Density,
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

    /// The configuration that predictions start from.
    pub fn config(&self, recurrent: bool, paper: bool) -> Config {
        let preset = if paper { Preset::Paper { recurrent } } else { Preset::Carried };
        let clip = recurrent.then_some(0.25);
        Config { density: self.density.fraction(), clip, preset, ..Config::default() }
    }
}

#[derive(Clone, Debug, Args)]
pub struct Plan {
    #[command(flatten)]
    model: ModelArgs,
    /// Measure the network among these ranks
    #[arg(long, value_enum)]
    comm: Option<Comm>,
    /// The network, if it is not measured: a platform's name, a platform file, or alpha=SECONDS,beta=SECONDS_PER_BYTE
    #[arg(long, default_value = "1gbe", conflicts_with = "comm")]
    network: String,
    /// Machines and network as saved before or as described, instead of any measurement: a platform's name or file
    #[arg(long, conflicts_with_all = ["comm", "network"])]
    platform: Option<String>,
    /// Ranks [default: 4; with --comm mpi those that mpirun started]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// Length of the backward pass of one step
    #[arg(long, default_value_t = 0.0, value_parser = parse_ms)]
    backward_ms: f64,
    /// Length of the forward pass of one step
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
                (described.platform, self.described_ranks(), described.paper)
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
                (platform, self.described_ranks(), false)
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
        // What is always dense would only make the table long.
        let always = |why: &str| why.ends_with("always dense");
        for layer in answer.layers.iter().filter(|layer| !always(&layer.why)) {
            out.add_row([layer.name.clone(), grouped(layer.size), layer.choice.into(), layer.why.clone()]);
        }
        let rest = answer.layers.iter().filter(|layer| always(&layer.why)).count();
        crate::say!("{name} on {} ranks, {}\n{out}", answer.ranks, platform.name);
        crate::say!("and {rest} biases and norms, which are always dense");
        let mut out = table(&["method", "predicted step", "against sgd"]);
        let p = &answer.predicted_ms;
        for (method, ms) in
            [("sgd", p.sgd), ("rgc", p.rgc), ("rgc+asq", p.rgc_asq), ("auto (the plan above)", p.auto)]
        {
            out.add_row([method.to_string(), format!("{ms:.2} ms"), format!("{:.2} x", p.sgd / ms)]);
        }
        crate::say!("{out}\n{}", answer.verdict);
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

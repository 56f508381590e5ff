//! `redsync simulate`: scaling curves of a model on a platform, from the cost model alone.
//! Comes in: a model, a platform, numbers of ranks. Goes out: for every method the time of a step by phase, its speed-up over
//! dense SGD and over one rank, and bytes.

mod work;

use crate::bench::{parse_ms, print_json, table};
use crate::plan::predict::{Question, local};
use crate::plan::{ModelArgs, OptimizerArg, refused};
use crate::platform::{self, Described};
use anyhow::Result;
use clap::Args;
use redsync_engine::cost::{Compute, Step, Times, training_time};
use redsync_engine::{Choice, Config, Exchange, Layer, Method, WarmUp, choices};
use serde::Serialize;

/// Those of the paper.
const PAPERS: [Method; 4] = [Method::Sgd, Method::Rgc, Method::RgcAsq, Method::RgcNaive];

#[derive(Clone, Debug, Args)]
pub struct Simulate {
    #[command(flatten)]
    model: ModelArgs,
    /// A platform's name or file: piz-daint, muradin, 1gbe, 10gbe, 25gbe, 100gbe, 100mbit, home-fibre, home-cable
    #[arg(long, default_value = "10gbe")]
    platform: String,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256,512,1024",
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Vec<u32>,
    /// Samples per rank and step [default: the paper's for its models]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Length of the forward pass in milliseconds, instead of the platform's floating-point operations
    #[arg(long, value_parser = parse_ms, requires = "backward_ms")]
    forward_ms: Option<f64>,
    /// Length of the backward pass in milliseconds, instead of the platform's floating-point operations
    #[arg(long, value_parser = parse_ms)]
    backward_ms: Option<f64>,
    /// The first epochs: none, dense:EPOCHS (everything dense) or ramp:EPOCHS (25% to 0.4%, so many epochs in all) [default: ramp:5;
    /// none where layers are treated as in the paper]
    #[arg(long, value_parser = parse_warm_up)]
    warm_up: Option<WarmUp>,
    /// Epochs of the training whose average step is shown
    #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    epochs: u64,
    /// Also local steps, with an exchange every so many
    #[arg(long, value_delimiter = ',', value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    every: Vec<u64>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    platform: String,
    about: String,
    density: f64,
    batch: u32,
    forward_ms: f64,
    backward_ms: f64,
    curves: Vec<Curve>,
}

#[derive(Debug, Serialize)]
struct Curve {
    method: String,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    ranks: usize,
    exchange: &'static str,
    step_ms: f64,
    compute_ms: f64,
    select_ms: f64,
    encode_ms: f64,
    exchange_ms: f64,
    decode_ms: f64,
    apply_ms: f64,
    /// The average over all epochs, warm-up included.
    average_step_ms: f64,
    /// Samples per second against those of sgd on one rank.
    scaling: f64,
    /// Against sgd on as many ranks.
    speedup: f64,
    /// What the link of a rank carries in one direction.
    bytes_on_link: f64,
    /// Of the messages of compressed layers, as a share of what their dense sum would carry.
    share_of_dense_bytes: f64,
}

/// Steps that stand for an epoch: only the shares of the stages matter, and a ramp changes them at its fortieths.
const PER_EPOCH: u64 = 40;

fn parse_warm_up(text: &str) -> Result<WarmUp, String> {
    let wrong = || "expected none, dense:EPOCHS or ramp:EPOCHS".to_string();
    let (kind, epochs) = text.split_once(':').unwrap_or((text, "0"));
    let epochs: u64 = epochs.parse().ok().filter(|epochs| *epochs <= 1_000_000).ok_or_else(wrong)?;
    match (kind, epochs) {
        ("none", 0) => Ok(WarmUp::None),
        ("dense", 1..) => Ok(WarmUp::Dense(PER_EPOCH * epochs)),
        ("ramp", 1..) => Ok(WarmUp::Ramp(PER_EPOCH * epochs)),
        _ => Err(wrong()),
    }
}

impl Simulate {
    pub fn run(self) -> Result<()> {
        let report = self.simulate()?;
        if self.json {
            return print_json(&report);
        }
        print(&report);
        Ok(())
    }

    fn simulate(&self) -> Result<Report> {
        let (name, layers, recurrent) = self.model.resolve()?;
        let described = platform::load(&self.platform).map_err(refused)?;
        let platform = self.model.on_hosts(described.platform.clone());
        let (batch, compute) = self.compute(&described)?;
        let mut config = self.model.config(recurrent, described.paper);
        let usual = if described.paper { WarmUp::None } else { WarmUp::Ramp(5 * PER_EPOCH) };
        config.warm_up = self.warm_up.unwrap_or(usual);
        let question = Question { layers: &layers, config, platform: &platform, ranks: 1, compute };
        let alone = question.times(Method::Sgd, 1)?;
        let all_ranks = |method: String, row: &dyn Fn(usize) -> Result<Row>| -> Result<Curve> {
            let rows = self.ranks.iter().map(|ranks| row(*ranks as usize)).collect::<Result<_>>()?;
            Ok(Curve { method, rows })
        };
        let curve = |(method, every): (Method, Option<u64>)| {
            let name = every.map_or(method.name().into(), |every| format!("every {every}"));
            all_ranks(name, &|ranks| self.row(&question, method, every, ranks, alone))
        };
        let adamw = [Method::Sgd, Method::Rgc, Method::RgcTwoBit, Method::RgcAsq];
        let methods = if self.model.optimizer == OptimizerArg::Adamw { &adamw[..] } else { &PAPERS };
        let local = self.every.iter().map(|every| (Method::RgcTwoBit, Some(*every)));
        let curves = methods.iter().map(|method| (*method, None)).chain(local);
        let mut curves = curves.map(curve).collect::<Result<Vec<_>>>()?;
        // The usual method by the exchanges that the curves above do not have; one that was asked for is theirs.
        for exchange in [Exchange::Owners, Exchange::Hosts] {
            // Where every rank has its own link, hosts are ranks.
            let differs = exchange != Exchange::Hosts || platform.ranks_per_host > 1;
            if differs && self.model.exchange.is_none() {
                let config = Config { exchange: Some(exchange), ..question.config.clone() };
                let name = format!("{}, {}", config.method.name(), exchange.name());
                let row = |ranks| self.row_of(&question, &config, None, ranks, alone);
                curves.push(all_ranks(name, &row)?);
            }
        }
        let auto = |ranks| self.row_of(&question, &question.auto(ranks)?, None, ranks, alone);
        curves.push(all_ranks("auto".into(), &auto)?);
        Ok(Report {
            model: name,
            platform: self.platform.clone(),
            about: described.about,
            density: self.model.fraction(),
            batch,
            forward_ms: 1e3 * compute.forward,
            backward_ms: 1e3 * compute.backward,
            curves,
        })
    }

    /// How long forward and backward pass take: as told, or from operations, of which the backward pass has two thirds.
    fn compute(&self, described: &Described) -> Result<(u32, Compute)> {
        let known = work::of(&self.model.model).filter(|_| self.model.layers.is_none());
        let batch = self.batch.or(known.map(|work| work.batch)).unwrap_or(1);
        if let Some(backward) = self.backward_ms {
            let forward = self.forward_ms.unwrap_or(backward / 2.0) / 1e3;
            return Ok((batch, Compute { forward, backward: backward / 1e3, on_cores: described.on_cores }));
        }
        let Some(work) = known.filter(|_| described.flops > 0.0) else {
            let what = "how long this model computes on this platform is not known: give --backward-ms";
            return Err(crate::usage(what.into()));
        };
        let forward = work.operations * f64::from(batch) / (described.flops * work.efficiency);
        Ok((batch, Compute { forward, backward: 2.0 * forward, on_cores: described.on_cores }))
    }

    fn row(
        &self,
        question: &Question<'_>,
        method: Method,
        every: Option<u64>,
        ranks: usize,
        alone: Times,
    ) -> Result<Row> {
        let config = Config { method, ..question.config.clone() };
        let config = if every.is_some() { local(&config) } else { config };
        self.row_of(question, &config, every, ranks, alone)
    }

    /// One number of ranks with a configuration.
    fn row_of(
        &self,
        question: &Question<'_>,
        config: &Config,
        every: Option<u64>,
        ranks: usize,
        alone: Times,
    ) -> Result<Row> {
        let choices = choices(question.layers, config)?;
        let Question { layers, platform, compute, .. } = *question;
        let step = Step { layers, choices: &choices, config, platform, ranks, compute };
        let t = every.map_or_else(|| step.times(), |every| step.local_times(every));
        let dense = question.times(Method::Sgd, ranks)?;
        let exchange = config.exchange.unwrap_or(Exchange::Gather);
        Ok(Row {
            ranks,
            exchange: exchange.name(),
            step_ms: 1e3 * t.step,
            compute_ms: 1e3 * t.compute,
            select_ms: 1e3 * t.select,
            encode_ms: 1e3 * t.encode,
            exchange_ms: 1e3 * t.exchange,
            decode_ms: 1e3 * t.decode,
            apply_ms: 1e3 * t.apply,
            average_step_ms: match every {
                Some(_) => 1e3 * t.step,
                None => {
                    1e3 * training_time(&step, PER_EPOCH * self.epochs) / (PER_EPOCH * self.epochs) as f64
                }
            },
            scaling: ranks as f64 * alone.step / t.step,
            speedup: dense.step / t.step,
            bytes_on_link: t.bytes_on_link.round(),
            share_of_dense_bytes: share(layers, &choices, t, dense),
        })
    }
}

/// What compressed layers put on the link, against what they would if they were dense.
fn share(layers: &[Layer], choices: &[Choice], t: Times, dense: Times) -> f64 {
    let elements = |sparse: bool| -> usize {
        let of =
            |(layer, choice): (&Layer, &Choice)| ((*choice != Choice::Dense) == sparse).then_some(layer.size);
        layers.iter().zip(choices).filter_map(of).sum()
    };
    let (sparse, rest) = (elements(true) as f64, elements(false) as f64);
    if sparse == 0.0 || dense.bytes_on_link == 0.0 {
        return 1.0;
    }
    let per_element = dense.bytes_on_link / (sparse + rest);
    (t.bytes_on_link - rest * per_element) / (sparse * per_element)
}

fn print(report: &Report) {
    crate::say!(
        "{} on {} ({}), batch {}, forward {:.1} ms, backward {:.1} ms, density {}%",
        report.model,
        report.platform,
        report.about,
        report.batch,
        report.forward_ms,
        report.backward_ms,
        100.0 * report.density,
    );
    for curve in &report.curves {
        let header = [
            "ranks",
            "step ms",
            "select",
            "encode",
            "exchange",
            "decode",
            "apply",
            "scaling",
            "vs sgd",
            "MB on link",
            "of dense",
            "exchange",
        ];
        let mut out = table(&header);
        for row in &curve.rows {
            let ms = |ms: f64| format!("{ms:.2}");
            out.add_row([
                row.ranks.to_string(),
                ms(row.average_step_ms),
                ms(row.select_ms),
                ms(row.encode_ms),
                ms(row.exchange_ms),
                ms(row.decode_ms),
                ms(row.apply_ms),
                format!("{:.1}", row.scaling),
                format!("{:.2} x", row.speedup),
                format!("{:.2}", row.bytes_on_link / 1e6),
                format!("{:.2}%", 100.0 * row.share_of_dense_bytes),
                row.exchange.into(),
            ]);
        }
        crate::say!("\n{}\n{out}", curve.method);
    }
    crate::say!(
        "scaling: samples per second against sgd on one rank. exchange: what keeps the link busy, hidden behind the backward \
         pass or not. of dense: what compressed layers put on the link, against their dense sum. auto: \
         layers and exchange as `redsync plan` chooses them for each number of ranks."
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        simulate: Simulate,
    }

    fn curves(arguments: &[&str]) -> Report {
        let cli = Cli::try_parse_from([&["simulate"], arguments].concat()).unwrap();
        cli.simulate.simulate().unwrap()
    }

    fn best(report: &Report, method: &str, ranks: std::ops::RangeInclusive<usize>) -> f64 {
        let curve = report.curves.iter().find(|curve| curve.method == method).unwrap();
        let rows = curve.rows.iter().filter(|row| ranks.contains(&row.ranks));
        rows.map(|row| row.speedup).fold(0.0, f64::max)
    }

    fn on_daint(model: &str) -> Report {
        curves(&["--model", model, "--platform", "piz-daint"])
    }

    /// The paper's findings on its supercomputer, as ranges: the figures behind its statements are not published.
    #[test]
    fn the_networks_that_gain_are_the_papers() {
        let gain = |model, ranks| best(&on_daint(model), "rgc+asq", ranks);
        let alexnet = gain("alexnet", 4..=16);
        assert!((2.2..4.0).contains(&alexnet), "alexnet {alexnet}");
        let vgg16 = gain("vgg16", 4..=64);
        assert!((1.5..2.6).contains(&vgg16), "vgg16 {vgg16}");
        let lstm = gain("lstm-ptb", 2..=16);
        assert!((2.2..4.5).contains(&lstm), "lstm {lstm}");
        let resnet = gain("resnet50", 1..=1024);
        assert!((0.9..1.35).contains(&resnet), "resnet50 {resnet}");
    }

    #[test]
    fn gains_shrink_with_many_ranks_and_decompression_overtakes_communication() {
        for model in ["alexnet", "vgg16", "lstm-ptb"] {
            let report = on_daint(model);
            assert!(
                best(&report, "rgc+asq", 1024..=1024) < 0.8 * best(&report, "rgc+asq", 4..=64),
                "{model}"
            );
        }
        let report = on_daint("resnet50");
        let row = report.curves[2].rows.iter().find(|row| row.ranks == 128).unwrap();
        assert!(row.decode_ms + row.apply_ms > row.exchange_ms, "{row:?}");
    }

    #[test]
    fn naive_selection_is_slower_than_dense_on_the_papers_server() {
        let report = curves(&["--model", "vgg16", "--platform", "muradin", "--ranks", "2,4,8"]);
        assert!(best(&report, "rgc-naive", 2..=8) < 1.0);
    }

    #[test]
    fn at_128_ranks_the_messages_are_an_eighth_of_the_dense_bytes() {
        let report = curves(&["--model", "vgg16", "--platform", "piz-daint", "--ranks", "128"]);
        let share = report.curves[1].rows[0].share_of_dense_bytes;
        assert!((share - 0.128).abs() < 0.002, "{share}");
    }

    #[test]
    fn one_rank_only_loses() {
        for curve in curves(&["--model", "alexnet", "--platform", "piz-daint", "--ranks", "1"]).curves {
            assert!(curve.rows[0].scaling <= 1.0001, "{} {:?}", curve.method, curve.rows[0]);
        }
    }

    #[test]
    fn a_dense_warm_up_is_part_of_the_average() {
        let report = curves(&["--warm-up", "dense:9", "--ranks", "4", "--backward-ms", "10"]);
        let (sgd, asq) = (&report.curves[0].rows[0], &report.curves[2].rows[0]);
        let expected = 0.1 * sgd.step_ms + 0.9 * asq.step_ms;
        assert!((asq.average_step_ms / expected - 1.0).abs() < 1e-9);
        assert!(parse_warm_up("dense").is_err() && parse_warm_up("ramp:x").is_err());
    }

    /// The paper's authors stopped where gathering ends to help. Owners go on.
    #[test]
    fn the_chosen_exchange_is_never_slower_than_dense_and_goes_on_where_gathering_ends() {
        for platform in ["piz-daint", "muradin", "10gbe", "25gbe"] {
            for model in ["vgg16", "alexnet", "resnet50", "lstm-ptb"] {
                let report = curves(&["--model", model, "--platform", platform]);
                let rows =
                    |method: &str| &report.curves.iter().find(|curve| curve.method == method).unwrap().rows;
                for row in rows("auto") {
                    assert!(
                        row.speedup > 0.95,
                        "{model} on {platform}: {} ranks, {}",
                        row.ranks,
                        row.speedup
                    );
                }
                let (gathered, auto) = (rows("rgc+asq").last().unwrap(), rows("auto").last().unwrap());
                assert!(
                    gathered.speedup < 1.0 && auto.speedup > 1.05 && auto.exchange == "owners",
                    "{model} {platform}"
                );
            }
        }
    }
}

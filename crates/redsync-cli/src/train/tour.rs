//! What `redsync train` does if nothing is chosen: the default training dense and compressed, side by side.
//! Goes out: one table of accuracy, bytes, and the step that the cost model predicts for three networks.
//! What must hold: each of both trainings is the one that `redsync train --method` runs, to the bit.

use super::compare::{jobs, run_all};
use super::options::Options;
use super::progress::size;
use super::{fresh_directory, metric};
use crate::bench::{progress, table};
use crate::plan::predict::{Question, time};
use crate::platform;
use anyhow::{Context, Result};
use redsync_burn::train::Summary;
use redsync_engine::cost::{Compute, Network, Times};
use redsync_engine::models::Model;
use redsync_engine::{Config, Method, measure};
use std::path::Path;

/// What a step is predicted for, by the names of platforms.
const NETWORKS: [(&str, &str); 3] = [("100 Mbit/s", "100mbit"), ("1 Gbit/s", "1gbe"), ("10 Gbit/s", "10gbe")];

/// Trains both ways, measures this machine, and tells.
pub fn run() -> Result<()> {
    let methods = [Method::Sgd, Method::RgcAsq].map(|method| method.name().to_string());
    let options = Options::default();
    let out = fresh_directory(&options.settings()?.model);
    let jobs = jobs(&Options { out: Some(out.clone()), ..options }, &methods)?;
    let warm_up_epochs = jobs.last().map_or(0.0, |job| job.settings.warm_up.epochs());
    let summaries = run_all(jobs, &|_| Ok(()))?;
    let [dense, compressed] = summaries.as_slice() else { return Ok(()) };
    let steps = predict(dense, compressed)?;
    print(dense, compressed, warm_up_epochs, &steps);
    say_next(&out);
    Ok(())
}

/// What a step takes on a network, dense and compressed.
struct Predicted {
    network: &'static str,
    dense: Times,
    compressed: Times,
}

/// Asks the cost model, with what compression costs on this machine and with the shorter compute time of both trainings: the network
/// is the same, and what the other one took longer, its workers took from each other.
fn predict(dense: &Summary, compressed: &Summary) -> Result<Vec<Predicted>> {
    let layers = Model::named(&dense.model)?.layers;
    let config = Config::default();
    let bar = progress(100, "measuring this machine");
    let mut platform =
        measure::machine(&config, Network::default(), &mut |done| bar.set_position((100.0 * done) as u64))?;
    bar.finish_and_clear();
    let shorter = |of: fn(&Summary) -> f64| of(dense).min(of(compressed)) / dense.steps.max(1) as f64;
    let (forward, backward) = (shorter(|run| run.seconds.forward), shorter(|run| run.seconds.backward));
    let compute = Compute { forward, backward, on_cores: true };
    let mut all = Vec::new();
    for (network, name) in NETWORKS {
        platform.network = platform::network(name).context(name)?;
        let (config, platform, ranks) = (config.clone(), &platform, dense.workers);
        let question = Question { layers: &layers, config, platform, ranks, compute };
        let times = |method| question.times(method, ranks);
        all.push(Predicted { network, dense: times(Method::Sgd)?, compressed: times(Method::RgcAsq)? });
    }
    Ok(all)
}

fn print(dense: &Summary, compressed: &Summary, warm_up_epochs: f64, predicted: &[Predicted]) {
    let Summary { model, data, workers, seed, .. } = dense;
    crate::say!("{model} on {data}, {workers} workers, {} steps, seed {seed}, both ways", dense.steps);
    let mut out = table(&["", "dense", "compressed", "gain"]);
    let less = |whole: f64, part: f64| format!("1/{:.0}", whole / part.max(1.0));
    let sent = [dense.bytes_sent, compressed.bytes_sent];
    // What of the training comes after the warm-up; all of it, if it is dense.
    let later = dense.steps as f64 * (1.0 - warm_up_epochs / dense.epochs.len().max(1) as f64);
    let after = (compressed.bytes_sent - compressed.traffic.warm_up) as f64 / later.max(1.0);
    let after = [dense.bytes_sent / dense.steps.max(1), after as u64];
    out.add_row([
        format!("{} on the test data", dense.metric_name),
        metric(dense),
        metric(compressed),
        String::new(),
    ]);
    for (what, [dense, compressed]) in
        [("sent by each worker, in all", sent), ("sent in a step after the warm-up", after)]
    {
        out.add_row([what.into(), size(dense), size(compressed), less(dense as f64, compressed as f64)]);
    }
    for Predicted { network, dense, compressed } in predicted {
        out.add_row([
            format!("a step on {network}, predicted"),
            time(1e3 * dense.step),
            time(1e3 * compressed.step),
            format!("{:.1} x", dense.step / compressed.step),
        ]);
    }
    crate::say!("{out}");
    let computes = predicted.first().map_or(0.0, |first| first.dense.compute);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    crate::say!(
        "Predicted: {workers} machines like this one, joined by such a network, by the cost model of `redsync plan`. {} of a \
         step is computing, as measured here, where {workers} workers shared {cores} cores.",
        time(1e3 * computes),
    );
    crate::say!(
        "The weights are equal on all workers: dense {}, compressed {}.",
        dense.replica_hash,
        compressed.replica_hash
    );
}

fn say_next(out: &Path) {
    crate::say!(
        "Next: `redsync report {}` draws both trainings; `redsync plan --help` says how to ask whether it helps your model.",
        out.display()
    );
}

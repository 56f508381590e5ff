//! The first exchange of a run: every rank says what it runs, and a difference is an error that names it.

use crate::config::{Choice, Config, Method};
use crate::error::SyncError;
use crate::layer::Layer;
use crate::plan::{self, moment_period};
use crate::state::Identity;
use redsync_comm::{Communicator, Tag};
use redsync_core::Momentum;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// What changes the results of a run, in the order in which differences are told.
pub(crate) fn identity(layers: &[Layer], choices: &[Choice], config: &Config) -> Identity {
    [of_run(layers, config, momentum(layers, config)), of_layers(layers, choices, config)].concat()
}

fn of_run(layers: &[Layer], config: &Config, momentum: String) -> Identity {
    [
        ("method", config.method.name().to_string()),
        ("density", config.density.to_string()),
        ("the least number of elements", config.at_least.to_string()),
        ("warm-up", config.warm_up.to_string()),
        ("momentum", momentum),
        ("masking", config.masking.to_string()),
        ("keep", config.keep.to_string()),
        ("bf16", config.bf16.to_string()),
        ("clip", config.clip_told()),
        ("the number of layers", layers.len().to_string()),
    ]
    .map(|(name, value)| (name.to_string(), value))
    .into()
}

/// What a run does with momentum, in one entry, since a checkpoint of before knows of no other: its form; where there may be less of it while
/// elements wait, that of the first layer of which that is so.
fn momentum(layers: &[Layer], config: &Config) -> String {
    let of = |layer: &Layer| {
        let (momentum, lowers) = plan::momentum(layer, config);
        (lowers && momentum.traced() != Momentum::None).then_some(momentum)
    };
    let lowered = layers.iter().filter(|_| config.method != Method::Sgd).find_map(of);
    lowered.map_or_else(
        || config.momentum.form().into(),
        |momentum| format!("{}, less while elements wait (lower_momentum)", momentum.form()),
    )
}

/// The layers, and behind them what follows from all their choices.
fn of_layers(layers: &[Layer], choices: &[Choice], config: &Config) -> Identity {
    let entries = |(layer, choice): (&Layer, &Choice)| {
        let size = (format!("the size of {}", layer.name), layer.size.to_string());
        [size, (format!("the choice for {}", layer.name), choice.to_string())]
    };
    let period = moment_period(layers, choices, config).to_string();
    let last = [("the period of second moments".to_string(), period)];
    layers.iter().zip(choices).flat_map(entries).chain(last).collect()
}

/// What all ranks must agree on to understand each other: versions, what the caller says, what changes results, and the exact
/// momentum of every layer.
pub(crate) fn agreement(layers: &[Layer], choices: &[Choice], config: &Config) -> Identity {
    let version = |name: &str, version: String| (name.to_string(), version);
    let mut all = vec![
        version("the wire format", redsync_core::wire::VERSION.to_string()),
        version("redsync", env!("CARGO_PKG_VERSION").to_string()),
    ];
    // What the caller says comes first: what differs there is what a user chose, and may be the cause of the rest.
    all.extend(config.agree.iter().cloned());
    all.extend(of_run(layers, config, config.momentum.form().into()));
    all.push(("lower_momentum".into(), config.lower_momentum.to_string()));
    all.push(("preset".into(), config.preset.name().into()));
    all.push(("exchange".into(), config.exchange().name().into()));
    all.extend(layers.iter().enumerate().map(|(i, layer)| (format!("layer {i}"), layer.name.clone())));
    all.extend(of_layers(layers, choices, config));
    let momentum = |layer: &Layer| layer.momentum.unwrap_or(config.momentum).to_string();
    all.extend(layers.iter().map(|layer| (format!("the momentum of {}", layer.name), momentum(layer))));
    all
}

/// What stands for an agreement in every frame.
pub(crate) fn fingerprint(agreement: &Identity) -> u64 {
    xxh3_64(json!(agreement).to_string().as_bytes())
}

/// What stands for a long text.
pub(crate) fn hash(text: &str) -> String {
    format!("{:016x}", xxh3_64(text.as_bytes()))
}

/// Exchanges entries with all ranks, and compares them.
pub(crate) fn compare(comm: &dyn Communicator, ours: &Identity, config: &Config) -> Result<(), SyncError> {
    for (rank, theirs) in gather(comm, &json!(ours), config)?.into_iter().enumerate() {
        let theirs: Identity = serde_json::from_value(theirs).unwrap_or_default();
        let find = |all: &Identity, name: &str| all.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        // Names may stand twice, by the caller and by us: entry by entry first.
        let apart = ours.iter().zip(&theirs).find(|((a, x), (b, y))| a == b && x != y);
        if let Some(((what, ours), (_, theirs))) = apart {
            let (what, theirs, ours) = (what.clone(), theirs.clone(), ours.clone());
            return Err(SyncError::Hello { rank, what, theirs, ours });
        }
        let none = || "nothing".to_string();
        let differs = |name: &String| (find(&theirs, name) != find(ours, name)).then(|| name.clone());
        if let Some(what) = ours.iter().chain(&theirs).find_map(|(name, _)| differs(name)) {
            let (theirs, ours) = (find(&theirs, &what), find(ours, &what));
            let (theirs, ours) = (theirs.unwrap_or_else(none), ours.unwrap_or_else(none));
            return Err(SyncError::Hello { rank, what, theirs, ours });
        }
    }
    Ok(())
}

/// What every rank says.
pub(crate) fn gather(
    comm: &dyn Communicator,
    ours: &Value,
    config: &Config,
) -> Result<Vec<Value>, SyncError> {
    let pending = comm.allgather(Tag { step: 0, op: u32::MAX }, ours.to_string().into_bytes());
    let failed = |source| SyncError::exchange("the ranks' hello".into(), source);
    let all = pending.wait(config.deadline).map_err(failed)?;
    Ok(all.iter().map(|theirs| serde_json::from_slice(theirs).unwrap_or(Value::Null)).collect())
}

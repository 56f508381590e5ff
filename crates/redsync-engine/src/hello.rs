//! The first exchange of a run: every rank says what it runs, and a difference is an error that names it.

use crate::config::{Choice, Config, Fault};
use crate::error::SyncError;
use crate::layer::Layer;
use redsync_comm::{Communicator, Tag};
use serde_json::{Value, json};

/// Everything that must be the same on all ranks, in the order in which differences are reported.
pub(crate) fn fingerprint(layers: &[Layer], choices: &[Choice], config: &Config) -> Value {
    let layers: Vec<Value> = layers
        .iter()
        .zip(choices)
        .map(|(layer, choice)| json!([layer.name, layer.size, format!("{choice:?}")]))
        .collect();
    let wire_version = redsync_core::wire::VERSION + u16::from(config.fault == Some(Fault::OtherVersion));
    json!([
        ["wire format", wire_version],
        ["redsync-engine", env!("CARGO_PKG_VERSION")],
        ["method", config.method.name()],
        ["preset", config.preset],
        ["density", format!("{:?}", config.density)],
        ["warm-up", format!("{:?}", config.warm_up)],
        ["momentum", format!("{:?}", config.momentum)],
        ["masking", config.masking],
        ["bf16", config.bf16],
        ["mode", format!("{:?}", config.mode)],
        ["number of layers", layers.len()],
        ["layers", layers],
    ])
}

/// Exchanges fingerprints, and with each what else all ranks must agree on, by name; compares them.
pub(crate) fn exchange(
    comm: &dyn Communicator,
    fingerprint: &Value,
    agree: &[(&str, Value)],
    config: &Config,
) -> Result<(), SyncError> {
    let ours = json!([fingerprint, agree]);
    for (rank, theirs) in gather(comm, &ours, config)?.iter().enumerate() {
        compare(rank, &theirs[1], &ours[1])?;
        compare(rank, &theirs[0], &ours[0])?;
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
    let failed = |source| SyncError::Exchange { layers: "the ranks' hello".into(), source };
    let all = pending.wait(config.deadline).map_err(failed)?;
    Ok(all.iter().map(|theirs| serde_json::from_slice(theirs).unwrap_or(Value::Null)).collect())
}

fn differs(rank: usize, what: &str, theirs: &Value, ours: &Value) -> SyncError {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    SyncError::Hello { rank, what: what.into(), theirs: plain(theirs), ours: plain(ours) }
}

/// The first entry that differs; for layers, the first layer.
fn compare(rank: usize, theirs: &Value, ours: &Value) -> Result<(), SyncError> {
    if theirs == ours {
        return Ok(());
    }
    for (i, entry) in ours.as_array().into_iter().flatten().enumerate() {
        let (name, mine, other) = (entry[0].as_str().unwrap_or(""), &entry[1], &theirs[i][1]);
        if theirs[i][0] != entry[0] {
            return Err(differs(rank, "what it says", theirs, ours));
        }
        if mine == other {
            continue;
        }
        if name == "layers" {
            let lists = mine.as_array().into_iter().flatten().zip(other.as_array().into_iter().flatten());
            if let Some((at, (mine, other))) = lists.enumerate().find(|(_, (mine, other))| mine != other) {
                return Err(differs(rank, &format!("layer {at}"), other, mine));
            }
        }
        return Err(differs(rank, name, other, mine));
    }
    Err(differs(rank, "what it says", theirs, ours))
}

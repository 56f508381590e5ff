//! From a gradient to the frames of a group, on whichever thread has it: the sending one, or with hosts the one that has their sum.

use super::{Pools, Shared, lock, ms};
use crate::config::Stage;
use crate::exchange::{Packed, Packing};
use crate::plan::{Group, Sent};
use crate::source::Source;
use crate::stats::LayerStats;
use redsync_core::wire::FrameWriter;
use redsync_core::{Bad, LayerError, Sparse, Workspace};
use std::time::Instant;

/// Which step it is, and what is sent at it.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub number: u64,
    pub stage: Stage,
}

/// The message of a layer; empty where there is no gradient, and then u and v stay as they are.
pub(super) fn compress(
    shared: &Shared,
    step: Step,
    layer: usize,
    source: Option<(&dyn Source, f32)>,
    message: &mut Sparse,
    workspace: &mut Workspace,
) -> Result<(), LayerError> {
    let Shared { parts, choices, config, compressed, .. } = shared;
    let n = parts[layer].size;
    let values = Sent::at(choices[layer], n, config, step.stage).map(|sent| sent.values).unwrap_or_default();
    message.reset(n as u32, values.phase(step.number));
    match source {
        None => Ok(()),
        Some((source, scale)) => {
            lock(compressed).compress(layer, step.number, source, scale, message, workspace)
        }
    }
}

/// Whether a gradient that cannot be used may be the consequence of a scaled loss.
pub(super) fn is_overflow(why: &Bad) -> bool {
    matches!(why, Bad::NotFinite { .. } | Bad::Overflow { .. })
}

/// The frames of a group. `stats` has an entry for each of its layers.
pub(super) fn pack(
    shared: &Shared,
    step: Step,
    group: &Group,
    messages: &[Sparse],
    writer: &mut FrameWriter,
    stats: &mut [LayerStats],
) -> Packed {
    if let Some(buffer) = lock(&shared.pools.frames).pop() {
        writer.reuse(buffer);
    }
    let begin = Instant::now();
    let Shared { parts, choices, config, plan, exchange, .. } = shared;
    let sent = |layer: &usize| Sent::at(choices[*layer], parts[*layer].size, config, step.stage);
    let sent: Vec<Option<Sent>> = group.layers.iter().map(sent).collect();
    let mut bytes = vec![(0, 0); group.layers.len()];
    let packing = Packing { group, messages, sent: &sent, step: step.number, plan: *plan, bytes: &mut bytes };
    let packed = exchange.pack(packing, writer);
    let share = ms(begin) / group.layers.len().max(1) as f64;
    for (stats, (bytes, headers)) in stats.iter_mut().zip(bytes) {
        (stats.encode_ms, stats.bytes_sent, stats.header_bytes) = (share, bytes, headers);
    }
    packed
}

/// A vector for the gradients of a group, one after the other.
pub(super) fn dense_buffer(pools: &Pools, length: usize) -> Vec<f32> {
    let mut pool = lock(&pools.dense);
    match pool.iter().position(|buffer| buffer.len() == length) {
        Some(at) => pool.swap_remove(at),
        None => vec![0.0; length],
    }
}

//! The receiving thread: an exchange that was started comes in, its updates go out, in the order in which they were started.

use super::{Arrived, InFlight, Journey, Outcome, Received, Shared, lock, ms};
use crate::error::SyncError;
use crate::exchange::{About, Landed, names, share_time};
use redsync_core::{Sparse, Workspace};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

/// Runs until the sending thread ends or something fails.
pub(super) fn run(shared: &Shared, in_flight: Receiver<InFlight>, outcomes: Sender<Outcome>) {
    let mut workspace = Workspace::new(shared.config.threads);
    for exchange in in_flight {
        let outcome = complete(shared, exchange, &mut workspace);
        if let Err(error) = &outcome {
            // The communicator has told the others of what it met itself; only the first reason counts.
            shared.comm.give_up(&error.to_string());
        }
        let failed = outcome.is_err();
        if outcomes.send(outcome).is_err() || failed {
            return;
        }
    }
}

fn complete(shared: &Shared, in_flight: InFlight, workspace: &mut Workspace) -> Outcome {
    let InFlight { step, group, all_dense, loss_scale, started, journey, mut stats, targets } = in_flight;
    let deadline = shared.config.deadline;
    let result = match journey {
        Journey::Dense(pending) => {
            let failed = |source| SyncError::exchange(names(&shared.layers, &group), source);
            let sum = pending.wait(deadline).map_err(failed)?;
            share_time(&mut stats, ms(started));
            Received::Dense(sum)
        }
        Journey::Sparse(flight) => {
            let Shared { layers, choices, config, plan, .. } = shared;
            let (plan, rank) = (*plan, shared.comm.rank());
            let about = About { layers, choices, config, plan, group: &group, step, rank, stats: &mut stats };
            let landed = flight.land(about, buffers(shared, &group.layers))?;
            take_in(shared, landed)?
        }
    };
    let time = (started, Instant::now());
    let mut arrived = Arrived { group, result, stats, time, scale: loss_scale.unwrap_or(1.0), targets };
    // Where everything is dense, clipping needs all averaged gradients, and comes first.
    if !(all_dense && shared.config.clip.is_some()) {
        arrived.deliver(shared, workspace)?;
    }
    Ok(arrived)
}

/// Vectors to be filled, one list for each layer.
fn buffers(shared: &Shared, layers: &[usize]) -> Vec<Vec<Sparse>> {
    let mut pool = lock(&shared.pools.sparse);
    pool.resize_with(shared.layers.len(), Vec::new);
    layers.iter().map(|layer| std::mem::take(&mut pool[*layer])).collect()
}

/// Puts what an exchange returns to where it belongs.
fn take_in(shared: &Shared, landed: Landed) -> Result<Received, SyncError> {
    if !landed.returned.is_empty() {
        let mut compressed = lock(&shared.compressed);
        landed.returned.iter().try_for_each(|(layer, elements)| compressed.give_back(*layer, elements))?;
    }
    let mut pool = lock(&shared.pools.frames);
    // Some engines give all ranks' buffers back, but only one at a time is filled.
    let room = shared.layers.len().saturating_sub(pool.len());
    pool.extend(landed.frames.into_iter().take(room));
    Ok(landed.updates.map_or(Received::Void, Received::Sparse))
}

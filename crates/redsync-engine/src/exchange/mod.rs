//! How the messages of a group travel: one frame of this rank goes in, sparse updates come out, the same on every rank.
//! What must hold: what comes out was checked to the last byte, and whatever an exchange does not use it gives back.

mod gather;

use crate::config::{Choice, Config};
use crate::error::SyncError;
use crate::layer::Layer;
use crate::plan::Group;
use crate::stats::LayerStats;
use redsync_comm::{Communicator, Tag};
use redsync_core::Sparse;

pub(crate) use gather::Gather;

/// A way to exchange.
pub(crate) trait Exchange: Send + Sync {
    /// Starts to exchange the frame of a group; an empty frame says that this rank has nothing to send at a step that will not
    /// count.
    fn start(&self, comm: &dyn Communicator, tag: Tag, frame: Vec<u8>) -> Box<dyn Flight>;
}

/// An exchange under way.
pub(crate) trait Flight: Send {
    /// Waits for the exchange, and reads what came. `updates` holds buffers to be filled, one list for each layer of the group.
    fn land(self: Box<Self>, about: About<'_>, updates: Vec<Vec<Sparse>>) -> Result<Landed, SyncError>;
}

/// What an exchange needs to know to read what came.
pub(crate) struct About<'a> {
    pub layers: &'a [Layer],
    pub choices: &'a [Choice],
    pub config: &'a Config,
    /// Fingerprint of what the ranks agreed on.
    pub plan: u64,
    pub group: &'a Group,
    pub step: u64,
    pub rank: usize,
    /// One entry for each layer of the group; bytes and times are added.
    pub stats: &'a mut [LayerStats],
}

/// What came of an exchange.
pub(crate) struct Landed {
    /// For each layer of the group, vectors whose sum is the update; None if some rank sent an empty frame.
    pub updates: Option<Vec<Vec<Sparse>>>,
    /// For some layers, elements of this rank's message that were not used.
    pub returned: Vec<(usize, Sparse)>,
    /// Buffers of frames, to be filled again.
    pub frames: Vec<Vec<u8>>,
}

/// What a group is called in errors.
pub(crate) fn names(layers: &[Layer], group: &Group) -> String {
    let first = group.layers.first().map_or("", |layer| &layers[*layer].name);
    match group.layers.len() {
        0 | 1 => format!("layer {first}"),
        more => format!("layers {first} and {} more", more - 1),
    }
}

/// Divides the time of an exchange among its layers by bytes.
pub(crate) fn share_time(stats: &mut [LayerStats], ms: f64) {
    let total: u64 = stats.iter().map(|layer| layer.bytes_sent).sum();
    for layer in stats {
        layer.exchange_ms = ms * layer.bytes_sent as f64 / total.max(1) as f64;
    }
}

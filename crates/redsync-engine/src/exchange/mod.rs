//! How the messages of a group travel: what this rank chose goes in, sparse updates come out, the same on every rank.
//! What must hold: what comes out was checked to the last byte, and whatever an exchange does not use it keeps or gives back.

pub(crate) mod cut;
mod gather;
mod owners;

use crate::config::{Choice, Config};
use crate::error::SyncError;
use crate::layer::Layer;
use crate::plan::{Group, Sent};
use crate::state::{Kept, LayerState};
use crate::stats::LayerStats;
use redsync_comm::{Communicator, Tag};
use redsync_core::wire::FrameWriter;
use redsync_core::{Sparse, Unfit};
use std::cell::RefCell;

pub(crate) use gather::Gather;
pub(crate) use owners::Owners;

/// A way to exchange.
pub(crate) trait Exchange: Send + Sync {
    /// Whether collectives of a step must be started by the thread that waits for them, because some follow from others.
    fn in_order(&self) -> bool {
        false
    }

    /// A step begins.
    fn begin(&self) {}

    /// Writes the messages of a group.
    fn pack(&self, packing: Packing<'_>, writer: &mut FrameWriter) -> Packed;

    /// What is sent instead at a step that will not count.
    fn void(&self) -> Packed;

    /// Starts to exchange the frames of a group.
    fn start(&self, comm: &dyn Communicator, tag: Tag, frames: Packed) -> Box<dyn Flight>;

    /// The learning rate at which updates of a layer will be applied.
    fn set_rate(&self, _layer: usize, _rate: f32) -> Result<(), Unfit> {
        Ok(())
    }

    /// Takes the last step back.
    fn take_back(&self) -> Result<(), Unfit> {
        Ok(())
    }

    /// What is kept of a layer between steps.
    fn save(&self, _layer: usize) -> Option<Kept> {
        None
    }

    /// Whether a state has what is kept of a layer here; a sentence if not.
    fn check(&self, _layer: usize, state: &LayerState) -> Result<(), String> {
        match state.kept {
            None => Ok(()),
            Some(_) => Err("it is of an exchange by owners".into()),
        }
    }

    /// Continues from what was kept, if anything was.
    fn restore(&self, _layer: usize, _kept: Option<&Kept>) -> Result<(), Unfit> {
        Ok(())
    }
}

/// What is to be written.
pub(crate) struct Packing<'a> {
    pub group: &'a Group,
    /// What this rank chose of every layer of the model.
    pub messages: &'a [Sparse],
    /// How each layer of the group travels.
    pub sent: &'a [Option<Sent>],
    pub step: u64,
    pub plan: u64,
    /// For each layer of the group, bytes that leave this rank, and those of them that are headers.
    pub bytes: &'a mut [(u64, u64)],
}

/// The frames of a group: one, or one for each rank.
pub(crate) struct Packed(pub Vec<Vec<u8>>);

/// An exchange under way.
pub(crate) trait Flight: Send {
    /// Waits for the exchange, and reads what came. `updates` holds buffers to be filled, one list for each layer of the group.
    fn land(self: Box<Self>, about: About<'_>, updates: Vec<Vec<Sparse>>) -> Result<Landed, SyncError>;
}

/// What an exchange needs to know to read what came.
pub(crate) struct About<'a> {
    pub comm: &'a dyn Communicator,
    pub layers: &'a [Layer],
    pub choices: &'a [Choice],
    pub config: &'a Config,
    /// Fingerprint of what the ranks agreed on.
    pub plan: u64,
    pub group: &'a Group,
    pub step: u64,
    pub rank: usize,
    /// One entry for each layer of the group; bytes and times are added.
    pub stats: RefCell<&'a mut [LayerStats]>,
}

impl About<'_> {
    /// Bytes came in for a layer of the group.
    fn count_received(&self, at: usize, bytes: u64) {
        self.stats.borrow_mut()[at].bytes_received += bytes;
    }

    /// Bytes went out for a layer of the group, some of them headers.
    fn count_sent(&self, at: usize, bytes: u64, headers: u64) {
        let mut stats = self.stats.borrow_mut();
        stats[at].bytes_sent += bytes;
        stats[at].header_bytes += headers;
    }
}

/// What came of an exchange.
pub(crate) struct Landed {
    /// For each layer of the group, vectors whose sum is the update; None if some rank had nothing to send at a step that does not count.
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

//! Everything that can end a synchronized step. Each text is one line that names rank, layer and cause as far as known.

use crate::state::StateError;
use crate::target::TargetError;
use redsync_comm::CommError;
use redsync_core::wire::{FrameError, MessageError};
use redsync_core::{ConfigError, LayerError, Unfit};
use std::path::PathBuf;
use thiserror::Error;

/// Why a synchronizer failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// A layer cannot be set up.
    #[error("layer {layer}: {why}")]
    Config {
        /// Its name.
        layer: String,
        /// What is wrong.
        why: ConfigError,
    },
    /// Two layers have one name, or a choice names no layer.
    #[error("{0}")]
    Layers(String),
    /// A rank runs something else.
    #[error("rank {rank} runs something else: {what} is {theirs} there, {ours} here")]
    Hello {
        /// The rank.
        rank: usize,
        /// What differs.
        what: String,
        /// Its value there.
        theirs: String,
        /// Its value here.
        ours: String,
    },
    /// A gradient was refused.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A gradient could not be brought to where it is compressed.
    #[error("layer {layer}: {reason}")]
    Source {
        /// The layer's name.
        layer: String,
        /// What its framework said.
        reason: String,
    },
    /// The state of a layer cannot be changed like this.
    #[error("layer {layer}: {why}")]
    Unfit {
        /// The layer's name.
        layer: String,
        /// What is wrong.
        why: Unfit,
    },
    /// Another rank gave up.
    #[error("rank {rank} gave up: {reason}")]
    Peer {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
        /// The ranks that it blames; empty if the cause is its own.
        blames: Vec<usize>,
    },
    /// The exchange failed.
    #[error("{layers}: {source}")]
    Exchange {
        /// The layers that were being exchanged.
        layers: String,
        /// Why it failed.
        source: CommError,
    },
    /// A frame of a rank is not what it should be.
    #[error("frame of rank {rank} with {layers}: {why}")]
    Frame {
        /// The rank.
        rank: usize,
        /// The layers it should hold.
        layers: String,
        /// What is wrong.
        why: FrameError,
    },
    /// A message of a rank is not what it should be.
    #[error("rank {rank}, layer {layer}: {why}")]
    Message {
        /// The rank.
        rank: usize,
        /// The layer's name.
        layer: String,
        /// What is wrong.
        why: MessageError,
    },
    /// An update does not fit the weights.
    #[error("layer {layer}: {why}")]
    Apply {
        /// The layer's name.
        layer: String,
        /// What is wrong.
        why: TargetError,
    },
    /// The replicas are no longer equal.
    #[error("replicas differ at step {step}: layer {layer} of rank {rank} is not that of rank 0")]
    Replicas {
        /// The step.
        step: u64,
        /// The first rank that differs.
        rank: usize,
        /// Its first layer that differs.
        layer: String,
    },
    /// The calls were not in order.
    #[error("{0}")]
    Order(String),
    /// A checkpoint is not one of this run.
    #[error("the checkpoint{}: {why}", .dir.as_ref().map_or(String::new(), |dir| format!(" in {}", dir.display())))]
    Checkpoint {
        /// Its directory, if it came from one.
        dir: Option<PathBuf>,
        /// What is different.
        why: String,
    },
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The synchronizer failed before; the text is that of the first failure.
    #[error("{0}")]
    Failed(String),
}

impl SyncError {
    /// What a failed collective means: another rank's reason stands for itself.
    pub(crate) fn exchange(layers: String, source: CommError) -> Self {
        match source {
            CommError::GaveUp { rank, reason, blames, .. } => SyncError::Peer { rank, reason, blames },
            source => SyncError::Exchange { layers, source },
        }
    }

    /// The same error of an exchange among some ranks only, which counted them from 0: these are their numbers.
    pub(crate) fn of_ranks(self, ranks: &[usize]) -> Self {
        let real = |rank: usize| ranks.get(rank).copied().unwrap_or(rank);
        match self {
            SyncError::Frame { rank, layers, why } => SyncError::Frame { rank: real(rank), layers, why },
            SyncError::Message { rank, layer, why } => SyncError::Message { rank: real(rank), layer, why },
            other => other,
        }
    }

    /// Whether a gradient of this or of another rank is the cause.
    pub fn is_gradient(&self) -> bool {
        match self {
            SyncError::Layer(_) => true,
            // Reasons are texts of errors, and only those about a gradient name a layer and a step first.
            SyncError::Peer { reason, .. } => reason.starts_with("layer ") && reason.contains(", step "),
            _ => false,
        }
    }

    /// The ranks that are to blame, as far as they are known.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            SyncError::Hello { rank, .. }
            | SyncError::Frame { rank, .. }
            | SyncError::Message { rank, .. }
            | SyncError::Replicas { rank, .. } => vec![*rank],
            SyncError::Peer { rank, blames, .. } if blames.is_empty() => vec![*rank],
            SyncError::Peer { blames, .. } => blames.clone(),
            SyncError::Exchange { source, .. } => source.ranks(),
            _ => Vec::new(),
        }
    }
}

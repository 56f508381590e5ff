//! Training: settings go in with data and a rank's communicator, a trained network comes out, the same on every rank.
//!
//! ```text
//! batch --> network --> loss --> backward --gradients--> Distributed --> network with other weights
//! ```

mod checkpoint;
mod epoch;
mod events;
mod images;
mod metrics;
mod optimizer;
mod ranks;
mod resume;
mod schedule;
mod seconds;
mod settings;
mod task;
mod tell;
mod trainer;
mod words;

pub use metrics::{EpochRecord, LayerRecord, Metrics, Observer, RunRecord, StepRecord, Summary, Way};
pub use optimizer::Optimizer;
pub use schedule::{Pace, Schedule};
pub use seconds::{Seconds, milliseconds};
pub use settings::{Settings, WarmUp};
pub use trainer::{Ended, train, train_network};

use crate::DistributedError;
use crate::net::UnknownModel;
use redsync_comm::CommError;
use redsync_data::{DataError, OrderError};
use redsync_engine::SyncError;
use redsync_engine::file::FileError;
use std::path::PathBuf;

/// Why a training ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The model, or that it does not fit the data.
    #[error(transparent)]
    Model(#[from] UnknownModel),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The data cannot be dealt out like this.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// The exchange of gradients.
    #[error(transparent)]
    Sync(Box<SyncError>),
    /// The network on several ranks.
    #[error(transparent)]
    Distributed(DistributedError),
    /// Another collective.
    #[error("{what}: {source}")]
    Comm {
        /// What was being exchanged.
        what: &'static str,
        /// Why it failed.
        source: CommError,
    },
    /// Values of a rank that cannot be used.
    #[error("{what} of rank {rank}: {why}")]
    Values {
        /// What was being exchanged.
        what: &'static str,
        /// Whose values.
        rank: usize,
        /// What is wrong.
        why: String,
    },
    /// A checkpoint that cannot be used.
    #[error("the checkpoint {path}: {why}")]
    Checkpoint {
        /// Its file or directory.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A file of a checkpoint that cannot be written or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another file that cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A setting that makes no sense.
    #[error("{0}")]
    Setting(String),
    /// The loss is no number any more.
    #[error("the loss is {loss} at step {step}: the learning rate {rate} may be too high")]
    Diverged {
        /// The step.
        step: u64,
        /// The loss.
        loss: f32,
        /// The learning rate.
        rate: f32,
    },
}

impl From<SyncError> for TrainError {
    fn from(error: SyncError) -> Self {
        TrainError::Sync(Box::new(error))
    }
}

impl From<DistributedError> for TrainError {
    fn from(error: DistributedError) -> Self {
        match error {
            DistributedError::Sync(error) => TrainError::Sync(error),
            error => TrainError::Distributed(error),
        }
    }
}

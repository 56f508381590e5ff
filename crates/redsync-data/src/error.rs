//! What can go wrong, each in one line that names the file or address, what is wrong with it, and what to do.

use std::io;
use std::path::PathBuf;

use redsync_names::nearest;
use thiserror::Error;

/// Why a data set was not opened.
#[derive(Debug, Error)]
pub enum DataError {
    /// No data set has this name.
    #[error("unknown data set {name}: {}", nearest(.name, .known))]
    UnknownName {
        /// The name asked for.
        name: String,
        /// All known names.
        known: Vec<&'static str>,
    },
    /// The files are in none of the places.
    #[error("{name} was not found in {looked}: {advice}")]
    NotFound {
        /// The data set.
        name: &'static str,
        /// Where it was looked for.
        looked: String,
        /// What to do.
        advice: String,
    },
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file is not what its name says.
    #[error("{}: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A file could not be fetched, or is not the right one. Nothing was put in place.
    #[error("fetching {address}: {why}")]
    Fetch {
        /// Where from.
        address: String,
        /// What is wrong.
        why: String,
    },
    /// There is nowhere to put what is fetched.
    #[error(
        "there is no cache directory to fetch {name} into: set XDG_CACHE_HOME or HOME to an absolute path"
    )]
    NoCache {
        /// The data set.
        name: String,
    },
}

impl DataError {
    pub(crate) fn damaged(path: impl Into<PathBuf>, why: impl Into<String>) -> Self {
        DataError::Damaged { path: path.into(), why: why.into() }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, source: io::Error) -> Self {
        DataError::Io { path: path.into(), source }
    }
}

/// Why data cannot be dealt out as asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OrderError {
    /// A number that must be at least 1 is 0.
    #[error("the number of {what} must be at least 1, got 0")]
    Zero {
        /// Of what.
        what: &'static str,
    },
    /// There is not even one global batch.
    #[error("{len} samples are too few for {ranks} ranks with {batch} each: one step takes {needed}")]
    FewSamples {
        /// The number of samples.
        len: usize,
        /// The number of ranks.
        ranks: usize,
        /// Samples per rank and step.
        batch: usize,
        /// The least number of samples.
        needed: u128,
    },
    /// Samples are numbered in 32 bits.
    #[error("{len} samples are too many: they are numbered in 32 bits")]
    ManySamples {
        /// The number of samples.
        len: usize,
    },
    /// The text is too short for a single step.
    #[error(
        "{len} tokens are too few for {ranks} ranks with {batch} at a time and windows of {bptt}: one step takes {needed}"
    )]
    FewTokens {
        /// The number of tokens.
        len: usize,
        /// The number of ranks.
        ranks: usize,
        /// Streams or windows per rank.
        batch: usize,
        /// Tokens per window.
        bptt: usize,
        /// The least number of tokens.
        needed: u128,
    },
}

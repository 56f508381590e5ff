//! Every way in which a collective can fail. Each text is one line that names the ranks concerned.

use crate::{Call, Tag};
use std::time::Duration;

/// Why a collective failed. The communicator is broken afterwards: later calls fail with the same cause.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Another rank started a different collective at this place of the sequence, or an allreduce of another length.
    #[error("rank {rank} started {theirs} where this rank started {ours}")]
    Mismatch {
        /// The rank that disagrees.
        rank: usize,
        /// What that rank started.
        theirs: Call,
        /// What this rank started.
        ours: Call,
    },

    /// The deadline passed before every rank had done its part.
    #[error("{} within {waited:?} in {tag}", silence(.missing))]
    Deadline {
        /// The collective that was waited for.
        tag: Tag,
        /// How long this rank waited.
        waited: Duration,
        /// The ranks from which something was still missing, as far as this rank can know.
        missing: Vec<usize>,
    },

    /// A rank gave up its communicator before it took part in this collective.
    #[error("rank {rank} left the group before {tag}")]
    Left {
        /// The rank that left.
        rank: usize,
        /// The collective that it will never start.
        tag: Tag,
    },

    /// A rank met an error of its own, and left before it took part in this collective.
    #[error("rank {rank} gave up before {tag}: {reason}")]
    GaveUp {
        /// The rank that met the error.
        rank: usize,
        /// The collective that will never be complete.
        tag: Tag,
        /// What that rank said.
        reason: String,
    },

    /// The engine underneath reported an error, or could not be started.
    #[error("{engine}: {reason}")]
    Engine {
        /// The name of the engine.
        engine: &'static str,
        /// What it said.
        reason: String,
    },

    /// The MPI engine was asked for in a build that does not have it.
    #[error(
        "this build has no MPI: build with `cargo build --release --features mpi` \
         (needs the packages libopenmpi-dev and libclang-dev)"
    )]
    NotBuilt,
}

impl CommError {
    /// What the others are told when this rank leaves because of this error: who met the first error, and which.
    pub(crate) fn origin(&self, rank: usize) -> (usize, String) {
        match self {
            CommError::GaveUp { rank, reason, .. } => (*rank, reason.clone()),
            cause => (rank, cause.to_string()),
        }
    }
}

fn silence(missing: &[usize]) -> String {
    match missing {
        [] => "not finished".to_string(),
        [rank] => format!("no answer from rank {rank}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("no answer from ranks {} and {last}", first.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    #[test]
    fn every_text_names_ranks_and_tag_in_one_line() {
        let tag = Tag { step: 3, op: 1 };
        let deadline = |missing: &[usize]| CommError::Deadline {
            tag,
            waited: Duration::from_secs(60),
            missing: missing.to_vec(),
        };
        assert_eq!(deadline(&[2]).to_string(), "no answer from rank 2 within 60s in step 3 op 1");
        assert_eq!(
            deadline(&[0, 2, 5]).to_string(),
            "no answer from ranks 0, 2 and 5 within 60s in step 3 op 1"
        );
        assert_eq!(deadline(&[]).to_string(), "not finished within 60s in step 3 op 1");
        assert_eq!(CommError::Left { rank: 4, tag }.to_string(), "rank 4 left the group before step 3 op 1");
        let theirs = Call { kind: Kind::Allreduce, tag, length: 10 };
        let ours = Call { kind: Kind::Barrier, tag: Tag { step: 3, op: 2 }, length: 0 };
        assert_eq!(
            CommError::Mismatch { rank: 1, theirs, ours }.to_string(),
            "rank 1 started allreduce of 10 values at step 3 op 1 where this rank started barrier at step 3 op 2"
        );
        assert!(CommError::NotBuilt.to_string().contains("--features mpi"));
    }
}

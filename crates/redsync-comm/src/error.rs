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

    /// A rank gave up, by [`give_up`](crate::Communicator::give_up) or because of an error, so this collective will not be
    /// complete. Each collective that fails so has its own tag in the error.
    #[error("rank {rank} gave up before {tag}: {reason}")]
    GaveUp {
        /// The rank that gave up first.
        rank: usize,
        /// The collective that will never be complete.
        tag: Tag,
        /// What that rank said.
        reason: String,
        /// The ranks whose silence made that rank give up; empty if the cause is its own.
        blames: Vec<usize>,
    },

    /// Ranks were cut off in the middle of this collective, and gave no sign of life afterwards.
    #[error("{} gave no sign of life in {tag} ({reason})", names(.ranks))]
    Lost {
        /// The ranks that are gone; all survivors name the same.
        ranks: Vec<usize>,
        /// The collective that was under way.
        tag: Tag,
        /// How it was noticed.
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
    /// The ranks to blame, as far as this rank knows.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            CommError::Mismatch { rank, .. } | CommError::Left { rank, .. } => vec![*rank],
            CommError::Deadline { missing, .. } => missing.clone(),
            CommError::Lost { ranks, .. } => ranks.clone(),
            CommError::GaveUp { rank, blames, .. } if blames.is_empty() => vec![*rank],
            CommError::GaveUp { blames, .. } => blames.clone(),
            CommError::Engine { .. } | CommError::NotBuilt => Vec::new(),
        }
    }

    /// For engines: what a collective of another rank fails with when `rank` goes because of this error. Who gave up first
    /// keeps its name, over any number of ranks.
    pub fn followed(&self, rank: usize, tag: Tag) -> CommError {
        let blames = match self {
            CommError::GaveUp { .. } => return self.clone().at(tag),
            CommError::Deadline { missing, .. } => missing.clone(),
            CommError::Lost { ranks, .. } => ranks.clone(),
            CommError::Left { rank, .. } => vec![*rank],
            _ => Vec::new(),
        };
        CommError::GaveUp { rank, tag, reason: self.to_string(), blames }
    }

    /// For engines: this cause as the collective `tag` reports it.
    pub fn at(mut self, tag: Tag) -> CommError {
        if let CommError::GaveUp { tag: own, .. } = &mut self {
            *own = tag;
        }
        self
    }

    /// For engines: an all-to-all that was not given one message for each rank.
    pub fn miscounted(engine: &'static str, messages: usize, ranks: usize) -> CommError {
        let reason = format!("an all-to-all among {ranks} ranks was given {messages} messages");
        CommError::Engine { engine, reason }
    }
}

fn silence(missing: &[usize]) -> String {
    match missing {
        [] => "not finished".to_string(),
        ranks => format!("no answer from {}", names(ranks)),
    }
}

fn names(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".to_string(),
        [rank] => format!("rank {rank}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
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
        let theirs = Call { kind: Kind::Alltoall, tag, length: 10 };
        assert_eq!(theirs.to_string(), "all-to-all at step 3 op 1");
    }

    #[test]
    fn blame_passes_through_those_who_follow() {
        let tag = |op| Tag { step: 3, op };
        let deadline = CommError::Deadline { tag: tag(1), waited: Duration::from_secs(2), missing: vec![2] };
        assert_eq!(deadline.ranks(), [2]);
        let followed = deadline.followed(0, tag(4));
        let reason = "no answer from rank 2 within 2s in step 3 op 1".to_string();
        assert_eq!(followed, CommError::GaveUp { rank: 0, tag: tag(4), reason, blames: vec![2] });
        assert_eq!(followed.followed(1, tag(5)), followed.clone().at(tag(5)));
        assert_eq!(followed.ranks(), [2]);
        let left = CommError::Left { rank: 3, tag: tag(1) };
        assert_eq!((left.ranks(), left.followed(0, tag(1)).ranks()), (vec![3], vec![3]));
        let lost =
            CommError::Lost { ranks: vec![1, 3], tag: tag(1), reason: "connection closed".to_string() };
        assert_eq!(lost.to_string(), "ranks 1 and 3 gave no sign of life in step 3 op 1 (connection closed)");
        assert_eq!((lost.ranks(), lost.followed(0, tag(1)).ranks()), (vec![1, 3], vec![1, 3]));
        let own = CommError::Engine { engine: "local", reason: "broken".to_string() };
        assert_eq!((own.ranks(), own.followed(1, tag(1)).ranks()), (vec![], vec![1]));
    }
}

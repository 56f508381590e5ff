//! What ranks leave on the board: a note of each about itself, and one verdict of all. Notes come in, whom to blame goes out. What
//! must hold: everything here is a function of the notes, so that it can be tested without a network.

use redsync_comm::{CommError, Tag};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a rank says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// Grows with every note: a sign of life.
    pub beats: u64,
    /// How many collectives the rank has started.
    pub started: u64,
    /// How many of them are done there.
    pub finished: u64,
    /// Why it takes no part any more, if so.
    pub gone: Option<Gone>,
}

/// Why a rank takes no part any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gone {
    /// It left in order.
    Left,
    /// It cannot go on, or follows one that cannot.
    GaveUp {
        /// The first collective that it takes no part in to the end.
        from: u64,
        /// The rank that gave up first.
        rank: usize,
        /// What that rank said.
        reason: String,
        /// Whose silence made that rank give up.
        blames: Vec<usize>,
    },
}

impl Gone {
    /// What an error of rank `rank` means for the others: they fail from the collective `from` on.
    pub fn because(cause: &CommError, rank: usize, from: u64) -> Gone {
        match cause.followed(rank, Tag { step: 0, op: 0 }) {
            CommError::GaveUp { rank, reason, blames, .. } => Gone::GaveUp { from, rank, reason, blames },
            other => Gone::GaveUp { from, rank, reason: other.to_string(), blames: Vec::new() },
        }
    }
}

impl Note {
    /// The first collective that cannot be complete because of this rank, if it is gone.
    pub fn fails_from(&self) -> Option<u64> {
        self.gone.as_ref().map(|gone| match gone {
            Gone::Left => self.started,
            Gone::GaveUp { from, .. } => *from,
        })
    }
}

/// How much is known of a rank's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pulse {
    /// It gave a sign of life lately.
    Beating,
    /// Too early to tell.
    Unknown,
    /// It gave none for too long.
    Silent,
}

/// What the survivors agree on. The first that is written counts for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// What the ranks did.
    pub found: Found,
    /// Who.
    pub ranks: Vec<usize>,
}

/// What can be found out about a collective that does not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Found {
    /// Ranks gave no sign of life.
    Silent,
    /// A rank left before it.
    Left,
    /// Ranks are alive and did not start it.
    Behind,
    /// All ranks are alive and started it.
    Nothing,
}

/// Why somebody asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// A wait of so long expired.
    Expired(Duration),
    /// The process group failed, and said this.
    Failed(String),
    /// A rank has left.
    Left,
}

/// Who is to blame that the collective `number` does not end; None while it is too early to tell. `others` are the notes of the
/// other ranks, None of a rank that never wrote one. Silence comes first: a rank may have left, or lag, because of it.
pub fn judge<'a>(
    number: u64,
    others: impl Iterator<Item = (usize, Option<&'a Note>, Pulse)>,
) -> Option<Verdict> {
    let (mut silent, mut left, mut behind) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, note, pulse) in others {
        match (note.and_then(|note| note.gone.as_ref()), pulse) {
            (Some(Gone::Left), _) if note.is_some_and(|note| note.started <= number) => left.push(rank),
            (Some(_), _) => {}
            (None, Pulse::Unknown) => return None,
            (None, Pulse::Silent) => silent.push(rank),
            (None, Pulse::Beating) if note.is_none_or(|note| note.started <= number) => behind.push(rank),
            (None, Pulse::Beating) => {}
        }
    }
    let found = [(Found::Silent, silent), (Found::Left, left), (Found::Behind, behind)];
    let found = found.into_iter().find(|(_, ranks)| !ranks.is_empty());
    let (found, ranks) = found.unwrap_or((Found::Nothing, Vec::new()));
    Some(Verdict { found, ranks })
}

impl Verdict {
    /// The verdict as the error of a collective. `patience` is how long the process group itself waits.
    pub fn error(&self, tag: Tag, why: &Why, patience: Duration) -> CommError {
        let missing = self.ranks.clone();
        match (self.found, why) {
            (Found::Left, _) if !missing.is_empty() => CommError::Left { rank: missing[0], tag },
            (_, Why::Expired(waited)) => CommError::Deadline { tag, waited: *waited, missing },
            (Found::Silent, Why::Failed(reason)) => {
                CommError::Lost { ranks: missing, tag, reason: reason.clone() }
            }
            (Found::Silent, Why::Left) => {
                CommError::Lost { ranks: missing, tag, reason: "others have left".to_string() }
            }
            (Found::Nothing | Found::Left, Why::Failed(reason)) => {
                let reason = format!("{tag} failed, though all ranks are alive: {reason}");
                CommError::Engine { engine: super::ENGINE, reason }
            }
            (_, Why::Failed(_) | Why::Left) => CommError::Deadline { tag, waited: patience, missing },
        }
    }
}

//! What a rank says when it starts a collective: which kind, under which tag, how long. Two calls either match or are an
//! error on both sides; the texts made here are what that error shows.

use std::fmt;

/// Names one collective: the training step and a number within it (a layer, a frame).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// The global training step.
    pub step: u64,
    /// Which collective of that step.
    pub op: u32,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} op {}", self.step, self.op)
    }
}

/// The kinds of collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every rank receives every rank's bytes.
    Allgather,
    /// Element-wise sum of `f32` values.
    Allreduce,
    /// Nothing but the meeting itself.
    Barrier,
    /// Every rank receives its own message from every rank.
    Alltoall,
}

/// One rank's part in a collective, as the other ranks see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Call {
    /// Which kind of collective.
    pub kind: Kind,
    /// Which collective it is meant to be.
    pub tag: Tag,
    /// Bytes of an allgather message, values of an allreduce, bytes sent in an all-to-all, 0 for a barrier.
    pub length: u64,
}

impl Call {
    /// Whether two ranks mean the same collective. Only the length of a sum has to agree.
    pub fn matches(&self, other: &Call) -> bool {
        let same_length = self.kind != Kind::Allreduce || self.length == other.length;
        self.kind == other.kind && self.tag == other.tag && same_length
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Allgather => write!(f, "allgather at {}", self.tag),
            Kind::Allreduce => write!(f, "allreduce of {} values at {}", self.length, self.tag),
            Kind::Barrier => write!(f, "barrier at {}", self.tag),
            Kind::Alltoall => write!(f, "all-to-all at {}", self.tag),
        }
    }
}

//! One collective in flight: the ranks meet, which tells each what the others have started, then the body. A call that does not
//! match ours is an error that names its rank.

use super::body::{Body, Tags};
use super::direct::Direct;
use super::library::Library;
use super::rounds::Rounds;
use crate::{Call, CommError};
use std::ffi::c_int;

/// Collectives that can be in flight before MPI tags repeat; the standard promises tags up to 32767.
const CYCLE: u64 = 8191;

/// The MPI tag of notes, not used by any collective.
pub(super) const NOTES: c_int = 4 * CYCLE as c_int;

/// What was heard of a peer: its call, how many bytes or values of it are for this rank, and these if they are short.
pub(super) struct Heard<'a> {
    pub peer: usize,
    pub call: Call,
    pub length: usize,
    pub inline: &'a [u8],
}

/// How the ranks of a collective hear of each other. A meeting never blocks: it starts transfers and is asked to go on.
pub(super) trait Meeting {
    fn begin(&mut self, lib: &Library, tag: c_int) -> Result<(), CommError>;

    /// Moves on, and tells of the peers that have been heard of; true when something happened.
    fn progress(
        &mut self,
        lib: &Library,
        hear: &mut dyn FnMut(Heard<'_>) -> Result<(), CommError>,
    ) -> Result<bool, CommError>;

    /// The peers that have not been heard of.
    fn missing(&self) -> Vec<usize>;

    /// Whether everything is sent.
    fn idle(&self) -> bool;
}

pub(super) struct Exchange {
    pub number: u64,
    pub call: Call,
    meeting: Box<dyn Meeting>,
    body: Box<dyn Body>,
}

impl Exchange {
    pub fn new(lib: &Library, number: u64, call: Call, in_rounds: bool, body: Box<dyn Body>) -> Exchange {
        let meeting: Box<dyn Meeting> = if in_rounds {
            Box::new(Rounds::new(lib, call, &*body))
        } else {
            Box::new(Direct::new(lib, call, &*body))
        };
        Exchange { number, call, meeting, body }
    }

    /// Says to the others what this rank has started, and begins the body.
    pub fn begin(&mut self, lib: &Library) -> Result<(), CommError> {
        let base = (self.number % CYCLE) as c_int * 4;
        let tags = Tags { header: base, payload: base + 1, result: base + 2 };
        self.meeting.begin(lib, tags.header)?;
        self.body.begin(lib, tags)?;
        self.report();
        Ok(())
    }

    /// Moves on; true when something happened.
    pub fn progress(&mut self, lib: &Library) -> Result<bool, CommError> {
        let Exchange { call: ours, meeting, body, .. } = self;
        let mut moved = meeting.progress(lib, &mut |Heard { peer, call, length, inline }| {
            if !call.matches(ours) {
                return Err(CommError::Mismatch { rank: peer, theirs: call, ours: *ours });
            }
            body.heard(lib, peer, length, inline)
        })?;
        moved |= body.progress(lib)?;
        if moved {
            self.report();
        }
        Ok(moved)
    }

    pub fn done(&self) -> bool {
        self.meeting.idle() && self.body.done()
    }

    pub fn fail(&self, cause: &CommError) {
        self.body.fail(cause.clone().at(self.call.tag));
    }

    /// Whether the caller has its result or an error.
    pub fn filled(&self) -> bool {
        self.body.filled()
    }

    /// The ranks from which something is missing, in order.
    pub fn missing(&self) -> Vec<usize> {
        let mut missing = self.meeting.missing();
        if missing.is_empty() {
            missing = self.body.missing();
        }
        missing.sort_unstable();
        missing
    }

    fn report(&self) {
        self.body.report(self.missing());
    }
}

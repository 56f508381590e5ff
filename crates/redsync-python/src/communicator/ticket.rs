//! The caller's end of a collective: it waits for the slot, and asks the board who is missing when the time is up.

use super::desk::{Desk, Done, Inquest};
use super::note::Why;
use redsync_comm::{CommError, Operation, Slot, Tag};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One collective under way.
pub struct Ticket<T> {
    pub slot: Arc<Slot<Done>>,
    pub desk: Arc<Desk>,
    pub number: u64,
    pub tag: Tag,
    /// Who is to blame if not even the board answers.
    pub holder: Vec<usize>,
    /// What the caller wants of the result.
    pub finish: fn(Done) -> T,
}

impl<T: Send> Operation<T> for Ticket<T> {
    fn poll(&mut self) -> bool {
        self.slot.is_filled()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<T, CommError> {
        // A deadline too far away to be a date is none.
        self.desk.waits(self.number, Instant::now().checked_add(deadline));
        if let Some(outcome) = self.slot.wait(deadline) {
            return outcome.map(self.finish);
        }
        let why = Why::Expired(deadline);
        self.desk.inquire(Inquest { number: self.number, tag: self.tag, why });
        // The board looks for a few beats; a store that does not answer keeps it for a grace.
        if let Some(outcome) = self.slot.wait(2 * self.desk.grace) {
            return outcome.map(self.finish);
        }
        let silent = CommError::Deadline { tag: self.tag, waited: deadline, missing: self.holder.clone() };
        self.desk.fail(self.number, silent.clone());
        Err(silent)
    }
}

//! Where a result is left for the caller. A thread fills the slot once, the caller polls or waits for it.

use super::desk::{Desk, Done, Inquest};
use super::note::Why;
use redsync_comm::{CommError, Operation, Tag};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The place of one result.
#[derive(Debug, Default)]
pub struct Slot {
    outcome: Mutex<Option<Result<Done, CommError>>>,
    filled: Condvar,
}

impl Slot {
    /// Leaves the result. Only the first counts.
    pub fn fill(&self, outcome: Result<Done, CommError>) {
        self.lock().get_or_insert(outcome);
        self.filled.notify_all();
    }

    fn take(&self, until: Option<Instant>) -> Option<Result<Done, CommError>> {
        let mut outcome = self.lock();
        loop {
            if outcome.is_some() {
                return outcome.take();
            }
            outcome = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return None,
                Some(left) => {
                    let woken = self.filled.wait_timeout(outcome, left);
                    woken.map_or_else(|poisoned| poisoned.into_inner().0, |(outcome, _)| outcome)
                }
                None => self.filled.wait(outcome).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Done, CommError>>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The caller's end of a slot.
pub struct Ticket<T> {
    pub slot: Arc<Slot>,
    pub desk: Arc<Desk>,
    pub number: u64,
    pub tag: Tag,
    /// Who is to blame if not even the board answers.
    pub holder: Vec<usize>,
    pub finish: fn(Done) -> T,
}

impl<T: Send> Operation<T> for Ticket<T> {
    fn poll(&mut self) -> bool {
        self.slot.lock().is_some()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<T, CommError> {
        // A deadline too far away to be a date is none.
        let until = Instant::now().checked_add(deadline);
        if let Some(outcome) = self.slot.take(Some(Instant::now())) {
            return outcome.map(self.finish);
        }
        self.desk.waits(self.number, until);
        if let Some(outcome) = self.slot.take(until) {
            return outcome.map(self.finish);
        }
        let why = Why::Expired(deadline);
        self.desk.inquire(Inquest { number: self.number, tag: self.tag, why });
        // The board looks for a few beats; a store that does not answer keeps it for a grace.
        if let Some(outcome) = self.slot.take(Some(Instant::now() + 2 * self.desk.grace)) {
            return outcome.map(self.finish);
        }
        let silent = CommError::Deadline { tag: self.tag, waited: deadline, missing: self.holder.clone() };
        self.desk.fail(self.number, silent.clone());
        Err(silent)
    }
}

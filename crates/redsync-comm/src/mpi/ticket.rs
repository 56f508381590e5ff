//! The caller's end of a collective: a slot that the communication thread fills. A wait whose time is up is told to the thread,
//! which hears the other ranks before it names who is missing.

use super::thread::{Command, grace};
use crate::{CommError, Operation, Slot, Tag};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long the thread may be late with its verdict. It is stuck in a call of MPI then.
const STUCK: Duration = Duration::from_secs(2);

/// The first cause that broke a communicator, known to all its users.
#[derive(Clone, Default)]
pub(super) struct Broken(Arc<Mutex<Option<CommError>>>);

impl Broken {
    pub fn cause(&self) -> Option<CommError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps the first cause and gives it back.
    pub fn set(&self, cause: CommError) -> CommError {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause).clone()
    }
}

pub(super) struct Ticket<T> {
    pub slot: Arc<Slot<T>>,
    pub tag: Tag,
    pub number: u64,
    pub broken: Broken,
    pub thread: Sender<Command>,
}

impl<T: Send> Operation<T> for Ticket<T> {
    fn poll(&mut self) -> bool {
        self.slot.is_filled()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<T, CommError> {
        if let Some(outcome) = self.slot.wait(deadline) {
            return outcome;
        }
        // If the thread is gone nobody needs to be told, and there is no answer to wait for.
        let told = self.thread.send(Command::Expire(self.number, self.tag, deadline)).is_ok();
        let answer = self.slot.wait(if told { grace(deadline) + STUCK } else { Duration::ZERO });
        answer.unwrap_or_else(|| {
            let expired =
                CommError::Deadline { tag: self.tag, waited: deadline, missing: self.slot.missing() };
            self.broken.set(expired.clone());
            Err(expired)
        })
    }
}

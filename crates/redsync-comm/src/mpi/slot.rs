//! Where a result is left for the caller: the communication thread fills a slot once, the caller polls or waits for it. Until
//! then the slot says which ranks are missing, so that a deadline can name them even if the thread were stuck.

use super::thread::Command;
use crate::{CommError, Operation, Tag};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The place of one result.
pub(super) struct Slot<T> {
    content: Mutex<Content<T>>,
    filled: Condvar,
}

struct Content<T> {
    outcome: Option<Result<T, CommError>>,
    missing: Vec<usize>,
}

impl<T> Slot<T> {
    pub fn new() -> Arc<Slot<T>> {
        let content = Mutex::new(Content { outcome: None, missing: Vec::new() });
        Arc::new(Slot { content, filled: Condvar::new() })
    }

    /// Leaves the result. Only the first counts.
    pub fn fill(&self, outcome: Result<T, CommError>) {
        self.lock().outcome.get_or_insert(outcome);
        self.filled.notify_all();
    }

    /// Says which ranks are missing now.
    pub fn missing(&self, missing: Vec<usize>) {
        self.lock().missing = missing;
    }

    fn lock(&self) -> MutexGuard<'_, Content<T>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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

/// The caller's end of a slot.
pub(super) struct Ticket<T> {
    pub slot: Arc<Slot<T>>,
    pub tag: Tag,
    pub number: u64,
    pub broken: Broken,
    pub thread: Sender<Command>,
}

impl<T: Send> Operation<T> for Ticket<T> {
    fn poll(&mut self) -> bool {
        self.slot.lock().outcome.is_some()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<T, CommError> {
        let begin = Instant::now();
        let mut content = self.slot.lock();
        loop {
            if let Some(outcome) = content.outcome.take() {
                return outcome;
            }
            let Some(left) = deadline.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) else {
                let missing = std::mem::take(&mut content.missing);
                let expired = CommError::Deadline { tag: self.tag, waited: deadline, missing };
                // Nobody is told if the thread is gone, and nobody needs to be.
                let _ = self.thread.send(Command::Expire(self.number, expired.clone()));
                self.broken.set(expired.clone());
                return Err(expired);
            };
            let woken = self.slot.filled.wait_timeout(content, left);
            content = woken.map_or_else(|poisoned| poisoned.into_inner().0, |(content, _)| content);
        }
    }
}

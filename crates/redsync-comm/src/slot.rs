//! Where an engine's thread leaves a result for the caller. It is filled once, by the thread, and polled or waited for by the
//! caller. Until then it says which ranks are missing, so that a deadline can name them even if the thread were stuck.

use crate::CommError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The place of one result: a part to build engines from.
///
/// ```
/// use redsync_comm::Slot;
/// use std::{sync::Arc, time::Duration};
///
/// let slot = Slot::new();
/// slot.set_missing(vec![1]);
/// // Nothing yet: what is missing goes into the error.
/// assert_eq!((slot.wait(Duration::ZERO), slot.missing()), (None, vec![1]));
/// let thread = Arc::clone(&slot);
/// std::thread::spawn(move || thread.fill(Ok(42)));
/// assert_eq!(slot.wait(Duration::from_secs(60)), Some(Ok(42)));
/// ```
#[derive(Debug)]
pub struct Slot<T> {
    content: Mutex<Content<T>>,
    filled: Condvar,
}

#[derive(Debug)]
struct Content<T> {
    outcome: Option<Result<T, CommError>>,
    filled: bool,
    missing: Vec<usize>,
}

impl<T> Slot<T> {
    /// An empty slot, for the thread and the caller to share.
    pub fn new() -> Arc<Slot<T>> {
        let content = Mutex::new(Content { outcome: None, filled: false, missing: Vec::new() });
        Arc::new(Slot { content, filled: Condvar::new() })
    }

    /// Leaves the result. Only the first counts.
    pub fn fill(&self, outcome: Result<T, CommError>) {
        let mut content = self.lock();
        if !content.filled {
            content.filled = true;
            content.outcome = Some(outcome);
            self.filled.notify_all();
        }
    }

    /// Says which ranks are missing now.
    pub fn set_missing(&self, missing: Vec<usize>) {
        self.lock().missing = missing;
    }

    /// The ranks that were missing when the thread last looked.
    pub fn missing(&self) -> Vec<usize> {
        self.lock().missing.clone()
    }

    /// Whether the result is there, or has been taken.
    pub fn is_filled(&self) -> bool {
        self.lock().filled
    }

    /// Takes the result as soon as it is there, or nothing when the time is up.
    pub fn wait(&self, deadline: Duration) -> Option<Result<T, CommError>> {
        let begin = Instant::now();
        let mut content = self.lock();
        loop {
            if let Some(outcome) = content.outcome.take() {
                return Some(outcome);
            }
            let left = deadline.checked_sub(begin.elapsed()).filter(|left| !left.is_zero())?;
            let woken = self.filled.wait_timeout(content, left);
            content = woken.map_or_else(|poisoned| poisoned.into_inner().0, |(content, _)| content);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Content<T>> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

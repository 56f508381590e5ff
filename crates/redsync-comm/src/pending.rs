//! The handle of a collective under way. It comes from an engine; it goes to the caller, who polls it, waits for it, or
//! drops it. Dropping leaves the other ranks undisturbed: this rank's part was given when the collective was started.

use crate::CommError;
use std::time::Duration;

/// What an engine keeps behind a [`Pending`].
pub trait Operation<T>: Send {
    /// True when the result or an error is there. Never blocks for another rank.
    fn poll(&mut self) -> bool;

    /// Waits for the result, at most `deadline` from now.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<T, CommError>;
}

/// A collective under way.
#[must_use = "a collective is only finished when it was waited for"]
pub struct Pending<T> {
    operation: Box<dyn Operation<T>>,
}

impl<T: Send + 'static> Pending<T> {
    /// Wraps an engine's operation.
    pub fn new(operation: impl Operation<T> + 'static) -> Pending<T> {
        Pending { operation: Box::new(operation) }
    }

    /// A collective whose outcome is known already.
    pub fn ready(outcome: Result<T, CommError>) -> Pending<T> {
        Pending::new(Ready(outcome))
    }

    /// True when [`wait`](Self::wait) would return at once, with a result or with an error.
    pub fn poll(&mut self) -> bool {
        self.operation.poll()
    }

    /// Waits for the result, at most `deadline` from this call.
    ///
    /// # Errors
    /// Any [`CommError`]; when the time is up, [`CommError::Deadline`] with the ranks that are missing.
    pub fn wait(self, deadline: Duration) -> Result<T, CommError> {
        self.operation.wait(deadline)
    }
}

impl<T: Send + 'static> Pending<T> {
    /// The same collective, with something else made of its result.
    pub fn map<U: Send + 'static>(self, change: impl FnOnce(T) -> U + Send + 'static) -> Pending<U> {
        self.and_then(|result| Ok(change(result)))
    }

    /// The same, where that may fail.
    pub fn and_then<U: Send + 'static>(
        self,
        change: impl FnOnce(T) -> Result<U, CommError> + Send + 'static,
    ) -> Pending<U> {
        Pending::new(Changed { pending: self, change })
    }
}

struct Changed<T, F> {
    pending: Pending<T>,
    change: F,
}

impl<T: Send + 'static, U, F: FnOnce(T) -> Result<U, CommError> + Send> Operation<U> for Changed<T, F> {
    fn poll(&mut self) -> bool {
        self.pending.poll()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<U, CommError> {
        self.pending.wait(deadline).and_then(self.change)
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

struct Ready<T>(Result<T, CommError>);

impl<T: Send> Operation<T> for Ready<T> {
    fn poll(&mut self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _deadline: Duration) -> Result<T, CommError> {
        self.0
    }
}

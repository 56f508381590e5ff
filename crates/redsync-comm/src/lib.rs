//! Collectives among the ranks of a group: a variable-length allgather and all-to-all, a dense sum, a barrier. Owned buffers go
//! in, owned buffers come out through a [`Pending`] that can be polled or waited for with a deadline.
//!
//! What holds on every engine:
//! - Collectives are matched in the order in which each rank starts them. The [`Tag`] travels along, so ranks that
//!   disagree get [`CommError::Mismatch`], never a hang or a wrong result.
//! - Sums are taken in rank order: the same bits on every rank, in every run and on every engine.
//! - Every wait has a deadline. After an error a communicator is broken: what was started before the failed collective may
//!   still finish, everything later fails at once with the same cause.
//! - A rank that cannot go on says so with [`Communicator::give_up`], and no rank has to wait for it until a deadline.
//!
//! | engine | ranks are | made by |
//! | --- | --- | --- |
//! | [`local`] | threads of one process | [`local::group`] |
//! | [`mpi`] | processes under `mpirun` or a batch system (feature `mpi`) | [`mpi::world`] |
//!
//! A further engine implements [`Communicator`] and [`Operation`], and has to pass the module `conformance` (feature
//! `conformance`). [`Slot`] and [`sum::in_order`] are parts to build it from.
//!
//! ```
//! use redsync_comm::{CommError, Communicator, Tag, local};
//! use std::time::Duration;
//!
//! fn train(comm: &dyn Communicator) -> Result<f32, CommError> {
//!     let deadline = Duration::from_secs(60);
//!     // Both are under way before the first wait: this is where the gradient of the next layer is computed.
//!     let mut messages = comm.allgather(Tag { step: 0, op: 0 }, vec![7; comm.rank()]);
//!     let sum = comm.allreduce(Tag { step: 0, op: 1 }, vec![1.5, comm.rank() as f32]);
//!     messages.poll();
//!     let messages = messages.wait(deadline)?;
//!     assert_eq!(messages.from_rank(2), [7, 7]);
//!     Ok(sum.wait(deadline)?[1])
//! }
//!
//! let ranks: Vec<_> =
//!     local::group(4).into_iter().map(|comm| std::thread::spawn(move || train(&comm))).collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().expect("no panic")?, 0.0 + 1.0 + 2.0 + 3.0);
//! }
//! # Ok::<(), CommError>(())
//! ```

mod among;
mod call;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod gathered;
pub mod local;
pub mod mpi;
mod pending;
mod slot;
pub mod sum;

pub use among::Among;
pub use call::{Call, Kind, Tag};
pub use error::CommError;
pub use gathered::Gathered;
pub use pending::{Operation, Pending};
pub use slot::Slot;

/// One rank's place in a group, and the collectives it can start there.
///
/// All collectives return at once. They may be started from any thread; ranks must agree on the order.
pub trait Communicator: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks the group has.
    fn size(&self) -> usize;

    /// The engine, such as `"local"` or `"mpi"`.
    fn name(&self) -> &'static str;

    /// A name that ranks have in common if they share memory, and only they; None if the engine does not know.
    fn host(&self) -> Option<String> {
        None
    }

    /// Starts a variable-length allgather: every rank receives every rank's bytes, its own included.
    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered>;

    /// Starts a dense sum over the ranks, element by element, in rank order. All ranks must give equally many values.
    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>>;

    /// Starts an all-to-all of variable lengths: message i goes to rank i, and every rank receives one from each, its own
    /// included. Another number of messages than ranks is a [`CommError::Engine`]; the collective is not started then.
    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered>;

    /// The same where most messages are empty: an engine need not make room for them.
    fn alltoall_few(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        self.alltoall(tag, messages)
    }

    /// Starts a barrier: it is done when every rank has started it.
    fn barrier(&self, tag: Tag) -> Pending<()>;

    /// This rank cannot go on. Every rank that waits for a collective that this rank has not started, of any kind, learns
    /// the reason as [`CommError::GaveUp`]; what it had started still finishes. Later calls of this rank fail. Returns at
    /// once; only the first reason counts, and an engine may cut what is longer than a line or two.
    fn give_up(&self, reason: &str);
}

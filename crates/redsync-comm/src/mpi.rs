//! The engine whose ranks are MPI processes (feature `mpi`; OpenMPI or MPICH). One communication thread makes every MPI call;
//! owned buffers reach it through a channel and come back through the [`Pending`](crate::Pending) of the collective.
//!
//! # How it exchanges
//! Each collective begins with a meeting: a small header of every rank reaches every other, with kind, tag, length, and the
//! payload itself when that is short. So ranks that disagree find out, and ranks that are missing have a name. Longer payloads
//! follow directly from rank to rank. A sum is scattered and gathered: rank `r` adds up the `r`-th segment, in rank order, chunk
//! by chunk, and sends it to all; every link carries `2 (N-1)/N` of the data, the least possible, in both directions at once.
//! These are the rounds of MPI's own non-blocking collectives; made here of sends and receives they can be waited for with
//! a deadline, given up and left, have no limit of 2^31 elements, and sum to the same bits as the engine [`local`](crate::local). One
//! of MPI's own that has begun can be neither cancelled nor asked whom it waits for.
//!
//! # How it meets
//! Few ranks send their header directly to each of the others, N-1 messages in one step. Many meet in rounds: in round `k` a rank
//! sends what it has heard so far to the rank `2^k` behind it, so that log2 N messages are enough, in as many steps. Where ranks
//! begin with rounds is [`Options::rounds_from`], the same on all of them. What is short travels along; a message of an all-to-all only
//! if it is very short, since each is sent on by half of the rounds. All kinds meet in the same rounds, and calls are compared after the
//! last one only: ranks that disagree pass on what the others need to find out too. Who does not get through misses all of whom it has
//! not heard; the words that ranks exchange at a deadline (below) excuse those who were there and wait themselves.
//!
//! While it waits the thread tests its requests with pauses of 20 to 200 microseconds, because MPI moves nothing by itself.
//!
//! # How it finds out who is missing
//! A rank whose deadline has passed may miss a peer that itself waits for another. So it tells every rank how many collectives
//! it has started and whom it misses where, all answer with the same, also those that are idle, and the verdict falls when all have
//! answered or a short grace is over (a quarter of the deadline, at most a second): whoever is missed somewhere and was not
//! there, nor is held up earlier itself. Ranks whose deadline has not passed follow with [`GaveUp`](crate::CommError::GaveUp).
//!
//! # How it ends
//! Dropping a healthy [`Mpi`] tells the other ranks, waits until they leave too and calls `MPI_Finalize`, which is a
//! collective itself. After an error that could wait for ever, so a broken `Mpi` tells the others why it leaves, gives them two
//! seconds to leave too, and ends without `MPI_Finalize`; the process should then end. `mpirun` ends all processes as
//! soon as one has failed: say what happened before dropping the communicator. [`abort`] ends the whole job at once.
//!
//! A rank that is killed is noticed by `mpirun`, which ends the job. A dead link is noticed by nobody but the deadline.
//!
//! An `mpirun` of another MPI than the one linked starts N groups of one rank: check [`size`](crate::Communicator::size).

#[cfg(feature = "mpi")]
mod body;
#[cfg(feature = "mpi")]
mod direct;
#[cfg(feature = "mpi")]
mod exchange;
#[cfg(feature = "mpi")]
mod header;
#[cfg(feature = "mpi")]
mod library;
#[cfg(feature = "mpi")]
mod notes;
mod options;
#[cfg(feature = "mpi")]
mod pace;
#[cfg(feature = "mpi")]
mod reduce;
#[cfg(feature = "mpi")]
mod rounds;
#[cfg(feature = "mpi")]
mod thread;
#[cfg(feature = "mpi")]
mod ticket;
#[cfg(feature = "mpi")]
mod verdict;
#[cfg(feature = "mpi")]
mod world;

#[cfg(feature = "mpi")]
pub use world::{Mpi, abort, world, world_with};

#[cfg(not(feature = "mpi"))]
mod absent;
#[cfg(not(feature = "mpi"))]
pub use absent::{Mpi, abort, world, world_with};
pub use options::Options;

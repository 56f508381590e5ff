//! What stands in for the engine in a build without MPI: the same names, and an error that says how to switch it on.

use super::options::Options;
use crate::{CommError, Communicator, Gathered, Pending, Tag};

/// One MPI process. This build has no MPI, so there is never one.
#[derive(Debug)]
pub enum Mpi {}

/// Joins the MPI world; here always an error.
///
/// # Errors
/// [`CommError::NotBuilt`].
pub fn world() -> Result<Mpi, CommError> {
    Err(CommError::NotBuilt)
}

/// The same with other options.
///
/// # Errors
/// [`CommError::NotBuilt`].
pub fn world_with(_options: Options) -> Result<Mpi, CommError> {
    Err(CommError::NotBuilt)
}

/// Ends this process with the given status.
pub fn abort(status: i32) -> ! {
    std::process::exit(status)
}

impl Mpi {
    /// How many messages this rank has handed to MPI so far.
    pub fn messages_sent(&self) -> u64 {
        match *self {}
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        match *self {}
    }

    fn size(&self) -> usize {
        match *self {}
    }

    fn name(&self) -> &'static str {
        match *self {}
    }

    fn allgather(&self, _tag: Tag, _message: Vec<u8>) -> Pending<Gathered> {
        match *self {}
    }

    fn allreduce(&self, _tag: Tag, _values: Vec<f32>) -> Pending<Vec<f32>> {
        match *self {}
    }

    fn alltoall(&self, _tag: Tag, _messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        match *self {}
    }

    fn barrier(&self, _tag: Tag) -> Pending<()> {
        match *self {}
    }

    fn give_up(&self, _reason: &str) {
        match *self {}
    }
}

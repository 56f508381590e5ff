//! Ranks as threads of this process: what one rank does goes in, what each of them returned comes out.
//! What must hold: nobody waits for ever for a rank that ended early, because the communicator of one that is dropped is gone for all.

use redsync_comm::{Communicator, local};
use std::sync::Arc;
use std::thread;

/// Runs a function on so many ranks, each a thread of this process, and gives what they returned, in rank order, or the error of the
/// first that has one. To try things out: as processes under mpirun, each calls the function itself, with
/// [`mpi::world`](redsync_comm::mpi::world).
///
/// ```
/// use redsync_burn::on_threads;
/// let ranks = on_threads(3, |comm| Ok::<_, ()>(comm.rank()))?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), ()>(())
/// ```
///
/// # Panics
/// If a rank panics.
pub fn on_threads<T: Send, E: Send>(
    ranks: usize,
    rank: impl Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    thread::scope(|scope| {
        let rank = &rank;
        let start = |comm: local::Local| scope.spawn(move || rank(Arc::new(comm)));
        let threads: Vec<_> = local::group(ranks).into_iter().map(start).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

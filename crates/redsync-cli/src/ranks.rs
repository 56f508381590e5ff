//! The ranks of a command. What one rank does goes in; threads of this process do it, or this process as one of those that mpirun
//! started; what rank 0 gives comes out.
//! What must hold: an error names the rank it happened on, and who only says that another rank went is left out where the cause is
//! known.

use crate::complain;
use anyhow::{Result, anyhow, bail};
use redsync_burn::train::TrainError;
use redsync_comm::{CommError, Communicator, local, mpi};
use redsync_engine::SyncError;
use std::sync::Arc;

/// Every rank is a thread.
pub fn on_threads<T, F>(ranks: usize, work: F) -> Result<T>
where
    T: Send + 'static,
    F: Fn(Arc<dyn Communicator>) -> Result<T> + Clone + Send + 'static,
{
    let start = |comm: local::Local| {
        let work = work.clone();
        std::thread::spawn(move || as_rank(Arc::new(comm), work))
    };
    let threads: Vec<_> = local::group(ranks).into_iter().map(start).collect();
    let (mut first, mut errors) = (None, Vec::new());
    for (rank, thread) in threads.into_iter().enumerate() {
        match thread.join().unwrap_or_else(|_| Err(anyhow!("panicked"))) {
            Ok(result) => first = first.or(Some(result)),
            Err(error) => errors.push((rank, error)),
        }
    }
    match (first, tell(&errors)) {
        (Some(result), None) => Ok(result),
        (_, Some(why)) => bail!(why),
        (None, None) => bail!("there are no ranks"),
    }
}

/// This process is a rank. `said` is how many the user expects, `what` the option by which. Only rank 0 gets what came out; if
/// this rank fails, the process ends.
pub fn on_mpi<T>(
    what: &str,
    said: Option<usize>,
    work: impl FnOnce(Arc<dyn Communicator>) -> Result<T>,
) -> Result<Option<T>> {
    let comm: Arc<dyn Communicator> = Arc::new(mpi::world()?);
    let (rank, ranks) = (comm.rank(), comm.size());
    if let Some(said) = said.filter(|said| *said != ranks) {
        bail!("mpirun started {ranks} {what}, --{what} says {said}: is it the mpirun of another MPI?");
    }
    match as_rank(comm.clone(), work) {
        Ok(result) => Ok((rank == 0).then_some(result)),
        Err(error) => {
            // Before the communicator goes: mpirun ends the other ranks when the first one fails.
            complain(&format!("rank {rank}: {error:#}"));
            drop(comm);
            std::process::exit(1);
        }
    }
}

/// One rank; if it fails, no other has to wait for it.
fn as_rank<T>(
    comm: Arc<dyn Communicator>,
    work: impl FnOnce(Arc<dyn Communicator>) -> Result<T>,
) -> Result<T> {
    work(comm.clone()).inspect_err(|error| comm.give_up(&format!("{error:#}")))
}

/// Of the errors of ranks, those that are a cause and not an echo; one line each.
fn tell(errors: &[(usize, anyhow::Error)]) -> Option<String> {
    let line = |(_, error): &(usize, anyhow::Error)| format!("{error:#}");
    let first = line(errors.first()?);
    if errors.iter().all(|error| line(error) == first) {
        return Some(first);
    }
    let causes: Vec<_> = errors.iter().filter(|(_, error)| !is_echo(error)).collect();
    let shown = if causes.is_empty() { errors.iter().collect() } else { causes };
    let lines: Vec<String> =
        shown.into_iter().map(|error| format!("rank {}: {}", error.0, line(error))).collect();
    Some(lines.join("\nredsync: "))
}

/// Whether a rank only says that another one went.
fn is_echo(error: &anyhow::Error) -> bool {
    let sync = match error.downcast_ref() {
        Some(TrainError::Sync(error)) => Some(&**error),
        _ => error.downcast_ref(),
    };
    let went = |cause: &CommError| matches!(cause, CommError::Left { .. } | CommError::GaveUp { .. });
    matches!(sync, Some(SyncError::Peer { .. }))
        || error.chain().any(|cause| cause.downcast_ref().is_some_and(went))
}

#[cfg(test)]
mod tests {
    use super::*;
    use redsync_comm::Tag;
    use std::time::Duration;

    fn gathers(comm: &dyn Communicator) -> Result<usize> {
        let gathered = comm.allgather(Tag { step: 0, op: 0 }, vec![1]).wait(Duration::from_secs(60))?;
        Ok(gathered.ranks())
    }

    #[test]
    fn the_cause_is_told_and_its_echoes_are_not() {
        let failed = on_threads(3, |comm| if comm.rank() == 1 { bail!("no disk") } else { gathers(&*comm) });
        assert_eq!(failed.expect_err("a rank failed").to_string(), "rank 1: no disk");
        let failed = on_threads(2, |_| -> Result<()> { bail!("no disk") });
        assert_eq!(failed.expect_err("all ranks failed").to_string(), "no disk");
        assert_eq!(on_threads(3, |comm| gathers(&*comm)).expect("nobody failed"), 3);
    }
}

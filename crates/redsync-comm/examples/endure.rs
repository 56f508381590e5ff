//! Exchanges over and over, for trying what happens when a rank dies or a link goes: every rank that survives ends with one
//! line that says who is missing, and exit status 1. Rank 0 says when the first exchange is done.
//!
//!     endure [STEPS] [DEADLINE_SECONDS] [ROUNDS_FROM]

use redsync_comm::{CommError, Communicator, Tag, mpi};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let number = |position: usize, default: u64| {
        std::env::args().nth(position).map_or(Some(default), |text| text.parse().ok())
    };
    let usual = mpi::Options::default().rounds_from as u64;
    let (Some(steps), Some(deadline), Some(rounds_from)) =
        (number(1, 1_000_000), number(2, 60), number(3, usual))
    else {
        eprintln!("usage: endure [STEPS] [DEADLINE_SECONDS] [ROUNDS_FROM]");
        return ExitCode::from(2);
    };
    let comm = match mpi::world_with(mpi::Options { rounds_from: rounds_from as usize }) {
        Ok(comm) => comm,
        Err(cause) => {
            eprintln!("endure: {cause}");
            return ExitCode::FAILURE;
        }
    };
    match exchange(&comm, steps, Duration::from_secs(deadline)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            // In one piece: mpirun mixes what the ranks write.
            let line = format!("endure: rank {}: {cause}\n", comm.rank());
            let _ = std::io::stderr().write_all(line.as_bytes());
            // Dropped, not aborted: each rank shall come to its own verdict. A broken communicator ends at once.
            ExitCode::FAILURE
        }
    }
}

fn exchange(comm: &dyn Communicator, steps: u64, deadline: Duration) -> Result<(), CommError> {
    for step in 0..steps {
        let sum = comm.allreduce(Tag { step, op: 0 }, vec![1.0; 100_000]);
        let gathered = comm.allgather(Tag { step, op: 1 }, vec![comm.rank() as u8; 20_000]);
        sum.wait(deadline)?;
        gathered.wait(deadline)?;
        if step == 0 && comm.rank() == 0 {
            println!("endure: {} ranks exchange", comm.size());
        }
    }
    Ok(())
}

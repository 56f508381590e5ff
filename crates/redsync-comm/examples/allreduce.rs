//! Times the engine's allreduce against a bare blocking `MPI_Allreduce` of the same bytes, and a small allgather.
//! Run it under `mpirun` or `lab/cluster run`; rank 0 prints one JSON document.
//!
//!     allreduce [VALUES] [ROUNDS]

use ::mpi::Threading;
use ::mpi::collective::SystemOperation;
use ::mpi::traits::CommunicatorCollectives;
use redsync_comm::{CommError, Communicator, Tag, mpi};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let number = |position: usize, default: usize| {
        std::env::args().nth(position).map_or(Some(default), |text| text.parse().ok())
    };
    let (Some(values), Some(rounds)) = (number(1, 3_700_000), number(2, 5)) else {
        eprintln!("usage: allreduce [VALUES] [ROUNDS]");
        return ExitCode::from(2);
    };
    // Initialised here and not by the engine, so that this thread may call MPI too.
    let Some((universe, _)) = ::mpi::initialize_with_threading(Threading::Multiple) else {
        eprintln!("allreduce: MPI was initialised before");
        return ExitCode::FAILURE;
    };
    match compare(&universe.world(), values, rounds.max(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("allreduce: {cause}");
            mpi::abort(1)
        }
    }
}

fn compare(world: &impl CommunicatorCollectives, values: usize, rounds: usize) -> Result<(), CommError> {
    let comm = mpi::world()?;
    let (mut bare, mut ours, mut gather) = (Vec::new(), Vec::new(), Vec::new());
    // In turns, so that both meet the same weather; the first turn opens the connections and is not counted.
    for round in 0..=rounds as u64 {
        let sent: Vec<f32> = (0..values).map(|i| (i % 1000 + comm.rank()) as f32).collect();
        let mut received = vec![0.0_f32; values];
        let tag = |op| Tag { step: round, op };
        comm.barrier(tag(0)).wait(DEADLINE)?;
        let begin = Instant::now();
        world.all_reduce_into(&sent, &mut received, SystemOperation::sum());
        bare.push(begin.elapsed());
        comm.barrier(tag(1)).wait(DEADLINE)?;
        let begin = Instant::now();
        let sum = comm.allreduce(tag(2), sent).wait(DEADLINE)?;
        ours.push(begin.elapsed());
        assert!(sum == received, "the sums differ");
        comm.barrier(tag(3)).wait(DEADLINE)?;
        let begin = Instant::now();
        comm.allgather(tag(4), vec![1; 1000]).wait(DEADLINE)?;
        gather.push(begin.elapsed());
    }
    if comm.rank() == 0 {
        let [bare, ours, gather] = [bare, ours, gather].map(median_ms);
        println!(
            "{{\"ranks\":{},\"bytes\":{},\"bare_ms\":{bare:.3},\"ours_ms\":{ours:.3},\"ratio\":{:.3},\
             \"allgather_1kb_ms\":{gather:.3}}}",
            comm.size(),
            values * 4,
            ours / bare,
        );
    }
    Ok(())
}

fn median_ms(mut times: Vec<Duration>) -> f64 {
    times.remove(0);
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

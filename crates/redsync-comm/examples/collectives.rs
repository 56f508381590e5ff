//! Times small and middling collectives by the number of ranks: the engine's, and the library's own blocking ones beside them.
//! Run it under `mpirun` or `lab/cluster run`; rank 0 prints one JSON line per setting: its median time, the messages that it
//! sends, and the time that all ranks together spend on a core, which says more than the first where ranks share cores.
//! The ways take turns, so that all meet the same weather.
//!
//!     collectives [ROUNDS] [TURNS] [KIND] [WAY]

use ::mpi::Threading;
use ::mpi::collective::SystemOperation;
use ::mpi::traits::CommunicatorCollectives;
use redsync_comm::{CommError, Communicator, Tag, mpi};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(120);

/// What is exchanged, and how many bytes of it: of each rank, for each peer, of the sum.
const SETTINGS: [(&str, usize); 7] = [
    ("barrier", 0),
    ("allgather", 64),
    ("allgather", 1000),
    ("alltoall", 64),
    ("alltoall", 1000),
    ("allreduce", 256),
    ("allreduce", 1_000_000),
];

/// The ways by name: from how many ranks on the engine meets in rounds; none for the library's own collectives.
const WAYS: [(&str, Option<usize>); 3] =
    [("direct", Some(usize::MAX)), ("rounds", Some(2)), ("library", None)];

/// One way to exchange one setting: how long each round took, how many messages this rank sent, and its time on a core.
#[derive(Default)]
struct Times {
    each: Vec<Duration>,
    messages: u64,
    on_core: Duration,
}

fn main() -> ExitCode {
    let number = |position: usize, default: usize| {
        std::env::args().nth(position).map_or(Some(default), |text| text.parse().ok())
    };
    let (Some(rounds), Some(turns)) = (number(1, 20), number(2, 3)) else {
        eprintln!("usage: collectives [ROUNDS] [TURNS] [KIND] [WAY]");
        return ExitCode::from(2);
    };
    // Initialised here and not by the engine, so that this thread may call MPI too.
    let Some((universe, _)) = ::mpi::initialize_with_threading(Threading::Multiple) else {
        eprintln!("collectives: MPI was initialised before");
        return ExitCode::FAILURE;
    };
    match measure(&universe.world(), rounds.max(1), turns.max(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("collectives: {cause}");
            mpi::abort(1)
        }
    }
}

fn measure(world: &impl CommunicatorCollectives, rounds: usize, turns: usize) -> Result<(), CommError> {
    let (ranks, rank) = (world.size() as usize, world.rank());
    let wanted = |position: usize, name: &str| std::env::args().nth(position).is_none_or(|only| only == name);
    let settings: Vec<_> = SETTINGS.iter().filter(|(kind, _)| wanted(3, kind)).collect();
    let ways: Vec<_> = WAYS.iter().filter(|(name, _)| wanted(4, name)).collect();
    let mut all: Vec<Vec<Times>> =
        ways.iter().map(|_| settings.iter().map(|_| Times::default()).collect()).collect();
    for _ in 0..turns {
        for ((_, rounds_from), times) in ways.iter().zip(&mut all) {
            let comm =
                rounds_from.map(|from| mpi::world_with(mpi::Options { rounds_from: from })).transpose()?;
            for ((kind, bytes), times) in settings.iter().zip(times) {
                let begin = on_core();
                match &comm {
                    Some(comm) => ours(comm, kind, *bytes, rounds, times)?,
                    None => library(world, kind, *bytes, rounds, times),
                }
                times.on_core += on_core().saturating_sub(begin);
            }
        }
    }
    for ((name, rounds_from), times) in ways.iter().zip(all) {
        for ((kind, bytes), Times { each, messages, on_core }) in settings.iter().zip(times) {
            let mut cores = 0.0;
            world.all_reduce_into(&on_core.as_secs_f64(), &mut cores, SystemOperation::sum());
            // The rounds that are not counted take time too.
            let cpu = cores * 1e3 / (each.len() + turns) as f64;
            // What the library sends is not known.
            let sent = rounds_from
                .map_or("null".to_string(), |_| format!("{:.1}", messages as f64 / each.len() as f64));
            let median = median_ms(each);
            if rank == 0 {
                println!(
                    "{{\"ranks\":{ranks},\"kind\":\"{kind}\",\"bytes\":{bytes},\"way\":\"{name}\",\
                     \"median_ms\":{median:.3},\"messages\":{sent},\"cpu_ms_of_all\":{cpu:.2}}}"
                );
            }
        }
    }
    Ok(())
}

/// One collective of the engine, again and again. The first opens connections and is not counted.
fn ours(
    comm: &mpi::Mpi,
    kind: &str,
    bytes: usize,
    rounds: usize,
    times: &mut Times,
) -> Result<(), CommError> {
    let mut before = 0;
    for round in 0..=rounds as u64 {
        let tag = Tag { step: round, op: 0 };
        let message = vec![comm.rank() as u8; bytes];
        let values = vec![comm.rank() as f32; bytes / 4];
        let messages = vec![message.clone(); if kind == "alltoall" { comm.size() } else { 0 }];
        let begin = Instant::now();
        match kind {
            "barrier" => comm.barrier(tag).wait(DEADLINE)?,
            "allgather" => drop(comm.allgather(tag, message).wait(DEADLINE)?),
            "alltoall" => drop(comm.alltoall(tag, messages).wait(DEADLINE)?),
            _ => drop(comm.allreduce(tag, values).wait(DEADLINE)?),
        }
        if round > 0 {
            times.each.push(begin.elapsed());
        } else {
            before = comm.messages_sent();
        }
    }
    times.messages += comm.messages_sent() - before;
    Ok(())
}

/// The same by the library's blocking collective, called on this thread. What it sends is not known.
fn library(world: &impl CommunicatorCollectives, kind: &str, bytes: usize, rounds: usize, times: &mut Times) {
    let size = world.size() as usize;
    for round in 0..=rounds {
        let (message, values) = (vec![1_u8; bytes], vec![1.0_f32; bytes / 4]);
        let begin = Instant::now();
        match kind {
            "barrier" => world.barrier(),
            "allgather" => world.all_gather_into(&message, &mut vec![0_u8; bytes * size]),
            "alltoall" => world.all_to_all_into(&vec![1_u8; bytes * size], &mut vec![0_u8; bytes * size]),
            _ => world.all_reduce_into(&values, &mut vec![0.0; values.len()], SystemOperation::sum()),
        }
        if round > 0 {
            times.each.push(begin.elapsed());
        }
    }
}

/// How long the threads of this process have been on a core.
fn on_core() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let texts = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok());
    Duration::from_nanos(texts.filter_map(|text| text.split(' ').next()?.parse::<u64>().ok()).sum())
}

fn median_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

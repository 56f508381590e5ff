//! The conformance suite on MPI. Started plainly (by `cargo test`) it starts itself under `mpirun` with 1, 2, 4 and 8 ranks for
//! the healthy cases, and once per breaking case and size; each job has a time limit, so that a hang is a failure. All that is done
//! with ranks that meet directly and with ranks that meet in rounds, which by themselves only many would.
//!
//! `REDSYNC_MPIRUN` names another launcher and its options, for example `mpirun.mpich`.
#![allow(clippy::unwrap_used)]

use redsync_comm::conformance::{BREAKING, HEALTHY, LONG, Seat};
use redsync_comm::{Call, CommError, Communicator, Kind, Tag, mpi};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const OPENMPI: &str = "mpirun.openmpi --allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1";

/// Where the ranks of a job leave their verdicts: set in those, unset in the process that starts the jobs.
const VERDICTS: &str = "REDSYNC_TEST_VERDICTS";

type Own = fn(&dyn Communicator, &Path);

/// Cases of this engine alone.
const OWN: &[(&str, Own)] = &[
    ("a_rank_that_falls_silent_is_named_by_all_others", falls_silent),
    ("a_rank_that_falls_silent_in_short_exchanges_is_named_by_all_others", falls_silent_in_short_ones),
    ("a_rank_that_waits_for_another_itself_is_not_named", is_held_up),
    ("one_all_to_all_among_allgathers_names_both_sides", deals_among_allgathers),
    ("one_barrier_among_all_to_alls_names_both_sides", meets_among_all_to_alls),
    ("who_gives_up_behind_what_others_wait_for_is_named", gives_up_behind),
];

/// How ranks meet, by name: from how many ranks on in rounds, the numbers of ranks for the healthy cases and for the others.
const WAYS: &[(&str, usize, &[usize], &[usize])] =
    &[("direct", usize::MAX, &[1, 2, 4, 8], &[2, 4]), ("rounds", 2, &[2, 4, 5, 8], &[2, 4, 5])];

/// The case that compares both ways in one process.
const BOTH: &str = "both_ways_have_the_same_bits";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match std::env::var_os(VERDICTS) {
        Some(verdicts) => rank(&PathBuf::from(verdicts), &arguments),
        // The harness flags of cargo mean nothing here; a bare word selects cases, as usual.
        None => driver(arguments.iter().find(|argument| !argument.starts_with('-'))),
    }
}

fn driver(filter: Option<&String>) -> ExitCode {
    let wanted = |name: &str| filter.is_none_or(|filter| name.contains(filter.as_str()));
    let (mut passed, mut failed) = (0, 0);
    let mut judge = |name: &str, ranks: usize, case: &str, way: &str| {
        let outcome = job(ranks, case, way);
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("test mpi::{way}::{name} on {ranks} ranks ... {verdict}");
        outcome.unwrap_or_else(|report| {
            println!("{report}");
            failed += 1;
        });
        passed += usize::from(verdict == "ok");
    };
    if wanted(BOTH) {
        [2, 3, 5, 6, 8, 13].into_iter().for_each(|ranks| judge(BOTH, ranks, BOTH, "both"));
    }
    for (way, _, healthy, breaking) in WAYS {
        if wanted("healthy") || HEALTHY.iter().any(|(name, _)| wanted(name)) {
            healthy.iter().for_each(|ranks| judge("all_healthy_cases", *ranks, "healthy", way));
        }
        let own = OWN.iter().map(|(name, _)| *name);
        for name in BREAKING.iter().map(|(name, _)| *name).chain(own).filter(|name| wanted(name)) {
            breaking.iter().for_each(|ranks| judge(name, *ranks, name, way));
        }
    }
    println!("\nmpi: {passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case on so many ranks; the verdicts decide, because a broken job may end in any way but must end.
fn job(ranks: usize, case: &str, way: &str) -> Result<(), String> {
    let process = std::process::id();
    let verdicts = std::env::temp_dir().join(format!("redsync-mpi-{process}-{way}-{case}-{ranks}"));
    std::fs::create_dir_all(&verdicts).map_err(|cause| cause.to_string())?;
    let launcher = std::env::var("REDSYNC_MPIRUN").unwrap_or_else(|_| OPENMPI.to_string());
    let this = std::env::current_exe().map_err(|cause| cause.to_string())?;
    // `timeout` ends the launcher with a signal that it passes on, which nothing in std can.
    let output = Command::new("timeout")
        .args(["-k", "10", "180"])
        .args(launcher.split_whitespace())
        .args(["-n", &ranks.to_string()])
        .arg(this)
        .args([case, &ranks.to_string(), way])
        .env(VERDICTS, &verdicts)
        .output()
        .map_err(|cause| format!("cannot start {launcher}: {cause}"))?;
    let read = |rank: usize| std::fs::read_to_string(verdicts.join(rank.to_string())).unwrap_or_default();
    let good = (0..ranks).all(|rank| read(rank) == "ok");
    let ended = output.status.code().is_some_and(|code| code != 124 && code != 137);
    let healthy = !["healthy", BOTH].contains(&case) || output.status.success();
    let said: Vec<String> = (0..ranks).map(|rank| format!("rank {rank}: {}", read(rank))).collect();
    let _ = std::fs::remove_dir_all(&verdicts);
    if good && ended && healthy {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}\n{}\n{errors}", output.status, said.join("\n")))
}

/// One rank of a job.
fn rank(verdicts: &Path, arguments: &[String]) -> ExitCode {
    let (case, size) = (&arguments[0], arguments[1].parse::<usize>().unwrap());
    if case == BOTH {
        return both_ways(verdicts, size);
    }
    let (_, rounds_from, ..) = WAYS.iter().find(|(way, ..)| *way == arguments[2]).unwrap();
    let comm = mpi::world_with(mpi::Options { rounds_from: *rounds_from }).unwrap();
    assert_eq!(comm.size(), size, "this mpirun belongs to another MPI than the one linked");
    let rank = comm.rank();
    // There whole or not at all: who sees the last one goes, and mpirun then ends the rank that wrote it.
    let say = |kind: &str, what: &str| {
        let part = verdicts.join(format!("part-{rank}"));
        std::fs::write(&part, what).unwrap();
        std::fs::rename(&part, verdicts.join(format!("{kind}{rank}"))).unwrap();
        wait_for(&(0..size).collect::<Vec<_>>(), verdicts, kind);
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| match case.as_str() {
        "healthy" => {
            assert_eq!(comm.host().as_deref(), Some("that of rank 0"), "all are on one machine");
            HEALTHY.iter().for_each(|(name, case)| {
                eprintln!("rank {rank}: {name}");
                case(&comm);
            })
        }
        _ => match OWN.iter().find(|(name, _)| name == case) {
            Some((_, run)) => run(&comm, verdicts),
            None => {
                let (_, run) = BREAKING.iter().find(|(name, _)| name == case).unwrap();
                run(Seat { comm: Box::new(comm), meet: &|| say("meet", "ok") });
            }
        },
    }));
    // The first rank to end without finalizing makes mpirun end all others: not before they have spoken.
    say("", outcome.map_or("failed", |()| "ok"));
    ExitCode::SUCCESS
}

/// The same collectives on communicators of both ways, one after the other: lengths of all sorts, the same of all ranks or not.
fn both_ways(verdicts: &Path, size: usize) -> ExitCode {
    // Initialised here and not by the engine, which would not start a second time.
    let (universe, _) = ::mpi::initialize_with_threading(::mpi::Threading::Multiple).unwrap();
    let results = [usize::MAX, 2].map(|rounds_from| {
        let comm = mpi::world_with(mpi::Options { rounds_from }).unwrap();
        assert_eq!(comm.size(), size, "this mpirun belongs to another MPI than the one linked");
        let before = comm.messages_sent();
        comm.barrier(Tag { step: 0, op: 0 }).wait(LONG).unwrap();
        let messages = comm.messages_sent() - before;
        let expected =
            if rounds_from == 2 { size.next_power_of_two().trailing_zeros() as usize } else { size - 1 };
        assert_eq!(messages, expected as u64);
        (comm.rank(), collectives(&comm))
    });
    let [(rank, direct), (_, rounds)] = results;
    assert!(direct.len() > 100 && direct == rounds);
    drop(universe);
    std::fs::write(verdicts.join(rank.to_string()), "ok").unwrap();
    ExitCode::SUCCESS
}

/// The bytes of many results.
fn collectives(comm: &dyn Communicator) -> Vec<Vec<u8>> {
    const LENGTHS: [usize; 12] = [0, 1, 7, 64, 255, 256, 257, 1000, 4063, 4064, 4065, 50_001];
    let (rank, size) = (comm.rank(), comm.size());
    let bytes =
        |seed: usize, length: usize| (0..length).map(|i| (i * 31 + seed * 7 + i / 251) as u8).collect();
    // Of very different sizes, so that another order of addition has other bits.
    let value = |i: usize| {
        f32::from_bits(0x3000_0000 | ((i * 41 + rank * 977) as u32).wrapping_mul(0x9E37_79B9) & 0x8FFF_FFFF)
    };
    let mut results = Vec::new();
    for (op, length) in LENGTHS.into_iter().enumerate() {
        let uneven = |seed: usize| LENGTHS[(op + seed) % LENGTHS.len()];
        let tag = |kind| Tag { step: op as u64, op: kind };
        let gathered = [
            comm.allgather(tag(0), bytes(rank, length)),
            comm.allgather(tag(1), bytes(rank, uneven(5 * rank))),
            comm.alltoall(tag(2), (0..size).map(|to| bytes(rank * 100 + to, length)).collect()),
            comm.alltoall(tag(3), (0..size).map(|to| bytes(rank + to, uneven(rank * 3 + to))).collect()),
            comm.alltoall_few(
                tag(4),
                (0..size).map(|to| bytes(rank, if to == op { 500 } else { 0 })).collect(),
            ),
        ];
        let sum = comm.allreduce(tag(5), (0..length).map(value).collect());
        for gathered in gathered {
            results.extend(gathered.wait(LONG).unwrap().iter().map(<[u8]>::to_vec));
        }
        results
            .push(sum.wait(LONG).unwrap().iter().flat_map(|value| value.to_bits().to_le_bytes()).collect());
    }
    results
}

/// The last rank is stopped while all exchange, wherever it is then, and goes on once the others have named it.
fn falls_silent(comm: &dyn Communicator, verdicts: &Path) {
    goes_silent(comm, verdicts, comm.size() - 1, &|step| {
        let sum = comm.allreduce(Tag { step, op: 0 }, vec![1.0; 300_000]);
        let gathered = comm.allgather(Tag { step, op: 1 }, vec![1; 20_000]);
        sum.wait(Duration::from_secs(2))?;
        gathered.wait(Duration::from_secs(2)).map(drop)
    });
}

/// The same of a rank in the middle, where others wait for what it has only to pass on.
fn falls_silent_in_short_ones(comm: &dyn Communicator, verdicts: &Path) {
    goes_silent(comm, verdicts, comm.size() / 2, &|step| {
        let sum = comm.allreduce(Tag { step, op: 0 }, vec![1.0; 3]);
        let received = comm.alltoall(Tag { step, op: 1 }, vec![vec![1; 100]; comm.size()]);
        let barrier = comm.barrier(Tag { step, op: 2 });
        sum.wait(Duration::from_secs(2))?;
        received.wait(Duration::from_secs(2))?;
        barrier.wait(Duration::from_secs(2))
    });
}

fn goes_silent(
    comm: &dyn Communicator,
    verdicts: &Path,
    silent: usize,
    exchange: &dyn Fn(u64) -> Result<(), CommError>,
) {
    let rank = comm.rank();
    let signal = |signal: &str, process: &str| {
        Command::new("kill").args([signal, process]).status().unwrap();
    };
    std::thread::scope(|scope| {
        let silence = || {
            let this = std::process::id().to_string();
            std::fs::write(verdicts.join("silent"), &this).unwrap();
            signal("-STOP", &this);
        };
        let cause = (0..).find_map(|step| {
            if (rank, step) == (silent, 20) {
                scope.spawn(silence);
            }
            exchange(step).err()
        });
        if rank == silent {
            return;
        }
        std::fs::write(verdicts.join(format!("named{rank}")), "").unwrap();
        let others: Vec<usize> = (0..comm.size()).filter(|rank| *rank != silent).collect();
        wait_for(&others, verdicts, "named");
        if rank == others[0] {
            signal("-CONT", &std::fs::read_to_string(verdicts.join("silent")).unwrap());
        }
        let cause = cause.unwrap();
        assert_eq!(cause.ranks(), [silent], "{cause}");
    });
}

/// A rank in the middle starts something else than all others: all see the other side.
fn differs(comm: &dyn Communicator, odd: Kind, even: Kind) {
    let (rank, size) = (comm.rank(), comm.size());
    let tag = Tag { step: 1, op: 1 };
    let call = |kind| Call { kind, tag, length: if kind == Kind::Alltoall { 10 * size as u64 } else { 0 } };
    let start = |kind| match kind {
        Kind::Alltoall => comm.alltoall(tag, vec![vec![1; 10]; size]).wait(LONG).map(drop),
        Kind::Allgather => comm.allgather(tag, Vec::new()).wait(LONG).map(drop),
        _ => comm.barrier(tag).wait(LONG),
    };
    let middle = size / 2;
    let (ours, theirs) = if rank == middle { (odd, even) } else { (even, odd) };
    let cause = start(ours).unwrap_err();
    let CommError::Mismatch { rank: named, theirs: said, ours: own } = cause else { panic!("{cause}") };
    assert_eq!((said, own), (call(theirs), call(ours)));
    assert_eq!(named == middle, rank != middle);
}

fn deals_among_allgathers(comm: &dyn Communicator, _: &Path) {
    differs(comm, Kind::Alltoall, Kind::Allgather);
}

fn meets_among_all_to_alls(comm: &dyn Communicator, _: &Path) {
    differs(comm, Kind::Barrier, Kind::Alltoall);
}

/// The middle rank gives up when the others are known to be in the next collective: what it had started finishes everywhere, and
/// of the next all learn the reason.
fn gives_up_behind(comm: &dyn Communicator, verdicts: &Path) {
    let (rank, size, middle) = (comm.rank(), comm.size(), comm.size() / 2);
    let tag = |op| Tag { step: 0, op };
    let everybody: Vec<usize> = (0..size).collect();
    let gathered = comm.allgather(tag(0), vec![rank as u8; 300]);
    let next = (rank != middle).then(|| comm.allgather(tag(1), vec![1; 300]));
    std::fs::write(verdicts.join(format!("waiting{rank}")), "").unwrap();
    wait_for(&everybody, verdicts, "waiting");
    if rank == middle {
        comm.give_up("the disk is full");
    }
    let gathered = gathered.wait(LONG).unwrap();
    assert!(gathered.iter().enumerate().all(|(rank, message)| message == vec![rank as u8; 300]));
    if let Some(next) = next {
        let reason = "the disk is full".to_string();
        let gave_up = CommError::GaveUp { rank: middle, tag: tag(1), reason, blames: Vec::new() };
        assert_eq!(next.wait(LONG), Err(gave_up));
    }
}

/// Rank 0 waits for a collective to which the others do not come, because the last one is missing in the one before.
fn is_held_up(comm: &dyn Communicator, verdicts: &Path) {
    let (rank, last) = (comm.rank(), comm.size() - 1);
    let (first, second) = (Tag { step: 0, op: 1 }, Tag { step: 0, op: 2 });
    comm.barrier(Tag { step: 0, op: 0 }).wait(LONG).unwrap();
    let waited = Duration::from_secs(2);
    let deadline = |tag| CommError::Deadline { tag, waited, missing: vec![last] };
    if rank == 0 {
        let pending = (comm.barrier(first), comm.barrier(second));
        assert_eq!(pending.1.wait(waited), Err(deadline(second)));
        assert_eq!(pending.0.wait(waited), Err(deadline(first)));
    } else if rank != last {
        let cause = comm.barrier(first).wait(LONG).unwrap_err();
        assert_eq!(cause, deadline(second).followed(0, first));
    }
    std::fs::write(verdicts.join(format!("named{rank}")), "").unwrap();
    wait_for(&(0..comm.size()).collect::<Vec<_>>(), verdicts, "named");
}

/// Looks for the files of these ranks until they are there or somebody must have hung.
fn wait_for(ranks: &[usize], verdicts: &Path, kind: &str) {
    let begin = Instant::now();
    let all_there = || ranks.iter().all(|rank| verdicts.join(format!("{kind}{rank}")).exists());
    while !all_there() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(2));
    }
}

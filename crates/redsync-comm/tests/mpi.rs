//! The conformance suite on MPI. Started plainly (by `cargo test`) it starts itself under `mpirun` with 1, 2, 4 and 8 ranks for
//! the healthy cases, and once per breaking case and size; each job has a time limit, so that a hang is a failure.
//!
//! `REDSYNC_MPIRUN` names another launcher and its options, for example `mpirun.mpich`.
#![allow(clippy::unwrap_used)]

use redsync_comm::conformance::{BREAKING, HEALTHY, LONG, Seat};
use redsync_comm::{CommError, Communicator, Tag, mpi};
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
    ("a_rank_that_waits_for_another_itself_is_not_named", is_held_up),
];

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
    let mut judge = |name: &str, ranks: usize, case: &str| {
        let outcome = job(ranks, case);
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("test mpi::{name} on {ranks} ranks ... {verdict}");
        outcome.unwrap_or_else(|report| {
            println!("{report}");
            failed += 1;
        });
        passed += usize::from(verdict == "ok");
    };
    for ranks in [1, 2, 4, 8] {
        if wanted("healthy") || HEALTHY.iter().any(|(name, _)| wanted(name)) {
            judge("all_healthy_cases", ranks, "healthy");
        }
    }
    let own = OWN.iter().map(|(name, _)| *name);
    for name in BREAKING.iter().map(|(name, _)| *name).chain(own).filter(|name| wanted(name)) {
        [2, 4].into_iter().for_each(|ranks| judge(name, ranks, name));
    }
    println!("\nmpi: {passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case on so many ranks; the verdicts decide, because a broken job may end in any way but must end.
fn job(ranks: usize, case: &str) -> Result<(), String> {
    let verdicts = std::env::temp_dir().join(format!("redsync-mpi-{}-{case}-{ranks}", std::process::id()));
    std::fs::create_dir_all(&verdicts).map_err(|cause| cause.to_string())?;
    let launcher = std::env::var("REDSYNC_MPIRUN").unwrap_or_else(|_| OPENMPI.to_string());
    let this = std::env::current_exe().map_err(|cause| cause.to_string())?;
    // `timeout` ends the launcher with a signal that it passes on, which nothing in std can.
    let output = Command::new("timeout")
        .args(["-k", "10", "180"])
        .args(launcher.split_whitespace())
        .args(["-n", &ranks.to_string()])
        .arg(this)
        .args([case, &ranks.to_string()])
        .env(VERDICTS, &verdicts)
        .output()
        .map_err(|cause| format!("cannot start {launcher}: {cause}"))?;
    let read = |rank: usize| std::fs::read_to_string(verdicts.join(rank.to_string())).unwrap_or_default();
    let good = (0..ranks).all(|rank| read(rank) == "ok");
    let ended = output.status.code().is_some_and(|code| code != 124 && code != 137);
    let healthy = case != "healthy" || output.status.success();
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
    let comm = mpi::world().unwrap();
    assert_eq!(comm.size(), size, "this mpirun belongs to another MPI than the one linked");
    let rank = comm.rank();
    // There whole or not at all: who sees the last one goes, and mpirun then ends the rank that wrote it.
    let say = |kind: &str, what: &str| {
        let part = verdicts.join(format!("part-{rank}"));
        std::fs::write(&part, what).unwrap();
        std::fs::rename(&part, verdicts.join(format!("{kind}{rank}"))).unwrap();
        wait_for(size, verdicts, kind);
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| match case.as_str() {
        "healthy" => HEALTHY.iter().for_each(|(name, case)| {
            eprintln!("rank {rank}: {name}");
            case(&comm);
        }),
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

/// The last rank is stopped while all exchange, wherever it is then, and goes on once the others have named it.
fn falls_silent(comm: &dyn Communicator, verdicts: &Path) {
    let (rank, last) = (comm.rank(), comm.size() - 1);
    let signal = |signal: &str, process: &str| {
        Command::new("kill").args([signal, process]).status().unwrap();
    };
    let exchange = |step: u64| {
        let sum = comm.allreduce(Tag { step, op: 0 }, vec![1.0; 300_000]);
        let gathered = comm.allgather(Tag { step, op: 1 }, vec![1; 20_000]);
        sum.wait(Duration::from_secs(2))?;
        gathered.wait(Duration::from_secs(2))
    };
    std::thread::scope(|scope| {
        let silence = || {
            let this = std::process::id().to_string();
            std::fs::write(verdicts.join("silent"), &this).unwrap();
            signal("-STOP", &this);
        };
        let cause = (0..).find_map(|step| {
            if (rank, step) == (last, 20) {
                scope.spawn(silence);
            }
            exchange(step).err()
        });
        if rank == last {
            return;
        }
        std::fs::write(verdicts.join(format!("named{rank}")), "").unwrap();
        wait_for(last, verdicts, "named");
        if rank == 0 {
            signal("-CONT", &std::fs::read_to_string(verdicts.join("silent")).unwrap());
        }
        let cause = cause.unwrap();
        assert_eq!(cause.ranks(), [last], "{cause}");
    });
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
    wait_for(comm.size(), verdicts, "named");
}

/// Looks for the files of all ranks until they are there or somebody must have hung.
fn wait_for(size: usize, verdicts: &Path, kind: &str) {
    let begin = Instant::now();
    let all_there = || (0..size).all(|rank| verdicts.join(format!("{kind}{rank}")).exists());
    while !all_there() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(2));
    }
}

//! The conformance suite on MPI. Started plainly (by `cargo test`) it starts itself under `mpirun` with 1, 2, 4 and 8 ranks for
//! the healthy cases, and once per breaking case and size; each job has a time limit, so that a hang is a failure.
//!
//! `REDSYNC_MPIRUN` names another launcher and its options, for example `mpirun.mpich`.
#![allow(clippy::unwrap_used)]

use redsync_comm::conformance::{BREAKING, HEALTHY, LONG, Seat};
use redsync_comm::{Communicator, mpi};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const OPENMPI: &str = "mpirun.openmpi --allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1";

/// Where the ranks of a job leave their verdicts: set in those, unset in the process that starts the jobs.
const VERDICTS: &str = "REDSYNC_TEST_VERDICTS";

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
    for (name, _) in BREAKING.iter().filter(|(name, _)| wanted(name)) {
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
        _ => {
            let (_, run) = BREAKING.iter().find(|(name, _)| name == case).unwrap();
            run(Seat { comm: Box::new(comm), meet: &|| say("meet", "ok") });
        }
    }));
    // The first rank to end without finalizing makes mpirun end all others: not before they have spoken.
    say("", outcome.map_or("failed", |()| "ok"));
    ExitCode::SUCCESS
}

/// Looks for the files of all ranks until they are there or somebody must have hung.
fn wait_for(size: usize, verdicts: &Path, kind: &str) {
    let begin = Instant::now();
    let all_there = || (0..size).all(|rank| verdicts.join(format!("{kind}{rank}")).exists());
    while !all_there() && begin.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(2));
    }
}

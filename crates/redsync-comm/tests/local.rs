//! The conformance suite on threads, with 1 to 8 ranks, and what only this engine promises.

use redsync_comm::conformance::{BREAKING, HEALTHY, Seat};
use redsync_comm::{CommError, Communicator, Tag, local, mpi};
use std::sync::Barrier;
use std::time::Duration;

fn on_all_ranks(size: usize, case: impl Fn(Box<dyn Communicator>) + Sync) {
    std::thread::scope(|scope| {
        let case = &case;
        for comm in local::group(size) {
            scope.spawn(move || case(Box::new(comm)));
        }
    });
}

/// All cases at once, each on a thread with its name, which is what a failure shows.
fn run<C: Copy + Send>(cases: &[(&str, C)], run: impl Fn(C) + Sync) {
    std::thread::scope(|scope| {
        for &(name, case) in cases {
            let run = &run;
            let thread = std::thread::Builder::new().name(name.to_string());
            thread.spawn_scoped(scope, move || run(case)).unwrap();
        }
    });
}

#[test]
fn the_healthy_cases_hold_on_1_to_8_ranks() {
    run(HEALTHY, |case| (1..=8).for_each(|size| on_all_ranks(size, |comm| case(&*comm))));
}

#[test]
fn the_breaking_cases_hold_on_2_3_and_8_ranks() {
    run(BREAKING, |case| {
        for size in [2, 3, 8] {
            let barrier = Barrier::new(size);
            let meet = || {
                barrier.wait();
            };
            on_all_ranks(size, |comm| case(Seat { comm, meet: &meet }));
        }
    });
}

const TAG: Tag = Tag { step: 1, op: 2 };

#[test]
fn a_message_is_shared_and_not_copied() {
    let ranks = local::group(2);
    let sent = vec![5; 1000];
    let place = sent.as_ptr();
    let pending = [ranks[0].allgather(TAG, sent), ranks[1].allgather(TAG, Vec::new())];
    for received in pending.map(|pending| pending.wait(Duration::ZERO).unwrap()) {
        assert_eq!(received.from_rank(0).as_ptr(), place);
    }
}

#[test]
fn a_sum_comes_back_in_the_buffer_that_was_given() {
    let ranks = local::group(2);
    let values = vec![1.0; 1000];
    let place = values.as_ptr();
    let pending = [ranks[0].allreduce(TAG, values), ranks[1].allreduce(TAG, vec![2.0; 1000])];
    let sums = pending.map(|pending| pending.wait(Duration::ZERO).unwrap());
    assert_eq!(sums[0].as_ptr(), place);
    assert_eq!(sums[0], sums[1]);
}

#[test]
fn a_group_of_one_needs_nobody() {
    let alone = &local::group(1)[0];
    assert_eq!(alone.allreduce(TAG, vec![3.0]).wait(Duration::ZERO), Ok(vec![3.0]));
    assert_eq!((alone.rank(), alone.size(), alone.name()), (0, 1, "local"));
}

#[test]
fn a_deadline_names_all_who_are_missing() {
    let ranks = local::group(4);
    let waited = Duration::from_millis(1);
    let cause = ranks[2].barrier(TAG).wait(waited).unwrap_err();
    assert_eq!(cause, CommError::Deadline { tag: TAG, waited, missing: vec![0, 1, 3] });
}

#[test]
#[cfg(not(feature = "mpi"))]
fn without_the_feature_mpi_says_how_to_switch_it_on() {
    let cause = mpi::world().unwrap_err();
    assert_eq!(cause, CommError::NotBuilt);
    assert!(cause.to_string().contains("cargo build --release --features mpi"));
}

#[test]
#[cfg(feature = "mpi")]
fn with_the_feature_the_engine_is_there() {
    let _: fn() -> Result<mpi::Mpi, CommError> = mpi::world;
}

//! The conformance suite on threads, with 1 to 8 ranks, and what only this engine promises.

use redsync_comm::conformance::{BREAKING, Breaking, HEALTHY, LONG, Seat};
use redsync_comm::{Among, CommError, Communicator, Tag, local, mpi};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::Scope;
use std::time::Duration;

/// Starts a thread; its name is what a failure shows.
fn start<'s>(scope: &'s Scope<'s, '_>, name: &str, run: impl FnOnce() + Send + 's) {
    let thread = std::thread::Builder::new().name(name.to_string());
    thread.spawn_scoped(scope, run).expect("a thread");
}

fn on_all_ranks(name: &str, size: usize, case: impl Fn(Box<dyn Communicator>) + Sync) {
    std::thread::scope(|scope| {
        let case = &case;
        for comm in local::group(size) {
            start(scope, name, move || case(Box::new(comm)));
        }
    });
}

/// Where ranks meet. Who waits too long goes on: a rank that has failed never comes.
#[derive(Default)]
struct Meeting {
    come: Mutex<usize>,
    changed: Condvar,
}

impl Meeting {
    fn wait_for(&self, size: usize) {
        let mut come = self.come.lock().expect("nobody panics here");
        *come += 1;
        self.changed.notify_all();
        drop(self.changed.wait_timeout_while(come, LONG, |come| *come < size));
    }
}

#[test]
fn the_healthy_cases_hold_on_1_to_8_ranks() {
    std::thread::scope(|scope| {
        for (name, case) in HEALTHY {
            start(scope, name, || (1..=8).for_each(|size| on_all_ranks(name, size, |comm| case(&*comm))));
        }
    });
}

#[test]
fn the_healthy_cases_hold_for_two_groups_within_one() {
    let within = |size: usize, case: redsync_comm::conformance::Healthy| {
        on_all_ranks("within", 2 * size, |comm| {
            let members = (0..size).map(|member| 2 * member + comm.rank() % 2).collect();
            case(&Among::new(Arc::from(comm), members));
        });
    };
    HEALTHY.iter().for_each(|(_, case)| (1..=4).for_each(|size| within(size, *case)));
}

#[test]
fn the_breaking_cases_hold_on_2_3_and_8_ranks() {
    let run = |name: &str, case: Breaking, size: usize| {
        let meeting = Meeting::default();
        on_all_ranks(name, size, |comm| case(Seat { comm, meet: &|| meeting.wait_for(size) }));
    };
    std::thread::scope(|scope| {
        for (name, case) in BREAKING {
            start(scope, name, move || [2, 3, 8].into_iter().for_each(|size| run(name, *case, size)));
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
fn who_waits_for_another_itself_is_not_named() {
    let ranks = local::group(3);
    let waited = Duration::from_millis(1);
    let later = Tag { step: 1, op: 3 };
    // Rank 1 is in the first one and waits there for rank 2.
    let held_up = ranks[1].barrier(TAG);
    let (first, second) = (ranks[0].barrier(TAG), ranks[0].barrier(later));
    let cause = second.wait(waited).unwrap_err();
    assert_eq!(cause, CommError::Deadline { tag: later, waited, missing: vec![2] });
    // The first can still finish, and does.
    ranks[2].barrier(TAG).wait(Duration::ZERO).unwrap();
    assert_eq!((first.wait(Duration::ZERO), held_up.wait(Duration::ZERO)), (Ok(()), Ok(())));
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

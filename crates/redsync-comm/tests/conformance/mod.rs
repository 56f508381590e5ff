//! What every engine must hold. A case gets one rank's communicator and runs on all ranks of a group at once; it fails by
//! panicking. `healthy` cases leave the group usable, `breaking` ones need a group of their own.
#![allow(dead_code, clippy::unwrap_used)]

use redsync_comm::{Call, CommError, Communicator, Kind, Pending, Tag};
use std::time::Duration;

/// Longer than any test takes: whoever waits so long hangs.
pub const LONG: Duration = Duration::from_secs(60);

/// Hands the names of the healthy cases to a macro.
#[macro_export]
macro_rules! healthy {
    ($then:ident) => {
        $then! {
            unequal_and_empty_messages_arrive
            sums_have_the_bits_of_rank_order
            many_collectives_can_be_in_flight
            what_queues_goes_on_after_all_before_it_finished_at_once
            polling_alone_is_enough
            handles_can_be_dropped
            large_messages_arrive
            buffers_come_back
            handles_can_be_waited_for_on_another_thread
        }
    };
}

/// Hands the names of the breaking cases to a macro.
#[macro_export]
macro_rules! breaking {
    ($then:ident) => {
        $then! {
            a_wrong_order_names_both_sides
            another_kind_names_both_sides
            another_length_names_both_sides
            what_was_started_before_a_mismatch_still_finishes
            a_rank_that_never_comes_is_named
            a_rank_that_leaves_is_named
            what_a_leaver_has_started_still_finishes
            who_gave_up_and_why_is_passed_on
        }
    };
}

/// One rank in a breaking case.
pub struct Seat<'a> {
    pub comm: Box<dyn Communicator>,
    /// Returns once all ranks have called it, by other means than the communicator.
    pub meet: &'a dyn Fn(),
}

fn tag(op: u32) -> Tag {
    Tag { step: 7, op }
}

fn done<T: Send + 'static>(pending: Pending<T>) -> T {
    pending.wait(LONG).unwrap_or_else(|cause| panic!("{cause}"))
}

fn message(rank: usize, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + rank * 7 + i / 251) as u8).collect()
}

/// Values of very different sizes, so that another order of addition has other bits.
fn value(rank: usize, i: usize) -> f32 {
    let mixed = ((i as u32) ^ (rank as u32) << 20)
        .wrapping_mul(0x9E37_79B9)
        .rotate_left(13)
        .wrapping_mul(0x85EB_CA6B);
    f32::from_bits(0x3000_0000 | mixed & 0x8FFF_FFFF)
}

fn values(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|i| value(rank, i)).collect()
}

/// Looks at every value of a short sum and at a sample of a long one.
fn assert_sum(sum: &[f32], ranks: usize, length: usize) {
    assert_eq!(sum.len(), length);
    for i in (0..length).step_by(1 + length / 20_000) {
        let expected = (1..ranks).fold(value(0, i), |sum, rank| sum + value(rank, i));
        assert_eq!(sum[i].to_bits(), expected.to_bits(), "value {i} of {length}");
    }
}

pub fn unequal_and_empty_messages_arrive(comm: &dyn Communicator) {
    let length = |rank: usize, round: usize| match (rank + round) % 5 {
        0 => 0,
        1 => 1 + rank,
        2 => 4063 + rank,
        3 => 20_000 * rank,
        _ => 300_001,
    };
    for round in 0..10 {
        let sent = message(comm.rank(), length(comm.rank(), round));
        let gathered = done(comm.allgather(tag(round as u32), sent));
        assert_eq!(gathered.ranks(), comm.size());
        for (rank, received) in gathered.iter().enumerate() {
            assert!(received == message(rank, length(rank, round)), "round {round}, rank {rank}");
        }
    }
    let gathered = done(comm.allgather(tag(99), Vec::new()));
    assert!(gathered.iter().all(<[u8]>::is_empty));
}

pub fn sums_have_the_bits_of_rank_order(comm: &dyn Communicator) {
    for (op, length) in [0, 1, 7, 1016, 1017, 5_000, 65_537, 1_000_003].into_iter().enumerate() {
        let sum = done(comm.allreduce(tag(op as u32), values(comm.rank(), length)));
        assert_sum(&sum, comm.size(), length);
    }
}

pub fn many_collectives_can_be_in_flight(comm: &dyn Communicator) {
    let rank = comm.rank();
    let mut pending = Vec::new();
    for op in 0..100 {
        let gathered = comm.allgather(tag(3 * op), message(rank, op as usize * 100));
        let sum = comm.allreduce(tag(3 * op + 1), values(rank, op as usize * 50));
        pending.push((op as usize, gathered, sum, comm.barrier(tag(3 * op + 2))));
    }
    // The last first: waiting has no order.
    for (op, gathered, sum, barrier) in pending.into_iter().rev() {
        done(barrier);
        assert_sum(&done(sum), comm.size(), op * 50);
        let gathered = done(gathered);
        assert!((0..comm.size()).all(|rank| gathered.from_rank(rank) == message(rank, op * 100)));
    }
}

/// One rank comes late, so that the others find all they have in flight finished at one look.
pub fn what_queues_goes_on_after_all_before_it_finished_at_once(comm: &dyn Communicator) {
    for round in 0..20 {
        if round % comm.size() == comm.rank() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let barriers: Vec<Pending<()>> = (0..40).map(|op| comm.barrier(tag(op))).collect();
        barriers.into_iter().for_each(done);
    }
}

pub fn polling_alone_is_enough(comm: &dyn Communicator) {
    let mut sum = comm.allreduce(tag(0), values(comm.rank(), 300_000));
    let mut gathered = comm.allgather(tag(1), message(comm.rank(), 9_000));
    let mut barrier = comm.barrier(tag(2));
    while !(sum.poll() & gathered.poll() & barrier.poll()) {
        std::thread::yield_now();
    }
    assert_sum(&sum.wait(Duration::ZERO).unwrap(), comm.size(), 300_000);
    assert_eq!(gathered.wait(Duration::ZERO).unwrap().from_rank(0), message(0, 9_000));
    barrier.wait(Duration::ZERO).unwrap();
}

pub fn handles_can_be_dropped(comm: &dyn Communicator) {
    for op in 0..50 {
        let mut gathered = comm.allgather(tag(4 * op), message(comm.rank(), 50_000));
        gathered.poll();
        drop(gathered);
        drop(comm.allreduce(tag(4 * op + 1), values(comm.rank(), 20_000)));
        drop(comm.barrier(tag(4 * op + 2)));
    }
    // One rank keeps what the others drop.
    let sum = comm.allreduce(tag(1000), values(comm.rank(), 200_000));
    if comm.rank() == 0 {
        assert_sum(&done(sum), comm.size(), 200_000);
    }
    done(comm.barrier(tag(1001)));
}

pub fn large_messages_arrive(comm: &dyn Communicator) {
    const LARGE: usize = (33 << 20) + 5;
    let last = comm.size() - 1;
    let mut sent = vec![comm.rank() as u8; if comm.rank() == last { LARGE } else { comm.rank() }];
    // A mark every 4 KB tells where each part of the message ended up.
    sent.chunks_mut(4096).enumerate().for_each(|(i, chunk)| chunk[0] = (i % 251) as u8);
    let gathered = done(comm.allgather(tag(0), sent));
    assert!((0..last).all(|rank| gathered.from_rank(rank).len() == rank));
    let received = gathered.from_rank(last);
    assert_eq!(received.len(), LARGE);
    let marked = |(i, chunk): (usize, &[u8])| chunk[0] == (i % 251) as u8;
    assert!(received.chunks(4096).enumerate().all(marked));
    assert_eq!(received[LARGE - 1], last as u8);
    let sum = done(comm.allreduce(tag(1), values(comm.rank(), 3_000_011)));
    assert_sum(&sum, comm.size(), 3_000_011);
}

pub fn buffers_come_back(comm: &dyn Communicator) {
    let gathered = done(comm.allgather(tag(0), message(comm.rank(), 10_000)));
    assert!(gathered.reclaim().len() <= comm.size());
    let values = vec![1.0; 10_000];
    let sum = done(comm.allreduce(tag(1), values));
    assert_eq!(sum, vec![comm.size() as f32; 10_000]);
}

pub fn handles_can_be_waited_for_on_another_thread(comm: &dyn Communicator) {
    let sum = comm.allreduce(tag(0), values(comm.rank(), 100_000));
    let size = comm.size();
    std::thread::spawn(move || assert_sum(&done(sum), size, 100_000)).join().unwrap();
}

/// Rank 0 does one thing, the others another: all must see the other side, and nothing works afterwards.
fn disagree(seat: Seat, start: impl Fn(&dyn Communicator) -> CommError, odd: Call, even: Call) {
    let comm = &*seat.comm;
    done(comm.barrier(tag(100)));
    let cause = start(comm);
    let CommError::Mismatch { rank, theirs, ours } = cause else { panic!("{cause}") };
    if comm.rank() == 0 {
        assert!(rank > 0 && rank < comm.size());
        assert_eq!((theirs, ours), (even, odd));
    } else {
        assert_eq!((rank, theirs, ours), (0, odd, even));
    }
    assert_eq!(comm.barrier(tag(101)).wait(LONG), Err(cause.clone()));
    let mut later = comm.allreduce(tag(102), vec![0.0; 5]);
    assert!(later.poll());
    assert_eq!(later.wait(Duration::ZERO), Err(cause));
    drop(seat.comm);
    (seat.meet)();
}

pub fn a_wrong_order_names_both_sides(seat: Seat) {
    let start = |comm: &dyn Communicator| {
        let (first, second) = if comm.rank() == 0 { (2, 1) } else { (1, 2) };
        let one = comm.allgather(tag(first), vec![1; 100]);
        let two = comm.allgather(tag(second), vec![2; 100]);
        let cause = one.wait(LONG).unwrap_err();
        assert_eq!(two.wait(LONG), Err(cause.clone()));
        cause
    };
    let call = |op| Call { kind: Kind::Allgather, tag: tag(op), length: 100 };
    disagree(seat, start, call(2), call(1));
}

pub fn another_kind_names_both_sides(seat: Seat) {
    let start = |comm: &dyn Communicator| match comm.rank() {
        0 => comm.allreduce(tag(1), vec![1.0; 25]).wait(LONG).unwrap_err(),
        _ => comm.allgather(tag(1), vec![1; 100]).wait(LONG).unwrap_err(),
    };
    let odd = Call { kind: Kind::Allreduce, tag: tag(1), length: 25 };
    let even = Call { kind: Kind::Allgather, tag: tag(1), length: 100 };
    disagree(seat, start, odd, even);
}

pub fn another_length_names_both_sides(seat: Seat) {
    let length = |rank: usize| if rank == 0 { 500_000 } else { 400_000 };
    let start = |comm: &dyn Communicator| {
        comm.allreduce(tag(1), vec![1.0; length(comm.rank())]).wait(LONG).unwrap_err()
    };
    let call = |rank| Call { kind: Kind::Allreduce, tag: tag(1), length: length(rank) as u64 };
    disagree(seat, start, call(0), call(1));
}

pub fn what_was_started_before_a_mismatch_still_finishes(seat: Seat) {
    let start = |comm: &dyn Communicator| {
        let sum = comm.allreduce(tag(0), values(comm.rank(), 300_000));
        let odd = comm.barrier(tag(u32::from(comm.rank() == 0)));
        let cause = odd.wait(LONG).unwrap_err();
        assert_sum(&done(sum), comm.size(), 300_000);
        cause
    };
    let call = |op| Call { kind: Kind::Barrier, tag: tag(op), length: 0 };
    disagree(seat, start, call(1), call(0));
}

pub fn a_rank_that_never_comes_is_named(seat: Seat) {
    let comm = &*seat.comm;
    let last = comm.size() - 1;
    done(comm.barrier(tag(0)));
    if comm.rank() != last {
        // All present ranks have spoken before the first of them gives up.
        let deadline = Duration::from_secs(2);
        let cause = comm.allreduce(tag(1), vec![1.0; 100_000]).wait(deadline).unwrap_err();
        assert_eq!(cause, CommError::Deadline { tag: tag(1), waited: deadline, missing: vec![last] });
        assert_eq!(comm.allgather(tag(2), Vec::new()).wait(LONG), Err(cause));
    }
    (seat.meet)();
}

pub fn a_rank_that_leaves_is_named(seat: Seat) {
    let Seat { comm, meet } = seat;
    let last = comm.size() - 1;
    done(comm.barrier(tag(0)));
    if comm.rank() != last {
        let cause = comm.allgather(tag(1), vec![1; 10_000]).wait(LONG).unwrap_err();
        assert_eq!(cause, CommError::Left { rank: last, tag: tag(1) });
        assert_eq!(comm.barrier(tag(2)).wait(LONG), Err(cause));
    }
    drop(comm);
    meet();
}

pub fn what_a_leaver_has_started_still_finishes(seat: Seat) {
    let Seat { comm, meet } = seat;
    let (rank, size) = (comm.rank(), comm.size());
    let gathered = comm.allgather(tag(0), message(rank, 100_000));
    let sum = comm.allreduce(tag(1), values(rank, 200_000));
    if rank == size - 1 {
        drop((gathered, sum));
    } else {
        assert_eq!(done(gathered).from_rank(size - 1), message(size - 1, 100_000));
        assert_sum(&done(sum), size, 200_000);
        let cause = comm.barrier(tag(2)).wait(LONG).unwrap_err();
        assert_eq!(cause, CommError::Left { rank: size - 1, tag: tag(2) });
    }
    drop(comm);
    meet();
}

pub fn who_gave_up_and_why_is_passed_on(seat: Seat) {
    let Seat { comm, meet } = seat;
    let (rank, last) = (comm.rank(), comm.size() - 1);
    done(comm.barrier(tag(0)));
    if rank == last {
        return meet();
    }
    let first = comm.barrier(tag(1));
    if rank == 0 {
        let waited = Duration::from_secs(2);
        let cause = first.wait(waited).unwrap_err();
        assert_eq!(cause, CommError::Deadline { tag: tag(1), waited, missing: vec![last] });
    } else {
        let reason = format!("no answer from rank {last} within 2s in {}", tag(1));
        let cause = comm.barrier(tag(2)).wait(LONG).unwrap_err();
        assert_eq!(cause, CommError::GaveUp { rank: 0, tag: tag(2), reason });
    }
    drop(comm);
    meet();
}

//! What every engine must hold, as cases that a driver runs by name. One rank's communicator comes in, and the case runs on all
//! ranks of a group at once; it fails by panicking.
//!
//! Whoever writes an engine runs every case of [`HEALTHY`] on groups of 1 to 8 ranks, one after the other on the same group if
//! starting one is expensive, and every case of [`BREAKING`] on 2 ranks and more, each on a group of its own, because it leaves
//! the group unusable. A job that takes longer than some times [`LONG`] hangs, which is a failure too.
//!
//! ```
//! use redsync_comm::{conformance, local};
//!
//! for (name, case) in conformance::HEALTHY.iter().take(2) {
//!     println!("{name}");
//!     std::thread::scope(|scope| {
//!         for comm in local::group(3) {
//!             scope.spawn(move || case(&comm));
//!         }
//!     });
//! }
//! ```
#![allow(clippy::unwrap_used)]

use crate::{Call, CommError, Communicator, Kind, Pending, Tag};
use std::time::Duration;

/// Longer than any case takes: whoever waits so long hangs.
pub const LONG: Duration = Duration::from_secs(60);

/// A case that leaves the group usable.
pub type Healthy = fn(&dyn Communicator);

/// A case after which the group is broken.
pub type Breaking = fn(Seat<'_>);

macro_rules! cases {
    ($($name:ident)*) => { &[$((stringify!($name), $name)),*] };
}

/// The cases that leave the group usable, by name.
pub const HEALTHY: &[(&str, Healthy)] = cases! {
    unequal_and_empty_messages_arrive
    all_to_all_messages_of_unequal_and_no_length_arrive
    a_wrong_number_of_messages_is_an_error_and_harms_nobody
    sums_have_the_bits_of_rank_order
    many_collectives_can_be_in_flight
    what_queues_goes_on_after_all_before_it_finished_at_once
    polling_alone_is_enough
    handles_can_be_dropped
    large_messages_arrive
    large_all_to_all_messages_arrive
    buffers_come_back_when_nobody_needs_them
    handles_can_be_waited_for_on_another_thread
};

/// The cases that need a group of their own, by name.
pub const BREAKING: &[(&str, Breaking)] = cases! {
    a_wrong_order_names_both_sides
    another_kind_names_both_sides
    another_length_names_both_sides
    what_was_started_before_a_mismatch_still_finishes
    a_rank_that_never_comes_is_named
    a_rank_that_leaves_is_named
    what_a_leaver_has_started_still_finishes
    who_gave_up_and_why_is_passed_on
    whose_deadline_is_later_follows_at_once
    a_rank_that_gives_up_is_named_in_an_allgather
    a_rank_that_gives_up_is_named_in_a_long_sum
    a_rank_that_gives_up_is_named_in_an_all_to_all
    a_rank_that_gives_up_is_named_in_a_barrier
    only_the_first_reason_for_giving_up_counts
    what_was_started_before_giving_up_still_finishes
};

/// One rank in a breaking case.
pub struct Seat<'a> {
    /// Its communicator.
    pub comm: Box<dyn Communicator>,
    /// Returns once all ranks have called it, by other means than the communicator.
    pub meet: &'a dyn Fn(),
}

impl std::fmt::Debug for Seat<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat").field("rank", &self.comm.rank()).finish_non_exhaustive()
    }
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

fn unequal_and_empty_messages_arrive(comm: &dyn Communicator) {
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

/// The message of one rank for another in an all-to-all.
fn dealt(from: usize, to: usize, length: usize) -> Vec<u8> {
    message(from * 101 + to, length)
}

fn all_to_all_messages_of_unequal_and_no_length_arrive(comm: &dyn Communicator) {
    let length = |from: usize, to: usize, round: usize| match (from + 2 * to + round) % 6 {
        0 => 0,
        1 => 1 + to,
        2 => 4064,
        3 => 4065 + from,
        4 => 20_000 * to,
        _ => 300_001 + to,
    };
    let (rank, size) = (comm.rank(), comm.size());
    for round in 0..12 {
        let messages = (0..size).map(|to| dealt(rank, to, length(rank, to, round))).collect();
        let received = done(comm.alltoall(tag(round as u32), messages));
        assert_eq!(received.ranks(), size);
        for (from, message) in received.iter().enumerate() {
            assert!(message == dealt(from, rank, length(from, rank, round)), "round {round}, from {from}");
        }
    }
    let received = done(comm.alltoall(tag(99), vec![Vec::new(); size]));
    assert!(received.iter().all(<[u8]>::is_empty));
}

fn a_wrong_number_of_messages_is_an_error_and_harms_nobody(comm: &dyn Communicator) {
    let size = comm.size();
    for wrong in [0, size - 1, size + 1] {
        let cause = comm.alltoall(tag(0), vec![vec![1]; wrong]).wait(LONG).unwrap_err();
        let CommError::Engine { engine, reason } = cause else { panic!("{cause}") };
        assert_eq!(engine, comm.name());
        assert!(reason.contains(&size.to_string()) && reason.contains(&wrong.to_string()), "{reason}");
    }
    done(comm.barrier(tag(1)));
}

fn sums_have_the_bits_of_rank_order(comm: &dyn Communicator) {
    for (op, length) in [0, 1, 7, 1016, 1017, 5_000, 65_537, 1_000_003].into_iter().enumerate() {
        let sum = done(comm.allreduce(tag(op as u32), values(comm.rank(), length)));
        assert_sum(&sum, comm.size(), length);
    }
}

fn many_collectives_can_be_in_flight(comm: &dyn Communicator) {
    let rank = comm.rank();
    let mut pending = Vec::new();
    for op in 0..100 {
        let gathered = comm.allgather(tag(4 * op), message(rank, op as usize * 100));
        let sum = comm.allreduce(tag(4 * op + 1), values(rank, op as usize * 50));
        let messages = (0..comm.size()).map(|to| dealt(rank, to, op as usize * 100 + to)).collect();
        let dealt = comm.alltoall(tag(4 * op + 2), messages);
        pending.push((op as usize, gathered, sum, dealt, comm.barrier(tag(4 * op + 3))));
    }
    // The last first: waiting has no order.
    for (op, gathered, sum, received, barrier) in pending.into_iter().rev() {
        done(barrier);
        let received = done(received);
        let arrived = |from| received.from_rank(from) == dealt(from, rank, op * 100 + rank);
        assert!((0..comm.size()).all(arrived));
        assert_sum(&done(sum), comm.size(), op * 50);
        let gathered = done(gathered);
        assert!((0..comm.size()).all(|rank| gathered.from_rank(rank) == message(rank, op * 100)));
    }
}

/// One rank comes late, so that the others find all they have in flight finished at one look.
fn what_queues_goes_on_after_all_before_it_finished_at_once(comm: &dyn Communicator) {
    for round in 0..20 {
        if round % comm.size() == comm.rank() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let barriers: Vec<Pending<()>> = (0..40).map(|op| comm.barrier(tag(op))).collect();
        barriers.into_iter().for_each(done);
    }
}

fn polling_alone_is_enough(comm: &dyn Communicator) {
    let mut sum = comm.allreduce(tag(0), values(comm.rank(), 300_000));
    let mut gathered = comm.allgather(tag(1), message(comm.rank(), 9_000));
    let mut received = comm.alltoall(tag(2), vec![message(comm.rank(), 8_000); comm.size()]);
    let mut barrier = comm.barrier(tag(3));
    while !(sum.poll() & gathered.poll() & received.poll() & barrier.poll()) {
        std::thread::yield_now();
    }
    assert_sum(&sum.wait(Duration::ZERO).unwrap(), comm.size(), 300_000);
    assert_eq!(gathered.wait(Duration::ZERO).unwrap().from_rank(0), message(0, 9_000));
    assert_eq!(received.wait(Duration::ZERO).unwrap().from_rank(0), message(0, 8_000));
    barrier.wait(Duration::ZERO).unwrap();
}

fn handles_can_be_dropped(comm: &dyn Communicator) {
    for op in 0..50 {
        let mut gathered = comm.allgather(tag(4 * op), message(comm.rank(), 50_000));
        gathered.poll();
        drop(gathered);
        drop(comm.allreduce(tag(4 * op + 1), values(comm.rank(), 20_000)));
        drop(comm.barrier(tag(4 * op + 2)));
        drop(comm.alltoall(tag(4 * op + 3), vec![message(comm.rank(), 10_000); comm.size()]));
    }
    // One rank keeps what the others drop.
    let sum = comm.allreduce(tag(1000), values(comm.rank(), 200_000));
    if comm.rank() == 0 {
        assert_sum(&done(sum), comm.size(), 200_000);
    }
    done(comm.barrier(tag(1001)));
}

fn large_messages_arrive(comm: &dyn Communicator) {
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

/// The first rank sends more to the last than any single transfer carries, and something to everybody.
fn large_all_to_all_messages_arrive(comm: &dyn Communicator) {
    const LARGE: usize = (34 << 20) + 3;
    let (rank, size) = (comm.rank(), comm.size());
    let length =
        |from: usize, to: usize| if from == 0 && to == size - 1 { LARGE } else { 100_000 * from + to };
    let messages = (0..size).map(|to| dealt(rank, to, length(rank, to))).collect();
    let received = done(comm.alltoall(tag(0), messages));
    for from in 0..size {
        assert!(received.from_rank(from) == dealt(from, rank, length(from, rank)), "from {from}");
    }
}

/// A buffer that comes back is free: who writes to it changes nobody's message. And once all are done with a message, somebody
/// has its buffer; of an all-to-all, whose messages have one reader each, that reader.
fn buffers_come_back_when_nobody_needs_them(comm: &dyn Communicator) {
    const LENGTH: usize = 10_000;
    let (rank, size) = (comm.rank(), comm.size());
    let free = |buffers: Vec<Vec<u8>>| {
        buffers.into_iter().filter_map(|mut buffer| {
            buffer.fill(0xEE);
            (buffer.capacity() >= LENGTH).then_some(())
        })
    };
    let early = done(comm.allgather(tag(0), message(rank, LENGTH)));
    let kept = done(comm.allgather(tag(1), message(rank, LENGTH)));
    let _ = free(early.reclaim()).count();
    done(comm.barrier(tag(2)));
    assert!((0..size).all(|from| kept.from_rank(from) == message(from, LENGTH)));
    // All ranks have read it before anybody lets go of it.
    done(comm.barrier(tag(3)));
    let back = free(kept.reclaim()).count();
    let total = done(comm.allreduce(tag(4), vec![back as f32]))[0];
    assert!(total >= size as f32, "{total} of {size} buffers came back");

    let received = done(comm.alltoall(tag(5), vec![message(rank, LENGTH); size]));
    assert!((0..size).all(|from| received.from_rank(from) == message(from, LENGTH)));
    assert_eq!(free(received.reclaim()).count(), size);
    let sum = done(comm.allreduce(tag(6), vec![1.0; LENGTH]));
    assert_eq!(sum, vec![size as f32; LENGTH]);
}

fn handles_can_be_waited_for_on_another_thread(comm: &dyn Communicator) {
    let sum = comm.allreduce(tag(0), values(comm.rank(), 100_000));
    let size = comm.size();
    std::thread::spawn(move || assert_sum(&done(sum), size, 100_000)).join().unwrap();
}

/// Rank 0 does one thing, the others another: all must see the other side, and nothing works afterwards.
fn disagree(seat: Seat<'_>, start: impl Fn(&dyn Communicator) -> CommError, odd: Call, even: Call) {
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

fn a_wrong_order_names_both_sides(seat: Seat<'_>) {
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

fn another_kind_names_both_sides(seat: Seat<'_>) {
    let start = |comm: &dyn Communicator| match comm.rank() {
        0 => comm.allreduce(tag(1), vec![1.0; 25]).wait(LONG).unwrap_err(),
        _ => comm.allgather(tag(1), vec![1; 100]).wait(LONG).unwrap_err(),
    };
    let odd = Call { kind: Kind::Allreduce, tag: tag(1), length: 25 };
    let even = Call { kind: Kind::Allgather, tag: tag(1), length: 100 };
    disagree(seat, start, odd, even);
}

fn another_length_names_both_sides(seat: Seat<'_>) {
    let length = |rank: usize| if rank == 0 { 500_000 } else { 400_000 };
    let start = |comm: &dyn Communicator| {
        comm.allreduce(tag(1), vec![1.0; length(comm.rank())]).wait(LONG).unwrap_err()
    };
    let call = |rank| Call { kind: Kind::Allreduce, tag: tag(1), length: length(rank) as u64 };
    disagree(seat, start, call(0), call(1));
}

fn what_was_started_before_a_mismatch_still_finishes(seat: Seat<'_>) {
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

fn a_rank_that_never_comes_is_named(seat: Seat<'_>) {
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

fn a_rank_that_leaves_is_named(seat: Seat<'_>) {
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

fn what_a_leaver_has_started_still_finishes(seat: Seat<'_>) {
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

fn who_gave_up_and_why_is_passed_on(seat: Seat<'_>) {
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
        assert_eq!(cause, CommError::GaveUp { rank: 0, tag: tag(2), reason, blames: vec![last] });
        assert_eq!(cause.ranks(), [last]);
    }
    drop(comm);
    meet();
}

/// Also in a collective that the rank whose deadline passed had started, and although that rank does not leave.
fn whose_deadline_is_later_follows_at_once(seat: Seat<'_>) {
    let comm = &*seat.comm;
    let (rank, last) = (comm.rank(), comm.size() - 1);
    done(comm.barrier(tag(0)));
    if rank != last {
        let sum = comm.allreduce(tag(1), values(rank, 300_000));
        let cause = sum.wait(if rank == 0 { Duration::from_secs(2) } else { LONG }).unwrap_err();
        assert_eq!(cause.ranks(), [last]);
        let reason = format!("no answer from rank {last} within 2s in {}", tag(1));
        let followed = CommError::GaveUp { rank: 0, tag: tag(1), reason, blames: vec![last] };
        assert_eq!(cause.followed(0, tag(1)), followed);
        assert_eq!(matches!(cause, CommError::Deadline { .. }), rank == 0);
        assert_eq!(comm.barrier(tag(2)).wait(LONG), Err(cause.at(tag(2))));
    }
    (seat.meet)();
}

const REASON: &str = "the disk is full";

/// The last rank gives up where the others start a collective: they learn why, in that one and in the next.
fn gives_up(seat: Seat<'_>, wait: impl Fn(&dyn Communicator, Tag) -> CommError) {
    let comm = &*seat.comm;
    let last = comm.size() - 1;
    let gave_up =
        |op| CommError::GaveUp { rank: last, tag: tag(op), reason: REASON.to_string(), blames: Vec::new() };
    done(comm.barrier(tag(0)));
    if comm.rank() == last {
        comm.give_up(REASON);
    }
    assert_eq!(wait(comm, tag(1)), gave_up(1));
    assert_eq!(gave_up(1).ranks(), [last]);
    assert_eq!(comm.barrier(tag(2)).wait(LONG), Err(gave_up(2)));
    let mut later = comm.allgather(tag(3), vec![1; 100]);
    assert!(later.poll());
    assert_eq!(later.wait(Duration::ZERO), Err(gave_up(3)));
    // Who gave up leaves in the end as everybody does.
    drop(seat.comm);
    (seat.meet)();
}

fn a_rank_that_gives_up_is_named_in_an_allgather(seat: Seat<'_>) {
    gives_up(seat, |comm, tag| comm.allgather(tag, vec![1; 10_000]).wait(LONG).unwrap_err());
}

fn a_rank_that_gives_up_is_named_in_a_long_sum(seat: Seat<'_>) {
    gives_up(seat, |comm, tag| comm.allreduce(tag, vec![1.0; 300_000]).wait(LONG).unwrap_err());
}

fn a_rank_that_gives_up_is_named_in_an_all_to_all(seat: Seat<'_>) {
    gives_up(seat, |comm, tag| {
        comm.alltoall(tag, vec![vec![1; 10_000]; comm.size()]).wait(LONG).unwrap_err()
    });
}

fn a_rank_that_gives_up_is_named_in_a_barrier(seat: Seat<'_>) {
    gives_up(seat, |comm, tag| comm.barrier(tag).wait(LONG).unwrap_err());
}

fn only_the_first_reason_for_giving_up_counts(seat: Seat<'_>) {
    gives_up(seat, |comm, tag| {
        let cause = comm.barrier(tag).wait(LONG).unwrap_err();
        comm.give_up("something else");
        cause
    });
}

/// More than an engine may have in flight at once, and nobody has waited for any of it.
fn what_was_started_before_giving_up_still_finishes(seat: Seat<'_>) {
    const MANY: u32 = 40;
    let Seat { comm, meet } = seat;
    let (rank, size) = (comm.rank(), comm.size());
    let sums: Vec<_> = (0..MANY).map(|op| comm.allreduce(tag(op), values(rank, 30_000))).collect();
    let gathered = comm.allgather(tag(MANY), message(rank, 100_000));
    if rank == size - 1 {
        comm.give_up(REASON);
    }
    let next = comm.barrier(tag(MANY + 1));
    sums.into_iter().for_each(|sum| assert_sum(&done(sum), size, 30_000));
    assert_eq!(done(gathered).from_rank(size - 1), message(size - 1, 100_000));
    let (tag, reason) = (tag(MANY + 1), REASON.to_string());
    let gave_up = CommError::GaveUp { rank: size - 1, tag, reason, blames: Vec::new() };
    assert_eq!(next.wait(LONG), Err(gave_up));
    drop(comm);
    meet();
}

//! The rooms of the communicator that need no interpreter: blocks, forecasts, notes and verdicts, as pure functions. The crate
//! itself links only into Python, so they are taken in by their paths.

// Each room is used here in part.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

#[path = "../src/communicator/block.rs"]
mod block;
#[path = "../src/communicator/forecast.rs"]
mod forecast;
#[path = "../src/communicator/note.rs"]
mod note;

use block::{HEADER, Header, LEAST, REASON, cut};
use forecast::Forecast;
use note::{Found, Gone, Note, Pulse, Verdict, Why, judge};
use redsync_comm::{Call, CommError, Kind, Tag};
use std::time::Duration;

/// What `note.rs` finds where it belongs.
pub(crate) const ENGINE: &str = "torch";

fn call(kind: Kind, op: u32) -> Call {
    Call { kind, tag: Tag { step: u64::MAX - 1, op }, length: 1 << 40 }
}

#[test]
fn a_header_survives_the_way_and_a_foreign_one_is_refused() {
    for kind in [Kind::Allgather, Kind::Allreduce, Kind::Barrier, Kind::Alltoall] {
        let header = Header { call: Some(call(kind, 7)), part: 3, longest: 1 << 41 };
        let mut block = [9; LEAST];
        header.write(b"abc", &mut block);
        assert_eq!(Header::read(&block), Some(header));
        assert_eq!(block[HEADER..][..4], *b"abc\x09");
        block[0] ^= 1;
        assert_eq!(Header::read(&block), None);
    }
    let mut block = [0; LEAST];
    let farewell = Header { call: None, part: 6, longest: 6 };
    farewell.write(b"enough", &mut block);
    assert_eq!(Header::read(&block), Some(farewell));
    block[4] = 5;
    assert_eq!(Header::read(&block), None);
    assert_eq!(Header::read(&block[..HEADER - 1]), None);
}

#[test]
fn a_reason_is_cut_between_two_characters() {
    assert_eq!(cut("short"), "short");
    let long = format!("x{}", "é".repeat(REASON));
    assert_eq!(cut(&long).len(), REASON - 1);
    assert!(long.starts_with(cut(&long)));
}

#[test]
fn what_repeats_fits_into_its_block() {
    let mut forecast = Forecast::default();
    assert_eq!(forecast.block(), LEAST);
    for step in 0..4 {
        for (op, longest) in [(0, 20_000), (1, 100), (2, 3_000)] {
            // What follows the last of a step is known once there was a second one.
            assert!(step < 2 || forecast.block() >= HEADER + longest as usize, "step {step}, op {op}");
            assert!(forecast.block() <= HEADER + 21_000 && forecast.block().is_multiple_of(8));
            forecast.learn(call(Kind::Allgather, op), longest);
        }
    }
}

#[test]
fn what_is_too_long_or_absurd_leaves_small_blocks() {
    let mut forecast = Forecast::default();
    for longest in [1 << 20, u64::MAX, 1 << 60, 70_000, u64::MAX - 1] {
        forecast.learn(call(Kind::Allgather, 0), longest);
        assert_eq!(forecast.block(), LEAST);
    }
}

#[test]
fn a_block_shrinks_slowly() {
    let mut forecast = Forecast::default();
    forecast.learn(call(Kind::Allgather, 0), 0);
    forecast.learn(call(Kind::Allgather, 0), 40_000);
    let wide = forecast.block();
    forecast.learn(call(Kind::Allgather, 0), 1_000);
    assert!(forecast.block() < wide && forecast.block() > wide * 3 / 4);
    (0..200).for_each(|_| forecast.learn(call(Kind::Allgather, 0), 1_000));
    assert!(forecast.block() < 1_200);
}

fn note(started: u64, finished: u64, gone: Option<Gone>) -> Note {
    Note { beats: 9, started, finished, gone }
}

/// The verdict about collective 5, of ranks 1, 2, ..
fn verdict(others: &[(Note, Pulse)]) -> Option<(Found, Vec<usize>)> {
    let others = others.iter().enumerate().map(|(at, (note, pulse))| (at + 1, Some(note), *pulse));
    judge(5, others).map(|verdict| (verdict.found, verdict.ranks))
}

#[test]
fn silence_comes_before_leaving_and_leaving_before_lagging() {
    let present = || (note(6, 5, None), Pulse::Beating);
    let behind = || (note(5, 5, None), Pulse::Beating);
    let left = || (note(5, 5, Some(Gone::Left)), Pulse::Unknown);
    let silent = || (note(6, 5, None), Pulse::Silent);
    assert_eq!(verdict(&[present(), behind(), left(), silent()]), Some((Found::Silent, vec![4])));
    assert_eq!(verdict(&[present(), behind(), left()]), Some((Found::Left, vec![3])));
    assert_eq!(verdict(&[behind(), present(), behind()]), Some((Found::Behind, vec![1, 3])));
    assert_eq!(verdict(&[present(), present()]), Some((Found::Nothing, vec![])));
    assert_eq!(verdict(&[silent(), (note(6, 5, None), Pulse::Unknown)]), None);
    let absent = judge(5, [(1, None, Pulse::Silent)].into_iter());
    assert_eq!(absent, Some(Verdict { found: Found::Silent, ranks: vec![1] }));
}

#[test]
fn who_is_held_up_itself_is_named_only_if_nobody_else_can_be() {
    let held_up = || (note(5, 4, None), Pulse::Beating);
    let behind = || (note(4, 4, None), Pulse::Beating);
    assert_eq!(verdict(&[held_up(), behind()]), Some((Found::Behind, vec![2])));
    assert_eq!(verdict(&[held_up()]), Some((Found::Behind, vec![1])));
}

#[test]
fn who_left_after_it_had_started_the_collective_is_not_blamed() {
    let left = (note(6, 6, Some(Gone::Left)), Pulse::Unknown);
    assert_eq!(verdict(&[left, (note(5, 5, None), Pulse::Beating)]), Some((Found::Behind, vec![2])));
}

#[test]
fn every_verdict_names_its_ranks_whoever_asks() {
    let (tag, patience) = (Tag { step: 3, op: 1 }, Duration::from_secs(60));
    let failed = Why::Failed("connection closed".to_string());
    for why in [Why::Expired(Duration::from_secs(2)), failed.clone(), Why::Left] {
        for found in [Found::Silent, Found::Behind, Found::Left] {
            let verdict = Verdict { found, ranks: vec![2] };
            assert_eq!(verdict.error(tag, &why, patience).ranks(), [2], "{found:?} {why:?}");
        }
    }
    let nobody = Verdict { found: Found::Nothing, ranks: vec![] };
    assert!(nobody.error(tag, &failed, patience).to_string().contains("connection closed"));
    let silent = Verdict { found: Found::Silent, ranks: vec![2] };
    let text = "rank 2 gave no sign of life in step 3 op 1 (connection closed)";
    assert_eq!(silent.error(tag, &failed, patience).to_string(), text);
}

#[test]
fn the_cause_of_a_rank_passes_through_its_note() {
    let tag = Tag { step: 3, op: 1 };
    let cause = CommError::Deadline { tag, waited: Duration::from_secs(2), missing: vec![2] };
    let gone = Gone::because(&cause, 1, 4);
    let reason = cause.to_string();
    assert_eq!(gone, Gone::GaveUp { from: 4, rank: 1, reason: reason.clone(), blames: vec![2] });
    let follower = CommError::GaveUp { rank: 1, tag, reason, blames: vec![2] };
    assert_eq!(Gone::because(&follower, 3, 4), gone);
    let note = note(7, 4, Some(gone));
    assert_eq!(note.fails_from(), Some(4));
    let text = serde_json::to_vec(&note).unwrap();
    assert_eq!(serde_json::from_slice::<Note>(&text).unwrap(), note);
}

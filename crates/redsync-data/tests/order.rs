//! Which rank sees what: permutations, batches and windows, for any sizes.

use proptest::prelude::*;
use redsync_data::OrderError;
use redsync_data::order::{Epochs, Streams, Windows};

/// All indices of a step, rank after rank.
fn global_batch(epochs: &mut Epochs, epoch: u64, step: usize, ranks: usize) -> Vec<u32> {
    (0..ranks).flat_map(|rank| epochs.indices(epoch, step, rank).to_vec()).collect()
}

fn distinct(mut indices: Vec<u32>, len: usize) -> bool {
    let count = indices.len();
    indices.sort_unstable();
    indices.dedup();
    indices.len() == count && indices.last().is_none_or(|&last| (last as usize) < len)
}

proptest! {
    #[test]
    fn an_epoch_shows_each_sample_at_most_once_and_leaves_out_less_than_a_global_batch(
        ranks in 1..9usize, batch in 1..9usize, extra in 0..300usize, seed: u64, epoch: u64,
    ) {
        let len = ranks * batch + extra;
        let mut epochs = Epochs::new(len, ranks, batch, seed).unwrap();
        let steps = epochs.steps_per_epoch();
        let all: Vec<u32> = (0..steps).flat_map(|step| global_batch(&mut epochs, epoch, step, ranks)).collect();
        prop_assert!(all.len() <= len && len - all.len() < ranks * batch);
        prop_assert!(distinct(all, len));
    }

    #[test]
    fn without_a_remainder_an_epoch_is_a_permutation(len in 1..500usize, seed: u64, epoch: u64) {
        let mut all = Epochs::new(len, 1, len, seed).unwrap().indices(epoch, 0, 0).to_vec();
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..len as u32));
    }

    #[test]
    fn how_a_global_batch_is_split_does_not_change_it(
        a in 1..5usize, b in 1..5usize, c in 1..5usize, extra in 0..100usize, seed: u64, epoch: u64,
    ) {
        let len = a * b * c + extra;
        let splits = [(1, a * b * c), (a, b * c), (a * b, c), (a * b * c, 1)];
        let batches = splits.map(|(ranks, batch)| {
            let mut epochs = Epochs::new(len, ranks, batch, seed).unwrap();
            let steps = epochs.steps_per_epoch();
            (0..steps).map(|step| global_batch(&mut epochs, epoch, step, ranks)).collect::<Vec<_>>()
        });
        prop_assert!(batches.iter().all(|same| *same == batches[0]));
    }

    #[test]
    fn the_order_in_which_epochs_are_asked_for_does_not_matter(seed: u64, first in 0..9u64, then in 0..9u64) {
        let mut epochs = Epochs::new(64, 2, 8, seed).unwrap();
        let before = global_batch(&mut epochs, first, 1, 2);
        global_batch(&mut epochs, then, 0, 2);
        prop_assert_eq!(before, global_batch(&mut epochs, first, 1, 2));
    }

    #[test]
    fn windows_continue_each_stream_and_targets_are_the_next_tokens(
        ranks in 1..4usize, batch in 1..5usize, bptt in 1..7usize, extra in 0..200usize,
    ) {
        let len = ranks * batch * (bptt + 1) + extra;
        let tokens: Vec<u32> = (0..len as u32).collect();
        let streams = Streams::new(&tokens, ranks, batch, bptt).unwrap();
        let stream_len = len / (ranks * batch);
        prop_assert_eq!(streams.steps_per_epoch(), (stream_len - 1) / bptt);
        for (rank, step) in (0..ranks).flat_map(|rank| (0..streams.steps_per_epoch()).map(move |step| (rank, step))) {
            let (inputs, targets) = streams.window(step, rank);
            for (at, (&input, &target)) in inputs.iter().zip(&targets).enumerate() {
                let (time, row) = (at / batch, rank * batch + at % batch);
                prop_assert_eq!(input as usize, row * stream_len + step * bptt + time);
                prop_assert_eq!(target, input + 1);
            }
            prop_assert_eq!((inputs.len(), targets.len()), (bptt * batch, bptt * batch));
        }
    }

    #[test]
    fn streams_are_the_same_however_many_ranks_share_them(ranks in 1..5usize, batch in 1..4usize, extra in 0..99usize) {
        let tokens: Vec<u32> = (0..(ranks * batch * 6 + extra) as u32).collect();
        let alone = Streams::new(&tokens, 1, ranks * batch, 5).unwrap();
        let shared = Streams::new(&tokens, ranks, batch, 5).unwrap();
        let (whole, _) = alone.window(0, 0);
        for (rank, (time, row)) in (0..ranks).flat_map(|r| (0..5).flat_map(move |t| (0..batch).map(move |b| (r, (t, b))))) {
            let (part, _) = shared.window(0, rank);
            prop_assert_eq!(part[time * batch + row], whole[time * ranks * batch + rank * batch + row]);
        }
    }

    #[test]
    fn shuffled_windows_show_each_place_at_most_once_in_an_epoch(
        ranks in 1..4usize, batch in 1..5usize, bptt in 1..7usize, extra in 0..200usize, seed: u64, epoch: u64,
    ) {
        let len = ranks * batch * bptt + 1 + extra;
        let tokens: Vec<u32> = (0..len as u32).collect();
        let mut windows = Windows::new(&tokens, ranks, batch, bptt, seed).unwrap();
        prop_assert_eq!(windows.steps_per_epoch(), (len - 1) / bptt / (ranks * batch));
        let mut order = Epochs::new((len - 1) / bptt, ranks, batch, seed).unwrap();
        let mut seen = Vec::new();
        for (step, rank) in (0..windows.steps_per_epoch()).flat_map(|step| (0..ranks).map(move |rank| (step, rank))) {
            let (inputs, targets) = windows.window(epoch, step, rank);
            let places = order.indices(epoch, step, rank);
            prop_assert_eq!((inputs.len(), targets.len()), (bptt * batch, bptt * batch));
            for (at, (&input, &target)) in inputs.iter().zip(&targets).enumerate() {
                prop_assert_eq!(input as usize, places[at % batch] as usize * bptt + at / batch);
                prop_assert_eq!(target, input + 1);
            }
            seen.extend(inputs);
        }
        prop_assert!(distinct(seen, len));
    }
}

/// Computed by other code from the definitions of SplitMix64 and xoshiro256++. If this fails, runs of before and after
/// cannot be compared, and a run cannot be resumed.
#[test]
fn the_order_is_the_same_in_every_version() {
    let mut epochs = Epochs::new(12, 1, 12, 42).unwrap();
    assert_eq!(epochs.indices(0, 0, 0), [3, 7, 1, 0, 11, 5, 4, 9, 8, 2, 10, 6]);
    assert_eq!(epochs.indices(1, 0, 0), [8, 11, 0, 4, 5, 10, 3, 6, 7, 9, 1, 2]);
    assert_eq!(epochs.epoch_seed(0), 0xcbc5_7cfc_c243_aad8);
}

#[test]
fn epochs_and_seeds_differ() {
    let order = |seed, epoch| Epochs::new(1000, 1, 1000, seed).unwrap().indices(epoch, 0, 0).to_vec();
    assert_ne!(order(1, 0), order(1, 1));
    assert_ne!(order(1, 0), order(2, 0));
}

#[test]
fn sizes_without_a_single_step_are_refused() {
    let error = Epochs::new(31, 4, 8, 0).unwrap_err();
    assert_eq!(error.to_string(), "31 samples are too few for 4 ranks with 8 each: one step takes 32");
    assert_eq!(Epochs::new(31, 0, 8, 0).unwrap_err(), OrderError::Zero { what: "ranks" });
    assert_eq!(Epochs::new(31, 1, 0, 0).unwrap_err(), OrderError::Zero { what: "samples in a batch" });
    assert!(matches!(Epochs::new(31, usize::MAX, usize::MAX, 0), Err(OrderError::FewSamples { .. })));
    let tokens = [0; 41];
    let error = Streams::new(&tokens, 2, 3, 6).unwrap_err();
    let expected = "41 tokens are too few for 2 ranks with 3 at a time and windows of 6: one step takes 42";
    assert_eq!(error.to_string(), expected);
    assert_eq!(Streams::new(&tokens, 2, 3, 0).unwrap_err(), OrderError::Zero { what: "tokens in a window" });
    assert!(matches!(
        Streams::new(&tokens, usize::MAX, usize::MAX, usize::MAX),
        Err(OrderError::FewTokens { .. })
    ));
    assert!(Windows::new(&tokens, 2, 5, 4, 0).is_ok());
    let error = Windows::new(&tokens[..40], 2, 5, 4, 0).unwrap_err();
    let expected = "40 tokens are too few for 2 ranks with 5 at a time and windows of 4: one step takes 41";
    assert_eq!(error.to_string(), expected);
    assert_eq!(
        Windows::new(&tokens, 2, 5, 0, 0).unwrap_err(),
        OrderError::Zero { what: "tokens in a window" }
    );
    assert!(matches!(
        Windows::new(&tokens, usize::MAX, usize::MAX, usize::MAX, 0),
        Err(OrderError::FewTokens { .. })
    ));
}

//! The exchange by owners: the same training as by gathering, with bytes that do not grow with the number of ranks.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Damaging, LR, Replica, assert_close, bits, config, dense_sgd, everything, gradient, run};
use redsync_comm::Tag;
use redsync_core::Momentum;
use redsync_engine::state::{Cut, Saved};
use redsync_engine::{Config, Exchange, Kind, Layer, Method, Rest, SyncError, WarmUp};
use std::sync::Arc;

/// A layer that is dealt out in blocks, one that has one owner, one that is dense, and an output.
fn layers() -> Vec<Layer> {
    vec![
        Layer::new("large", 9_000, Kind::Weight),
        Layer::new("norm", 9, Kind::BiasOrNorm),
        Layer::new("small", 300, Kind::Weight),
        Layer::new("out", 2_000, Kind::Output),
    ]
}

fn owners(config: Config) -> Config {
    Config { exchange: Some(Exchange::Owners), ..config }
}

/// All ranks send everything, exactly: dense training, whatever the number of ranks.
#[test]
fn owners_of_everything_are_dense_sgd() {
    for ranks in [1, 2, 5, 9] {
        for momentum in [Momentum::None, Momentum::Nesterov(0.9)] {
            let expected = dense_sgd(&layers(), ranks, 12, momentum);
            let weights = run(ranks, move |_, comm| {
                let config = owners(everything(Method::Rgc, momentum));
                let mut replica = Replica::of(layers(), config, comm).unwrap();
                (0..12).for_each(|_| replica.step().unwrap());
                replica.check().unwrap();
                replica.weights
            });
            assert_close(&weights[0], expected.last().unwrap(), &format!("{ranks} {momentum:?}"));
        }
    }
}

/// Adds what an owner keeps to a layer, at the places where it belongs.
fn spread(kept: &[f32], cut: Cut, rank: usize, into: &mut [f64], factor: f64) {
    for (place, value) in (0u32..).zip(kept) {
        into[cut.index(rank, place) as usize] += factor * f64::from(*value);
    }
}

/// What was applied, what ranks have not sent and what owners have not sent on are together what dense training did.
#[test]
fn nothing_is_lost_between_ranks_and_owners() {
    const STEPS: u64 = 45;
    for ranks in [2, 3, 8] {
        for (method, rest) in
            [(Method::Rgc, Rest::F32), (Method::RgcAsq, Rest::EightBit), (Method::RgcTwoBit, Rest::TwoBit)]
        {
            let expected = dense_sgd(&layers(), ranks, STEPS, Momentum::Plain(0.9));
            let all = run(ranks, move |_, comm| {
                let config = Config {
                    momentum: Momentum::Plain(0.9),
                    warm_up: WarmUp::Ramp(40),
                    lower_momentum: false,
                    masking: false,
                    rest,
                    ..owners(config(method, 0.004))
                };
                let mut replica = Replica::of(layers(), config, comm).unwrap();
                (0..STEPS).for_each(|_| replica.step().unwrap());
                replica.check().unwrap();
                let saved = replica.sync.capture(0, Vec::new()).unwrap();
                (replica.weights, saved)
            });
            let mut weights: Vec<Vec<f64>> =
                all[0].0.iter().map(|w| w.iter().map(|x| f64::from(*x)).collect()).collect();
            let mut kept = 0;
            for (rank, (_, saved)) in all.iter().enumerate() {
                for layer in &saved.layers {
                    let number = layers().iter().position(|l| l.name == layer.name).unwrap();
                    let to = &mut weights[number];
                    let lr = f64::from(LR);
                    to.iter_mut().zip(&layer.v).for_each(|(w, v)| *w -= lr * f64::from(*v));
                    if let Some(part) = &layer.kept {
                        spread(&part.v, part.cut, rank, to, -lr);
                        kept += part.v.len();
                    }
                }
            }
            let compressed: usize = all[0].1.layers.iter().map(|layer| layer.size).sum();
            assert_eq!(kept, compressed, "every element has one owner");
            let weights: Vec<Vec<f32>> =
                weights.iter().map(|w| w.iter().map(|x| *x as f32).collect()).collect();
            assert_close(&weights, expected.last().unwrap(), &format!("{ranks} {method:?}"));
        }
    }
}

/// What a rank receives at a step after some, from all others.
fn received(ranks: usize, exchange: Exchange) -> (u64, u64) {
    let costs = run(ranks, move |_, comm| {
        let layers = vec![Layer::new("a", 400_000, Kind::Weight), Layer::new("b", 200_000, Kind::Weight)];
        let config = Config { exchange: Some(exchange), ..config(Method::RgcAsq, 0.001) };
        let mut replica = Replica::of(layers, config, comm).unwrap();
        (0..12).for_each(|_| replica.step().unwrap());
        let total = replica.sync.stats().total();
        (total.bytes_sent, total.bytes_received)
    });
    (costs.iter().map(|cost| cost.0).max().unwrap(), costs.iter().map(|cost| cost.1).max().unwrap())
}

#[test]
fn what_a_rank_receives_does_not_grow_with_the_number_of_ranks() {
    let [few, many] = [8, 24].map(|ranks| received(ranks, Exchange::Owners));
    // 600 elements of 11.5 bits; the headers of two collectives with 23 others come on top.
    let elements = 600.0 * 11.52 / 8.0;
    let headers = |ranks: f64| 2.0 * (ranks - 1.0) * (40.0 + 2.0 * 4.0);
    assert!((many.1 as f64) < 4.0 * elements + headers(24.0), "{many:?}");
    assert!((few.1 as f64) < 4.0 * elements + headers(8.0), "{few:?}");
    assert!(many.0 as f64 - headers(24.0) < 4.0 * elements, "{many:?}");
    let gathered = received(24, Exchange::Gather);
    assert!(gathered.1 > 2 * many.1, "{gathered:?} {many:?}");
}

fn train(
    ranks: usize,
    steps: u64,
    from: Option<&std::path::Path>,
    to: &std::path::Path,
) -> Vec<Vec<Vec<u32>>> {
    let (from, to) = (from.map(|from| from.to_path_buf()), to.to_path_buf());
    run(ranks, move |_, comm| {
        let config = Config { momentum: Momentum::Nesterov(0.9), ..owners(config(Method::RgcAsq, 0.02)) };
        let mut replica = Replica::of(layers(), config, comm).unwrap();
        if let Some(from) = &from {
            let extra = replica.sync.load(from).unwrap();
            for (to, (_, values)) in replica.weights.iter_mut().chain(&mut replica.buffers).zip(extra) {
                *to = values;
            }
        }
        for layer in 0..4 {
            replica.sync.set_rate(layer, LR).unwrap();
        }
        (0..steps).for_each(|_| replica.step().unwrap());
        let hash = replica.check().unwrap();
        let all = replica.weights.iter().chain(&replica.buffers).enumerate();
        let extra = all.map(|(i, values)| (i.to_string(), values.clone())).collect();
        replica.sync.save(&to, hash, extra).unwrap();
        bits(&replica.weights)
    })
}

#[test]
fn it_resumes_to_the_same_bits_and_with_another_number_of_ranks_to_the_same_sums() {
    let directory = || tempfile::tempdir().unwrap();
    let (half, whole, resumed) = (directory(), directory(), directory());
    let expected = train(4, 14, None, whole.path());
    train(4, 6, None, half.path());
    assert_eq!(train(4, 8, Some(half.path()), resumed.path()), expected);
    for rank in 0..4 {
        let read = |dir: &tempfile::TempDir| std::fs::read(dir.path().join(Saved::file_name(rank))).unwrap();
        assert!(read(&whole) == read(&resumed), "rank {rank}");
    }
    let total = |saved: &[Saved]| -> Vec<Vec<f64>> {
        let mut sums: Vec<Vec<f64>> = saved[0].layers.iter().map(|layer| vec![0.0; layer.size]).collect();
        for state in saved {
            for (sum, layer) in sums.iter_mut().zip(&state.layers) {
                sum.iter_mut().zip(&layer.v).for_each(|(sum, v)| *sum += f64::from(*v));
                if let Some(kept) = &layer.kept {
                    spread(&kept.v, kept.cut, state.rank, sum, 1.0);
                }
            }
        }
        sums
    };
    let before = Saved::read_all(whole.path()).unwrap();
    for ranks in [1, 3, 7] {
        let after: Vec<Saved> =
            (0..ranks).map(|rank| Saved::reshare(before.clone(), rank, ranks).unwrap()).collect();
        for (a, b) in total(&before).iter().flatten().zip(total(&after).iter().flatten()) {
            assert!((a - b).abs() < 1e-6 * (1.0 + a.abs()), "{a} {b}");
        }
        let on = directory();
        train(ranks, 3, Some(whole.path()), on.path());
    }
}

#[test]
fn damage_at_either_stage_is_named() {
    for second in [false, true] {
        let errors = run(3, move |rank, comm| {
            let damage = move |tag: Tag, message: &mut Vec<u8>| {
                let stage = tag.op >> 30 == 1;
                if tag.step == 2 && (tag.op < 1000 || stage) && stage == second && message.len() > 50 {
                    message[45] ^= 4;
                }
            };
            let comm = if rank == 1 { Arc::new(Damaging { comm, damage }) } else { comm };
            let mut replica = Replica::of(layers(), owners(config(Method::RgcAsq, 0.05)), comm).unwrap();
            (0..2).for_each(|_| replica.step().unwrap());
            replica.step().unwrap_err()
        });
        for rank in [0, 2] {
            let named = matches!(&errors[rank], SyncError::Frame { rank: 1, .. });
            let heard = errors[rank].to_string().contains("frame of rank 1");
            assert!(named || heard, "{second}: {}", errors[rank]);
        }
    }
}

/// Gradients at a few places only: owners of the rest have nothing to do.
#[test]
fn owners_with_nothing_to_add_and_layers_smaller_than_the_ranks_are_fine() {
    run(6, |rank, comm| {
        let layers = vec![Layer::new("three", 3, Kind::Weight), Layer::new("one", 1, Kind::BiasOrNorm)];
        let config = Config { rest: Rest::EightBit, ..owners(config(Method::Rgc, 0.5)) };
        let mut replica = Replica::of(layers, config, comm).unwrap();
        for step in 0..5 {
            let mut g = vec![0.0; 3];
            g[step % 3] = gradient(rank, step as u64, 0, 1)[0];
            replica.sync.submit(0, g).unwrap();
            replica.sync.submit(1, vec![0.0]).unwrap();
            replica.sync.finish().unwrap();
            replica.apply().unwrap();
            replica.check().unwrap();
        }
    });
}

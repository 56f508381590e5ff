//! Dense sums inside a host: the same training, with the bytes of one rank per host between hosts.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Comm, Damaging, LR, Replica, assert_close, bits, config, dense_sgd, everything, gradient, run};
use redsync_comm::Tag;
use redsync_core::{Adam, Momentum};
use redsync_engine::state::Saved;
use redsync_engine::{Config, Exchange, Kind, Layer, Method, Rest, SyncError, WarmUp};
use std::path::Path;
use std::sync::Arc;

/// Layers that are cut among the ranks of a host, and two that are too small for it.
fn layers() -> Vec<Layer> {
    vec![
        Layer::new("large", 9_001, Kind::Weight),
        Layer::new("norm", 9, Kind::BiasOrNorm),
        Layer::new("small", 300, Kind::Weight),
        Layer::new("out", 2_000, Kind::Output),
    ]
}

/// So many ranks on each host, one after the other.
fn hosts(config: Config, rank: usize, on_each: usize) -> Config {
    Config { exchange: Some(Exchange::Hosts), host: Some(format!("host {}", rank / on_each)), ..config }
}

#[test]
fn hosts_that_send_everything_are_dense_sgd() {
    for (ranks, on_each) in [(1, 1), (3, 1), (4, 4), (4, 2), (6, 3), (6, 2)] {
        for momentum in [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
            let expected = dense_sgd(&layers(), ranks, 12, momentum);
            let weights = run(ranks, move |rank, comm| {
                let config = hosts(everything(Method::Rgc, momentum), rank, on_each);
                let mut replica = Replica::of(layers(), config, comm).unwrap();
                (0..12).for_each(|_| replica.step().unwrap());
                replica.check().unwrap();
                replica.weights
            });
            assert_close(&weights[0], expected.last().unwrap(), &format!("{ranks} {on_each} {momentum:?}"));
        }
    }
}

#[test]
fn hosts_of_one_rank_have_the_bits_of_gathering() {
    let train = |exchange: Exchange| {
        run(3, move |rank, comm| {
            let config = Config {
                momentum: Momentum::Nesterov(0.9),
                warm_up: WarmUp::Dense(3),
                clip: Some(2.0),
                rest: Rest::EightBit,
                ..config(Method::RgcAsq, 0.02)
            };
            let config = Config { exchange: Some(exchange), ..hosts(config, rank, 1) };
            let mut replica = Replica::of(layers(), config, comm).unwrap();
            (0..12).for_each(|_| replica.step().unwrap());
            (bits(&replica.weights), replica.sync.traffic())
        })
    };
    assert_eq!(train(Exchange::Hosts), train(Exchange::Gather));
}

/// What was applied and what ranks have not sent of their parts are together what dense training did.
#[test]
fn nothing_is_lost_inside_hosts() {
    const STEPS: u64 = 45;
    for (ranks, on_each) in [(4, 2), (6, 3), (2, 2)] {
        for (method, rest) in
            [(Method::Rgc, Rest::F32), (Method::RgcAsq, Rest::EightBit), (Method::RgcTwoBit, Rest::TwoBit)]
        {
            let expected = dense_sgd(&layers(), ranks, STEPS, Momentum::Plain(0.9));
            let all = run(ranks, move |rank, comm| {
                let config = Config {
                    momentum: Momentum::Plain(0.9),
                    warm_up: WarmUp::Ramp(40),
                    lower_momentum: false,
                    masking: false,
                    rest,
                    ..hosts(config(method, 0.004), rank, on_each)
                };
                let mut replica = Replica::of(layers(), config, comm).unwrap();
                (0..STEPS).for_each(|_| replica.step().unwrap());
                replica.check().unwrap();
                let saved = replica.sync.capture(0, Vec::new()).unwrap();
                (replica.weights, saved)
            });
            let own: usize =
                all.iter().map(|(_, saved)| saved.layers.iter().map(|l| l.v.len()).sum::<usize>()).sum();
            let compressed = if rest == Rest::F32 { 11_301 } else { 11_310 };
            assert_eq!(own, compressed * ranks / on_each, "a host has every residual once");
            let whole = Saved::reshare(all.iter().map(|(_, saved)| saved.clone()).collect(), 0, 1).unwrap();
            let mut weights = all[0].0.clone();
            for layer in &whole.layers {
                let number = layers().iter().position(|l| l.name == layer.name).unwrap();
                weights[number].iter_mut().zip(&layer.v).for_each(|(w, v)| *w -= LR * v);
            }
            assert_close(&weights, expected.last().unwrap(), &format!("{ranks} {on_each} {method:?}"));
        }
    }
}

#[test]
fn a_host_sends_what_a_single_rank_would() {
    let sent = |exchange: Exchange| {
        let costs = run(8, move |rank, comm| {
            let layers = vec![Layer::new("a", 400_000, Kind::Weight), Layer::new("b", 200_000, Kind::Weight)];
            let config = Config { exchange: Some(exchange), ..hosts(config(Method::RgcAsq, 0.001), rank, 4) };
            let mut replica = Replica::of(layers, config, comm).unwrap();
            (0..12).for_each(|_| replica.step().unwrap());
            replica.sync.stats().total()
        });
        let host = &costs[..4];
        (
            host.iter().map(|cost| cost.bytes_sent).sum::<u64>(),
            host.iter().map(|cost| cost.inside_bytes).sum::<u64>(),
        )
    };
    let (gathered, nothing) = sent(Exchange::Gather);
    let (summed, inside) = sent(Exchange::Hosts);
    // Ranks of a host have a frame each; apart from their headers, a quarter.
    assert!(summed < gathered / 4 + 4 * 2 * 60, "{summed} {gathered}");
    assert!(nothing == 0 && inside > 4 * 600_000 * 4, "{inside}");
}

const ADAM: Momentum = Momentum::Adam(Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 });

fn train(
    ranks: usize,
    on_each: usize,
    momentum: Momentum,
    steps: u64,
    from: Option<&Path>,
    to: &Path,
) -> Vec<Vec<Vec<u32>>> {
    let (from, to) = (from.map(Path::to_path_buf), to.to_path_buf());
    run(ranks, move |rank, comm| {
        let config = Config { momentum, ..config(Method::RgcTwoBit, 0.02) };
        let config = if on_each == 0 { config } else { hosts(config, rank, on_each) };
        let mut replica = Replica::of(layers(), config, comm).unwrap();
        if let Some(from) = &from {
            let extra = replica.sync.load(from).unwrap();
            for (to, (_, values)) in replica.weights.iter_mut().chain(&mut replica.buffers).zip(extra) {
                *to = values;
            }
        }
        (0..4).for_each(|layer| replica.sync.set_rate(layer, LR).unwrap());
        (0..steps).for_each(|_| replica.step().unwrap());
        let hash = replica.check().unwrap();
        let all = replica.weights.iter().chain(&replica.buffers).enumerate();
        let extra = all.map(|(i, values)| (i.to_string(), values.clone())).collect();
        replica.sync.save(&to, hash, extra).unwrap();
        bits(&replica.weights)
    })
}

#[test]
fn it_resumes_to_the_same_bits_and_elsewhere_to_the_same_sums() {
    let directory = || tempfile::tempdir().unwrap();
    for momentum in [Momentum::Nesterov(0.9), ADAM] {
        let (half, whole, resumed) = (directory(), directory(), directory());
        let expected = train(4, 2, momentum, 14, None, whole.path());
        train(4, 2, momentum, 6, None, half.path());
        assert_eq!(train(4, 2, momentum, 8, Some(half.path()), resumed.path()), expected);
        for rank in 0..4 {
            let read =
                |dir: &tempfile::TempDir| std::fs::read(dir.path().join(Saved::file_name(rank))).unwrap();
            assert!(read(&whole) == read(&resumed), "rank {rank}");
        }
        let total = |dir: &Path| Saved::reshare(Saved::read_all(dir).unwrap(), 0, 1).unwrap();
        let before = total(whole.path());
        // Other numbers of ranks and hosts, and ranks without hosts; and back.
        for (ranks, on_each) in [(4, 4), (4, 1), (6, 3), (2, 1), (1, 1), (4, 0), (3, 0)] {
            let (on, back) = (directory(), directory());
            train(ranks, on_each, momentum, 0, Some(whole.path()), on.path());
            let after = total(on.path());
            for (a, b) in before.layers.iter().zip(&after.layers) {
                let near = |a: &[f32], b: &[f32]| {
                    let apart = a.iter().zip(b).find(|(a, b)| (*a - *b).abs() > 1e-6 * (1.0 + a.abs()));
                    assert!(a.len() == b.len() && apart.is_none(), "{} {ranks} {on_each}: {apart:?}", "sums");
                };
                near(&a.v, &b.v);
                near(&a.u, &b.u);
            }
            train(ranks, on_each, momentum, 3, Some(on.path()), back.path());
            train(4, 2, momentum, 3, Some(back.path()), directory().path());
        }
    }
}

/// The error of every rank when one of them damages what it sends at a stage.
fn damaged(stage: u32) -> Vec<SyncError> {
    run(4, move |rank, comm: Comm| {
        let damage = move |tag: Tag, message: &mut Vec<u8>| {
            if tag.step == 2 && tag.op < 1 << 30 && tag.op >> 28 == stage && message.len() > 50 {
                message.truncate(49);
            }
        };
        let comm = if rank == 3 { Arc::new(Damaging { comm, damage }) } else { comm };
        let mut replica = Replica::of(layers(), hosts(config(Method::RgcAsq, 0.05), rank, 2), comm).unwrap();
        (0..2).for_each(|_| replica.step().unwrap());
        // What is told inside a host comes last: the other host has finished the step by then, and hears of it at the next.
        replica.step().and_then(|()| replica.step()).unwrap_err()
    })
}

#[test]
fn damage_before_between_and_after_hosts_is_named() {
    for (stage, expected) in [
        (2, "rank 3 of this host sent gradients that make no sense"),
        (0, "frame of rank 3"),
        (1, "rank 3 of this host told updates that make no sense"),
    ] {
        for (rank, error) in damaged(stage).iter().enumerate().take(3) {
            assert!(error.to_string().contains(expected), "stage {stage}, rank {rank}: {error}");
        }
    }
}

#[test]
fn a_sum_that_overflows_is_named_at_its_place_in_the_layer() {
    let errors = run(4, |rank, comm| {
        let momentum = Momentum::Plain(0.9);
        let config = hosts(Config { momentum, masking: false, ..config(Method::Rgc, 0.05) }, rank, 2);
        let mut replica = Replica::of(layers(), config, comm).unwrap();
        let mut step = || {
            for layer in (0..4).rev() {
                let mut g = gradient(rank, 0, layer, layers()[layer].size);
                if layer == 0 && rank > 1 {
                    g[7_000] = f32::MAX;
                }
                replica.sync.submit(layer, g)?;
            }
            replica.sync.finish()
        };
        (0..8).find_map(|_| step().err()).unwrap()
    });
    for error in errors {
        assert!(error.is_gradient(), "{error}");
        let place = "the accumulated gradient overflows at element 7000";
        assert!(
            error.to_string().contains("layer large, step ") && error.to_string().contains(place),
            "{error}"
        );
    }
}

#[test]
fn a_layer_that_no_rank_of_a_host_uses_stays_as_it_is_there() {
    let all = run(4, |rank, comm| {
        let config = Config { momentum: Momentum::Plain(0.5), ..hosts(config(Method::Rgc, 0.02), rank, 2) };
        let mut replica = Replica::of(layers(), config, comm).unwrap();
        replica.step().unwrap();
        let before = replica.sync.capture(0, Vec::new()).unwrap();
        for layer in 0..4 {
            // Nobody on the second host, one of two on the first.
            match layer == 0 && rank > 0 {
                true => replica.sync.skip(layer).unwrap(),
                false => replica.sync.submit(layer, gradient(rank, 1, layer, layers()[layer].size)).unwrap(),
            }
        }
        replica.sync.finish().unwrap();
        replica.apply().unwrap();
        replica.check().unwrap();
        let after = replica.sync.capture(0, Vec::new()).unwrap();
        before.layers[0] == after.layers[0]
    });
    assert_eq!(all, [false, false, true, true]);
}

#[test]
fn hosts_that_were_not_named_or_are_unequal_are_refused() {
    for (names, expected) in [
        ([Some("a"), None, Some("a")], "rank 1 does not say on which host it is"),
        ([Some("a"), Some("b"), Some("a")], "host a has 2, host b 1"),
    ] {
        let errors = run(3, move |rank, comm| {
            let host = names[rank].map(String::from);
            let config = Config { exchange: Some(Exchange::Hosts), host, ..config(Method::Rgc, 0.1) };
            redsync_engine::Synchronizer::new(layers(), config, comm).err().unwrap().to_string()
        });
        assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
    }
}

#[test]
fn ranks_that_exchange_otherwise_are_told_so() {
    let errors = run(2, |rank, comm| {
        let config = match rank {
            0 => hosts(config(Method::Rgc, 0.1), rank, 1),
            _ => config(Method::Rgc, 0.1),
        };
        redsync_engine::Synchronizer::new(layers(), config, comm).err().unwrap().to_string()
    });
    assert!(
        errors[0].contains("rank 1 runs something else: exchange is gather there, hosts here"),
        "{errors:?}"
    );
    assert!(
        errors[1].contains("rank 0 runs something else: exchange is hosts there, gather here"),
        "{errors:?}"
    );
}

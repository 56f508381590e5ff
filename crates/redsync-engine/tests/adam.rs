//! Adam in the engine: replicas stay equal, and N ranks with equal batches are dense Adam.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{LR, Replica, config, everything, gradient, initial_weights, layers, run};
use redsync_core::{Adam, Momentum};
use redsync_engine::state::Saved;
use redsync_engine::{Config, Exchange, Kind, Layer, Method, Rest, Update};

const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 };

#[test]
fn replicas_are_equal_to_the_bit_after_500_steps() {
    for density in [0.01, 0.001] {
        for method in [Method::Rgc, Method::RgcAsq, Method::RgcTwoBit] {
            let config = Config { momentum: Momentum::Adam(ADAM), ..config(method, density) };
            let hashes = run(3, move |_, comm| {
                let mut replica = Replica::new(config.clone(), comm).unwrap();
                (0..500).for_each(|_| replica.step().unwrap());
                replica.check().unwrap()
            });
            assert!(hashes.iter().all(|hash| *hash == hashes[0]));
        }
    }
}

/// A thousandth of what is compressed of these is many elements.
fn large_layers() -> Vec<Layer> {
    vec![
        Layer::new("first", 24_000, Kind::Weight),
        Layer::new("norm", 9, Kind::BiasOrNorm),
        Layer::new("middle", 3_000, Kind::Weight),
        Layer::new("out", 20_000, Kind::Output),
    ]
}

#[test]
fn replicas_of_large_layers_are_equal_whether_the_output_goes_whole_or_not() {
    for density in [0.01, 0.001] {
        for whole in [true, false] {
            let config = Config {
                momentum: Momentum::Adam(ADAM),
                whole_output: Some(whole),
                rest: Rest::TwoBit,
                ..config(Method::RgcTwoBit, density)
            };
            let hashes = run(3, move |_, comm| {
                let mut replica = Replica::of(large_layers(), config.clone(), comm).unwrap();
                (0..500).for_each(|_| replica.step().unwrap());
                let Some(Update::Sparse(messages)) = replica.sync.update(0) else { panic!("no update") };
                let many = (density * 24_000.0 / 2.0) as usize;
                assert!(messages.iter().all(|message| message.len() >= many && message.len() < 24_000));
                // Second moments are told only beside an output of which some waits.
                assert_eq!(replica.sync.choices()[3].is_sparse(), !whole);
                assert_eq!(replica.sync.traffic().moments > 0, !whole);
                replica.check().unwrap()
            });
            assert!(hashes.iter().all(|hash| *hash == hashes[0]));
        }
    }
}

/// Clipped gradients have at most the norm of the rank's share of the limit, and their squares enter with the number of ranks squared,
/// so that bounds what a second moment can have become.
#[test]
fn clipped_replicas_are_equal_and_no_second_moment_exceeds_the_limit() {
    const RANKS: usize = 3;
    const STEPS: i32 = 64;
    let trained = |clip: Option<f32>, method: Method| {
        let config =
            Config { momentum: Momentum::Adam(ADAM), share_moments: Some(8), clip, ..config(method, 0.02) };
        run(RANKS, move |_, comm| {
            let mut replica = Replica::new(config.clone(), comm).unwrap();
            (0..STEPS).for_each(|_| replica.step().unwrap());
            assert!(replica.sync.traffic().moments > 0);
            let hash = replica.check().unwrap();
            let saved = replica.sync.capture(0, Vec::new()).unwrap();
            let squares = saved.layers.iter().flat_map(|layer| &layer.second.as_ref().unwrap().own);
            (hash, squares.map(|q| f64::from(*q)).sum::<f64>())
        })
    };
    for method in [Method::RgcTwoBit, Method::Rgc] {
        let limit = 0.5;
        let share = f64::from(limit) * (RANKS as f64).powf(0.25);
        let most = share * share * (1.0 - f64::from(ADAM.beta2).powi(STEPS));
        let (clipped, free) = (trained(Some(limit), method), trained(None, method));
        for (rank, ((hash, squares), (free_hash, free_squares))) in clipped.iter().zip(&free).enumerate() {
            assert_eq!((*hash, *free_hash), (clipped[0].0, free[0].0), "rank {rank}");
            // All that is clipped but the norm is compressed.
            assert!(
                *squares <= 1.001 * most && *squares > 0.9 * most,
                "rank {rank}: {squares}, at most {most}"
            );
            assert!(*free_squares > 4.0 * most, "rank {rank}: {free_squares}, clipped at most {most}");
        }
        assert_ne!(clipped[0].0, free[0].0);
    }
}

/// The sparse layers only: dense ones are the optimizer's.
#[test]
fn equal_batches_that_send_everything_are_dense_adam() {
    const STEPS: u64 = 200;
    let [b1, b2, eps] = [ADAM.beta1, ADAM.beta2, ADAM.eps].map(f64::from);
    let (layers, start) = (layers(), initial_weights(&layers()));
    let mut expected: Vec<Vec<f64>> = Vec::new();
    for (i, layer) in layers.iter().enumerate() {
        let mut w: Vec<f64> = start[i].iter().map(|x| f64::from(*x)).collect();
        let (mut m, mut q) = (vec![0.0; layer.size], vec![0.0; layer.size]);
        for t in 1..=STEPS {
            let unbias = |b: f64| 1.0 - b.powi(t as i32);
            for (at, g) in gradient(0, t - 1, i, layer.size).into_iter().map(f64::from).enumerate() {
                m[at] = b1 * m[at] + (1.0 - b1) * g;
                q[at] = b2 * q[at] + (1.0 - b2) * g * g;
                w[at] -= f64::from(LR) * (m[at] / unbias(b1)) / ((q[at] / unbias(b2)).sqrt() + eps);
            }
        }
        expected.push(w);
    }
    for ranks in [1, 2, 5] {
        let expected = expected.clone();
        run(ranks, move |_, comm| {
            // What others told is some steps old; a rank that keeps to its own has that of today, and here they are the same.
            let config = Config { share_moments: Some(0), ..everything(Method::Rgc, Momentum::Adam(ADAM)) };
            let mut replica = Replica::new(config, comm).unwrap();
            for step in 0..STEPS {
                for layer in 0..replica.weights.len() {
                    let g = gradient(0, step, layer, replica.weights[layer].len());
                    replica.sync.submit(layer, g).unwrap();
                }
                replica.sync.finish().unwrap();
                replica.apply().unwrap();
            }
            let sparse = (0..replica.weights.len()).filter(|layer| replica.sync.is_sparse(*layer));
            for layer in sparse {
                for (got, expected) in replica.weights[layer].iter().zip(&expected[layer]) {
                    let off = (f64::from(*got) - expected).abs();
                    assert!(
                        off <= 1e-4 * (1.0 + expected.abs()),
                        "layer {layer}: {got}, expected {expected}"
                    );
                }
            }
        });
    }
}

/// What every rank told is what the others divide by, and all of it was told after the period.
#[test]
fn second_moments_are_told_to_the_others() {
    const PERIOD: u64 = 8;
    let states = run(3, move |_, comm| {
        let config = Config {
            momentum: Momentum::Adam(ADAM),
            share_moments: Some(PERIOD),
            ..config(Method::RgcTwoBit, 0.02)
        };
        let mut replica = Replica::new(config, comm).unwrap();
        (0..64).for_each(|_| replica.step().unwrap());
        let traffic = replica.sync.traffic();
        assert!(traffic.moments > 0 && replica.sync.stats().total().moment_bytes > 0);
        replica.check().unwrap();
        replica.sync.capture(0, Vec::new()).unwrap()
    });
    let unbias = 1.0 / (1.0 - ADAM.beta2.powi(64));
    for (rank, state) in states.iter().enumerate() {
        for (at, layer) in state.layers.iter().enumerate() {
            let given = &layer.second.as_ref().unwrap().given;
            assert_eq!(given.len(), layer.size, "{}", layer.name);
            for (i, given) in given.iter().enumerate() {
                let others = states.iter().enumerate().filter(|(other, _)| *other != rank);
                let own = |s: &Saved| s.layers[at].second.as_ref().unwrap().own[i];
                let mean: f32 = others.map(|(_, state)| unbias * own(state) / 3.0).sum();
                // Some steps old, and within a power of two.
                assert!(*given > 0.4 * mean && *given < 2.5 * mean, "{}[{i}]: {given} {mean}", layer.name);
            }
        }
    }
}

/// Equal batches on all ranks, some of it sent and some waiting: what is handed back is where dense training would be.
#[test]
fn what_residuals_have_gathered_is_handed_back() {
    let (plain, nesterov, adam) = (Momentum::Plain(0.9), Momentum::Nesterov(0.9), Momentum::Adam(ADAM));
    for (momentum, exchange) in [
        (plain, Exchange::Gather),
        (nesterov, Exchange::Owners),
        (adam, Exchange::Owners),
        (nesterov, Exchange::Hosts),
        (adam, Exchange::Hosts),
    ] {
        let run = |density: f64| {
            run(4, move |_, comm| {
                let config = Config {
                    momentum,
                    lower_momentum: false,
                    masking: false,
                    share_moments: Some(0),
                    exchange: Some(exchange),
                    ..config(Method::Rgc, density)
                };
                let mut replica = Replica::new(config, comm).unwrap();
                for step in 0..20 {
                    for layer in 0..replica.weights.len() {
                        let g = gradient(0, step, layer, replica.weights[layer].len());
                        replica.sync.submit(layer, g).unwrap();
                    }
                    replica.sync.finish().unwrap();
                    replica.apply().unwrap();
                }
                let mut found = Vec::new();
                for layer in 0..replica.weights.len() {
                    let Some(gathered) = replica.sync.gathered(layer).unwrap() else { continue };
                    let weights = replica.weights[layer].iter().zip(&gathered.waiting);
                    let ends: Vec<f32> = weights.map(|(w, waits)| w - LR * waits).collect();
                    found.push((ends, gathered));
                }
                assert_eq!(found.len(), 3, "the norm is dense");
                found
            })
        };
        let (some, all) = (run(0.05), run(1.0));
        assert_eq!(some[0], some[1], "the same on all ranks, to the bit");
        for ((ends, gathered), (dense, expected)) in some[0].iter().zip(&all[0]) {
            let near = |a: &[f32], b: &[f32]| {
                assert_eq!(a.len(), b.len());
                a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} {b}"));
            };
            near(ends, dense);
            near(&gathered.first, &expected.first);
            near(&gathered.second, &expected.second);
            assert!(expected.waiting.iter().all(|waits| *waits == 0.0));
            assert_eq!(gathered.steps, if matches!(momentum, Momentum::Adam(_)) { 20 } else { 0 });
        }
    }
}

/// Ranks that keep to themselves send nothing of it, and one rank has nobody to tell.
#[test]
fn second_moments_stay_where_nobody_wants_them() {
    for (ranks, period) in [(1, None), (2, Some(0))] {
        run(ranks, move |_, comm| {
            let config = Config {
                momentum: Momentum::Adam(ADAM),
                share_moments: period,
                ..config(Method::RgcTwoBit, 0.02)
            };
            let mut replica = Replica::new(config, comm).unwrap();
            (0..9).for_each(|_| replica.step().unwrap());
            assert_eq!(replica.sync.traffic().moments, 0);
            let saved = replica.sync.capture(0, Vec::new()).unwrap();
            assert!(saved.layers.iter().all(|layer| layer.second.as_ref().unwrap().given.is_empty()));
        });
    }
}

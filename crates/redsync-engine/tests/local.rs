//! Local steps: all ranks continue from the same weights, whatever each of them did before.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{all_configs, config, gradient, initial_weights, layers, run};
use redsync_core::Momentum;
use redsync_engine::{Config, Local, Method, Rest, Synchronizer};

/// A step of one's own: another one on every rank.
fn descend(weights: &mut [Vec<f32>], rank: usize, step: u64) {
    for (layer, weights) in weights.iter_mut().enumerate() {
        let g = gradient(rank, step, layer, weights.len());
        weights.iter_mut().zip(g).for_each(|(w, g)| *w -= 0.05 * g);
    }
}

fn slices(weights: &mut [Vec<f32>]) -> Vec<&mut [f32]> {
    weights.iter_mut().map(|layer| &mut layer[..]).collect()
}

fn begin(weights: &[Vec<f32>], every: u64, rate: f32) -> Local {
    Local::new(every, rate, weights.iter().map(|layer| &layer[..])).unwrap()
}

#[test]
fn replicas_are_equal_after_every_exchange_with_every_configuration() {
    for config in all_configs().into_iter().step_by(3) {
        let config = Config { momentum: Momentum::None, clip: None, keep: 0.95, ..config };
        run(3, move |rank, comm| {
            let mut sync = Synchronizer::new(layers(), config.clone(), comm).unwrap();
            let mut weights = initial_weights(&layers());
            let mut local = begin(&weights, 4, 0.7);
            for step in 0..40 {
                descend(&mut weights, rank, step);
                if local.step() {
                    local.agree(&mut sync, &mut slices(&mut weights)).unwrap();
                    let all: Vec<&[f32]> = weights.iter().map(|layer| &layer[..]).collect();
                    assert_eq!(all, local.shared());
                    sync.check_replicas(&all).unwrap();
                }
            }
            assert_eq!(sync.step(), 10);
        });
    }
}

/// Nothing is compressed: the mean of the weights of all ranks.
#[test]
fn with_sgd_weights_are_averaged() {
    for (ranks, method) in [(1, Method::Sgd), (2, Method::Sgd), (4, Method::Sgd), (4, Method::Rgc)] {
        let start = initial_weights(&layers());
        let after = |rank| {
            let mut weights = start.clone();
            (0..5).for_each(|step| descend(&mut weights, rank, step));
            weights
        };
        let all: Vec<Vec<Vec<f32>>> = (0..ranks).map(after).collect();
        let results = run(ranks, move |rank, comm| {
            let config = Config { rest: Rest::F32, ..config(method, 1.0) };
            let mut sync = Synchronizer::new(layers(), config, comm).unwrap();
            let mut weights = initial_weights(&layers());
            let mut local = begin(&weights, 5, 1.0);
            for step in 0..5 {
                descend(&mut weights, rank, step);
                assert_eq!(local.step(), step == 4);
            }
            local.agree(&mut sync, &mut slices(&mut weights)).unwrap();
            // Dense training would have sent five times.
            let n: usize = layers().iter().map(|layer| layer.size).sum();
            assert_eq!((sync.traffic().dense, sync.stats().traffic.dense), (20 * n as u64, 20 * n as u64));
            weights
        });
        for weights in results {
            for (layer, values) in weights.iter().enumerate() {
                for (i, w) in values.iter().enumerate() {
                    let mean = all.iter().map(|rank| f64::from(rank[layer][i])).sum::<f64>() / ranks as f64;
                    assert!((f64::from(*w) - mean).abs() < 1e-6, "{w} and {mean}");
                }
            }
        }
    }
}

/// What is not sent at once is sent later: ranks that stand still after some steps arrive at the mean.
#[test]
fn nothing_of_what_the_ranks_found_is_lost() {
    let start = initial_weights(&layers());
    let mut ends = [start.clone(), start];
    ends.iter_mut().enumerate().for_each(|(rank, weights)| descend(weights, rank, 0));
    let results = run(2, |rank, comm| {
        let config = Config { density: 0.05, ..config(Method::Rgc, 0.05) };
        let mut sync = Synchronizer::new(layers(), config, comm).unwrap();
        let mut weights = initial_weights(&layers());
        let mut local = begin(&weights, 1, 1.0);
        descend(&mut weights, rank, 0);
        for _ in 0..60 {
            local.step();
            local.agree(&mut sync, &mut slices(&mut weights)).unwrap();
        }
        weights
    });
    for (layer, values) in results[0].iter().enumerate() {
        for (i, w) in values.iter().enumerate() {
            let mean = (f64::from(ends[0][layer][i]) + f64::from(ends[1][layer][i])) / 2.0;
            assert!((f64::from(*w) - mean).abs() < 1e-5, "{w} and {mean}");
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let weights = initial_weights(&layers());
    let of = |every, rate| Local::new(every, rate, weights.iter().map(|layer| &layer[..]));
    assert_eq!(of(0, 1.0).unwrap_err().to_string(), "every must be a whole number of steps from 1 on, got 0");
    assert!(of(3, f32::NAN).unwrap_err().to_string().contains("at the rate NaN"));
    let mut local = of(3, 1.0).unwrap();
    assert!(local.restore(weights.clone(), 3).is_err());
    assert!(local.restore(weights[1..].to_vec(), 0).is_err());
    local.restore(weights.clone(), 2).unwrap();
    assert!(local.step());
    run(1, |_, comm| {
        let mut sync = Synchronizer::new(layers(), config(Method::Rgc, 0.1), comm).unwrap();
        let mut weights = initial_weights(&layers());
        let mut local = begin(&weights, 2, 1.0);
        let error = local.agree(&mut sync, &mut slices(&mut weights[1..])).unwrap_err();
        assert!(error.to_string().contains("local steps began"), "{error}");
        local.agree(&mut sync, &mut slices(&mut weights)).unwrap(); // nothing to agree on
        assert_eq!(sync.step(), 0);
    });
}

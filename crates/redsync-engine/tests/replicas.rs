//! Ruling 21: replicas stay equal to the bit, whatever the order and the threads in which gradients come.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Random, Replica, all_configs, bits, config, run};
use redsync_core::Momentum;
use redsync_engine::{Config, Kind, Layer, Method, SyncError, Window};
use std::sync::Arc;

#[test]
fn replicas_stay_identical_whatever_the_method_and_the_order_on_each_rank() {
    for config in all_configs() {
        run(3, move |rank, comm| {
            let mut replica = Replica::new(config.clone(), comm).unwrap();
            let mut random = Random(rank as u64);
            let start = bits(&replica.weights);
            for step in 0..50 {
                replica.step_in(random.order(4)).unwrap();
                replica.check().unwrap_or_else(|error| panic!("{config:?} step {step}: {error}"));
            }
            assert!(bits(&replica.weights).iter().zip(start).all(|(now, start)| *now != start));
        });
    }
}

#[test]
fn the_updates_do_not_depend_on_the_order_of_submission() {
    for config in all_configs() {
        let weights = |shuffled: bool| {
            let config = config.clone();
            run(2, move |rank, comm| {
                let mut replica = Replica::new(config.clone(), comm).unwrap();
                let mut random = Random(77 + rank as u64);
                for _ in 0..15 {
                    replica.step_in(if shuffled { random.order(4) } else { vec![0, 1, 2, 3] }).unwrap();
                }
                bits(&replica.weights)
            })
        };
        assert_eq!(weights(true), weights(false), "{config:?}");
    }
}

#[test]
fn the_updates_do_not_depend_on_the_threads_that_submit_or_compress() {
    for clip in [None, Some(1.0)] {
        let config = Config { clip, momentum: Momentum::Plain(0.9), ..config(Method::RgcAsq, 0.03) };
        let weights = |threads: usize| {
            let config = Config { threads, ..config.clone() };
            run(3, move |_, comm| {
                let mut replica = Replica::new(config.clone(), comm).unwrap();
                for _ in 0..50 {
                    if threads == 1 {
                        replica.step().unwrap();
                    } else {
                        submit_from_threads(&replica);
                        replica.sync.finish().unwrap();
                        replica.apply().unwrap();
                    }
                    replica.check().unwrap();
                }
                bits(&replica.weights)
            })
        };
        assert_eq!(weights(1), weights(2), "{clip:?}");
    }
}

/// One thread per layer, as hooks of a framework do; the layers are windows of one buffer.
fn submit_from_threads(replica: &Replica) {
    let gradients = replica.gradients();
    let buffer = Arc::new(gradients.concat());
    std::thread::scope(|scope| {
        let mut start = 0;
        for (layer, gradient) in gradients.iter().enumerate() {
            let range = start..start + gradient.len();
            start = range.end;
            let (submitter, window) = (replica.sync.submitter(), Window { buffer: buffer.clone(), range });
            scope.spawn(move || submitter.submit(layer, window).unwrap());
        }
    });
}

#[test]
fn replicas_of_many_layers_in_several_frames_and_buckets_stay_identical() {
    let mut layers: Vec<Layer> = (0..12)
        .map(|i| {
            let kind = [Kind::Weight, Kind::BiasOrNorm, Kind::Weight][i % 3];
            Layer::new(format!("layer {i}"), 1 + 2500 * i, kind)
        })
        .collect();
    // More than a bucket on its own.
    layers.push(Layer::new("huge norm", (1 << 20) + 1, Kind::BiasOrNorm));
    for method in Method::ALL {
        let layers = layers.clone();
        let config = Config { momentum: Momentum::Plain(0.9), ..config(method, 0.2) };
        run(3, move |rank, comm| {
            let mut replica = Replica::of(layers.clone(), config.clone(), comm).unwrap();
            let mut random = Random(rank as u64);
            for _ in 0..5 {
                replica.step_in(random.order(13)).unwrap();
                replica.check().unwrap();
            }
        });
    }
}

#[test]
fn one_bit_of_one_rank_is_found_and_named_on_every_rank() {
    for (odd, layer, name) in [(1, 0, "first"), (2, 2, "middle"), (2, 3, "out")] {
        let errors = run(3, move |rank, comm| {
            let mut replica = Replica::new(config(Method::RgcAsq, 0.1), comm).unwrap();
            (0..3).for_each(|_| replica.step().unwrap());
            let hash = replica.check().unwrap();
            if rank == odd {
                let weight = &mut replica.weights[layer][17];
                *weight = f32::from_bits(weight.to_bits() ^ 1);
            }
            (hash, replica.check().unwrap_err())
        });
        for (hash, error) in &errors {
            assert_eq!(*hash, errors[0].0);
            assert!(matches!(error, SyncError::Replicas { step: 3, .. }));
            let expected =
                format!("replicas differ at step 3: layer {name} of rank {odd} is not that of rank 0");
            assert_eq!(error.to_string(), expected);
        }
    }
}

#[test]
fn the_sign_of_zero_counts() {
    let errors = run(2, |rank, comm| {
        let mut replica = Replica::new(config(Method::Sgd, 0.1), comm).unwrap();
        replica.weights[1][8] = if rank == 0 { 0.0 } else { -0.0 };
        replica.check().unwrap_err().to_string()
    });
    assert_eq!(errors[0], "replicas differ at step 0: layer norm of rank 1 is not that of rank 0");
    assert_eq!(errors[0], errors[1]);
}

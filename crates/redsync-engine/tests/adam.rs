//! Adam in the engine: replicas stay equal, and N ranks with equal batches are dense Adam.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{LR, Replica, config, everything, gradient, initial_weights, layers, run};
use redsync_core::{Adam, Momentum};
use redsync_engine::{Config, Method};

const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 };

#[test]
fn replicas_are_equal_to_the_bit_after_500_steps() {
    for density in [0.01, 0.001] {
        for method in [Method::Rgc, Method::RgcAsq] {
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
            let config = everything(Method::Rgc, Momentum::Adam(ADAM));
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

//! Ruling 8: local clipping by t * N^(-3/4) of gradients that carry 1/N, in the paper N^(-1/2); ordinary clipping where everything is dense.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Replica, assert_close, config, gradient, layers, run};
use redsync_core::{Adam, Momentum};
use redsync_engine::{Choice, Config, Method, Preset, WarmUp};

/// The gradients of a rank; ranks have gradients of very different norms.
fn gradients(rank: usize, step: u64) -> Vec<Vec<f32>> {
    let scale = [1.0, 0.01, 30.0][rank % 3];
    let scaled = |i, size| gradient(rank, step, i, size).into_iter().map(|x| x * scale).collect();
    layers().iter().enumerate().map(|(i, layer)| scaled(i, layer.size)).collect()
}

fn norm<'a>(all: impl IntoIterator<Item = &'a Vec<f64>>) -> f64 {
    all.into_iter().flatten().map(|x| x * x).sum::<f64>().sqrt()
}

fn scaled(all: &[Vec<f32>], factor: f64) -> Vec<Vec<f64>> {
    all.iter().map(|layer| layer.iter().map(|x| f64::from(*x) * factor).collect()).collect()
}

fn sum(ranks: &[Vec<Vec<f64>>]) -> Vec<Vec<f64>> {
    let mut sum = ranks[0].clone();
    for rank in &ranks[1..] {
        for (sum, layer) in sum.iter_mut().zip(rank) {
            sum.iter_mut().zip(layer).for_each(|(sum, x)| *sum += x);
        }
    }
    sum
}

fn clipped(gradients: Vec<Vec<f64>>, limit: f64) -> Vec<Vec<f64>> {
    let norm = norm(&gradients);
    let factor = if norm > limit { limit / norm } else { 1.0 };
    gradients.into_iter().map(|layer| layer.into_iter().map(|x| x * factor).collect()).collect()
}

/// What the ranks' gradients, clipped on each rank, add up to.
fn local(ranks: usize, step: u64, t: f64) -> Vec<Vec<f64>> {
    shared(ranks, step, t * (ranks as f64).powf(-0.75))
}

fn shared(ranks: usize, step: u64, limit: f64) -> Vec<Vec<f64>> {
    let each = |rank| clipped(scaled(&gradients(rank, step), 1.0 / ranks as f64), limit);
    sum(&(0..ranks).map(each).collect::<Vec<_>>())
}

/// The averaged gradient, clipped as in ordinary training.
fn ordinary(ranks: usize, step: u64, t: f64) -> Vec<Vec<f64>> {
    let each = |rank| scaled(&gradients(rank, step), 1.0 / ranks as f64);
    clipped(sum(&(0..ranks).map(each).collect::<Vec<_>>()), t)
}

/// The updates of every step against what they should be.
fn updates_are(config: Config, expected: impl Fn(usize, u64) -> Vec<Vec<f64>>) {
    for ranks in [1, 2, 3] {
        let config = config.clone();
        let what = format!("{ranks} ranks, {:?} {:?} {:?}", config.method, config.clip, config.warm_up);
        let updates = run(ranks, move |rank, comm| {
            let mut replica = Replica::new(config.clone(), comm).unwrap();
            let mut updates = Vec::new();
            for step in 0..4 {
                for (layer, gradient) in gradients(rank, step).into_iter().enumerate() {
                    replica.sync.submit(layer, gradient).unwrap();
                }
                replica.sync.finish().unwrap();
                updates.push(replica.updates());
            }
            updates
        });
        for step in 0..4 {
            let got: Vec<Vec<f32>> = (updates[0][step as usize].iter())
                .map(|layer| layer.iter().map(|x| *x as f32).collect())
                .collect();
            assert_close(&got, &expected(ranks, step), &format!("{what} step {step}"));
        }
    }
}

fn clipping(method: Method, t: f32) -> Config {
    Config { clip: Some(t), ..config(method, 1.0) }
}

#[test]
fn the_gradients_of_this_test_are_clipped_on_some_ranks_only() {
    let n = 3f64;
    let over = |rank| norm(&scaled(&gradients(rank, 0), 1.0 / n)) > 0.5 * n.powf(-0.75);
    assert_eq!([0, 1, 2].map(over), [true, false, true]);
}

#[test]
fn rgc_clips_on_each_rank_before_it_accumulates() {
    for t in [0.5, 5.0, 1e6] {
        updates_are(clipping(Method::Rgc, t), |ranks, step| local(ranks, step, f64::from(t)));
        let paper = |ranks: usize, step| shared(ranks, step, f64::from(t) / (ranks as f64).sqrt());
        updates_are(clipping(Method::RgcNaive, t), paper);
        let preset = Preset::Paper { recurrent: false };
        updates_are(Config { preset, dense_below: Some(0), ..clipping(Method::Rgc, t) }, paper);
    }
}

#[test]
fn local_clipping_comes_before_momentum() {
    let m = 0.5;
    let config = Config { momentum: Momentum::Plain(m), masking: false, ..clipping(Method::Rgc, 0.5) };
    updates_are(config, |ranks, step| {
        let weight = |past| f64::from(m).powi((step - past) as i32);
        let part = |past| -> Vec<Vec<f64>> {
            let clipped = local(ranks, past, 0.5);
            let scaled = |layer: Vec<f64>| layer.into_iter().map(|x| x * weight(past)).collect();
            clipped.into_iter().map(scaled).collect()
        };
        let mut all = sum(&(0..=step).map(part).collect::<Vec<_>>());
        // The dense layer has its momentum from the optimizer.
        all[1] = local(ranks, step, 0.5).swap_remove(1);
        all
    });
}

#[test]
fn local_clipping_comes_before_adam() {
    // With an eps as large as the roots of the second moments, Adam does not divide the clipping out again.
    let adam = Adam { beta1: 0.5, beta2: 0.75, eps: 0.25 };
    let [b1, b2, eps] = [adam.beta1, adam.beta2, adam.eps].map(f64::from);
    let momentum = Momentum::Adam(adam);
    let config = Config { momentum, masking: false, share_moments: Some(0), ..clipping(Method::Rgc, 0.5) };
    updates_are(config, |ranks, step| {
        let n = ranks as f64;
        let clipped = |rank, step| clipped(scaled(&gradients(rank, step), 1.0 / n), 0.5 * n.powf(-0.75));
        let own = |rank| {
            let zeros = scaled(&gradients(rank, 0), 0.0);
            let (mut m, mut q, mut v) = (zeros.clone(), zeros.clone(), zeros);
            for t in 0..=step {
                let unbias = |b: f64| 1.0 / (1.0 - b.powi(t as i32 + 1));
                for (layer, gradient) in clipped(rank, t).into_iter().enumerate() {
                    for (at, g) in gradient.into_iter().enumerate() {
                        let (m, q) = (&mut m[layer][at], &mut q[layer][at]);
                        *m = b1 * *m + (1.0 - b1) * g;
                        *q = b2 * *q + (1.0 - b2) * (n * g).powi(2);
                        v[layer][at] = *m * unbias(b1) / ((*q * unbias(b2)).sqrt() + eps);
                    }
                }
            }
            v
        };
        let mut all = sum(&(0..ranks).map(own).collect::<Vec<_>>());
        // The dense layer has its moments from the optimizer.
        all[1] = local(ranks, step, 0.5).swap_remove(1);
        all
    });
}

#[test]
fn sgd_clips_the_averaged_gradient() {
    for t in [0.5, 5.0, 1e6] {
        updates_are(clipping(Method::Sgd, t), |ranks, step| ordinary(ranks, step, f64::from(t)));
    }
}

#[test]
fn a_dense_warm_up_clips_the_averaged_gradient_and_then_each_rank_its_own() {
    let config = Config { warm_up: WarmUp::Dense(2), ..clipping(Method::Rgc, 0.5) };
    updates_are(
        config,
        |ranks, step| {
            if step < 2 { ordinary(ranks, step, 0.5) } else { local(ranks, step, 0.5) }
        },
    );
}

#[test]
fn a_plan_in_which_every_layer_is_dense_clips_once_the_averaged_gradient() {
    let mut config = clipping(Method::Rgc, 0.5);
    config.layers = layers().into_iter().map(|layer| (layer.name, Choice::Dense)).collect();
    updates_are(config, |ranks, step| ordinary(ranks, step, 0.5));
}

#[test]
fn without_a_limit_nothing_is_clipped() {
    for method in [Method::Sgd, Method::Rgc] {
        updates_are(config(method, 1.0), |ranks, step| ordinary(ranks, step, f64::INFINITY));
    }
}

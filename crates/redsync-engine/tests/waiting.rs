//! While elements wait, residuals have less momentum of the same strength; what that is does not depend on where a run was interrupted.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{LR, Replica, assert_close, bits, config, gradient, initial_weights, layers, run};
use redsync_core::Momentum;
use redsync_engine::{Config, Exchange, Method, Preset, WarmUp};

const STEPS: u64 = 40;

/// What is applied and what waits, of one rank that keeps momentum at `m` and takes gradients times `factor`.
fn dense(layer: usize, m: f64, factor: f64, nesterov: bool) -> Vec<f64> {
    let start = &initial_weights(&layers())[layer];
    let (mut w, mut u) = (start.iter().map(|w| f64::from(*w)).collect::<Vec<_>>(), vec![0.0; start.len()]);
    for step in 0..STEPS {
        for (i, g) in gradient(0, step, layer, start.len()).into_iter().enumerate() {
            let g = factor * f64::from(g);
            u[i] = if nesterov { m * (u[i] + g) } else { m * u[i] + g };
            w[i] -= f64::from(LR) * (u[i] + if nesterov { g } else { 0.0 });
        }
    }
    w
}

/// One rank without masking; the weights with what waits applied.
fn compressed(config: Config) -> Vec<Vec<f32>> {
    let config = Config { masking: false, ..config };
    let found = run(1, move |_, comm| {
        let mut replica = Replica::new(config.clone(), comm).unwrap();
        (0..STEPS).for_each(|_| replica.step().unwrap());
        let saved = replica.sync.capture(0, Vec::new()).unwrap();
        for state in saved.layers {
            let layer = layers().iter().position(|layer| layer.name == state.name).unwrap();
            replica.weights[layer].iter_mut().zip(&state.v).for_each(|(w, v)| *w -= LR * v);
        }
        replica.weights
    });
    found.into_iter().next().unwrap()
}

#[test]
fn momentum_is_less_and_gradients_count_for_as_much() {
    for (density, less, factor) in [(0.25, 0.9, 1.0), (0.02, 0.8, 2.0), (0.01, 0.6, 4.0), (0.004, 0.2, 8.0)] {
        for nesterov in [false, true] {
            let momentum = if nesterov { Momentum::Nesterov(0.9) } else { Momentum::Plain(0.9) };
            let lowered = compressed(Config { momentum, ..config(Method::Rgc, density) });
            let usual = Config { lower_momentum: false, momentum, ..config(Method::Rgc, density) };
            let usual = compressed(usual);
            for layer in [0, 2, 3] {
                let what = format!("{density}, layer {layer}, {momentum}");
                let close = |got: &[Vec<f32>], m: f64, factor: f64| {
                    assert_close(&got[layer..=layer], &[dense(layer, m, factor, nesterov)], &what);
                };
                close(&lowered, less, factor);
                close(&usual, 0.9, 1.0);
            }
        }
    }
}

#[test]
fn as_in_the_paper_and_with_little_momentum_nothing_is_lowered() {
    let paper = Preset::Paper { recurrent: false };
    for (method, preset, momentum) in [
        (Method::RgcNaive, Preset::Carried, Momentum::Nesterov(0.9)),
        (Method::Rgc, paper, Momentum::Nesterov(0.9)),
        (Method::RgcAsq, Preset::Carried, Momentum::Nesterov(0.4)),
        (Method::RgcAsq, Preset::Carried, Momentum::None),
    ] {
        let with = |lower: bool| {
            let usual = config(method, 0.004);
            bits(&compressed(Config { preset, momentum, lower_momentum: lower, ..usual }))
        };
        assert_eq!(with(true), with(false), "{method:?} {momentum}");
    }
}

/// A schedule of the momentum, over a ramp, said at every step; interrupted where it is lowered, and where it is not.
#[test]
fn a_schedule_goes_on_from_a_checkpoint_to_the_same_bits() {
    let momentum = |step: u64| Momentum::Nesterov(if step < 12 { 0.9 } else { 0.95 - 0.005 * step as f32 });
    for exchange in Exchange::ALL {
        let config = Config {
            momentum: momentum(0),
            warm_up: WarmUp::Ramp(30),
            exchange: Some(exchange),
            ..config(Method::RgcAsq, 0.002)
        };
        let step = move |replica: &mut Replica| {
            let now = momentum(replica.sync.step());
            for layer in [0, 2, 3] {
                replica.sync.set_momentum(layer, now).unwrap();
            }
            replica.step().unwrap();
        };
        for interrupted in [2, 4, 11, 17, 29] {
            let config = config.clone();
            let ends = run(2, move |_, comm| {
                let mut replica = Replica::new(config.clone(), comm.clone()).unwrap();
                (0..interrupted).for_each(|_| step(&mut replica));
                let saved = replica.sync.capture(0, Vec::new()).unwrap();
                let (weights, buffers) = (replica.weights.clone(), replica.buffers.clone());
                (interrupted..STEPS).for_each(|_| step(&mut replica));
                let whole = (bits(&replica.weights), replica.check().unwrap());
                drop(replica);
                let mut again = Replica::new(config.clone(), comm).unwrap();
                again.sync.restore(Ok(saved)).unwrap();
                (again.weights, again.buffers) = (weights, buffers);
                (interrupted..STEPS).for_each(|_| step(&mut again));
                (whole, (bits(&again.weights), again.check().unwrap()))
            });
            for (whole, again) in ends {
                assert!(whole == again, "{exchange:?}, interrupted at {interrupted}");
            }
        }
    }
}

/// A checkpoint says nothing of a setting that is newer, but the run was another one.
#[test]
fn a_run_that_was_begun_with_the_usual_momentum_says_so_when_it_is_resumed() {
    let begun = |lower: bool| Config {
        momentum: Momentum::Nesterov(0.9),
        lower_momentum: lower,
        ..config(Method::RgcAsq, 0.002)
    };
    run(2, move |_, comm| {
        let mut usual = Replica::new(begun(false), comm.clone()).unwrap();
        (0..3).for_each(|_| usual.step().unwrap());
        let saved = usual.sync.capture(0, Vec::new()).unwrap();
        drop(usual);
        let mut lowered = Replica::new(begun(true), comm.clone()).unwrap();
        let error = lowered.sync.restore(Ok(saved.clone())).unwrap_err().to_string();
        let says =
            "momentum was Nesterov momentum, is Nesterov momentum, less while elements wait (lower_momentum)";
        assert!(error.contains(says), "{error}");
        drop(lowered);
        let mut again = Replica::new(begun(false), comm).unwrap();
        again.sync.restore(Ok(saved)).unwrap();
    });
}

#[test]
fn a_momentum_that_makes_no_sense_is_refused_at_once_where_it_is_lowered_too() {
    run(1, |_, comm| {
        let momentum = Momentum::Nesterov(0.9);
        let config = Config { momentum, ..config(Method::Rgc, 0.01) };
        let mut replica = Replica::new(config, comm).unwrap();
        (0..3).for_each(|_| replica.step().unwrap());
        for (bad, says) in [(Momentum::Nesterov(1.0), "got 1"), (Momentum::Plain(0.5), "Nesterov momentum")] {
            let error = replica.sync.set_momentum(0, bad).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        replica.step().unwrap();
    });
}

/// What was applied, what waits and what is to come of the momentum is all that the gradients are worth, no more and no less.
#[test]
fn what_is_handed_back_of_a_lowered_momentum_is_worth_what_is_to_come_of_it() {
    for (momentum, m) in
        [(Momentum::Plain(0.9), 0.9), (Momentum::Nesterov(0.9), 0.9), (Momentum::Plain(0.5), 0.5)]
    {
        for (density, exchange) in [
            (0.02, Exchange::Gather),
            (0.01, Exchange::Owners),
            (0.004, Exchange::Hosts),
            (0.004, Exchange::Gather),
        ] {
            let exchange = Some(exchange);
            let config = Config { momentum, masking: false, exchange, ..config(Method::Rgc, density) };
            let found = run(4, move |_, comm| {
                let mut replica = Replica::new(config.clone(), comm).unwrap();
                (0..STEPS).for_each(|_| replica.step().unwrap());
                let gathered = [0, 2, 3].map(|layer| replica.sync.gathered(layer).unwrap().unwrap());
                (replica.weights, gathered)
            });
            for (weights, gathered) in found {
                for (layer, gathered) in [0, 2, 3].into_iter().zip(gathered) {
                    let start = &initial_weights(&layers())[layer];
                    let gradients: Vec<_> = (0..4)
                        .flat_map(|rank| (0..STEPS).map(move |step| (rank, step)))
                        .map(|(rank, step)| gradient(rank, step, layer, start.len()))
                        .collect();
                    for i in 0..start.len() {
                        let sum: f64 = gradients.iter().map(|g| f64::from(g[i]) / 4.0).sum();
                        // With zeros for gradients dense training would still move by this.
                        let nesterov = if matches!(momentum, Momentum::Nesterov(_)) { m } else { 1.0 };
                        let to_come = f64::from(gathered.first[i]) * nesterov * m / (1.0 - m);
                        let moved = f64::from(start[i] - weights[layer][i]) / f64::from(LR);
                        let (is, worth) = (moved + f64::from(gathered.waiting[i]) + to_come, sum / (1.0 - m));
                        assert!(
                            (is - worth).abs() < 1e-4 * (1.0 + worth.abs()),
                            "{momentum} at {density}, layer {layer}, element {i}: {is}, not {worth}"
                        );
                    }
                }
            }
        }
    }
}

/// A schedule moves the momentum during a dense warm-up; the checkpoint is of before the switch, and u starts from what the optimizer has.
#[test]
fn a_dense_warm_up_that_is_resumed_hands_its_momentum_over_to_the_same_bits() {
    for (begins, then) in
        [(Momentum::Nesterov(0.9), Momentum::Nesterov(0.95)), (Momentum::Plain(0.0), Momentum::Plain(0.9))]
    {
        let config = Config { momentum: begins, warm_up: WarmUp::Dense(6), ..config(Method::Rgc, 0.01) };
        let rest = move |replica: &mut Replica| {
            for layer in [0, 2, 3] {
                replica.sync.set_momentum(layer, then).unwrap();
            }
            while replica.sync.step() < STEPS {
                if replica.sync.turns_sparse() {
                    for layer in [0, 2, 3] {
                        let buffer = gradient(7, 7, layer, replica.weights[layer].len());
                        replica.sync.adopt_momentum(layer, &buffer).unwrap();
                    }
                }
                replica.step().unwrap();
            }
            (bits(&replica.weights), replica.check().unwrap())
        };
        let ends = run(2, move |_, comm| {
            let mut replica = Replica::new(config.clone(), comm.clone()).unwrap();
            (0..3).for_each(|_| replica.step().unwrap());
            let saved = replica.sync.capture(0, Vec::new()).unwrap();
            let (weights, buffers) = (replica.weights.clone(), replica.buffers.clone());
            let whole = rest(&mut replica);
            drop(replica);
            let mut again = Replica::new(config.clone(), comm).unwrap();
            again.sync.restore(Ok(saved)).unwrap();
            (again.weights, again.buffers) = (weights, buffers);
            (whole, rest(&mut again))
        });
        for (whole, again) in ends {
            assert!(whole == again, "{begins}, then {then}");
        }
    }
}

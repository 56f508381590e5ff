//! Rulings 1, 2, 4, 6, 7 and 9: with everything sent, the ranks together are dense training; warm-ups change over as ruled.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{LR, Replica, assert_close, config, dense_sgd, everything, layers, run};
use redsync_core::Momentum;
use redsync_engine::{Choice, Config, Method, Preset, Rest, Update, WarmUp};

const STEPS: u64 = 12;

fn follows_dense_sgd(config: Config) {
    for ranks in [1, 2, 3, 8] {
        let what = format!("{ranks} ranks, {:?} {:?} {:?}", config.method, config.preset, config.momentum);
        let expected = dense_sgd(&layers(), ranks, STEPS, config.momentum);
        let config = config.clone();
        run(ranks, move |_, comm| {
            let mut replica = Replica::new(config.clone(), comm).unwrap();
            for expected in &expected {
                replica.step().unwrap();
                assert_close(&replica.weights, expected, &what);
            }
        });
    }
}

#[test]
fn sgd_is_dense_sgd() {
    for momentum in [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
        follows_dense_sgd(Config { momentum, ..config(Method::Sgd, 0.001) });
    }
}

#[test]
fn rgc_that_sends_everything_is_dense_sgd() {
    for momentum in [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
        follows_dense_sgd(everything(Method::Rgc, momentum));
    }
}

#[test]
fn rgc_without_momentum_is_dense_sgd_with_masking_too() {
    follows_dense_sgd(config(Method::Rgc, 1.0));
}

#[test]
fn naive_rgc_that_sends_everything_is_dense_sgd() {
    for momentum in [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
        follows_dense_sgd(everything(Method::RgcNaive, momentum));
    }
}

#[test]
fn the_paper_s_preset_that_sends_everything_is_dense_sgd() {
    for method in [Method::Rgc, Method::RgcNaive] {
        follows_dense_sgd(Config {
            preset: Preset::Paper { recurrent: false },
            ..everything(method, Momentum::None)
        });
    }
}

#[test]
fn momentum_carries_on_from_a_dense_warm_up() {
    const DENSE: u64 = 5;
    for momentum in [Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
        for ranks in [1, 2, 3] {
            let expected = dense_sgd(&layers(), ranks, STEPS, momentum);
            let config = Config { warm_up: WarmUp::Dense(DENSE), ..everything(Method::Rgc, momentum) };
            run(ranks, move |_, comm| {
                let mut replica = Replica::new(config.clone(), comm).unwrap();
                for (step, expected) in expected.iter().enumerate() {
                    if step as u64 == DENSE {
                        let adopted: Vec<bool> = (replica.buffers.iter().enumerate())
                            .map(|(layer, buffer)| replica.sync.adopt_momentum(layer, buffer).is_ok())
                            .collect();
                        assert_eq!(adopted, [true, false, true, true]);
                    }
                    replica.step().unwrap();
                    assert_close(&replica.weights, expected, &format!("{momentum:?} step {step}"));
                }
            });
        }
    }
}

#[test]
fn a_dense_warm_up_is_dense_for_exactly_its_steps() {
    const DENSE: u64 = 4;
    for method in [Method::Rgc, Method::RgcAsq, Method::RgcNaive] {
        let config = Config { warm_up: WarmUp::Dense(DENSE), ..config(method, 0.05) };
        run(2, move |_, comm| {
            let mut replica = Replica::new(config.clone(), comm).unwrap();
            for step in 0..2 * DENSE {
                let announced: Vec<bool> = (0..4).map(|layer| replica.sync.is_sparse(layer)).collect();
                replica.step().unwrap();
                let sparse: Vec<bool> = (0..4)
                    .map(|layer| matches!(replica.sync.update(layer), Some(Update::Sparse(_))))
                    .collect();
                assert_eq!(sparse, [step >= DENSE, false, step >= DENSE, step >= DENSE], "step {step}");
                assert_eq!(announced, sparse, "step {step}");
            }
        });
    }
}

#[test]
fn a_ramp_sends_at_each_of_its_densities_and_then_at_the_final_one() {
    const LENGTH: u64 = 40;
    let config = Config { warm_up: WarmUp::Ramp(LENGTH), ..config(Method::Rgc, 0.002) };
    run(2, move |_, comm| {
        let mut replica = Replica::new(config.clone(), comm).unwrap();
        // Of 700, 9 (dense), 300 and 200 elements: 25, 6.25, 1.5625, 0.4 and 0.2%, rounded up.
        let expected = [[175, 9, 75, 50], [44, 9, 19, 13], [11, 9, 5, 4], [3, 9, 2, 1], [2, 9, 1, 1]];
        let ends = [LENGTH / 40, LENGTH / 10, 13 * LENGTH / 40, LENGTH];
        for step in 0..LENGTH + 5 {
            replica.step().unwrap();
            let elements: Vec<u64> = replica.sync.stats().layers.iter().map(|layer| layer.elements).collect();
            assert_eq!(elements, expected[ends.partition_point(|end| *end <= step)], "step {step}");
            assert_eq!(replica.sync.stats().step, step);
        }
    });
}

#[test]
fn a_ramp_stays_above_the_final_density() {
    let config = Config { warm_up: WarmUp::Ramp(40), ..config(Method::Rgc, 0.1) };
    run(2, move |_, comm| {
        let mut replica = Replica::new(config.clone(), comm).unwrap();
        for elements in [175, 70, 70, 70, 70] {
            replica.step().unwrap();
            assert_eq!(replica.sync.stats().layers[0].elements, elements);
        }
    });
}

fn whole(rest: Rest) -> Choice {
    if rest == Rest::TwoBit { Choice::DenseTwoBit } else { Choice::DenseEightBit }
}

/// Whatever was not sent waits: with what all ranks keep applied too, the weights are those of dense training, through every stage
/// of a ramp and however values are rounded. Only masking throws something away, and momentum that becomes less.
#[test]
fn what_was_sent_and_what_is_kept_are_dense_sgd_together() {
    const RAMP: u64 = 40;
    for method in [Method::Rgc, Method::RgcAsq] {
        for momentum in [Momentum::None, Momentum::Plain(0.9), Momentum::Nesterov(0.9)] {
            for (rest, bf16) in [(Rest::EightBit, false), (Rest::TwoBit, true)] {
                let warm_up = WarmUp::Ramp(RAMP);
                let exact = config(method, 0.002);
                let lower_momentum = false;
                let config =
                    Config { momentum, lower_momentum, warm_up, bf16, masking: false, rest, ..exact };
                let expected = dense_sgd(&layers(), 3, RAMP + 5, momentum);
                let all = run(3, move |_, comm| {
                    let mut replica = Replica::new(config.clone(), comm).unwrap();
                    assert_eq!(replica.sync.choices()[1], whole(rest));
                    (0..RAMP + 5).for_each(|_| replica.step().unwrap());
                    let kept = replica.sync.capture(0, Vec::new()).unwrap().layers;
                    (replica.weights, kept.into_iter().map(|layer| layer.v).collect::<Vec<_>>())
                });
                let mut weights = all[0].0.clone();
                for (_, kept) in &all {
                    for (w, v) in weights.iter_mut().flatten().zip(kept.iter().flatten()) {
                        *w -= LR * v;
                    }
                }
                assert_close(&weights, expected.last().unwrap(), &format!("{method:?} {momentum:?} {bf16}"));
            }
        }
    }
}

/// While the density is high a value is one of four, of either sign, and no momentum is cleared; later it is one mean of one sign.
#[test]
fn a_ramp_has_values_of_their_own_until_few_are_sent() {
    const RAMP: u64 = 40;
    let config = Config {
        warm_up: WarmUp::Ramp(RAMP),
        momentum: Momentum::Plain(0.9),
        rest: Rest::TwoBit,
        ..config(Method::RgcAsq, 0.002)
    };
    run(2, move |_, comm| {
        let mut replica = Replica::new(config.clone(), comm).unwrap();
        for step in 0..RAMP + 4 {
            replica.step().unwrap();
            let Some(Update::Sparse(messages)) = replica.sync.update(0) else { panic!("not sparse") };
            let coarse = step < 13;
            for message in messages {
                let mut values: Vec<u32> = message.iter().map(|(_, value)| value.to_bits()).collect();
                values.sort_unstable();
                values.dedup();
                assert_eq!(message.mean().is_none(), coarse, "step {step}");
                assert!(values.len() <= if coarse { 4 } else { 1 }, "step {step}: {values:?}");
            }
            let kept = replica.sync.capture(0, Vec::new()).unwrap().layers;
            let cleared = kept[0].u.iter().filter(|u| **u == 0.0).count();
            assert_eq!(cleared == 0, coarse, "step {step}");
            // Every element of the rest travels at every step, and keeps its momentum.
            let Some(Update::Sparse(rest)) = replica.sync.update(1) else { panic!("not sparse") };
            assert!(rest.iter().all(|message| message.len() == 9));
            assert!(kept[1].u.iter().all(|u| *u != 0.0));
        }
    });
}

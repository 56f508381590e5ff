//! A plan from figures: all ranks take rank 0's answer, whatever they measured themselves, and it follows the network.
#![allow(missing_docs, clippy::unwrap_used)]

use redsync_comm::{Communicator, local};
use redsync_engine::cost::{Compute, Decompression, Line, Network, Platform, Rates, Selection};
use redsync_engine::{Choice, Config, Figures, Kind, Layer, Method, Preset, SyncError, Synchronizer};
use std::sync::Arc;
use std::time::Duration;

const SIZE: usize = 200_000;

fn layers() -> Vec<Layer> {
    vec![
        Layer::new("large", SIZE, Kind::Weight),
        Layer::new("bias", 64, Kind::BiasOrNorm),
        Layer::new("small", 4_000, Kind::Weight),
    ]
}

/// Selection costs more than copying, so that a fast network has no use for it.
fn platform(beta: f64) -> Platform {
    let line = Line::new(1e-6, 1e-9);
    let slow = Line::new(1e-6, 5e-9);
    Platform {
        name: String::new(),
        cores: 2.0,
        contention: 1.0,
        start: 0.0,
        background: true,
        ranks_per_host: 1,
        network: Network::new(1e-5, beta),
        rates: Rates {
            select: Selection { exact: slow, trimmed: slow, threshold: slow, sampled: slow, carried: slow },
            encode: line,
            decode: line,
            apply: Decompression { fixed: 0.0, gamma_1: 1e-8, pass: 1e-9, near: 1e-9 },
            copy: line,
            update: line,
            ..Rates::default()
        },
    }
}

fn config(beta: Option<f64>) -> Config {
    let figures = beta.map(|beta| Figures { platform: platform(beta), compute: Compute::default() });
    Config { figures, deadline: Duration::from_secs(20), ..Config::default() }
}

/// The choices that each rank comes to, after one step.
fn choices(configs: Vec<Config>) -> Vec<Result<Vec<Choice>, SyncError>> {
    let run = |(comm, config): (local::Local, Config)| {
        std::thread::spawn(move || {
            let comm: Arc<dyn Communicator> = Arc::new(comm);
            let mut sync = Synchronizer::new(layers(), config, comm)?;
            for (number, layer) in layers().iter().enumerate() {
                sync.submit(number, vec![0.5; layer.size])?;
            }
            sync.finish()?;
            Ok(sync.choices().to_vec())
        })
    };
    let ranks: Vec<_> = local::group(configs.len()).into_iter().zip(configs).map(run).collect();
    ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
}

fn compressed(choices: &[Choice]) -> Vec<bool> {
    choices.iter().map(|choice| matches!(choice, Choice::Sparse { .. })).collect()
}

const SLOW: Option<f64> = Some(1e-6);
const FAST: Option<f64> = Some(1e-12);

#[test]
fn a_slow_network_compresses_and_a_fast_one_does_not() {
    for (beta, expected) in [(SLOW, [true, false, true]), (FAST, [false; 3]), (None, [true, false, true])] {
        for rank in choices(vec![config(beta), config(beta)]) {
            assert_eq!(compressed(&rank.unwrap()), expected, "{beta:?}");
        }
    }
}

#[test]
fn rank_0_decides_for_all_ranks_that_measured_something_else_or_nothing() {
    for other in [FAST, None, Some(1e-8)] {
        for rank in choices(vec![config(SLOW), config(other), config(other)]) {
            assert_eq!(compressed(&rank.unwrap()), [true, false, true], "{other:?}");
        }
    }
    for rank in choices(vec![config(None), config(FAST)]) {
        assert_eq!(compressed(&rank.unwrap()), [true, false, true], "rank 0 has no figures");
    }
}

#[test]
fn choices_by_name_the_paper_and_sgd_need_no_figures() {
    let mut named = config(FAST);
    named.layers.insert(
        "large".into(),
        Choice::Sparse { selector: redsync_core::Selector::Carried, quantized: true },
    );
    assert_eq!(compressed(choices(vec![named.clone(), named])[0].as_ref().unwrap()), [true, false, false]);
    let preset = Preset::Paper { recurrent: false };
    let paper = Config { preset, ..config(FAST) };
    assert_eq!(compressed(choices(vec![paper.clone(), paper])[0].as_ref().unwrap()), [true, false, false]);
    let sgd = Config { method: Method::Sgd, ..config(SLOW) };
    assert_eq!(compressed(choices(vec![sgd.clone(), sgd])[0].as_ref().unwrap()), [false; 3]);
}

#[test]
fn figures_that_cannot_be_are_refused() {
    for rank in choices(vec![config(Some(-1.0)), config(Some(-1.0))]) {
        let message = rank.unwrap_err().to_string();
        assert_eq!(message, "beta of the sparse link is -1: expected a number above 0");
    }
}

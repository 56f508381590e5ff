//! A checkpoint outlives a version of the program: files that were written once, and are kept for ever, resume to the same bits.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Comm, Replica, config, run};
use redsync_core::Momentum;
use redsync_engine::{Config, Kind, Layer, Method, WarmUp};
use std::path::{Path, PathBuf};

/// What the weights hash to three steps after the checkpoint that is kept.
const LATER: u64 = 0x7de2_d148_c152_7b9f;

fn kept() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kept/checkpoint-2")
}

fn settings() -> Config {
    Config {
        momentum: Momentum::Nesterov(0.9),
        clip: Some(3.0),
        clip_power: 0.5,
        lower_momentum: false,
        warm_up: WarmUp::Dense(2),
        ..config(Method::RgcAsq, 0.05)
    }
}

fn replica(comm: Comm) -> Replica {
    let layers = vec![
        Layer::new("first.weight", 60, Kind::Weight),
        Layer::new("first.bias", 5, Kind::BiasOrNorm),
        Layer::new("out.weight", 40, Kind::Output).with_momentum(Momentum::Plain(0.5)),
    ];
    Replica::of(layers, settings(), comm).unwrap()
}

fn named(replica: &Replica) -> Vec<(String, Vec<f32>)> {
    let all = replica.weights.iter().chain(&replica.buffers).enumerate();
    all.map(|(i, values)| (i.to_string(), values.clone())).collect()
}

#[test]
fn a_checkpoint_that_is_kept_resumes_to_the_same_bits() {
    for (ranks, exact) in [(2, true), (3, false)] {
        let hashes = run(ranks, |_, comm| {
            let mut replica = replica(comm);
            let mut extra = replica.sync.load(&kept()).unwrap().into_iter().map(|(_, values)| values);
            replica.weights = extra.by_ref().take(3).collect();
            replica.buffers = extra.collect();
            assert_eq!(replica.sync.step(), 5);
            (0..3).for_each(|_| replica.step().unwrap());
            replica.check().unwrap()
        });
        assert!(!exact || hashes[0] == LATER, "{:#018x}", hashes[0]);
    }
}

#[test]
fn an_uninterrupted_run_comes_to_the_same_bits() {
    let hashes = run(2, |_, comm| {
        let mut replica = replica(comm);
        (0..8).for_each(|_| replica.step().unwrap());
        replica.check().unwrap()
    });
    assert_eq!(hashes, [LATER; 2]);
}

fn write(to: &Path) {
    let to = to.to_path_buf();
    run(2, move |_, comm| {
        let mut replica = replica(comm);
        (0..5).for_each(|_| replica.step().unwrap());
        replica.sync.save(&to, replica.check().unwrap(), named(&replica)).unwrap();
    });
}

/// How the files were made: once for every version of the format.
#[test]
#[ignore = "writes the files that are kept"]
fn write_what_is_kept() {
    std::fs::create_dir_all(kept()).unwrap();
    write(&kept());
}

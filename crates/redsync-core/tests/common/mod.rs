//! What the tests share: a group of ranks that exchange through real frames, plain reference code, and data.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use proptest::prelude::*;
use redsync_core::wire::Frame;
use redsync_core::{
    Compressor, Config, Density, FrameWriter, Gradient, Phase, Selector, Sparse, Values, Workspace,
};

pub fn density(fraction: f64) -> Density {
    Density::new(fraction).unwrap()
}

/// Compresses one gradient, sends it through a frame and decodes it again.
pub fn send(layer: &mut Compressor, step: u64, g: &[f32], scale: f32, workspace: &mut Workspace) -> Sparse {
    let mut frame = FrameWriter::new();
    frame.begin(step, 0, 0);
    layer.compress(step, Gradient::F32(g), scale, workspace, &mut frame).unwrap();
    let mut received = Sparse::new();
    let frame = Frame::parse(frame.finish()).unwrap();
    assert_eq!(frame.messages().count(), 1);
    for message in frame.messages() {
        message.unwrap().decode(&layer.shape(step), &mut received).unwrap();
    }
    received
}

/// The elements that compete, largest first, ties to the smaller index: plain code, nothing shared with the crate.
pub fn ranking(v: &[f32], phase: Phase) -> Vec<(usize, f32)> {
    let competes = |x: f32| match phase {
        Phase::Both => x != 0.0,
        Phase::Positive => x > 0.0,
        Phase::Negative => x < 0.0,
    };
    let mut all: Vec<(usize, f32)> = v.iter().copied().enumerate().filter(|(_, x)| competes(*x)).collect();
    all.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()).then(a.0.cmp(&b.0)));
    all
}

/// The top k of a residual, in index order.
pub fn top_k(v: &[f32], phase: Phase, k: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> =
        ranking(v, phase).into_iter().take(k).map(|(i, x)| (i as u32, x)).collect();
    top.sort_by_key(|(i, _)| *i);
    top
}

pub fn elements(sparse: &Sparse) -> Vec<(u32, f32)> {
    sparse.iter().collect()
}

pub fn config(selector: Selector, values: Values, fraction: f64) -> Config {
    Config { selector, values, density: density(fraction), ..Config::default() }
}

/// Shapes of data that have broken selections elsewhere.
pub fn tensors() -> impl Strategy<Value = Vec<f32>> {
    let n = 1usize..700;
    prop_oneof![
        n.clone().prop_flat_map(|n| proptest::collection::vec(-1f32..1.0, n)),
        // Few distinct values: ties everywhere.
        n.clone().prop_flat_map(|n| proptest::collection::vec((-3i8..=3).prop_map(f32::from), n)),
        // Mostly zeros.
        n.clone().prop_flat_map(|n| {
            proptest::collection::vec(prop_oneof![9 => Just(0f32), 1 => -1f32..1.0], n)
        }),
        // Constant, zero included.
        (n.clone(), prop_oneof![Just(0f32), Just(-0.0f32), -1f32..1.0]).prop_map(|(n, x)| vec![x; n]),
        // A huge outlier, heavy tails, tiny numbers.
        (n.clone().prop_flat_map(|n| proptest::collection::vec(-1f32..1.0, n)), any::<prop::sample::Index>())
            .prop_map(|(mut v, at)| {
                let at = at.index(v.len());
                v[at] = -1e30;
                v
            }),
        n.clone().prop_flat_map(|n| {
            proptest::collection::vec((-30f32..30.0, any::<bool>()), n).prop_map(|v| {
                v.into_iter().map(|(e, sign)| if sign { e.exp2() } else { -e.exp2() }).collect()
            })
        }),
        n.prop_flat_map(|n| proptest::collection::vec(0f32..1e-40, n)),
    ]
}

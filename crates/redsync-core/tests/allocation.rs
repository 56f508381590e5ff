//! In the steady state nothing is allocated: neither on the sending nor on the receiving side.
#![allow(missing_docs, unsafe_code, clippy::unwrap_used)]

use redsync_core::wire::Frame;
use redsync_core::{
    Compressor, Config, FrameWriter, Gradient, Momentum, Selector, Sparse, Values, Workspace, apply,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One step of everything: compress, frame, parse, decode, apply.
fn step(
    step: u64,
    g: &[f32],
    layer: &mut Compressor,
    workspace: &mut Workspace,
    frame: &mut FrameWriter,
    received: &mut [Sparse],
    weights: &mut [f32],
) {
    frame.begin(step, 0, 0);
    layer.compress(step, Gradient::F32(g), 0.5, workspace, frame).unwrap();
    let bytes = frame.finish();
    for sparse in received.iter_mut() {
        for message in Frame::parse(bytes).unwrap().messages() {
            message.unwrap().decode(&layer.shape(step), sparse).unwrap();
        }
    }
    apply::add(weights, received, -0.1, workspace).unwrap();
}

/// One test only: another one running beside it would be counted too.
#[test]
fn the_steady_state_allocates_nothing() {
    let n = 300_000;
    let gradients: Vec<Vec<f32>> = (0..4u64)
        .map(|s| {
            (0..n).map(|i| (((i as u64 * 2654435761 + s * 97) % 10007) as f32 - 5003.0) * 1e-3).collect()
        })
        .collect();
    for selector in Selector::ALL {
        for values in [Values::F32, Values::Bf16, Values::Asq, Values::TwoBit, Values::EightBit] {
            if selector == Selector::Sampled && values == Values::Asq {
                continue;
            }
            let config = Config { selector, values, momentum: Momentum::Nesterov(0.9), ..Config::default() };
            let mut layer = Compressor::new(0, "l", n, config).unwrap();
            let (mut workspace, mut frame) = (Workspace::new(1), FrameWriter::new());
            let (mut received, mut weights) = (vec![Sparse::new(), Sparse::new()], vec![0f32; n]);
            let mut run = |from: u64, to: u64| {
                for s in from..to {
                    let g = &gradients[(s % 4) as usize];
                    step(s, g, &mut layer, &mut workspace, &mut frame, &mut received, &mut weights);
                }
            };
            run(0, 60);
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            run(60, 120);
            let after = ALLOCATIONS.load(Ordering::Relaxed);
            assert_eq!(after, before, "{selector:?} {values:?}");
        }
    }
}

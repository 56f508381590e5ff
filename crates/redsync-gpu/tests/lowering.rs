//! The kernels as text for CUDA, HIP and Metal, made without any of them: no product and sum are joined into one rounding.
#![cfg(all(feature = "wgpu", feature = "lowering"))]
#![allow(missing_docs, clippy::unwrap_used, unsafe_code)] // The macro makes an unsafe launcher of every kernel.

use cubecl::Compiler;
use cubecl::prelude::*;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler};
use cubecl_cpp::target::{Cuda, Hip, Metal};
use redsync_gpu::Gpu;
use redsync_gpu::kernels::{self, Form};

fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// A kernel as text for all three. Its arguments: buffers, scalars as (), the width of vectors, then what is known at compile time.
macro_rules! lowered {
    ($gpu:expr, $kernel:path, $($argument:expr),+) => {{
        let make = || {
            let settings =
                KernelSettings::new(*CubeDim::new_1d(256), ExecutionMode::Unchecked, AddressType::U32);
            let client = $gpu.client();
            <$kernel>::new(settings, client.properties_shared(), client.target_properties_shared(), $($argument),+).define()
        };
        let options = CompilationOptions::default();
        [
            CppCompiler::<Cuda>::default().compile(make(), &options).unwrap().to_string(),
            CppCompiler::<Hip>::default().compile(make(), &options).unwrap().to_string(),
            CppCompiler::<Metal>::default().compile(make(), &options).unwrap().to_string(),
        ]
    }};
}

#[test]
fn no_form_of_the_pass_joins_a_product_and_a_sum() {
    let gpu = Gpu::open("software").unwrap();
    for rule in [kernels::NONE, kernels::PLAIN, kernels::NESTEROV] {
        let kinds = [(kernels::SINGLE, 4), (kernels::HALF, 2), (kernels::BRAIN, 2)];
        let scalings = [(true, true, true), (true, true, false), (false, false, true)];
        for ((kind, words), (scales, carries, both)) in
            kinds.into_iter().flat_map(|kind| scalings.map(|s| (kind, s)))
        {
            let form = Form { rule, kind, scales, carries, seeks: true, both };
            let texts = lowered!(
                gpu,
                kernels::accumulate::Accumulate,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                4,
                words,
                form,
                8
            );
            for text in texts {
                assert!(text.contains(" ^ "), "{form:?}: nothing stands between products and sums:\n{text}");
                assert!(!text.contains("fma"), "{form:?}:\n{text}");
            }
        }
    }
}

#[test]
fn neither_do_the_others() {
    let gpu = Gpu::open("software").unwrap();
    let take_out = |sent| {
        lowered!(
            gpu,
            kernels::take_out::TakeOut,
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            (),
            (),
            (),
            (),
            sent,
            true
        )
    };
    let sent = [kernels::WHOLE, kernels::SAME, kernels::ROUNDED, kernels::LISTED].map(take_out);
    let merged = lowered!(gpu, kernels::add_merged::AddMerged, buffer(), buffer(), buffer(), ());
    let stats =
        lowered!(gpu, kernels::stats::Stats, buffer(), buffer(), buffer(), (), (), (), (), 1 << 15, 8);
    let copy = lowered!(gpu, kernels::copy::Copy, buffer(), buffer(), (), (), 4, true);
    let scatter =
        lowered!(gpu, kernels::scatter::Scatter, buffer(), buffer(), buffer(), buffer(), (), true, true);
    let edge = lowered!(gpu, kernels::edge::Edge, buffer(), buffer(), (), (), 2048, 256);
    for text in sent.iter().chain([&merged, &stats, &copy, &scatter, &edge]).flatten() {
        assert!(!text.contains("fma"), "{text}");
    }
}

/// What the kernels must not be.
#[cube(launch_unchecked)]
fn joined(x: &mut [f32], m: f32) {
    if UNIT_POS == 0 {
        x[0] += m * x[1];
    }
}

#[test]
fn a_plain_product_and_sum_would_be_joined() {
    let gpu = Gpu::open("software").unwrap();
    for text in lowered!(gpu, joined::Joined, buffer(), ()) {
        assert!(text.contains("fma"), "{text}");
    }
}

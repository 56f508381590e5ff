//! What this machine needs for each stage, measured on layers that do not fit into its caches.

use super::{Meter, noise};
use crate::cost::{Decompression, Line, Rates, Selection};
use crate::error::SyncError;
use crate::pipeline::dense::{copy_scaled, norm, sum_of_squares};
use redsync_core::wire::Frame;
use redsync_core::{
    Compressor, Config, Density, FrameWriter, Gradient, Selector, Sparse, Values, Workspace, apply,
};

/// Elements of a small and of a large layer.
const SIZES: [usize; 2] = [32 << 10, 8 << 20];
/// The same for selectors that are measured for comparison only: full selection would take seconds.
const LESS: [usize; 2] = [32 << 10, 4 << 20];
/// The gradient of each call begins elsewhere in the noise, up to this far.
const SHIFT: usize = 1 << 18;
const CALLS: usize = 7;

pub(super) fn measure(meter: &mut Meter<'_>, progress: &mut dyn FnMut(f64)) -> Result<Rates, SyncError> {
    let noise = noise(SIZES[1] + SHIFT, 1 + meter.comm.rank() as u64);
    let mut stage = 0.0;
    let mut next = || {
        stage += 1.0;
        progress(stage / 9.0);
    };
    let mut select = |selector, sizes, calls| selection(meter, &noise, selector, sizes, calls);
    let carried = select(Selector::Carried, SIZES, CALLS)?;
    next();
    let (trimmed, threshold) = (select(Selector::Trimmed, LESS, 3)?, select(Selector::Threshold, LESS, 3)?);
    next();
    let sampled = select(Selector::Sampled, LESS, 5)?;
    let exact = select(Selector::Exact, LESS, 2)?;
    next();
    let mut buffer = vec![0.0f32; SIZES[1]];
    let mut weights = vec![1.0f32; SIZES[1]];
    let copy = meter.line(SIZES, CALLS, |n| {
        copy_scaled(Gradient::F32(&noise[..n]), 0.5, &mut buffer[..n]).map_err(|why| refused("copy", why))
    })?;
    next();
    let update = meter.line(SIZES, CALLS, |n| {
        weights[..n].iter_mut().zip(&buffer[..n]).for_each(|(w, g)| *w -= 0.1 * g);
        Ok(())
    })?;
    next();
    let n = SIZES[1] as f64;
    let clip = meter.time(3, || {
        std::hint::black_box(sum_of_squares(Gradient::F32(&buffer)));
        Ok(())
    })? / n;
    let clip_dense = meter.time(3, || {
        std::hint::black_box(norm([&buffer[..]]));
        buffer.iter_mut().for_each(|x| *x *= 0.999);
        Ok(())
    })? / n;
    next();
    let (encode, decode) = coding(meter, &noise)?;
    next();
    let apply = decompression(meter, &mut weights)?;
    next();
    let select = Selection { exact, trimmed, threshold, sampled, carried };
    // The reduction is part of a measured sum; a described network gets it from the caller.
    let rates = Rates { select, encode, decode, apply, copy, update, clip, clip_dense, gamma_2: 0.0 };
    next();
    Ok(rates)
}

fn refused(layer: &str, why: redsync_core::Bad) -> SyncError {
    redsync_core::LayerError { layer: layer.into(), step: 0, why }.into()
}

fn config(meter: &Meter<'_>, layer: &str, selector: Selector, values: Values) -> Result<Config, SyncError> {
    let density = Density::new(meter.config.density);
    let density = density.map_err(|why| SyncError::Config { layer: layer.into(), why })?;
    let (momentum, masking) = (meter.config.momentum, meter.config.masking);
    Ok(Config { density, selector, values, momentum, masking, ..Config::default() })
}

fn compressor(n: usize, config: Config) -> Result<Compressor, SyncError> {
    let layer = "measured";
    Compressor::new(0, layer, n, config).map_err(|why| SyncError::Config { layer: layer.into(), why })
}

fn selection(
    meter: &mut Meter<'_>,
    noise: &[f32],
    selector: Selector,
    sizes: [usize; 2],
    calls: usize,
) -> Result<Line, SyncError> {
    let config = config(meter, "measured", selector, Values::F32)?;
    let mut layers = [compressor(sizes[0], config)?, compressor(sizes[1], config)?];
    let mut workspace = Workspace::new(meter.config.threads);
    let mut step = 0;
    let mut one = |n: usize| {
        step += 1;
        let layer = &mut layers[usize::from(n == sizes[1])];
        let shift = (step as usize * 7919 * 16) % SHIFT;
        layer.accumulate(step, Gradient::F32(&noise[shift..shift + n]), 1.0, &mut workspace)?;
        layer.select(step, &mut workspace);
        Ok(())
    };
    // Thresholds settle in the first steps.
    (0..4).try_for_each(|_| one(sizes[1]))?;
    meter.line(sizes, calls, one)
}

/// Encoding and decoding, per element.
fn coding(meter: &mut Meter<'_>, noise: &[f32]) -> Result<(Line, Line), SyncError> {
    let config = config(meter, "measured", Selector::Carried, Values::F32)?;
    let mut workspace = Workspace::new(meter.config.threads);
    let mut writer = FrameWriter::new();
    let mut chosen = Vec::new();
    for n in SIZES {
        let mut layer = compressor(n, config)?;
        layer.accumulate(0, Gradient::F32(&noise[..n]), 1.0, &mut workspace)?;
        layer.select(0, &mut workspace);
        let mut message = Sparse::new();
        workspace.swap_message(&mut message);
        writer.begin(0, 0, 0);
        layer.encode(&message, &mut writer);
        chosen.push((layer, message, writer.finish().to_vec()));
    }
    let counts = [chosen[0].1.len(), chosen[1].1.len()];
    let at = |count| usize::from(count == counts[1]);
    let encode = meter.line(counts, 15, |count| {
        let (layer, message, _) = &chosen[at(count)];
        writer.begin(0, 0, 0);
        layer.encode(message, &mut writer);
        std::hint::black_box(writer.finish());
        Ok(())
    })?;
    let mut decoded = Sparse::new();
    let decode = meter.line(counts, 15, |count| {
        let (layer, _, bytes) = &chosen[at(count)];
        let bad_frame = |why| SyncError::Frame { rank: 0, layers: "measured".into(), why };
        let bad_message = |why| SyncError::Message { rank: 0, layer: "measured".into(), why };
        for message in Frame::parse(bytes).map_err(bad_frame)?.messages() {
            let message = message.map_err(bad_frame)?;
            message.decode(&layer.shape(0), &mut decoded).map_err(bad_message)?;
        }
        Ok(())
    })?;
    Ok((encode, decode))
}

/// Adding few messages, whose elements are far apart, and many, which touch everything.
fn decompression(meter: &mut Meter<'_>, weights: &mut [f32]) -> Result<Decompression, SyncError> {
    let n = weights.len();
    let every = 1000;
    let message = |i: usize| {
        let indices: Vec<u32> =
            (0..n / every).map(|j| (j * every + (j * 331 + i * 137) % every) as u32).collect();
        let values = vec![0.5; indices.len()];
        Sparse::from_parts(n as u32, indices, values)
    };
    let bad = |why: &dyn std::fmt::Display| SyncError::Layers(format!("measuring: {why}"));
    let messages: Vec<Sparse> = (0..64).map(message).collect::<Result<_, _>>().map_err(|why| bad(&why))?;
    let mut workspace = Workspace::new(meter.config.threads);
    let mut add = |meter: &mut Meter<'_>, count: usize, calls| {
        meter.time(calls, || {
            apply::add(weights, &messages[..count], -0.1, &mut workspace).map_err(|why| bad(&why))
        })
    };
    let one = (n / every) as f64;
    let few = add(meter, 1, 9)?;
    let (some, many) = (add(meter, 32, 5)?, add(meter, 64, 5)?);
    let line = Line::through((32.0 * one, some), (64.0 * one, many));
    Ok(Decompression { fixed: 0.0, gamma_1: few / one, pass: line.fixed / n as f64, near: line.per })
}

//! What accumulation and selection cost on a device, beside plain `v += g` on the same device. Comes in: gradients, step by step. Goes
//! out: times, bytes, and whether messages and v are the host's to the bit.

use crate::{Gpu, GpuGradient, GpuLayer};
use redsync_core::{
    Compressor, Config, ConfigError, FrameWriter, Gradient, LayerError, Selector, Sparse, Workspace,
};
use redsync_engine::LayerCompressor;
use redsync_engine::offload::{DeviceError, Kernels, Offloaded};
use std::time::Instant;
use thiserror::Error;

/// Steps before the measured ones, in which residuals and carried thresholds settle.
const WARM_UP: u64 = 6;

/// Why a measurement ended.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A layer failed.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A layer was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// What was measured of one algorithm; medians over the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// `accumulate` for plain `v += g`, else the selector's name, with `+momentum` where there is one.
    pub name: String,
    /// Time of a step.
    pub median_ms: f64,
    /// The fewest elements that a step sent.
    pub selected_min: usize,
    /// The most.
    pub selected_max: usize,
    /// Bytes that kernels read and wrote in the memory of the device, per element of the layer.
    pub moved: f64,
    /// Bytes that crossed between host and device, per element that was sent; not the gradient.
    pub copied: f64,
    /// Whether messages, and v at the end, were the host's to the bit.
    pub host_bits: bool,
}

/// One algorithm on the device, and on the host beside it.
struct Contestant {
    name: String,
    device: Offloaded<GpuLayer>,
    host: Compressor,
    workspaces: [Workspace; 2],
    times: Vec<f64>,
    moved: Vec<f64>,
    copied: Vec<f64>,
    selected: Vec<usize>,
    host_bits: bool,
}

impl Contestant {
    fn new(gpu: &Gpu, n: usize, config: Config) -> Result<Self, BenchError> {
        let momentum = if config.momentum == redsync_core::Momentum::None { "" } else { "+momentum" };
        Ok(Contestant {
            name: format!("{}{momentum}", config.selector.name()),
            device: Offloaded::new(0, "bench", n, config, GpuLayer::new(gpu, n)?)?,
            host: Compressor::new(0, "bench", n, config)?,
            workspaces: [Workspace::new(1), Workspace::new(1)],
            times: Vec::new(),
            moved: Vec::new(),
            copied: Vec::new(),
            selected: Vec::new(),
            host_bits: true,
        })
    }

    fn step(
        &mut self,
        gpu: &Gpu,
        step: u64,
        gradient: &[f32],
        there: &GpuGradient,
    ) -> Result<(), BenchError> {
        let [ours, theirs] = &mut self.workspaces;
        let mut message = Sparse::new();
        gpu.take_traffic();
        let begin = Instant::now();
        self.device.accumulate(step, there, 1.0, theirs)?;
        self.device.select(step, &mut message, theirs)?;
        gpu.wait()?;
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        let traffic = gpu.take_traffic();
        self.host.accumulate(step, Gradient::F32(gradient), 1.0, ours)?;
        self.host.select(step, ours);
        let bytes = |message: &Sparse| {
            let mut frame = FrameWriter::new();
            frame.begin(0, 0, step);
            self.host.encode(message, &mut frame);
            frame.finish().to_vec()
        };
        self.host_bits &= bytes(&message) == bytes(ours.message());
        if step >= WARM_UP {
            self.times.push(ms);
            self.moved.push(traffic.moved as f64 / gradient.len() as f64);
            self.copied.push(traffic.copied as f64 / message.len().max(1) as f64);
            self.selected.push(message.len());
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Row, BenchError> {
        let v = self.device.kernels().read_v()?;
        let same = v.iter().zip(self.host.residual().v()).all(|(a, b)| a.to_bits() == b.to_bits());
        Ok(Row {
            name: self.name,
            median_ms: median(&mut self.times),
            selected_min: self.selected.iter().copied().min().unwrap_or(0),
            selected_max: self.selected.iter().copied().max().unwrap_or(0),
            moved: median(&mut self.moved),
            copied: median(&mut self.copied),
            host_bits: self.host_bits && same,
        })
    }
}

fn median(values: &mut [f64]) -> f64 {
    redsync_engine::measure::median(values)
}

/// Measures plain accumulation, every selector, and the default one with momentum, over steps of gradients that `fill` makes. The first row
/// is that of plain accumulation.
pub fn select(
    gpu: &Gpu,
    n: usize,
    config: Config,
    steps: u64,
    only: &[&str],
    mut fill: impl FnMut(&mut [f32], u64),
) -> Result<Vec<Row>, BenchError> {
    let momentum = redsync_core::Momentum::Nesterov(0.9);
    let configs = Selector::ALL.map(|selector| Config { selector, ..config });
    let configs = configs.into_iter().chain([Config { momentum, ..config }]);
    let contestants: Result<Vec<_>, _> = configs.map(|config| Contestant::new(gpu, n, config)).collect();
    let mut contestants = contestants?;
    contestants.retain(|contestant| only.is_empty() || only.contains(&&contestant.name[..]));
    let mut plain = GpuLayer::new(gpu, n)?;
    let (mut plain_times, mut plain_moved) = (Vec::new(), Vec::new());
    let (mut sum, mut gradient) = (vec![0f32; n], vec![0f32; n]);
    for step in 0..WARM_UP + steps {
        fill(&mut gradient, step);
        sum.iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += g);
        let there = GpuGradient::upload(gpu, Gradient::F32(&gradient));
        gpu.wait()?;
        gpu.take_traffic();
        let begin = Instant::now();
        plain.add_plain(&there);
        gpu.wait()?;
        if step >= WARM_UP {
            plain_times.push(begin.elapsed().as_secs_f64() * 1e3);
            plain_moved.push(gpu.take_traffic().moved as f64 / n as f64);
        }
        for contestant in &mut contestants {
            contestant.step(gpu, step, &gradient, &there)?;
        }
    }
    let first = Row {
        name: "accumulate".into(),
        median_ms: median(&mut plain_times),
        selected_min: 0,
        selected_max: 0,
        moved: median(&mut plain_moved),
        copied: 0.0,
        host_bits: plain.read_v()? == sum,
    };
    let rows: Result<Vec<Row>, BenchError> = contestants.into_iter().map(Contestant::finish).collect();
    Ok([first].into_iter().chain(rows?).collect())
}

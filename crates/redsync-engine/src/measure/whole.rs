//! A few whole steps of a small made-up model: what they take beyond the prediction is what threads that share cores with
//! exchanges cost each other, which no stage by itself can show.

use super::{Meter, median, noise};
use crate::config::{Config, Method, Mode, WarmUp};
use crate::cost::{Compute, Platform, Step};
use crate::error::SyncError;
use crate::layer::{Kind, Layer};
use crate::source::Window;
use crate::synchronizer::Synchronizer;
use redsync_comm::Communicator;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Layers and elements of each: enough that choosing takes longer than exchanging on all but the slowest networks.
const LAYERS: usize = 8;
const SIZE: usize = 1 << 20;
const STEPS: usize = 12;

/// More than this is noise of something else on the machine.
const MOST: f64 = 3.0;

pub(super) fn contention(
    comm: &Arc<dyn Communicator>,
    config: &Config,
    platform: &Platform,
    op: u32,
) -> Result<f64, SyncError> {
    let layers: Vec<Layer> =
        (0..LAYERS).map(|i| Layer::new(format!("measured.{i}"), SIZE, Kind::Weight)).collect();
    let config = Config {
        method: Method::RgcAsq,
        layers: BTreeMap::new(),
        dense_below: 0,
        figures: None,
        warm_up: WarmUp::None,
        mode: Mode::Cnn,
        ..config.clone()
    };
    let mut sync = Synchronizer::new(layers.clone(), config.clone(), comm.clone())?;
    let buffer = Arc::new(noise(SIZE + (1 << 16), 7 + comm.rank() as u64));
    let mut weights = vec![vec![0.0f32; SIZE]; LAYERS];
    let mut times = Vec::new();
    for step in 0..STEPS {
        let begin = Instant::now();
        for layer in (0..LAYERS).rev() {
            let shift = (step * LAYERS + layer) * 509 % (1 << 16);
            sync.submit(layer, Window { buffer: buffer.clone(), range: shift..shift + SIZE })?;
        }
        sync.finish()?;
        for (layer, weights) in weights.iter_mut().enumerate() {
            sync.apply(layer, weights, 0.01)?;
        }
        // Buffers grow and thresholds settle in the first steps.
        if step >= 4 {
            times.push(begin.elapsed().as_secs_f64());
        }
    }
    let choices = sync.choices().to_vec();
    drop(sync);
    let measured = Meter { comm: &**comm, config: &config, op }.agree(median(&mut times))?;
    let (compute, ranks) = (Compute::default(), comm.size());
    let step = Step { layers: &layers, choices: &choices, config: &config, platform, ranks, compute };
    let times = step.times();
    let worked = times.select + times.encode + times.decode + times.apply;
    // Where the link sets the pace there is nothing to learn about the cores.
    let learned = measured > times.step && worked > 0.3 * times.step;
    Ok(if learned { step.contention_of(measured).clamp(1.0, MOST) } else { 1.0 })
}

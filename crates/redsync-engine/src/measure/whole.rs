//! Whole steps of small made-up models: what they take beyond the prediction is what no stage by itself can show. A tiny model shows
//! what threads and ranks lose by waking each other, a larger one what threads that share cores with exchanges cost each other.

use super::{Meter, median, noise};
use crate::config::{Choice, Config, Method, WarmUp};
use crate::cost::{Compute, Platform, Step};
use crate::error::SyncError;
use crate::layer::{Kind, Layer};
use crate::source::Window;
use crate::synchronizer::Synchronizer;
use redsync_comm::Communicator;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Layers and elements of each: so little that only waking counts, and enough that choosing takes longer than exchanging on
/// all but the slowest networks.
const TINY: (usize, usize) = (24, 4 << 10);
const LARGER: (usize, usize) = (8, 1 << 20);
/// Steps, and how many of them settle.
const FEW: (usize, usize) = (12, 4);
const MANY: (usize, usize) = (40, 8);
/// Gradients are windows of noise, at offsets up to this.
const SHIFT: usize = 1 << 16;
/// More than this is noise of something else on the machine.
const MOST: f64 = 3.0;

/// A model of equal layers, all of them compressed.
struct Trial<'a> {
    comm: &'a Arc<dyn Communicator>,
    layers: Vec<Layer>,
    choices: Vec<Choice>,
    config: Config,
    /// The median time of a step, agreed on.
    measured: f64,
}

impl<'a> Trial<'a> {
    fn run(
        comm: &'a Arc<dyn Communicator>,
        config: &Config,
        (count, size): (usize, usize),
        (steps, settle): (usize, usize),
        op: u32,
    ) -> Result<Self, SyncError> {
        let layers: Vec<Layer> =
            (0..count).map(|i| Layer::new(format!("measured.{i}"), size, Kind::Weight)).collect();
        let config = Config {
            method: Method::RgcAsq,
            layers: BTreeMap::new(),
            dense_below: Some(0),
            figures: None,
            warm_up: WarmUp::None,
            clip: None,
            agree: Vec::new(),
            ..config.clone()
        };
        let mut sync = Synchronizer::new(layers.clone(), config.clone(), comm.clone())?;
        let buffer = Arc::new(noise(size + SHIFT, 7 + comm.rank() as u64));
        let mut weights = vec![vec![0.0f32; size]; count];
        let mut times = Vec::new();
        for step in 0..steps {
            let begin = Instant::now();
            for layer in (0..count).rev() {
                let shift = (step * count + layer) * 509 % SHIFT;
                sync.submit(layer, Window { buffer: buffer.clone(), range: shift..shift + size })?;
            }
            sync.finish()?;
            for (layer, weights) in weights.iter_mut().enumerate() {
                sync.apply(layer, weights, 0.01)?;
            }
            if step >= settle {
                times.push(begin.elapsed().as_secs_f64());
            }
        }
        let choices = sync.choices().to_vec();
        drop(sync);
        let measured = Meter { comm: &**comm, config: &config, op }.agree(median(&mut times))?;
        Ok(Trial { comm, layers, choices, config, measured })
    }

    fn step<'b>(&'b self, platform: &'b Platform) -> Step<'b> {
        let Trial { comm, layers, choices, config, .. } = self;
        Step { layers, choices, config, platform, ranks: comm.size(), compute: Compute::default() }
    }
}

/// What a step takes besides its stages.
pub(super) fn start(
    comm: &Arc<dyn Communicator>,
    config: &Config,
    platform: &Platform,
    op: u32,
) -> Result<f64, SyncError> {
    let trial = Trial::run(comm, config, TINY, MANY, op)?;
    Ok((trial.measured - trial.step(platform).times().step).max(0.0))
}

/// By what factor work takes longer on cores that also serve exchanges.
pub(super) fn contention(
    comm: &Arc<dyn Communicator>,
    config: &Config,
    platform: &Platform,
    op: u32,
) -> Result<f64, SyncError> {
    let trial = Trial::run(comm, config, LARGER, FEW, op)?;
    let step = trial.step(platform);
    let times = step.times();
    let worked = times.select + times.encode + times.decode + times.apply;
    // Where the link sets the pace there is nothing to learn about the cores.
    let learned = trial.measured > times.step && worked > 0.3 * times.step;
    Ok(if learned { step.contention_of(trial.measured).clamp(1.0, MOST) } else { 1.0 })
}

//! The sending thread: gradients come in, in any order; exchanges go out, in the order of the plan.

use super::compress::{Step, compress, dense_buffer, is_overflow, pack};
use super::dense::{copy_scaled, refusal, sum_of_squares};
use super::{Expected, InFlight, Journey, Outcome, Shared, Submitted, lock, ms};
use crate::config::Stage;
use crate::error::SyncError;
use crate::hosts::Hosts;
use crate::layer::Layer;
use crate::plan::{self, Group};
use crate::second;
use crate::source::Source;
use crate::stats::LayerStats;
use crate::target::Target;
use redsync_comm::Tag;
use redsync_core::wire::FrameWriter;
use redsync_core::{Bad, Gradient, LayerError, Sparse, Workspace};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

/// The state of the thread.
pub(super) struct Send {
    shared: Arc<Shared>,
    to_receive: Sender<Expected>,
    outcomes: Sender<Outcome>,
    workspace: Workspace,
    writer: FrameWriter,
    /// What each layer sends at this step, once it is chosen.
    messages: Vec<Sparse>,
    stats: Vec<LayerStats>,
    targets: Vec<Option<Box<dyn Target>>>,
    /// Gradients that wait for the others, with clipping; the inner None is a layer without gradient.
    held: Vec<Option<Option<Box<dyn Source>>>>,
    groups: Vec<Group>,
    /// For each group, how many layers are missing, and the buffer of a dense one.
    missing: Vec<usize>,
    buffers: Vec<Vec<f32>>,
    /// For each layer, its group and its offset in the buffer.
    place: Vec<(usize, usize)>,
    /// For each layer, whether it has a gradient at this step.
    present: Vec<bool>,
    /// For each layer, whether its device has begun with it.
    announced: Vec<bool>,
    next: usize,
    round: Option<u64>,
    step: u64,
    stage: Stage,
    loss_scale: Option<f32>,
    /// A gradient of a scaled loss is not finite: this rank has nothing more to send at this step.
    void: bool,
    /// Time that the next layer to be compressed has to answer for.
    extra_ms: f64,
}

impl Send {
    pub fn new(shared: Arc<Shared>, to_receive: Sender<Expected>, outcomes: Sender<Outcome>) -> Self {
        let layers = shared.layers.len();
        Send {
            workspace: Workspace::new(shared.config.threads),
            shared,
            to_receive,
            outcomes,
            writer: FrameWriter::new(),
            messages: (0..layers).map(|_| Sparse::new()).collect(),
            stats: vec![LayerStats::default(); layers],
            targets: (0..layers).map(|_| None).collect(),
            held: (0..layers).map(|_| None).collect(),
            groups: Vec::new(),
            missing: Vec::new(),
            buffers: Vec::new(),
            place: vec![(0, 0); layers],
            present: vec![false; layers],
            announced: vec![false; layers],
            next: 0,
            round: None,
            step: 0,
            stage: Stage::Dense,
            loss_scale: None,
            void: false,
            extra_ms: 0.0,
        }
    }

    /// Runs until the synchronizer is dropped or something fails.
    pub fn run(mut self, gradients: Receiver<Vec<Submitted>>) {
        for together in gradients {
            if let Err(error) = self.take_all(together) {
                self.shared.comm.give_up(&error.to_string());
                let _ = self.outcomes.send(Err(error));
                return;
            }
        }
    }

    /// Layers that were handed over together.
    fn take_all(&mut self, together: Vec<Submitted>) -> Result<(), SyncError> {
        let Some(&Submitted { round, step, loss_scale, .. }) = together.first() else { return Ok(()) };
        if self.round != Some(round) {
            self.begin(step, loss_scale)?;
            self.round = Some(round);
        }
        self.announce(&together)?;
        together.into_iter().try_for_each(|submitted| self.take(submitted))
    }

    /// Lets devices begin with all of several layers, if they will be compressed as they are.
    fn announce(&mut self, together: &[Submitted]) -> Result<(), LayerError> {
        let Shared { config, hosts, compressed, .. } = &*self.shared;
        if together.len() < 2 || self.void || hosts.is_some() || config.clip.is_some() {
            return Ok(());
        }
        let (step, scale) = (self.step, self.scale(1.0));
        for Submitted { layer, source, .. } in together {
            let Some(source) = source.as_deref().filter(|_| self.groups[self.place[*layer].0].sparse) else {
                continue;
            };
            lock(compressed).announce(*layer, step, source, scale, &mut self.workspace)?;
            self.announced[*layer] = true;
        }
        Ok(())
    }

    /// What a gradient is multiplied with, given the factor of clipping.
    fn scale(&self, factor: f32) -> f32 {
        factor / (self.shared.comm.size() as f32 * self.loss_scale.unwrap_or(1.0))
    }

    fn take(&mut self, submitted: Submitted) -> Result<(), SyncError> {
        let Submitted { layer, mut source, target, .. } = submitted;
        self.targets[layer] = target;
        if let Some(source) = &mut source {
            let failed = |reason| SyncError::Source { layer: self.shared.layers[layer].name.clone(), reason };
            source.fetch().map_err(failed)?;
        }
        // With everything dense, clipping is by the norm of the averaged gradients, and comes later.
        let Some(limit) = self.shared.config.clip.filter(|_| !self.all_dense()) else {
            return self.contribute(layer, source.as_deref(), 1.0);
        };
        self.held[layer] = Some(source);
        if self.held.iter().any(Option::is_none) {
            return Ok(());
        }
        let held: Vec<_> = self.held.iter_mut().filter_map(Option::take).collect();
        let begin = Instant::now();
        let factor = self.clipping(limit, &held)?;
        let clipping_ms = ms(begin);
        for (layer, source) in held.iter().enumerate().rev() {
            // The time of the common norm is that of the layer which is compressed first.
            self.extra_ms = if layer + 1 == held.len() { clipping_ms } else { 0.0 };
            self.contribute(layer, source.as_deref(), factor)?;
        }
        Ok(())
    }

    fn all_dense(&self) -> bool {
        self.groups.iter().all(|group| !group.sparse)
    }

    /// Sets everything up for the first gradient of a step.
    fn begin(&mut self, step: u64, loss_scale: Option<f32>) -> Result<(), SyncError> {
        let Shared { layers, parts, choices, config, hosts, .. } = &*self.shared;
        let stage = config.warm_up.stage(step, config.density);
        if self.round.is_none() || stage != self.stage {
            self.groups = plan::groups(layers, choices, config, stage, self.shared.comm.size());
            // Buckets of another stage have other lengths.
            lock(&self.shared.pools.dense).clear();
        }
        (self.step, self.stage, self.next) = (step, stage, 0);
        (self.loss_scale, self.void) = (loss_scale, false);
        self.held.fill_with(|| None);
        self.announced.fill(false);
        self.missing = self.groups.iter().map(|group| group.layers.len()).collect();
        self.buffers.clear();
        for (number, group) in self.groups.iter().enumerate() {
            let mut length = 0;
            for layer in &group.layers {
                self.place[*layer] = (number, length);
                length += layers[*layer].size;
            }
            let whole = !group.sparse || hosts.is_some();
            let buffer = if whole { dense_buffer(&self.shared.pools, length) } else { Vec::new() };
            self.buffers.push(buffer);
        }
        lock(&self.shared.compressed).begin(plan::sendings(parts, choices, config, stage))?;
        self.shared.exchange.begin();
        Ok(())
    }

    /// The factor that brings the norm of all gradients, which already carry 1/N, down to the limit times N^(-1/2).
    fn clipping(&mut self, limit: f32, gradients: &[Option<Box<dyn Source>>]) -> Result<f32, SyncError> {
        let ranks = self.shared.comm.size();
        let mut squares = 0.0;
        for (layer, source) in gradients.iter().enumerate() {
            let Some(source) = source else { continue };
            let gradient = self.on_host(layer, &**source)?;
            let sum = sum_of_squares(gradient);
            if !sum.is_finite() {
                self.refuse(layer, refusal(gradient))?;
                return Ok(1.0);
            }
            squares += sum;
        }
        let scale = f64::from(self.loss_scale.unwrap_or(1.0)) * ranks as f64;
        let share = self.shared.config.clip_share(ranks);
        let (norm, limit) = (squares.sqrt() / scale, f64::from(limit) * share);
        Ok(if norm > limit { (limit / norm) as f32 } else { 1.0 })
    }

    fn on_host<'a>(&self, layer: usize, source: &'a dyn Source) -> Result<Gradient<'a>, LayerError> {
        source.host().ok_or_else(|| self.error(layer, Bad::Elsewhere))
    }

    fn error(&self, layer: usize, why: Bad) -> LayerError {
        LayerError { layer: self.shared.layers[layer].name.clone(), step: self.step, why }
    }

    /// A gradient cannot be used: an error, unless it is of a scaled loss, which may overflow.
    fn refuse(&mut self, layer: usize, why: Bad) -> Result<(), LayerError> {
        if self.loss_scale.is_none() || !is_overflow(&why) {
            return Err(self.error(layer, why));
        }
        self.void = true;
        Ok(())
    }

    /// One layer: chooses what to send, or copies it all, and starts whatever is complete.
    fn contribute(
        &mut self,
        layer: usize,
        source: Option<&dyn Source>,
        factor: f32,
    ) -> Result<(), SyncError> {
        let begin = Instant::now();
        let scale = self.scale(factor);
        let (group, offset) = self.place[layer];
        self.stats[layer] = LayerStats::default();
        match (self.groups[group].sparse, &self.shared.hosts) {
            (true, None) => self.compress(layer, source, scale)?,
            _ => self.copy(layer, source, scale, group, offset)?,
        }
        self.stats[layer].select_ms = ms(begin) + std::mem::take(&mut self.extra_ms);
        self.missing[group] -= 1;
        while self.next < self.groups.len() && self.missing[self.next] == 0 {
            self.start(self.next);
            self.next += 1;
            if self.next == self.groups.len() {
                self.tell();
            }
        }
        Ok(())
    }

    /// The message of a layer. What a device has begun with is finished also at a step that will be taken back.
    fn compress(&mut self, layer: usize, source: Option<&dyn Source>, scale: f32) -> Result<(), SyncError> {
        let wanted = !self.void || self.announced[layer];
        let source = source.filter(|_| wanted).map(|source| (source, scale));
        let message = &mut self.messages[layer];
        let step = Step { number: self.step, stage: self.stage };
        if let Err(error) = compress(&self.shared, step, layer, source, message, &mut self.workspace) {
            self.refuse(layer, error.why)?;
        }
        self.stats[layer].elements = self.messages[layer].len() as u64;
        Ok(())
    }

    /// A layer's part of its bucket, where it is dense or summed inside a host first; zeros where there is no gradient.
    fn copy(
        &mut self,
        layer: usize,
        source: Option<&dyn Source>,
        scale: f32,
        group: usize,
        offset: usize,
    ) -> Result<(), SyncError> {
        let Layer { size, .. } = self.shared.layers[layer];
        let to = &mut self.buffers[group][offset..offset + size];
        let copied = match source {
            None => {
                to.fill(0.0);
                Ok(())
            }
            Some(source) => source.host().ok_or(Bad::Elsewhere).and_then(|g| copy_scaled(g, scale, to)),
        };
        if let Err(why) = copied {
            self.refuse(layer, why)?;
        }
        self.present[layer] = source.is_some();
        if !self.groups[group].sparse {
            let bytes = 4 * size as u64;
            let stats = &mut self.stats[layer];
            (stats.elements, stats.bytes_sent, stats.bytes_received) = (size as u64, bytes, bytes);
        }
        Ok(())
    }

    /// Starts the exchange of a complete group.
    fn start(&mut self, number: usize) {
        let (step, group) = (self.step, self.groups[number].clone());
        let tag = Tag { step, op: number as u32 };
        let started = Instant::now();
        let mut stats: Vec<LayerStats> = group.layers.iter().map(|layer| self.stats[*layer]).collect();
        let Shared { exchange, comm, hosts, .. } = &*self.shared;
        let journey = match (group.sparse, hosts) {
            (true, Some(hosts)) => Journey::Inside(tag, self.letters(hosts, &group, number)),
            (true, None) if self.void => Journey::Sparse(exchange.start(&**comm, tag, exchange.void())),
            (true, None) => {
                let at = Step { number: step, stage: self.stage };
                let frames = pack(&self.shared, at, &group, &self.messages, &mut self.writer, &mut stats);
                Journey::Sparse(exchange.start(&**comm, tag, frames))
            }
            (false, _) => {
                let values = std::mem::take(&mut self.buffers[number]);
                match hosts.is_some() || exchange.in_order() {
                    true => Journey::DenseLater(tag, values),
                    false => Journey::Dense(comm.allreduce(tag, values)),
                }
            }
        };
        if let Journey::Inside(..) = journey {
            lock(&self.shared.pools.dense).push(std::mem::take(&mut self.buffers[number]));
        }
        let in_flight = InFlight {
            step,
            all_dense: self.all_dense(),
            loss_scale: self.loss_scale,
            started,
            journey,
            stats,
            targets: group.layers.iter().map(|layer| self.targets[*layer].take()).collect(),
            is_last: number + 1 == self.groups.len(),
            group,
        };
        // If the receiving thread is gone it has reported why.
        let _ = self.to_receive.send(Expected::Group(in_flight));
    }

    /// What each rank of this host gets of a group; nothing if the step will not count.
    fn letters(&self, hosts: &Hosts, group: &Group, number: usize) -> Vec<Vec<u8>> {
        if self.void {
            return vec![Vec::new(); hosts.seat.on_each];
        }
        let present: Vec<bool> = group.layers.iter().map(|layer| self.present[*layer]).collect();
        let mut letters = lock(&self.shared.pools.letters);
        hosts.letters(&self.shared.sizes(group), &present, &self.buffers[number], &mut letters)
    }

    /// All layers are accumulated: tells a part of the second moments.
    fn tell(&mut self) {
        let Some(parts) = self.shared.told_at(self.step) else { return };
        let expected = match self.shared.hosts {
            Some(_) => Expected::MomentsLater { step: self.step, parts, void: self.void },
            None => {
                Expected::Moments(second::tell(&self.shared, self.step, parts, self.void, &mut self.writer))
            }
        };
        let _ = self.to_receive.send(expected);
    }
}

//! The two threads between `submit` and `finish`.
//! Compress: takes gradients in any order, compresses each at once, and starts the exchange of a group when all its layers
//! and all groups before it are there: the order of exchanges is the same on every rank, whatever the order of gradients.
//! Receive: waits for the exchanges in that order, with the deadline, checks and decodes what came.
//! What must hold: the first error, from wherever, reaches `finish`. The other ranks are told of one in compression; any other
//! they meet themselves, or see that this rank leaves.

use crate::config::{Config, Fault, Mode, Stage};
use crate::error::SyncError;
use crate::layer::Layer;
use crate::plan::{self, Group};
use crate::source::Source;
use crate::stats::LayerStats;
use redsync_comm::{Communicator, Gathered, Pending, Tag};
use redsync_core::wire::{Frame, FrameWriter};
use redsync_core::{Bad, Compressor, Density, Gradient, LayerError, Sparse, Values, Workspace};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Begins a message that says why a rank gives up, in the place of a frame.
const GIVE_UP: &[u8] = b"RSYE";

/// What all threads of a synchronizer know.
pub(crate) struct Shared {
    pub comm: Arc<dyn Communicator>,
    pub layers: Vec<Layer>,
    pub choices: Vec<crate::config::Choice>,
    pub config: Config,
    pub compressors: Mutex<Vec<Option<Compressor>>>,
    /// How the values of each compressed layer travel.
    pub values: Vec<Option<Values>>,
    pub pools: Pools,
}

/// Buffers that came back, to be filled again.
#[derive(Default)]
pub(crate) struct Pools {
    pub frames: Mutex<Vec<Vec<u8>>>,
    pub dense: Mutex<Vec<Vec<f32>>>,
    /// One place per layer.
    pub sparse: Mutex<Vec<Vec<Sparse>>>,
}

/// A panic of another thread is reported by its channel; what it guarded is still sound enough to be dropped.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn names(&self, group: &Group) -> String {
        let first = group.layers.first().map_or("", |layer| &self.layers[*layer].name);
        match group.layers.len() {
            0 | 1 => format!("layer {first}"),
            more => format!("layers {first} and {} more", more - 1),
        }
    }
}

/// A gradient on its way.
pub(crate) struct Submitted {
    /// Counts the steps that were tried; unlike the step it never goes back when a checkpoint is loaded.
    pub round: u64,
    pub step: u64,
    pub layer: usize,
    pub source: Box<dyn Source>,
}

/// What came of one group.
pub(crate) struct Arrived {
    pub group: Group,
    pub result: Received,
    pub stats: Vec<LayerStats>,
}

pub(crate) enum Received {
    /// For each layer of the group, one message per rank.
    Sparse(Vec<Vec<Sparse>>),
    /// The averaged gradients of the group's layers, one after the other.
    Dense(Vec<f32>),
}

pub(crate) type Outcome = Result<Arrived, SyncError>;

/// An exchange that was started.
pub(crate) struct InFlight {
    step: u64,
    group: Group,
    started: Instant,
    exchange: Exchange,
    stats: Vec<LayerStats>,
}

enum Exchange {
    Sparse(Pending<Gathered>),
    Dense(Pending<Vec<f32>>),
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// The compressing thread.
pub(crate) struct Compress {
    shared: Arc<Shared>,
    to_receive: Sender<InFlight>,
    outcomes: Sender<Outcome>,
    workspace: Workspace,
    writer: FrameWriter,
    /// What each layer sends at this step, once it is chosen.
    messages: Vec<Sparse>,
    stats: Vec<LayerStats>,
    /// Gradients that wait for the others, with clipping.
    held: Vec<Option<Box<dyn Source>>>,
    groups: Vec<Group>,
    /// For each group, how many layers are missing, and the buffer of a dense one.
    missing: Vec<usize>,
    buffers: Vec<Vec<f32>>,
    /// For each layer, its group and its offset in the buffer.
    place: Vec<(usize, usize)>,
    next: usize,
    round: Option<u64>,
    step: u64,
    stage: Stage,
    /// Time that the next layer to be compressed has to answer for.
    extra_ms: f64,
}

impl Compress {
    pub fn new(shared: Arc<Shared>, to_receive: Sender<InFlight>, outcomes: Sender<Outcome>) -> Self {
        let layers = shared.layers.len();
        Compress {
            workspace: Workspace::new(shared.config.threads),
            shared,
            to_receive,
            outcomes,
            writer: FrameWriter::new(),
            messages: (0..layers).map(|_| Sparse::new()).collect(),
            stats: vec![LayerStats::default(); layers],
            held: (0..layers).map(|_| None).collect(),
            groups: Vec::new(),
            missing: Vec::new(),
            buffers: Vec::new(),
            place: vec![(0, 0); layers],
            next: 0,
            round: None,
            step: 0,
            stage: Stage::Dense,
            extra_ms: 0.0,
        }
    }

    /// Runs until the synchronizer is dropped or something fails.
    pub fn run(mut self, gradients: Receiver<Submitted>) {
        for submitted in gradients {
            if let Err(error) = self.take(submitted) {
                self.give_up(&error);
                let _ = self.outcomes.send(Err(error));
                return;
            }
        }
    }

    fn take(&mut self, submitted: Submitted) -> Result<(), SyncError> {
        let Submitted { round, step, layer, source } = submitted;
        if self.round != Some(round) {
            self.begin(step);
            self.round = Some(round);
        }
        // With everything dense, clipping is by the norm of the averaged gradients, and comes later.
        if self.shared.config.mode == Mode::Cnn || self.groups.iter().all(|group| !group.sparse) {
            return self.compress(layer, source.gradient(), 1.0);
        }
        self.held[layer] = Some(source);
        if self.held.iter().any(Option::is_none) {
            return Ok(());
        }
        let held: Vec<_> = self.held.iter_mut().filter_map(Option::take).collect();
        let begin = Instant::now();
        let factor = self.clipping(step, &held)?;
        let clipping_ms = ms(begin);
        for (layer, source) in held.iter().enumerate().rev() {
            // The time of the common norm is that of the layer which is compressed first.
            self.extra_ms = if layer + 1 == held.len() { clipping_ms } else { 0.0 };
            self.compress(layer, source.gradient(), factor)?;
        }
        Ok(())
    }

    /// Sets everything up for the first gradient of a step.
    fn begin(&mut self, step: u64) {
        let Shared { layers, choices, config, .. } = &*self.shared;
        let stage = config.warm_up.stage(step, config.density);
        if self.round.is_none() || stage != self.stage {
            self.groups = plan::groups(layers, choices, stage);
            // Buckets of another stage have other lengths.
            lock(&self.shared.pools.dense).clear();
        }
        (self.step, self.stage, self.next) = (step, stage, 0);
        self.held.fill_with(|| None);
        self.missing = self.groups.iter().map(|group| group.layers.len()).collect();
        self.buffers.clear();
        for (number, group) in self.groups.iter().enumerate() {
            let mut length = 0;
            for layer in &group.layers {
                self.place[*layer] = (number, length);
                length += layers[*layer].size;
            }
            self.buffers.push(if group.sparse {
                Vec::new()
            } else {
                dense_buffer(&self.shared.pools, length)
            });
        }
        if let Stage::Sparse(density) = stage
            && let Ok(density) = Density::new(density)
        {
            lock(&self.shared.compressors).iter_mut().flatten().for_each(|c| c.set_density(density));
        }
    }

    /// The factor that brings the norm of all gradients, which already carry 1/N, down to the limit times N^(-1/2).
    fn clipping(&self, step: u64, gradients: &[Box<dyn Source>]) -> Result<f32, SyncError> {
        let Mode::Rnn { clip: Some(limit) } = self.shared.config.mode else { return Ok(1.0) };
        let ranks = self.shared.comm.size() as f64;
        let mut squares = 0.0;
        for (layer, source) in gradients.iter().enumerate() {
            let gradient = source.gradient();
            let sum = sum_of_squares(gradient);
            if !sum.is_finite() {
                return Err(not_finite(&self.shared.layers[layer].name, step, gradient).into());
            }
            squares += sum;
        }
        let (norm, limit) = (squares.sqrt() / ranks, f64::from(limit) / ranks.sqrt());
        Ok(if norm > limit { (limit / norm) as f32 } else { 1.0 })
    }

    /// One layer: chooses what to send, or copies it all, and starts whatever is complete.
    fn compress(&mut self, layer: usize, gradient: Gradient<'_>, factor: f32) -> Result<(), SyncError> {
        let begin = Instant::now();
        let step = self.step;
        let scale = factor / self.shared.comm.size() as f32;
        let (group, offset) = self.place[layer];
        self.stats[layer] = LayerStats::default();
        if self.groups[group].sparse {
            let mut compressors = lock(&self.shared.compressors);
            let Some(compressor) = &mut compressors[layer] else {
                return Err(SyncError::Order("a dense layer in a sparse group".into()));
            };
            compressor.select(step, gradient, scale, &mut self.workspace)?;
            self.workspace.swap_message(&mut self.messages[layer]);
            self.stats[layer].elements = self.messages[layer].len() as u64;
        } else {
            let Layer { name, size, .. } = &self.shared.layers[layer];
            let to = &mut self.buffers[group][offset..offset + size];
            copy_scaled(gradient, scale, to).map_err(|why| LayerError { layer: name.clone(), step, why })?;
            let bytes = 4 * *size as u64;
            let stats = &mut self.stats[layer];
            (stats.elements, stats.bytes_sent, stats.bytes_received) = (*size as u64, bytes, bytes);
        }
        self.stats[layer].select_ms = ms(begin) + std::mem::take(&mut self.extra_ms);
        self.missing[group] -= 1;
        while self.next < self.groups.len() && self.missing[self.next] == 0 {
            self.start(self.next);
            self.next += 1;
        }
        Ok(())
    }

    /// Starts the exchange of a complete group.
    fn start(&mut self, number: usize) {
        let (step, group) = (self.step, self.groups[number].clone());
        let tag = Tag { step, op: number as u32 };
        let exchange = if group.sparse {
            let frame = self.encode(step, &group);
            Exchange::Sparse(self.shared.comm.allgather(tag, frame))
        } else {
            let values = std::mem::take(&mut self.buffers[number]);
            Exchange::Dense(self.shared.comm.allreduce(tag, values))
        };
        let stats = group.layers.iter().map(|layer| self.stats[*layer]).collect();
        let started = Instant::now();
        // If the receiving thread is gone it has reported why.
        let _ = self.to_receive.send(InFlight { step, group, started, exchange, stats });
    }

    /// The frame of a group.
    fn encode(&mut self, step: u64, group: &Group) -> Vec<u8> {
        if let Some(buffer) = lock(&self.shared.pools.frames).pop() {
            self.writer.reuse(buffer);
        }
        self.writer.begin(step, self.shared.comm.rank() as u32);
        let compressors = lock(&self.shared.compressors);
        for layer in &group.layers {
            let (begin, before) = (Instant::now(), self.writer.len());
            if let Some(compressor) = &compressors[*layer] {
                compressor.encode(&self.messages[*layer], &mut self.writer);
            }
            self.stats[*layer].encode_ms = ms(begin);
            self.stats[*layer].bytes_sent = (self.writer.len() - before) as u64;
        }
        let mut frame = self.writer.take();
        if self.shared.config.fault == Some(Fault::DamageAt(step))
            && let Some(last) = frame.last_mut()
        {
            *last ^= 1;
        }
        frame
    }

    /// Tells the other ranks why, where they expect a frame; where they expect a dense sum they see the difference.
    fn give_up(&mut self, error: &SyncError) {
        let tag = Tag { step: self.step, op: self.next as u32 };
        let message = [GIVE_UP, error.to_string().as_bytes()].concat();
        drop(self.shared.comm.allgather(tag, message));
    }
}

fn dense_buffer(pools: &Pools, length: usize) -> Vec<f32> {
    let mut pool = lock(&pools.dense);
    match pool.iter().position(|buffer| buffer.len() == length) {
        Some(at) => pool.swap_remove(at),
        None => vec![0.0; length],
    }
}

/// `to = scale * gradient`, if it has the right length and is finite.
pub(crate) fn copy_scaled(gradient: Gradient<'_>, scale: f32, to: &mut [f32]) -> Result<(), Bad> {
    if gradient.len() != to.len() {
        return Err(Bad::Length { expected: to.len(), got: gradient.len() });
    }
    let mut finite = true;
    let mut put = |to: &mut f32, x: f32| {
        *to = x * scale;
        finite &= x.is_finite();
    };
    match gradient {
        Gradient::F32(g) => to.iter_mut().zip(g).for_each(|(to, x)| put(to, *x)),
        Gradient::F16(g) => to.iter_mut().zip(g).for_each(|(to, x)| put(to, x.to_f32())),
        Gradient::Bf16(g) => to.iter_mut().zip(g).for_each(|(to, x)| put(to, x.to_f32())),
    }
    if finite { Ok(()) } else { Err(refusal(gradient)) }
}

fn refusal(gradient: Gradient<'_>) -> Bad {
    let (index, value) = gradient.first_not_finite().unwrap_or((0, f32::NAN));
    Bad::NotFinite { index, value }
}

fn not_finite(layer: &str, step: u64, gradient: Gradient<'_>) -> LayerError {
    LayerError { layer: layer.into(), step, why: refusal(gradient) }
}

/// In eight partial sums, which the compiler can take side by side, always in the same order.
pub(crate) fn sum_of_squares(gradient: Gradient<'_>) -> f64 {
    fn sum<T: Copy>(g: &[T], to_f32: impl Fn(T) -> f32) -> f64 {
        let mut lanes = [0f64; 8];
        for chunk in g.chunks(8) {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                let x = f64::from(to_f32(*x));
                *lane += x * x;
            }
        }
        lanes.iter().sum()
    }
    match gradient {
        Gradient::F32(g) => sum(g, |x| x),
        Gradient::F16(g) => sum(g, |x| x.to_f32()),
        Gradient::Bf16(g) => sum(g, |x| x.to_f32()),
    }
}

/// The receiving thread: runs until the compressing thread ends or something fails.
pub(crate) fn receive(shared: &Shared, in_flight: Receiver<InFlight>, outcomes: Sender<Outcome>) {
    for exchange in in_flight {
        let outcome = complete(shared, exchange);
        let failed = outcome.is_err();
        if outcomes.send(outcome).is_err() || failed {
            return;
        }
    }
}

fn complete(shared: &Shared, in_flight: InFlight) -> Outcome {
    let InFlight { step, group, started, exchange, mut stats } = in_flight;
    let deadline = shared.config.deadline;
    let failed = |source| SyncError::Exchange { layers: shared.names(&group), source };
    let result = match exchange {
        Exchange::Dense(pending) => {
            let sum = pending.wait(deadline).map_err(failed)?;
            share_time(&mut stats, ms(started));
            Received::Dense(sum)
        }
        Exchange::Sparse(pending) => {
            let gathered = pending.wait(deadline).map_err(failed)?;
            share_time(&mut stats, ms(started));
            let messages = decode(shared, step, &group, &gathered, &mut stats)?;
            let mut pool = lock(&shared.pools.frames);
            // Some engines give all ranks' buffers back, but only one at a time is filled.
            let room = shared.layers.len().saturating_sub(pool.len());
            pool.extend(gathered.reclaim().into_iter().take(room));
            Received::Sparse(messages)
        }
    };
    Ok(Arrived { group, result, stats })
}

/// Divides the time of an exchange among its layers by bytes.
fn share_time(stats: &mut [LayerStats], ms: f64) {
    let total: u64 = stats.iter().map(|layer| layer.bytes_sent).sum();
    for layer in stats {
        layer.exchange_ms = ms * layer.bytes_sent as f64 / total.max(1) as f64;
    }
}

/// The messages of all ranks, for each layer of the group.
fn decode(
    shared: &Shared,
    step: u64,
    group: &Group,
    gathered: &Gathered,
    stats: &mut [LayerStats],
) -> Result<Vec<Vec<Sparse>>, SyncError> {
    let mut messages: Vec<Vec<Sparse>> = {
        let mut pool = lock(&shared.pools.sparse);
        pool.resize_with(shared.layers.len(), Vec::new);
        group.layers.iter().map(|layer| std::mem::take(&mut pool[*layer])).collect()
    };
    messages.iter_mut().for_each(|ranks| ranks.resize_with(gathered.ranks(), Sparse::new));
    for (rank, bytes) in gathered.iter().enumerate() {
        if let Some(reason) = bytes.strip_prefix(GIVE_UP) {
            return Err(SyncError::Peer { rank, reason: String::from_utf8_lossy(reason).into_owned() });
        }
        let bad_frame = |why| SyncError::Frame { rank, layers: shared.names(group), why };
        let frame = Frame::parse(bytes).map_err(bad_frame)?;
        frame.expect(step, rank as u32, group.layers.len() as u16).map_err(bad_frame)?;
        for (at, message) in frame.messages().enumerate() {
            let (begin, message) = (Instant::now(), message.map_err(bad_frame)?);
            let layer = group.layers[at];
            let Layer { name, size, .. } = &shared.layers[layer];
            let phase = shared.values[layer].unwrap_or_default().phase(step);
            let decoded = message.decode(layer as u32, *size as u32, phase, &mut messages[at][rank]);
            decoded.map_err(|why| SyncError::Message { rank, layer: name.clone(), why })?;
            stats[at].decode_ms += ms(begin);
            if rank != shared.comm.rank() {
                stats[at].bytes_received += message.byte_len() as u64;
            }
        }
    }
    Ok(messages)
}

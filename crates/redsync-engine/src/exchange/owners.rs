//! The exchange by owners: what a rank receives does not grow with the number of ranks. Two collectives for each group:
//!
//! ```text
//! all-to-all   every rank sends every owner the part of its message that is the owner's
//! the owner    adds the parts in rank order to what it kept, selects and quantizes anew, keeps the rest
//! allgather    the owners' messages: every rank applies the same bytes
//! ```
//!
//! What must hold: what ranks send is in the end applied or kept; a step that does not count is taken back by the owners as well. All
//! collectives are started by the thread that waits for them, because the second needs what the first brought, and ranks
//! must start all in one order.

use super::cut::Cut;
use super::{About, Exchange, Flight, Landed, Packed, Packing, names, share_time};
use crate::error::SyncError;
use crate::pipeline::{lock, ms};
use crate::plan::Sent;
use crate::state::{Kept, LayerState};
use redsync_comm::{Gathered, Tag};
use redsync_core::wire::{FRAME_HEADER, Frame, FrameWriter, Messages, Shape};
use redsync_core::{Compressor, ConfigError, Gradient, Memory, Sparse, Unfit, Workspace};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Distinguishes the second collective of a group from the first.
const SECOND: u32 = 1 << 30;

/// The exchange by owners.
pub(crate) struct Owners {
    rank: usize,
    ranks: usize,
    /// Of each layer, if it is compressed.
    cuts: Arc<Vec<Option<Cut>>>,
    own: Arc<Mutex<Own>>,
}

/// What this rank owns.
struct Own {
    /// Its part of each layer: sums that were not sent on.
    parts: Vec<Option<Compressor>>,
    /// Those that were changed at the step that is under way, or at the last one.
    touched: Vec<usize>,
    workspace: Workspace,
    writer: FrameWriter,
    sum: Vec<f32>,
}

impl Owners {
    /// Owners of layers, given their cuts and, for each, its name and how it is compressed.
    pub fn new(
        rank: usize,
        ranks: usize,
        cuts: Vec<Option<Cut>>,
        configs: Vec<(String, Option<redsync_core::Config>)>,
        threads: usize,
    ) -> Result<Self, (String, ConfigError)> {
        let mut parts = Vec::with_capacity(cuts.len());
        for (number, ((name, config), cut)) in configs.into_iter().zip(&cuts).enumerate() {
            let part = config.zip(*cut).map(|(config, cut)| (config, cut.len(rank)));
            let made = part.filter(|(_, length)| *length > 0).map(|(config, length)| {
                // Momentum was applied where the gradient came in.
                let momentum = redsync_core::Momentum::None;
                let config = redsync_core::Config { momentum, masking: false, keep: 1.0, ranks: 1, ..config };
                Compressor::new(number as u32, format!("{name}, as owner"), length, config)
            });
            parts.push(made.transpose().map_err(|why| (name, why))?);
        }
        let own = Own {
            parts,
            touched: Vec::new(),
            workspace: Workspace::new(threads),
            writer: FrameWriter::new(),
            sum: Vec::new(),
        };
        Ok(Owners { rank, ranks, cuts: Arc::new(cuts), own: Arc::new(Mutex::new(own)) })
    }

    fn each(
        &self,
        layer: usize,
        change: impl FnOnce(&mut Compressor) -> Result<(), Unfit>,
    ) -> Result<(), Unfit> {
        lock(&self.own).parts.get_mut(layer).and_then(Option::as_mut).map_or(Ok(()), change)
    }
}

/// The layers of a group of which an owner has a part, by their places in the group, with its length.
fn parts_of<'a>(
    cuts: &'a [Option<Cut>],
    layers: &'a [usize],
    owner: usize,
) -> impl Iterator<Item = (usize, Cut, usize)> + 'a {
    let part = move |(at, layer): (usize, &usize)| {
        cuts[*layer].map(|cut| (at, cut, cut.len(owner))).filter(|(_, _, length)| *length > 0)
    };
    layers.iter().enumerate().filter_map(part)
}

impl Exchange for Owners {
    fn in_order(&self) -> bool {
        true
    }

    fn begin(&self) {
        lock(&self.own).touched.clear();
    }

    /// One frame for each owner, with a message for each part.
    fn pack(&self, packing: Packing<'_>, writer: &mut FrameWriter) -> Packed {
        let Packing { group, messages, sent, step, plan, bytes } = packing;
        // Every message is dealt out once.
        let deal_out = |layer: &usize| match self.cuts[*layer] {
            Some(cut) => {
                let lengths: Vec<u32> = (0..self.ranks).map(|owner| cut.len(owner) as u32).collect();
                messages[*layer].deal_out(&lengths, |index| cut.place(index))
            }
            None => Vec::new(),
        };
        let dealt: Vec<Vec<Sparse>> = group.layers.iter().map(deal_out).collect();
        let mut frame = |owner: usize| {
            writer.begin(step, self.rank as u32, plan);
            let (mut before, mut header) = (0, FRAME_HEADER);
            for (at, ..) in parts_of(&self.cuts, &group.layers, owner) {
                let Some(sent) = &sent[at] else { continue };
                header += writer.push(&dealt[at][owner], sent.indices, sent.values);
                let length = writer.len() - std::mem::replace(&mut before, writer.len());
                // What stays here is not sent.
                if owner != self.rank {
                    bytes[at].0 += length as u64;
                    bytes[at].1 += header as u64;
                }
                header = 0;
            }
            // A frame without a message is sent as well.
            if let Some(first) = bytes.first_mut().filter(|_| header > 0 && owner != self.rank) {
                (first.0, first.1) = (first.0 + header as u64, first.1 + header as u64);
            }
            writer.take()
        };
        let frames = (0..self.ranks).map(&mut frame).collect();
        Packed(frames)
    }

    fn void(&self) -> Packed {
        Packed(vec![Vec::new(); self.ranks])
    }

    fn start(&self, _: &dyn redsync_comm::Communicator, tag: Tag, frames: Packed) -> Box<dyn Flight> {
        Box::new(Flying { tag, frames: frames.0, cuts: self.cuts.clone(), own: self.own.clone() })
    }

    fn set_rate(&self, layer: usize, rate: f32) -> Result<(), Unfit> {
        self.each(layer, |part| part.set_rate(rate))
    }

    fn take_back(&self) -> Result<(), Unfit> {
        let mut own = lock(&self.own);
        for layer in std::mem::take(&mut own.touched) {
            if let Some(part) = &mut own.parts[layer] {
                part.roll_back()?;
            }
        }
        Ok(())
    }

    fn save(&self, layer: usize) -> Option<Kept> {
        let own = lock(&self.own);
        let part = own.parts.get(layer)?.as_ref()?;
        let cut = self.cuts.get(layer).copied().flatten()?;
        Some(Kept { v: part.residual().v().to_vec(), cut, memory: part.memory(), rate: part.rate() })
    }

    fn check(&self, layer: usize, state: &LayerState) -> Result<(), String> {
        let cut = self.cuts.get(layer).copied().flatten().filter(|cut| cut.len(self.rank) > 0);
        match &state.kept {
            // Of a run with another number of ranks, or that gathered: nothing is kept yet.
            None => Ok(()),
            Some(kept) if Some(kept.cut) == cut => Ok(()),
            Some(kept) => Err(format!("owners keep other parts of it: {:?}, not {cut:?}", kept.cut)),
        }
    }

    fn restore(&self, layer: usize, kept: Option<&Kept>) -> Result<(), Unfit> {
        self.each(layer, |part| match kept {
            Some(kept) => part.restore(&[], &kept.v, None, kept.memory, kept.rate),
            None => part.restore(&[], &vec![0.0; part.residual().len()], None, Memory::default(), None),
        })
    }
}

struct Flying {
    tag: Tag,
    frames: Vec<Vec<u8>>,
    cuts: Arc<Vec<Option<Cut>>>,
    own: Arc<Mutex<Own>>,
}

impl Flight for Flying {
    fn land(self: Box<Self>, about: About<'_>, mut updates: Vec<Vec<Sparse>>) -> Result<Landed, SyncError> {
        let Flying { tag, frames, cuts, own } = *self;
        let started = Instant::now();
        let failed = |source| SyncError::exchange(names(about.layers, about.group), source);
        let first = about.comm.alltoall(tag, frames).wait(about.config.deadline).map_err(failed)?;
        let void = first.iter().any(<[u8]>::is_empty);
        let begin = Instant::now();
        let frame = if void { Vec::new() } else { lock(&own).merge(&about, &cuts, &first)? };
        let merging = ms(begin);
        let second = Tag { op: tag.op | SECOND, ..tag };
        let all = about.comm.allgather(second, frame).wait(about.config.deadline).map_err(failed)?;
        share_time(&mut about.stats.borrow_mut(), ms(started) - merging);
        let void = void || all.iter().any(<[u8]>::is_empty);
        let updates = match void {
            true => None,
            false => {
                let begin = Instant::now();
                decode(&about, &cuts, &all, &mut updates)?;
                let mut stats = about.stats.borrow_mut();
                let share = (ms(begin) + merging) / stats.len().max(1) as f64;
                stats.iter_mut().for_each(|stats| stats.decode_ms += share);
                Some(updates)
            }
        };
        Ok(Landed { updates, returned: Vec::new(), frames: all.reclaim() })
    }
}

/// How each layer of the group travels at this step, as a reader of parts needs it.
fn shapes(about: &About<'_>) -> Vec<Option<(Sent, Shape)>> {
    let About { layers, choices, config, group, step, .. } = about;
    let stage = config.warm_up.stage(*step, config.density);
    let shape = |layer: &usize| {
        let sent = Sent::at(choices[*layer], layers[*layer].size, config, stage)?;
        Some((sent, sent.shape(*step)))
    };
    group.layers.iter().map(shape).collect()
}

/// The checked frames of all ranks, each with as many messages as this many.
fn frames<'a>(
    about: &About<'_>,
    gathered: &'a Gathered,
    messages: impl Fn(usize) -> usize,
) -> Result<Vec<Messages<'a>>, SyncError> {
    let frame = |(rank, bytes): (usize, &'a [u8])| {
        let bad = |why| SyncError::Frame { rank, layers: names(about.layers, about.group), why };
        let frame = Frame::parse(bytes).map_err(bad)?;
        frame.expect(about.step, rank as u32, messages(rank) as u16, about.plan).map_err(bad)?;
        if rank != about.rank {
            about.count_received(0, FRAME_HEADER as u64);
        }
        Ok(frame.messages())
    };
    gathered.iter().enumerate().map(frame).collect()
}

/// The next message of a rank's frame, decoded; returns its bytes.
fn next(
    about: &About<'_>,
    rank: usize,
    at: usize,
    messages: &mut Messages<'_>,
    shape: &Shape,
    into: &mut Sparse,
) -> Result<u64, SyncError> {
    let layer = || about.layers[about.group.layers[at]].name.clone();
    let bad = |why| SyncError::Frame { rank, layers: names(about.layers, about.group), why };
    let missing = || SyncError::Failed(format!("the frame of rank {rank} ends before {}", layer()));
    let message = messages.next().ok_or_else(missing)?.map_err(bad)?;
    message.decode(shape, into).map_err(|why| SyncError::Message { rank, layer: layer(), why })?;
    Ok(message.byte_len() as u64)
}

/// Nothing may follow the last message.
fn check_ends(about: &About<'_>, frames: Vec<Messages<'_>>) -> Result<(), SyncError> {
    for (rank, mut messages) in frames.into_iter().enumerate() {
        if let Some(Err(why)) = messages.next() {
            return Err(SyncError::Frame { rank, layers: names(about.layers, about.group), why });
        }
    }
    Ok(())
}

impl Own {
    /// Adds what all ranks sent of this rank's parts to what was kept, chooses what to send on, and writes it.
    fn merge(
        &mut self,
        about: &About<'_>,
        cuts: &[Option<Cut>],
        gathered: &Gathered,
    ) -> Result<Vec<u8>, SyncError> {
        let parts: Vec<_> = parts_of(cuts, &about.group.layers, about.rank).collect();
        let mut frames = frames(about, gathered, |_| parts.len())?;
        let shapes = shapes(about);
        // All is read before anything is used: one list of messages for each part.
        let mut received: Vec<Vec<Sparse>> = Vec::with_capacity(parts.len());
        for (at, _, length) in &parts {
            let (Some((_, shape)), mut ranks) = (shapes[*at], Vec::with_capacity(frames.len())) else {
                continue;
            };
            let shape = Shape { n: *length as u32, ..shape };
            for (rank, messages) in frames.iter_mut().enumerate() {
                let mut sparse = Sparse::new();
                let bytes = next(about, rank, *at, messages, &shape, &mut sparse)?;
                if rank != about.rank {
                    about.count_received(*at, bytes);
                }
                ranks.push(sparse);
            }
            received.push(ranks);
        }
        let ranks = frames.len();
        check_ends(about, frames)?;
        self.writer.begin(about.step, about.rank as u32, about.plan);
        for ((at, _, length), messages) in parts.iter().zip(&received) {
            let layer = about.group.layers[*at];
            let (Some(part), Some((sent, _))) = (&mut self.parts[layer], shapes[*at]) else { continue };
            self.sum.clear();
            self.sum.resize(*length, 0.0);
            for (index, value) in messages.iter().flat_map(Sparse::iter) {
                self.sum[index as usize] += value;
            }
            let sending = sent.sent_on(ranks).sending();
            part.set_sending(sending);
            part.accumulate(about.step, Gradient::F32(&self.sum), 1.0, &mut self.workspace)?;
            self.touched.push(layer);
            part.select(about.step, &mut self.workspace);
            let before = self.writer.len();
            let header = self.writer.push(self.workspace.message(), sent.indices, sent.values);
            about.count_sent(*at, (self.writer.len() - before) as u64, header as u64);
        }
        about.count_sent(0, FRAME_HEADER as u64, FRAME_HEADER as u64);
        Ok(self.writer.take())
    }
}

/// What all owners sent on, for each layer of the group one vector of each owner.
fn decode(
    about: &About<'_>,
    cuts: &[Option<Cut>],
    gathered: &Gathered,
    updates: &mut [Vec<Sparse>],
) -> Result<(), SyncError> {
    let ranks = gathered.ranks();
    updates.iter_mut().for_each(|owners| owners.resize_with(ranks, Sparse::new));
    let shapes = shapes(about);
    let count = |owner: usize| parts_of(cuts, &about.group.layers, owner).count();
    let mut frames = frames(about, gathered, count)?;
    for (owner, messages) in frames.iter_mut().enumerate() {
        for (at, layer) in about.group.layers.iter().enumerate() {
            let into = &mut updates[at][owner];
            let n = about.layers[*layer].size as u32;
            let (Some(cut), Some((_, shape))) = (cuts[*layer], shapes[at]) else { continue };
            match cut.len(owner) {
                0 => into.reset(n, shape.phase),
                length => {
                    let shape = Shape { n: length as u32, ..shape };
                    let bytes = next(about, owner, at, messages, &shape, into)?;
                    if owner != about.rank {
                        about.count_received(at, bytes);
                    }
                    into.spread(n, |place| cut.index(owner, place));
                }
            }
        }
    }
    check_ends(about, frames)
}

//! The receiving thread: an exchange that was started comes in, its updates go out, in the order in which they were started.
//! With hosts it also sums inside the host and compresses the sum, so that the sending thread never waits; then exchanges of a step
//! are all started before the first is waited for, and what came is told inside the host behind the last.

use super::compress::{Step, compress, is_overflow, pack};
use super::{Arrived, Come, Expected, InFlight, Journey, Outcome, Received, Shared, lock, ms};
use crate::error::SyncError;
use crate::exchange::{About, Flight, Landed, names, share_time};
use crate::hosts::Hosts;
use crate::plan::Group;
use crate::second;
use crate::source::Source;
use crate::stats::LayerStats;
use redsync_comm::{Communicator, Tag};
use redsync_core::wire::FrameWriter;
use redsync_core::{LayerError, Sparse, Workspace};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

/// Runs until the sending thread ends or something fails.
pub(super) fn run(shared: &Shared, expected: Receiver<Expected>, outcomes: Sender<Outcome>) {
    let messages = shared.layers.iter().map(|_| Sparse::new()).collect();
    let (workspace, writer) = (Workspace::new(shared.config.threads), FrameWriter::new());
    let mut receive = Receive { shared, workspace, writer, messages, waiting: VecDeque::new(), void: false };
    for exchange in expected {
        match receive.take(exchange, &outcomes) {
            Ok(()) => {}
            Err(Stop::Failed(error)) => {
                // The communicator has told the others of what it met itself; only the first reason counts.
                shared.comm.give_up(&error.to_string());
                let _ = outcomes.send(Err(error));
                return;
            }
            Err(Stop::Unheard) => return,
        }
    }
}

/// Why the thread ends.
enum Stop {
    Failed(SyncError),
    /// Nobody takes what comes any more.
    Unheard,
}

impl From<SyncError> for Stop {
    fn from(error: SyncError) -> Self {
        Stop::Failed(error)
    }
}

/// The state of the thread.
struct Receive<'a> {
    shared: &'a Shared,
    workspace: Workspace,
    writer: FrameWriter,
    /// With hosts: what each layer's part sends at this step.
    messages: Vec<Sparse>,
    /// With hosts: exchanges of this step that are under way.
    waiting: VecDeque<(InFlight, Tag, Box<dyn Flight>)>,
    /// With hosts: a sum of this step is not finite, or a rank of this host said so.
    void: bool,
}

impl Receive<'_> {
    fn take(&mut self, expected: Expected, outcomes: &Sender<Outcome>) -> Result<(), Stop> {
        let tell = |come| outcomes.send(Ok(come)).map_err(|_| Stop::Unheard);
        match expected {
            Expected::Group(mut group) => {
                let is_last = group.is_last;
                match (std::mem::replace(&mut group.journey, Journey::Gone), &self.shared.hosts) {
                    (Journey::Inside(tag, letters), Some(hosts)) => {
                        let flight = self.sum_and_start(hosts, &mut group, tag, letters)?;
                        self.waiting.push_back((group, tag, flight));
                    }
                    (journey, _) => tell(Come::Group(self.complete(group, journey)?))?,
                }
                while is_last && let Some((group, tag, flight)) = self.waiting.pop_front() {
                    tell(Come::Group(self.land_inside(group, tag, flight)?))?;
                }
                self.void &= !is_last;
                Ok(())
            }
            Expected::Moments(telling) => tell(Come::Moments(second::hear(self.shared, telling)?)),
            Expected::MomentsLater { step, parts, void } => {
                let telling = second::tell(self.shared, step, parts, void, &mut self.writer);
                let members = self.shared.hosts.as_ref().map_or(&[][..], |hosts| hosts.across.members());
                let heard = second::hear(self.shared, telling).map_err(|error| error.of_ranks(members));
                tell(Come::Moments(heard?))
            }
        }
    }

    /// Waits for an exchange, and reads what came.
    fn complete(&mut self, mut group: InFlight, journey: Journey) -> Result<Arrived, SyncError> {
        let shared = self.shared;
        let failed = |source| SyncError::exchange(names(&shared.layers, &group.group), source);
        let journey = match journey {
            Journey::DenseLater(tag, values) => {
                group.started = Instant::now();
                Journey::Dense(shared.comm.allreduce(tag, values))
            }
            under_way => under_way,
        };
        let result = match journey {
            Journey::Dense(pending) => {
                let sum = pending.wait(shared.config.deadline).map_err(failed)?;
                share_time(&mut group.stats, ms(group.started));
                Received::Dense(sum)
            }
            Journey::Sparse(flight) => {
                let updates = buffers(shared, &group.group.layers);
                let landed = self.land(&group.group, group.step, &mut group.stats, flight, updates)?;
                take_in(shared, landed)?
            }
            Journey::Inside(..) | Journey::DenseLater(..) | Journey::Gone => {
                return Err(SyncError::Failed("an exchange that was not started".into()));
            }
        };
        self.arrive(group, result)
    }

    /// What came of a group, written to its targets.
    fn arrive(&mut self, group: InFlight, result: Received) -> Result<Arrived, SyncError> {
        let InFlight { group, all_dense, loss_scale, started, stats, targets, .. } = group;
        let (time, scale) = ((started, Instant::now()), loss_scale.unwrap_or(1.0));
        let mut arrived = Arrived { group, result, stats, time, scale, targets };
        // Where everything is dense, clipping needs all averaged gradients, and comes first.
        if !(all_dense && self.shared.config.clip.is_some()) {
            arrived.deliver(self.shared, &mut self.workspace)?;
        }
        Ok(arrived)
    }

    fn land(
        &self,
        group: &Group,
        step: u64,
        stats: &mut [LayerStats],
        flight: Box<dyn Flight>,
        updates: Vec<Vec<Sparse>>,
    ) -> Result<Landed, SyncError> {
        let Shared { parts, choices, config, plan, among, .. } = self.shared;
        let (plan, rank, stats) = (*plan, among.rank(), RefCell::new(stats));
        let about = About { comm: &**among, layers: parts, choices, config, plan, group, step, rank, stats };
        flight.land(about, updates)
    }

    /// Sums a group inside the host, compresses this rank's parts of the sum, and starts their exchange.
    fn sum_and_start(
        &mut self,
        hosts: &Hosts,
        group: &mut InFlight,
        tag: Tag,
        letters: Vec<Vec<u8>>,
    ) -> Result<Box<dyn Flight>, SyncError> {
        let (shared, step) = (self.shared, group.step);
        let failed = |source| SyncError::exchange(names(&shared.layers, &group.group), source);
        let sent: usize = letters.iter().map(Vec::len).sum();
        let came = hosts.inside.alltoall(Hosts::before(tag), letters).wait(shared.config.deadline);
        let came = came.map_err(failed)?;
        let sums = hosts.sums(&shared.sizes(&group.group), &came)?;
        let mut pool = lock(&shared.pools.letters);
        // At a step that does not count, more comes than goes.
        let room = (hosts.seat.on_each * shared.layers.len()).saturating_sub(pool.len());
        pool.extend(came.reclaim().into_iter().take(room));
        drop(pool);
        self.void |= sums.is_none();
        let step = Step { number: step, stage: shared.config.warm_up.stage(step, shared.config.density) };
        for (at, sum) in sums.into_iter().flatten().enumerate() {
            let (layer, begin) = (group.group.layers[at], Instant::now());
            let source = sum.as_ref().filter(|_| !self.void).map(|sum| (sum as &dyn Source, 1.0));
            let message = &mut self.messages[layer];
            match compress(shared, step, layer, source, message, &mut self.workspace) {
                Err(error) if group.loss_scale.is_some() && is_overflow(&error.why) => self.void = true,
                Err(error) => return Err(self.in_the_layer(hosts, layer, error).into()),
                Ok(()) => {}
            }
            let stats = &mut group.stats[at];
            stats.elements = self.messages[layer].len() as u64;
            stats.select_ms += ms(begin);
        }
        if let Some(first) = group.stats.first_mut() {
            first.inside_bytes += sent as u64;
        }
        let Shared { exchange, among, .. } = shared;
        let frames = match self.void {
            true => exchange.void(),
            false => pack(shared, step, &group.group, &self.messages, &mut self.writer, &mut group.stats),
        };
        group.started = Instant::now();
        Ok(exchange.start(&**among, tag, frames))
    }

    /// An error about a part, told of the layer.
    fn in_the_layer(&self, hosts: &Hosts, layer: usize, error: LayerError) -> LayerError {
        let begin = hosts.seat.part(layer, self.shared.layers[layer].size).start;
        LayerError { why: error.why.further(begin), ..error }
    }

    /// Waits for an exchange among hosts, and tells the ranks of this one what came.
    fn land_inside(
        &mut self,
        mut group: InFlight,
        tag: Tag,
        flight: Box<dyn Flight>,
    ) -> Result<Arrived, SyncError> {
        let shared = self.shared;
        let Some(hosts) = &shared.hosts else {
            return Err(SyncError::Failed("an exchange among hosts without hosts".into()));
        };
        let updates = group.group.layers.iter().map(|_| Vec::new()).collect();
        let landed = self.land(&group.group, group.step, &mut group.stats, flight, updates);
        let landed = landed.map_err(|error| error.of_ranks(hosts.across.members()))?;
        let own = landed.updates.as_deref().map(Hosts::tell).unwrap_or_default();
        if let Some(first) = group.stats.first_mut() {
            first.inside_bytes += (own.len() * hosts.seat.on_each) as u64;
        }
        let failed = |source| SyncError::exchange(names(&shared.layers, &group.group), source);
        let told = hosts.inside.allgather(Hosts::after(tag), own).wait(shared.config.deadline);
        let updates = hosts.hear(&shared.sizes(&group.group), &told.map_err(failed)?)?;
        take_in(shared, Landed { updates: None, ..landed })?;
        self.arrive(group, updates.map_or(Received::Void, Received::Sparse))
    }
}

/// Vectors to be filled, one list for each layer.
fn buffers(shared: &Shared, layers: &[usize]) -> Vec<Vec<Sparse>> {
    let mut pool = lock(&shared.pools.sparse);
    pool.resize_with(shared.layers.len(), Vec::new);
    layers.iter().map(|layer| std::mem::take(&mut pool[*layer])).collect()
}

/// Puts what an exchange returns to where it belongs.
fn take_in(shared: &Shared, landed: Landed) -> Result<Received, SyncError> {
    if !landed.returned.is_empty() {
        let mut compressed = lock(&shared.compressed);
        landed.returned.iter().try_for_each(|(layer, elements)| compressed.give_back(*layer, elements))?;
    }
    let mut pool = lock(&shared.pools.frames);
    // Some engines give all ranks' buffers back, but only one at a time is filled.
    let room = shared.layers.len().saturating_sub(pool.len());
    pool.extend(landed.frames.into_iter().take(room));
    Ok(landed.updates.map_or(Received::Void, Received::Sparse))
}

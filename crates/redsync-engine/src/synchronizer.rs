//! The synchronizer of one rank: `submit` gradients, `finish` the step, `apply` the updates.
//! What must hold: every rank gets the same updates, bit by bit, in the same order.

use crate::compressor::{Device, Host};
use crate::config::{self, Choice, Config, Method, Stage};
use crate::error::SyncError;
use crate::exchange::{Exchange, Gather, Owners};
use crate::hosts::{Hosts, Seat};
use crate::inbox::Submitter;
use crate::layer::Layer;
use crate::layers::Layers;
use crate::pipeline::dense::norm;
use crate::pipeline::{Arrived, Come, Pools, Received, Shared, Threads, lock, ms};
use crate::second::Told;
use crate::source::Source;
use crate::state::{Identity, LayerState};
use crate::stats::{StepStats, Traffic};
use crate::target::{Target, Update};
use crate::{hello, plan, replica};
use redsync_comm::{Communicator, Tag};
use redsync_core::{Momentum, Unfit, Workspace};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// The updates are there.
    Done,
    /// With a loss scale: a gradient of some rank was not finite. All ranks have taken the step back, and there is no update.
    Overflowed,
}

/// One rank's synchronizer.
pub struct Synchronizer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) submitter: Submitter,
    pub(crate) identity: Identity,
    threads: Threads,
    arrived: Vec<Arrived>,
    /// For each layer, which group that arrived has its update, and at which place.
    place: Vec<Option<(usize, usize)>>,
    stats: StepStats,
    traffic: Traffic,
    workspace: Workspace,
    /// Whether the last finished step can be taken back.
    fresh: bool,
}

impl Synchronizer {
    /// A synchronizer for the layers of a model, in the memory of the host. All ranks call this; it fails if they do not agree.
    pub fn new(layers: Vec<Layer>, config: Config, comm: Arc<dyn Communicator>) -> Result<Self, SyncError> {
        Self::on(&Host, layers, config, comm)
    }

    /// A synchronizer whose compressed layers live on a device. A rank that cannot set itself up gives up, so that no other waits.
    pub fn on(
        device: &dyn Device,
        layers: Vec<Layer>,
        config: Config,
        comm: Arc<dyn Communicator>,
    ) -> Result<Self, SyncError> {
        let made = Self::make(device, layers, config, comm.clone());
        made.inspect_err(|error| comm.give_up(&error.to_string()))
    }

    fn make(
        device: &dyn Device,
        layers: Vec<Layer>,
        config: Config,
        comm: Arc<dyn Communicator>,
    ) -> Result<Self, SyncError> {
        let config = plan::agree(&layers, config, &*comm)?;
        let choices = plan::choices(&layers, &config)?;
        let mut agreement = hello::agreement(&layers, &choices, &config);
        if config.exchange() == config::Exchange::Owners {
            let cuts = plan::cuts(&layers, &choices, &config, comm.size());
            agreement.push(("the owners of elements".into(), hello::hash(&format!("{cuts:?}"))));
        }
        let hosts = match config.exchange() {
            config::Exchange::Hosts => {
                // Who does not speak of hosts hears that first.
                hello::compare(&*comm, &agreement, &config)?;
                Some(Hosts::find(&config, &comm)?)
            }
            _ => None,
        };
        let among = hosts.as_ref().map_or(comm.clone(), |hosts| hosts.across.clone());
        let parts = hosts.as_ref().map_or_else(|| layers.clone(), |hosts| hosts.parts(&layers));
        let mut compressors = Vec::with_capacity(layers.len());
        for (number, (layer, choice)) in parts.iter().zip(&choices).enumerate() {
            let refuse = |why| SyncError::Config { layer: layer.name.clone(), why };
            let made = plan::compressor(layer, *choice, &config, among.size())?
                .map(|core| device.compressor(number as u32, layer, core).map_err(refuse));
            compressors.push(made.transpose()?);
        }
        let momenta = parts.iter().map(|layer| plan::momentum(layer, &config));
        let mut compressed = Layers::new(&parts, compressors, momenta);
        // So that the first step finds what it would make, and leaves no trace where it is taken back.
        compressed.begin(plan::sendings(
            &parts,
            &choices,
            &config,
            config.warm_up.stage(0, config.density),
        ))?;
        let exchange = exchange(&parts, &choices, &config, &*among)?;
        if let Some(Hosts { seat, .. }) = &hosts {
            let what = format!("{} hosts of {} ranks", seat.hosts, seat.on_each);
            agreement.push(("what was found of hosts".into(), what));
        }
        // A rank that could not set itself up has given up by now.
        hello::compare(&*comm, &agreement, &config)?;
        let identity = hello::identity(&layers, &choices, &config);
        let shared = Arc::new(Shared {
            comm,
            plan: hello::fingerprint(&agreement),
            compressed: Mutex::new(compressed),
            exchange,
            pools: Pools::default(),
            among,
            hosts,
            layers,
            parts,
            choices,
            config,
        });
        let threads = Threads::start(&shared)?;
        Ok(Synchronizer {
            submitter: Submitter::new(&shared.layers, threads.gradients.clone()),
            identity,
            threads,
            arrived: Vec::new(),
            place: vec![None; shared.layers.len()],
            stats: StepStats::default(),
            traffic: Traffic::default(),
            workspace: Workspace::new(shared.config.threads),
            fresh: false,
            shared,
        })
    }

    /// This rank and the number of ranks.
    pub fn rank(&self) -> (usize, usize) {
        (self.shared.comm.rank(), self.shared.comm.size())
    }

    /// The layers.
    pub fn layers(&self) -> &[Layer] {
        &self.shared.layers
    }

    /// What happens with each layer once the warm-up is over.
    pub fn choices(&self) -> &[Choice] {
        &self.shared.choices
    }

    /// How messages travel, as the ranks agreed.
    pub fn exchange(&self) -> config::Exchange {
        self.shared.config.exchange()
    }

    /// Layers of fewer bytes are dense, as the ranks agreed.
    pub fn dense_below(&self) -> usize {
        self.shared.config.limit()
    }

    /// The step that is under way: the number of steps that were finished.
    pub fn step(&self) -> u64 {
        self.submitter.inbox().step
    }

    /// What is sent at the step that is under way.
    pub fn stage(&self) -> Stage {
        self.shared.config.warm_up.stage(self.step(), self.shared.config.density)
    }

    /// Whether the step that is under way is the first at which compressed layers are sent compressed: the moment at which they
    /// take over the optimizer's momentum, if it has gathered any.
    pub fn turns_sparse(&self) -> bool {
        self.step() == self.shared.config.warm_up.first_sparse_step()
    }

    /// Whether a layer's update will be sparse, momentum included, at the step that is under way. What the last finished
    /// step brought, [`Synchronizer::update`] tells.
    pub fn is_sparse(&self, layer: usize) -> bool {
        self.stage() != Stage::Dense && self.shared.choices.get(layer).is_some_and(|c| *c != Choice::Dense)
    }

    /// Hands over the gradient of a layer, as soon as the backward pass has it. Returns at once.
    pub fn submit(&self, layer: usize, source: impl Source) -> Result<(), SyncError> {
        self.submitter.submit(layer, source)
    }

    /// Says that a layer has no gradient at this step on this rank. A compressed layer sends nothing then, and keeps its residual
    /// and momentum as they are; a dense one adds zeros.
    pub fn skip(&self, layer: usize) -> Result<(), SyncError> {
        self.submitter.skip(layer)
    }

    /// The submitting half, for hooks that run in other threads.
    pub fn submitter(&self) -> Submitter {
        self.submitter.clone()
    }

    /// By what the loss of the step that is under way was multiplied, before its first gradient: updates are those of the loss
    /// itself. A gradient that is not finite then ends no training, but only the step; see [`Finished::Overflowed`]. Needs
    /// [`Config::undo`](crate::Config::undo).
    pub fn set_loss_scale(&self, scale: Option<f32>) -> Result<(), SyncError> {
        if scale.is_some() && !self.shared.config.undo {
            return Err(SyncError::Order("a loss scale needs steps that can be taken back (undo)".into()));
        }
        if let Some(scale) = scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
            return Err(SyncError::Order(format!(
                "the scale of the loss must be a positive number, got {scale}"
            )));
        }
        let mut inbox = self.submitter.inbox();
        inbox.check_between()?;
        inbox.loss_scale = scale;
        Ok(())
    }

    /// Waits until the updates of all layers are there; [`Synchronizer::update`] then gives them. The wait ends at the
    /// latest when the receiving thread meets its deadline.
    pub fn finish(&mut self) -> Result<Finished, SyncError> {
        let (step, loss_scale) = self.check_complete()?;
        self.recycle();
        let begin = Instant::now();
        let done = self.collect(step, loss_scale);
        if let Err(error) = &done {
            self.submitter.inbox().failure = Some(error.to_string());
            self.recycle();
        }
        let finished = done?;
        self.fresh = finished == Finished::Done;
        self.stats.traffic = self.traffic_of(step);
        self.traffic.add(&self.stats.traffic);
        (self.stats.step, self.stats.exposed_ms) = (step, ms(begin));
        self.submitter.inbox().turn_to(step + 1);
        Ok(finished)
    }

    fn check_complete(&self) -> Result<(u64, Option<f32>), SyncError> {
        let inbox = self.submitter.inbox();
        inbox.check()?;
        match inbox.arrived.iter().position(|arrived| !arrived) {
            None => Ok((inbox.step, inbox.loss_scale)),
            Some(layer) => {
                let (name, step) = (&self.shared.layers[layer].name, inbox.step);
                Err(SyncError::Order(format!("layer {name} was not submitted at step {step}")))
            }
        }
    }

    /// Waits for all groups, and finishes what needs all of them.
    fn collect(&mut self, step: u64, loss_scale: Option<f32>) -> Result<Finished, SyncError> {
        let mut told = None;
        let listens = self.shared.told_at(step).is_some();
        while self.place.iter().any(Option::is_none) || (listens && told.is_none()) {
            let gone = || Err(SyncError::Failed("a thread of the synchronizer ended unexpectedly".into()));
            match self.threads.outcomes.recv().unwrap_or_else(|_| gone())? {
                Come::Group(arrived) => self.keep(arrived),
                Come::Moments(moments) => told = Some(moments),
            }
        }
        if loss_scale.is_some() && self.arrived.iter().any(overflowed) {
            self.undo()?;
            self.place.fill(None);
            return Ok(Finished::Overflowed);
        }
        if let Some(told) = told {
            self.hear(told)?;
        }
        self.clip_dense();
        for arrived in &mut self.arrived {
            arrived.deliver(&self.shared, &mut self.workspace)?;
        }
        Ok(Finished::Done)
    }

    /// Takes in what the other ranks told of their second moments.
    fn hear(&mut self, told: Told) -> Result<(), SyncError> {
        let total: u64 = told.cost.iter().map(|(_, sent, ..)| sent).sum();
        for (layer, sent, headers, received) in told.cost {
            let stats = &mut self.stats.layers[layer];
            stats.bytes_sent += sent;
            stats.header_bytes += headers;
            stats.moment_bytes += sent - headers;
            stats.bytes_received += received;
            stats.exchange_ms += told.ms * sent as f64 / total.max(1) as f64;
        }
        let mut compressed = lock(&self.shared.compressed);
        let parts = told.parts.unwrap_or_default();
        parts
            .iter()
            .try_for_each(|(part, values)| compressed.give_second(part.layer, part.range.start, values))
    }

    /// Where the bytes of a step went, from what its layers sent.
    fn traffic_of(&self, step: u64) -> Traffic {
        let Shared { layers, choices, config, .. } = &*self.shared;
        let mut traffic = Traffic::default();
        for (number, layer) in self.stats.layers.iter().enumerate() {
            traffic.dense += 4 * layers[number].size as u64;
            traffic.headers += layer.header_bytes;
            traffic.moments += layer.moment_bytes;
            let elements = layer.bytes_sent - layer.header_bytes - layer.moment_bytes;
            match choices[number].is_sparse() {
                true => traffic.messages += elements,
                false => traffic.rest += elements,
            }
        }
        match step < config.warm_up.end() && config.method != Method::Sgd {
            true => Traffic { warm_up: traffic.sent(), dense: traffic.dense, ..Traffic::default() },
            false => traffic,
        }
    }

    /// The last step was the exchange of so many steps: dense training would have exchanged at each.
    pub(crate) fn stands_for(&mut self, steps: u64) {
        let more = self.stats.traffic.dense * steps.saturating_sub(1);
        self.stats.traffic.dense += more;
        self.traffic.dense += more;
    }

    /// Where the bytes of this rank went since it was made.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Gives the buffers of the last step back.
    pub(crate) fn recycle(&mut self) {
        self.place.fill(None);
        self.fresh = false;
        self.stats.layers = vec![Default::default(); self.shared.layers.len()];
        for arrived in self.arrived.drain(..) {
            match arrived.result {
                Received::Sparse(messages) => {
                    let mut pool = lock(&self.shared.pools.sparse);
                    for (layer, messages) in arrived.group.layers.iter().zip(messages) {
                        // With hosts what arrived was made from many, and no buffer was taken.
                        if let Some(place) = pool.get_mut(*layer) {
                            *place = messages;
                        }
                    }
                }
                Received::Dense(values) => lock(&self.shared.pools.dense).push(values),
                Received::Void => {}
            }
        }
    }

    fn keep(&mut self, arrived: Arrived) {
        let group = self.arrived.len();
        for (at, layer) in arrived.group.layers.iter().enumerate() {
            self.place[*layer] = Some((group, at));
            self.stats.layers[*layer] = arrived.stats[at];
        }
        self.arrived.push(arrived);
        let first = self.arrived.iter().map(|arrived| arrived.time.0).min();
        let last = self.arrived.iter().map(|arrived| arrived.time.1).max();
        self.stats.exchange_ms =
            first.zip(last).map_or(0.0, |(first, last)| (last - first).as_secs_f64() * 1e3);
    }

    /// With everything dense, clipping is that of ordinary training: by the norm of the averaged gradients.
    fn clip_dense(&mut self) {
        let Some(limit) = self.shared.config.clip else { return };
        if self.arrived.iter().any(|arrived| arrived.group.sparse) {
            return;
        }
        let norm = norm(self.arrived.iter().filter_map(|arrived| arrived.result.dense()));
        if norm <= f64::from(limit) {
            return;
        }
        let factor = (f64::from(limit) / norm) as f32;
        for arrived in &mut self.arrived {
            if let Received::Dense(values) = &mut arrived.result {
                values.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }

    /// The update of a layer, after [`Synchronizer::finish`] and before the next.
    pub fn update(&self, layer: usize) -> Option<Update<'_>> {
        let (group, at) = (*self.place.get(layer)?)?;
        self.arrived.get(group)?.update(&self.shared, at)
    }

    /// `weights -= learning_rate * update`, plain.
    pub fn apply(&mut self, layer: usize, weights: &mut [f32], learning_rate: f32) -> Result<(), SyncError> {
        self.apply_to(layer, &mut { weights }, learning_rate)
    }

    /// The same for weights that are anything that takes updates.
    pub fn apply_to(
        &mut self,
        layer: usize,
        weights: &mut dyn Target,
        learning_rate: f32,
    ) -> Result<(), SyncError> {
        self.submitter.inbox().check()?;
        let begin = Instant::now();
        let missing = || SyncError::Order(format!("layer {layer} has no update: finish comes first"));
        let (group, at) = self.place.get(layer).copied().flatten().ok_or_else(missing)?;
        let update = self.arrived[group].update(&self.shared, at).ok_or_else(missing)?;
        let refuse = |why| SyncError::Apply { layer: self.shared.layers[layer].name.clone(), why };
        weights.add(update, -learning_rate, &mut self.workspace).map_err(refuse)?;
        self.stats.layers[layer].apply_ms += ms(begin);
        Ok(())
    }

    /// Takes the last finished step back, on this rank: compressed layers are as they were before it, and there is no update. All
    /// ranks have to do the same. The number of the step is not used again.
    pub fn take_back(&mut self) -> Result<(), SyncError> {
        self.submitter.inbox().check_between()?;
        if !self.shared.config.undo || !self.fresh {
            return Err(SyncError::Order("there is no step that could be taken back".into()));
        }
        self.recycle();
        self.undo()
    }

    /// Compressed layers are as they were before the last step, and so is what owners keep.
    fn undo(&self) -> Result<(), SyncError> {
        let unfit = |why| SyncError::Unfit { layer: "a layer that is owned here".into(), why };
        self.shared.exchange.take_back().map_err(unfit)?;
        lock(&self.shared.compressed).take_back()
    }

    /// What the last finished step cost.
    pub fn stats(&self) -> &StepStats {
        &self.stats
    }

    /// The norm of what a compressed layer has accumulated and not sent; None for a dense layer. One pass over it.
    pub fn residual_norm(&self, layer: usize) -> Option<f64> {
        lock(&self.shared.compressed).norm(layer)
    }

    /// The learning rate at which the updates of the step that is under way will be applied to a layer, before its first gradient:
    /// what waits in the residual since steps of other rates is rescaled, so that it moves the weights as far as it would have
    /// moved them then. Without it a rate that falls takes away from everything that waits. All ranks say the same.
    pub fn set_rate(&self, layer: usize, rate: f32) -> Result<(), SyncError> {
        self.submitter.inbox().check_between()?;
        lock(&self.shared.compressed).set_rate(layer, rate)?;
        let unfit = |why| SyncError::Unfit { layer: self.shared.layers[layer].name.clone(), why };
        self.shared.exchange.set_rate(layer, rate).map_err(unfit)
    }

    /// After a dense warm-up: a compressed layer carries on with its share of the optimizer's momentum buffer.
    pub fn adopt_momentum(&self, layer: usize, buffer: &[f32]) -> Result<(), SyncError> {
        let buffer = self.part_of(layer, buffer)?;
        lock(&self.shared.compressed).adopt_momentum(layer, buffer, self.shared.among.size())
    }

    /// After a dense warm-up with Adam, or from its checkpoint: a compressed layer carries on with the optimizer's first and second
    /// moment after so many steps.
    pub fn adopt_adam(&self, layer: usize, m: &[f32], q: &[f32], steps: u64) -> Result<(), SyncError> {
        let (m, q) = (self.part_of(layer, m)?, self.part_of(layer, q)?);
        lock(&self.shared.compressed).adopt_adam(layer, m, q, steps)
    }

    /// What this rank compresses of a vector of a whole layer.
    fn part_of<'a>(&self, layer: usize, whole: &'a [f32]) -> Result<&'a [f32], SyncError> {
        let Some(hosts) = &self.shared.hosts else { return Ok(whole) };
        let missing = || SyncError::Order(format!("there is no compressed layer {layer}"));
        let Layer { name, size, .. } = self.shared.layers.get(layer).ok_or_else(missing)?;
        let why = Unfit::Length { what: "the optimizer's state", expected: *size, got: whole.len() };
        let unfit = || SyncError::Unfit { layer: name.clone(), why };
        whole.get(hosts.seat.part(layer, *size)).filter(|_| whole.len() == *size).ok_or_else(unfit)
    }

    /// Where this rank sits, if the ranks of a host sum among themselves.
    pub fn seat(&self) -> Option<Seat> {
        self.shared.hosts.as_ref().map(|hosts| hosts.seat)
    }

    /// Changes the coefficient of a compressed layer's momentum, as schedules do; its form, plain or Nesterov, stays. A checkpoint does not
    /// keep it: after a restore it is the configuration's, until it is said anew.
    pub fn set_momentum(&self, layer: usize, momentum: Momentum) -> Result<(), SyncError> {
        lock(&self.shared.compressed).set_momentum(layer, momentum)
    }

    /// The state of a compressed layer.
    pub(crate) fn state_of(&self, layer: usize) -> Result<Option<LayerState>, SyncError> {
        lock(&self.shared.compressed).state_of(layer)
    }

    /// Ends the run on all ranks, with a reason that is this rank's own.
    pub fn give_up(&self, reason: &str) {
        self.submitter.inbox().failure.get_or_insert_with(|| reason.into());
        self.shared.comm.give_up(reason);
    }

    /// Compares the weights of all ranks, layer by layer. Returns their common hash.
    pub fn check_replicas(&self, weights: &[&[f32]]) -> Result<u64, SyncError> {
        self.submitter.inbox().check()?;
        let step = self.step();
        let hashes = replica::layer_hashes(weights);
        let bytes = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        let pending = self.shared.comm.allgather(Tag { step, op: u32::MAX - 1 }, bytes);
        let failed = |source| SyncError::exchange("replica hashes".into(), source);
        let all = pending.wait(self.shared.config.deadline).map_err(failed)?;
        for (rank, bytes) in all.iter().enumerate() {
            let theirs = |at: usize| bytes.get(8 * at..8 * at + 8);
            let first = all.from_rank(0);
            if let Some(at) = (0..hashes.len()).find(|at| theirs(*at) != first.get(8 * at..8 * at + 8)) {
                let layer = self.shared.layers.get(at).map_or(at.to_string(), |layer| layer.name.clone());
                return Err(SyncError::Replicas { step, rank, layer });
            }
        }
        Ok(replica::combine(&hashes))
    }
}

/// The exchange that a configuration asks for.
fn exchange(
    layers: &[Layer],
    choices: &[Choice],
    config: &Config,
    comm: &dyn Communicator,
) -> Result<Box<dyn Exchange>, SyncError> {
    let (rank, ranks) = (comm.rank(), comm.size());
    if config.exchange() != config::Exchange::Owners {
        return Ok(Box::new(Gather { rank }));
    }
    let mut configs = Vec::with_capacity(layers.len());
    for (layer, choice) in layers.iter().zip(choices) {
        configs.push((layer.name.clone(), plan::compressor(layer, *choice, config, ranks)?));
    }
    let cuts = plan::cuts(layers, choices, config, ranks);
    let refuse = |(layer, why)| SyncError::Config { layer, why };
    Ok(Box::new(Owners::new(rank, ranks, cuts, configs, config.threads).map_err(refuse)?))
}

/// Whether a gradient of a scaled loss was not finite.
fn overflowed(arrived: &Arrived) -> bool {
    match &arrived.result {
        Received::Void => true,
        Received::Dense(values) => !values.iter().all(|x| x.is_finite()),
        Received::Sparse(_) => false,
    }
}

impl Received {
    fn dense(&self) -> Option<&[f32]> {
        match self {
            Received::Dense(values) => Some(values),
            Received::Sparse(_) | Received::Void => None,
        }
    }
}

impl Drop for Synchronizer {
    /// Ends the threads, which hold the communicator: whoever drops the last handle of that finds nothing under way. The
    /// wait is bounded by the deadline of an exchange.
    fn drop(&mut self) {
        // Submitters may live on; what they submit from now on goes nowhere.
        self.submitter.inbox().gradients = channel().0;
        self.threads.gradients = channel().0;
        for thread in self.threads.handles.drain(..) {
            // A panic was reported by the closed channel.
            let _ = thread.join();
        }
    }
}

//! The synchronizer of one rank: `submit` gradients, `finish` the step, `apply` the updates.
//! What must hold: every rank gets the same updates, bit by bit, in the same order.

use crate::config::{Choice, Config, Mode, Stage};
use crate::error::SyncError;
use crate::layer::Layer;
use crate::pipeline::{Arrived, Compress, Outcome, Pools, Received, Shared, Submitted, lock, receive};
use crate::source::Source;
use crate::state::{LayerState, Saved};
use crate::stats::StepStats;
use crate::{hello, plan, replica};
use redsync_comm::{Communicator, Tag};
use redsync_core::{Compressor, Sparse, Workspace, apply};
use serde_json::{Value, json};
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// What a step brings for one layer.
#[derive(Clone, Copy, Debug)]
pub enum Update<'a> {
    /// One message per rank; their sum is the averaged update, momentum included.
    Sparse(&'a [Sparse]),
    /// The averaged gradient; momentum is the optimizer's.
    Dense(&'a [f32]),
}

/// Keeps the gradients of one step and hands them to the compressing thread; may be cloned into other threads.
#[derive(Clone)]
pub struct Submitter {
    inbox: Arc<Mutex<Inbox>>,
    sizes: Arc<Vec<(String, usize)>>,
}

struct Inbox {
    step: u64,
    round: u64,
    arrived: Vec<bool>,
    gradients: Sender<Submitted>,
    /// The first failure; nothing works after it.
    failure: Option<String>,
}

impl Inbox {
    fn check(&self) -> Result<(), SyncError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(SyncError::Failed(failure.clone())))
    }

    /// Whether no gradient of a step is under way.
    fn check_between(&self) -> Result<(), SyncError> {
        self.check()?;
        match self.arrived.contains(&true) {
            true => Err(SyncError::Order(format!("step {} is under way: finish comes first", self.step))),
            false => Ok(()),
        }
    }

    /// The next round begins, at a step.
    fn turn_to(&mut self, step: u64) {
        (self.step, self.round) = (step, self.round + 1);
        self.arrived.fill(false);
    }
}

impl Submitter {
    /// Hands over the gradient of a layer. Returns at once.
    pub fn submit(&self, layer: usize, source: impl Source) -> Result<(), SyncError> {
        let got = source.gradient().len();
        let mut inbox = lock(&self.inbox);
        inbox.check()?;
        let Some((name, size)) = self.sizes.get(layer) else {
            return Err(SyncError::Order(format!("there is no layer {layer}, only {}", self.sizes.len())));
        };
        let (step, round) = (inbox.step, inbox.round);
        if inbox.arrived[layer] {
            return Err(SyncError::Order(format!("layer {name} was submitted twice at step {step}")));
        }
        if got != *size {
            let why = redsync_core::Bad::Length { expected: *size, got };
            return Err(redsync_core::LayerError { layer: name.clone(), step, why }.into());
        }
        // If the thread is gone it has reported why, and `finish` will say it.
        let _ = inbox.gradients.send(Submitted { round, step, layer, source: Box::new(source) });
        inbox.arrived[layer] = true;
        Ok(())
    }
}

/// One rank's synchronizer.
pub struct Synchronizer {
    shared: Arc<Shared>,
    submitter: Submitter,
    outcomes: Receiver<Outcome>,
    arrived: Vec<Arrived>,
    /// For each layer, where its update is.
    place: Vec<Option<Place>>,
    stats: StepStats,
    workspace: Workspace,
    fingerprint: Value,
    threads: Vec<JoinHandle<()>>,
}

impl Synchronizer {
    /// A synchronizer for the layers of a model. All ranks call this; it fails if they do not agree.
    pub fn new(layers: Vec<Layer>, config: Config, comm: Arc<dyn Communicator>) -> Result<Self, SyncError> {
        let config = plan::agree(&layers, config, &*comm)?;
        let choices = plan::choices(&layers, &config)?;
        let compressors = (layers.iter().zip(&choices).enumerate())
            .map(|(number, (layer, choice))| plan::compressor(number, layer, *choice, &config))
            .collect::<Result<Vec<_>, _>>()?;
        let fingerprint = hello::fingerprint(&layers, &choices, &config);
        hello::exchange(&*comm, &fingerprint, &[], &config)?;
        let values = compressors.iter().map(|c| c.as_ref().map(|c| c.config().values)).collect();
        let sizes = Arc::new(layers.iter().map(|layer| (layer.name.clone(), layer.size)).collect::<Vec<_>>());
        let workspace = Workspace::new(config.threads);
        let compressors = Mutex::new(compressors);
        let pools = Pools::default();
        let shared = Arc::new(Shared { comm, layers, choices, config, compressors, values, pools });
        let (gradients, submitted) = channel();
        let (to_receive, in_flight) = channel();
        let (outcome, outcomes) = channel();
        let compress = Compress::new(shared.clone(), to_receive, outcome.clone());
        let receiver = shared.clone();
        let threads = vec![
            spawn("redsync-compress", outcome.clone(), move || compress.run(submitted))?,
            spawn("redsync-receive", outcome.clone(), move || receive(&receiver, in_flight, outcome))?,
        ];
        let layers = sizes.len();
        let inbox = Inbox { step: 0, round: 0, arrived: vec![false; layers], gradients, failure: None };
        Ok(Synchronizer {
            shared,
            submitter: Submitter { inbox: Arc::new(Mutex::new(inbox)), sizes },
            outcomes,
            arrived: Vec::new(),
            place: vec![None; layers],
            stats: StepStats::default(),
            workspace,
            fingerprint,
            threads,
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

    /// Layers of fewer bytes are dense, as the ranks agreed.
    pub fn dense_below(&self) -> usize {
        self.shared.config.dense_below
    }

    /// The step that is under way: the number of steps that were finished.
    pub fn step(&self) -> u64 {
        lock(&self.submitter.inbox).step
    }

    /// What is sent at the step that is under way.
    pub fn stage(&self) -> Stage {
        self.shared.config.warm_up.stage(self.step(), self.shared.config.density)
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

    /// The submitting half, for hooks that run in other threads.
    pub fn submitter(&self) -> Submitter {
        self.submitter.clone()
    }

    /// Waits until the updates of all layers are there; [`Synchronizer::update`] then gives them. The wait ends at the
    /// latest when the receiving thread meets its deadline.
    pub fn finish(&mut self) -> Result<(), SyncError> {
        let step = self.check_complete()?;
        self.recycle();
        let begin = Instant::now();
        while self.place.iter().any(Option::is_none) {
            let gone = || Err(SyncError::Failed("a thread of the synchronizer ended unexpectedly".into()));
            match self.outcomes.recv().unwrap_or_else(|_| gone()) {
                Ok(arrived) => self.keep(arrived),
                Err(error) => {
                    lock(&self.submitter.inbox).failure = Some(error.to_string());
                    self.recycle();
                    return Err(error);
                }
            }
        }
        self.clip_dense();
        (self.stats.step, self.stats.exposed_ms) = (step, begin.elapsed().as_secs_f64() * 1e3);
        lock(&self.submitter.inbox).turn_to(step + 1);
        Ok(())
    }

    fn check_complete(&self) -> Result<u64, SyncError> {
        let inbox = lock(&self.submitter.inbox);
        inbox.check()?;
        match inbox.arrived.iter().position(|arrived| !arrived) {
            None => Ok(inbox.step),
            Some(layer) => {
                let (name, step) = (&self.shared.layers[layer].name, inbox.step);
                Err(SyncError::Order(format!("layer {name} was not submitted at step {step}")))
            }
        }
    }

    /// Gives the buffers of the last step back.
    fn recycle(&mut self) {
        self.place.fill(None);
        let layers = self.shared.layers.len();
        self.stats.layers = vec![Default::default(); layers];
        for arrived in self.arrived.drain(..) {
            match arrived.result {
                Received::Sparse(messages) => {
                    let mut pool = lock(&self.shared.pools.sparse);
                    for (layer, messages) in arrived.group.layers.iter().zip(messages) {
                        pool[*layer] = messages;
                    }
                }
                Received::Dense(values) => lock(&self.shared.pools.dense).push(values),
            }
        }
    }

    fn keep(&mut self, arrived: Arrived) {
        let (group, mut begin) = (self.arrived.len(), 0);
        for (at, layer) in arrived.group.layers.iter().enumerate() {
            let end = begin + self.shared.layers[*layer].size;
            self.place[*layer] = Some(Place { group, at, elements: begin..end });
            self.stats.layers[*layer] = arrived.stats[at];
            begin = end;
        }
        self.arrived.push(arrived);
    }

    /// With everything dense, clipping is that of ordinary training: by the norm of the averaged gradients.
    fn clip_dense(&mut self) {
        let Mode::Rnn { clip: Some(limit) } = self.shared.config.mode else { return };
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
        find_update(&self.place, &self.arrived, layer)
    }

    /// `weights -= learning_rate * update`, plain.
    pub fn apply(&mut self, layer: usize, weights: &mut [f32], learning_rate: f32) -> Result<(), SyncError> {
        lock(&self.submitter.inbox).check()?;
        let begin = Instant::now();
        let refuse = |why| SyncError::Apply { layer: self.shared.layers[layer].name.clone(), why };
        match find_update(&self.place, &self.arrived, layer) {
            None => return Err(SyncError::Order(format!("layer {layer} has no update: finish comes first"))),
            Some(Update::Sparse(messages)) => {
                apply::add(weights, messages, -learning_rate, &mut self.workspace).map_err(refuse)?;
            }
            Some(Update::Dense(gradient)) if gradient.len() != weights.len() => {
                let rank = self.shared.comm.rank();
                return Err(refuse(apply::ApplyError { rank, theirs: gradient.len(), ours: weights.len() }));
            }
            Some(Update::Dense(gradient)) => {
                weights.iter_mut().zip(gradient).for_each(|(w, g)| *w -= learning_rate * g);
            }
        }
        self.stats.layers[layer].apply_ms += begin.elapsed().as_secs_f64() * 1e3;
        Ok(())
    }

    /// What the last finished step cost.
    pub fn stats(&self) -> &StepStats {
        &self.stats
    }

    /// The norm of what a compressed layer has accumulated and not sent; None for a dense layer. One pass over it.
    pub fn residual_norm(&self, layer: usize) -> Option<f64> {
        let compressors = lock(&self.shared.compressors);
        let v = compressors.get(layer)?.as_ref()?.residual().v();
        Some(v.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt())
    }

    /// After a dense warm-up: a compressed layer carries on with its share of the optimizer's momentum buffer. Returns false
    /// if the layer is dense or the buffer does not fit.
    pub fn adopt_momentum(&self, layer: usize, buffer: &[f32]) -> bool {
        let mut compressors = lock(&self.shared.compressors);
        let compressor = compressors.get_mut(layer).and_then(Option::as_mut);
        compressor.is_some_and(|c| c.residual_mut().adopt_momentum(buffer, self.shared.comm.size()))
    }

    /// Compares the weights of all ranks, layer by layer. Returns their common hash.
    pub fn check_replicas(&self, weights: &[&[f32]]) -> Result<u64, SyncError> {
        lock(&self.submitter.inbox).check()?;
        let step = self.step();
        let hashes = replica::layer_hashes(weights);
        let bytes = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        let pending = self.shared.comm.allgather(Tag { step, op: u32::MAX - 1 }, bytes);
        let failed = |source| SyncError::Exchange { layers: "replica hashes".into(), source };
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

    /// Writes this rank's state, with further tensors of the caller, into a directory: atomic, so that a crash leaves the
    /// old file whole. To be called between `finish` and the next `submit`, with the hash of the weights.
    pub fn save(
        &self,
        dir: &Path,
        replica_hash: u64,
        extra: Vec<(String, Vec<f32>)>,
    ) -> Result<(), SyncError> {
        lock(&self.submitter.inbox).check_between()?;
        let (rank, ranks) = self.rank();
        let compressors = lock(&self.shared.compressors);
        let layers = compressors.iter().flatten().map(|c| LayerState {
            name: c.name().into(),
            size: c.residual().len(),
            u: c.residual().u().to_vec(),
            v: c.residual().v().to_vec(),
            memory: c.memory(),
        });
        let saved = Saved {
            step: self.step(),
            rank,
            ranks,
            fingerprint: self.fingerprint.to_string(),
            replica_hash,
            layers: layers.collect(),
            extra,
        };
        Ok(saved.write(&dir.join(Saved::file_name(rank)))?)
    }

    /// Continues from the files in a directory, bit by bit if the number of ranks is the same; another number keeps the
    /// sums over the ranks. Returns the caller's tensors. All ranks call this; after an error nothing has changed.
    pub fn load(&mut self, dir: &Path) -> Result<Vec<(String, Vec<f32>)>, SyncError> {
        self.load_if(dir, None)
    }

    /// [`Synchronizer::load`], but only what was saved beside weights with this hash.
    pub fn load_for(&mut self, dir: &Path, replica_hash: u64) -> Result<Vec<(String, Vec<f32>)>, SyncError> {
        self.load_if(dir, Some(replica_hash))
    }

    fn load_if(&mut self, dir: &Path, hash: Option<u64>) -> Result<Vec<(String, Vec<f32>)>, SyncError> {
        lock(&self.submitter.inbox).check_between()?;
        let saved = self.find(dir)?;
        let refuse =
            |what: String| SyncError::Order(format!("the checkpoint in {} is {what}", dir.display()));
        if hash.is_some_and(|hash| hash != saved.replica_hash) {
            return Err(refuse("of other weights".into()));
        }
        if self.fingerprint != saved.fingerprint.parse::<Value>().unwrap_or(Value::Null) {
            return Err(refuse("of another model or configuration".into()));
        }
        let mut compressors = lock(&self.shared.compressors);
        let fits = |(c, layer): (&Compressor, &LayerState)| {
            (c.name(), c.residual().len(), c.residual().u().len())
                == (&layer.name, layer.v.len(), layer.u.len())
        };
        let count = compressors.iter().flatten().count();
        if count != saved.layers.len() || !compressors.iter().flatten().zip(&saved.layers).all(fits) {
            return Err(refuse("of other layers".into()));
        }
        let (step, hash) = (json!(saved.step), json!(saved.replica_hash));
        let agree = [("the step of the checkpoint", step), ("its replica hash", hash)];
        hello::exchange(&*self.shared.comm, &self.fingerprint, &agree, &self.shared.config)?;
        for (compressor, layer) in compressors.iter_mut().flatten().zip(&saved.layers) {
            if !compressor.residual_mut().restore(&layer.u, &layer.v) {
                return Err(refuse(format!("not finite in layer {}", layer.name)));
            }
            compressor.set_memory(layer.memory);
        }
        drop(compressors);
        self.recycle();
        lock(&self.submitter.inbox).turn_to(saved.step);
        Ok(saved.extra)
    }

    /// This rank's part of a checkpoint: its own file if every rank has one of the same run, else its share of all files.
    fn find(&self, dir: &Path) -> Result<Saved, SyncError> {
        let (rank, ranks) = self.rank();
        let own = Saved::read(&dir.join(Saved::file_name(rank))).ok().filter(|saved| saved.rank == rank);
        let what = own.as_ref().map(|saved| json!([saved.ranks, saved.step, saved.replica_hash]));
        let all = hello::gather(&*self.shared.comm, &json!([what]), &self.shared.config)?;
        let same = all.iter().all(|theirs| *theirs == all[0]) && all[0][0][0] == json!(ranks);
        match own {
            Some(own) if same => Ok(own),
            _ => Ok(Saved::reshare(Saved::read_all(dir)?, rank, ranks)?),
        }
    }
}

/// Where the update of a layer is.
#[derive(Clone)]
struct Place {
    group: usize,
    /// Its place among the layers of the group.
    at: usize,
    /// Its elements in the buffer of a dense group.
    elements: Range<usize>,
}

fn find_update<'a>(place: &[Option<Place>], arrived: &'a [Arrived], layer: usize) -> Option<Update<'a>> {
    let Place { group, at, elements } = place.get(layer)?.clone()?;
    match &arrived.get(group)?.result {
        Received::Sparse(messages) => Some(Update::Sparse(&messages[at])),
        Received::Dense(values) => Some(Update::Dense(&values[elements])),
    }
}

/// The norm of all buffers together, summed in their order.
pub(crate) fn norm<'a>(buffers: impl IntoIterator<Item = &'a [f32]>) -> f64 {
    buffers.into_iter().flatten().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

impl Received {
    fn dense(&self) -> Option<&[f32]> {
        match self {
            Received::Dense(values) => Some(values),
            Received::Sparse(_) => None,
        }
    }
}

impl Drop for Synchronizer {
    /// Ends the threads, which hold the communicator: whoever drops the last handle of that finds nothing under way. The
    /// wait is bounded by the deadline of an exchange.
    fn drop(&mut self) {
        // Submitters may live on; what they submit from now on goes nowhere.
        lock(&self.submitter.inbox).gradients = channel().0;
        for thread in self.threads.drain(..) {
            // A panic was reported by the closed channel.
            let _ = thread.join();
        }
    }
}

/// A thread whose panic, too, is an outcome.
fn spawn(
    name: &'static str,
    outcomes: Sender<Outcome>,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, SyncError> {
    let guarded = move || {
        if std::panic::catch_unwind(AssertUnwindSafe(run)).is_err() {
            let _ = outcomes.send(Err(SyncError::Failed(format!("the thread {name} panicked"))));
        }
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(guarded);
    thread.map_err(|error| SyncError::Failed(format!("cannot start a thread: {error}")))
}

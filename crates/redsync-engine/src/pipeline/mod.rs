//! The two threads between `submit` and `finish`.
//! Send: takes gradients in any order, compresses each at once, and starts the exchange of a group when all its layers and all
//! groups before it are there: the order of exchanges is the same on every rank, whatever the order of gradients.
//! Receive: waits for the exchanges in that order, with the deadline, and writes what came where it is wanted.
//! What must hold: the first error, from wherever, reaches `finish` of this rank and, with its reason, every other rank.

mod compress;
pub(crate) mod dense;
mod receive;
mod send;

use crate::config::{Choice, Config};
use crate::error::SyncError;
use crate::exchange::{Exchange, Flight};
use crate::hosts::Hosts;
use crate::layer::Layer;
use crate::layers::Layers;
use crate::plan::Group;
use crate::second::{Part, Telling, Told};
use crate::source::Source;
use crate::stats::LayerStats;
use crate::target::{Target, Update};
use redsync_comm::{Communicator, Pending, Tag};
use redsync_core::{Sparse, Workspace};
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// What all threads of a synchronizer know.
pub(crate) struct Shared {
    pub comm: Arc<dyn Communicator>,
    /// The ranks among which messages are exchanged: all of them, or with hosts one of each.
    pub among: Arc<dyn Communicator>,
    pub hosts: Option<Hosts>,
    pub layers: Vec<Layer>,
    /// What this rank compresses of each: the layer, or with hosts its part of it.
    pub parts: Vec<Layer>,
    pub choices: Vec<Choice>,
    pub config: Config,
    /// Fingerprint of what the ranks agreed on.
    pub plan: u64,
    pub compressed: Mutex<Layers>,
    pub exchange: Box<dyn Exchange>,
    pub pools: Pools,
}

impl Shared {
    /// The layers of a group with their sizes.
    pub fn sizes(&self, group: &Group) -> Vec<(usize, usize)> {
        group.layers.iter().map(|layer| (*layer, self.layers[*layer].size)).collect()
    }
}

/// Buffers that came back, to be filled again.
#[derive(Default)]
pub(crate) struct Pools {
    pub frames: Mutex<Vec<Vec<u8>>>,
    pub dense: Mutex<Vec<Vec<f32>>>,
    /// What travelled inside a host.
    pub letters: Mutex<Vec<Vec<u8>>>,
    /// One place per layer.
    pub sparse: Mutex<Vec<Vec<Sparse>>>,
}

/// A panic of another thread is reported by its channel; what it guarded is still sound enough to be dropped.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// A gradient on its way, or that there is none.
pub(crate) struct Submitted {
    /// Counts the steps that were tried; unlike the step it never goes back when a checkpoint is loaded.
    pub round: u64,
    pub step: u64,
    /// By what the loss was multiplied. A gradient that is not finite is then no error: the step will not count.
    pub loss_scale: Option<f32>,
    pub layer: usize,
    pub source: Option<Box<dyn Source>>,
    /// What the update replaces as soon as it is there.
    pub target: Option<Box<dyn Target>>,
}

/// An exchange that was started.
pub(crate) struct InFlight {
    pub step: u64,
    pub group: Group,
    /// Whether nothing at this step is compressed.
    pub all_dense: bool,
    pub loss_scale: Option<f32>,
    pub started: Instant,
    pub journey: Journey,
    pub stats: Vec<LayerStats>,
    /// One for each layer of the group.
    pub targets: Vec<Option<Box<dyn Target>>>,
    /// Whether it is the last of its step.
    pub is_last: bool,
}

pub(crate) enum Journey {
    Sparse(Box<dyn Flight>),
    /// What each rank of this host gets, to be summed there before anything is compressed.
    Inside(Tag, Vec<Vec<u8>>),
    Dense(Pending<Vec<f32>>),
    /// A dense sum that the receiving thread starts.
    DenseLater(Tag, Vec<f32>),
    /// It was taken out.
    Gone,
}

/// What came of one group.
pub(crate) struct Arrived {
    pub group: Group,
    pub result: Received,
    pub stats: Vec<LayerStats>,
    /// From when to when it was exchanged.
    pub time: (Instant, Instant),
    /// By what targets are scaled: gradients of a scaled loss are replaced by scaled ones.
    pub scale: f32,
    /// Targets that were not written yet.
    pub targets: Vec<Option<Box<dyn Target>>>,
}

pub(crate) enum Received {
    /// For each layer of the group, vectors whose sum is the update.
    Sparse(Vec<Vec<Sparse>>),
    /// The averaged gradients of the group's layers, one after the other.
    Dense(Vec<f32>),
    /// Some rank has a gradient that is not finite, of a scaled loss.
    Void,
}

/// What the receiving thread is told to wait for.
pub(crate) enum Expected {
    Group(InFlight),
    Moments(Telling),
    /// The receiving thread compresses, so it has what is to be told.
    MomentsLater {
        step: u64,
        parts: Vec<Part>,
        void: bool,
    },
}

/// What it has to tell.
pub(crate) enum Come {
    Group(Arrived),
    Moments(Told),
}

pub(crate) type Outcome = Result<Come, SyncError>;

impl Arrived {
    /// The update of a layer of the group, given its place in it.
    pub fn update(&self, shared: &Shared, at: usize) -> Option<Update<'_>> {
        match &self.result {
            Received::Sparse(messages) => Some(Update::Sparse(&messages[at])),
            Received::Dense(values) => {
                let sizes = self.group.layers.iter().map(|layer| shared.layers[*layer].size);
                let begin: usize = sizes.take(at).sum();
                Some(Update::Dense(&values[begin..begin + shared.layers[self.group.layers[at]].size]))
            }
            Received::Void => None,
        }
    }

    /// Writes the updates to their targets, each once.
    pub fn deliver(&mut self, shared: &Shared, workspace: &mut Workspace) -> Result<(), SyncError> {
        for (at, mut target) in std::mem::take(&mut self.targets).into_iter().enumerate() {
            let (Some(target), Some(update)) = (&mut target, self.update(shared, at)) else { continue };
            let begin = Instant::now();
            let name = &shared.layers[self.group.layers[at]].name;
            let refuse = |why| SyncError::Apply { layer: name.clone(), why };
            target.fill(update, self.scale, workspace).map_err(refuse)?;
            self.stats[at].apply_ms += ms(begin);
        }
        Ok(())
    }
}

/// The threads of a synchronizer, and the ends of their channels.
pub(crate) struct Threads {
    /// What came together is sent together.
    pub gradients: Sender<Vec<Submitted>>,
    pub outcomes: Receiver<Outcome>,
    pub handles: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts both threads.
    pub fn start(shared: &Arc<Shared>) -> Result<Self, SyncError> {
        let (gradients, submitted) = channel();
        let (to_receive, in_flight) = channel();
        let (outcome, outcomes) = channel();
        let send = send::Send::new(shared.clone(), to_receive, outcome.clone());
        let receiver = (shared.clone(), outcome.clone());
        let run = move || receive::run(&receiver.0, in_flight, receiver.1);
        let handles = vec![
            spawn("redsync-send", shared, outcome.clone(), move || send.run(submitted))?,
            spawn("redsync-receive", shared, outcome, run)?,
        ];
        Ok(Threads { gradients, outcomes, handles })
    }
}

/// A thread whose panic, too, is an outcome, on every rank.
fn spawn(
    name: &'static str,
    shared: &Arc<Shared>,
    outcomes: Sender<Outcome>,
    run: impl FnOnce() + std::marker::Send + 'static,
) -> Result<JoinHandle<()>, SyncError> {
    let comm = shared.comm.clone();
    let guarded = move || {
        if std::panic::catch_unwind(AssertUnwindSafe(run)).is_err() {
            let reason = format!("the thread {name} panicked");
            comm.give_up(&reason);
            let _ = outcomes.send(Err(SyncError::Failed(reason)));
        }
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(guarded);
    thread.map_err(|error| SyncError::Failed(format!("cannot start a thread: {error}")))
}

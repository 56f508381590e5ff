//! What the tests share: ranks as threads, a small model with its optimizer, gradients that differ per rank, and dense
//! training in f64.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use redsync_comm::{Communicator, Gathered, Pending, Tag, local};
use redsync_core::{Adam, Momentum};
use redsync_engine::{
    Config, Exchange, Kind, Layer, Method, Preset, Rest, SyncError, Synchronizer, Update, WarmUp,
};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub const LR: f32 = 0.1;
/// A run that takes longer hangs: it is several deadlines.
const PATIENCE: Duration = Duration::from_secs(40);

pub type Comm = Arc<dyn Communicator>;

/// Runs every rank in a thread of its own and returns what they return, in rank order.
pub fn run<T: Send + 'static>(
    ranks: usize,
    rank: impl Fn(usize, Comm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let (rank, until) = (Arc::new(rank), Instant::now() + PATIENCE);
    let spawn = |comm: local::Local| {
        let (rank, (done, result)) = (rank.clone(), channel());
        let thread = std::thread::spawn(move || drop(done.send(rank(comm.rank(), Arc::new(comm)))));
        (thread, result)
    };
    let threads: Vec<_> = local::group(ranks).into_iter().map(spawn).collect();
    let mut results = Vec::new();
    for (rank, (thread, result)) in threads.into_iter().enumerate() {
        match result.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(result) => results.push(result),
            Err(RecvTimeoutError::Timeout) => panic!("rank {rank} hangs"),
            Err(RecvTimeoutError::Disconnected) => resume_unwind(thread.join().unwrap_err()),
        }
    }
    results
}

/// Two compressed layers, a dense one between them, and an output, which is never quantized.
pub fn layers() -> Vec<Layer> {
    vec![
        Layer::new("first", 700, Kind::Weight),
        Layer::new("norm", 9, Kind::BiasOrNorm),
        Layer::new("middle", 300, Kind::Weight),
        Layer::new("out", 200, Kind::Output),
    ]
}

/// Everything that can be compressed is, however small, and the rest and all values are exact; a hang ends soon.
pub fn config(method: Method, density: f64) -> Config {
    let deadline = Duration::from_secs(8);
    Config {
        method,
        density,
        at_least: 0,
        dense_below: Some(0),
        rest: Rest::F32,
        bf16: false,
        deadline,
        ..Config::default()
    }
}

/// Density 1 and no masking: what must be the same as dense training.
pub fn everything(method: Method, momentum: Momentum) -> Config {
    Config { momentum, masking: false, ..config(method, 1.0) }
}

/// Every combination of method, preset, clipping and warm-up, and with Adam the methods with every exchange.
pub fn all_configs() -> Vec<Config> {
    let mut all = Vec::new();
    for method in Method::ALL {
        for (preset, clip) in [
            (Preset::Carried, None),
            (Preset::Carried, Some(2.0)),
            (Preset::Paper { recurrent: false }, None),
            (Preset::Paper { recurrent: true }, Some(2.0)),
        ] {
            for warm_up in [WarmUp::None, WarmUp::Dense(7), WarmUp::Ramp(6)] {
                let momentum = Momentum::Nesterov(0.9);
                for (rest, bf16) in [(Rest::TwoBit, true), (Rest::EightBit, true), (Rest::F32, false)] {
                    for exchange in Exchange::ALL.map(Some) {
                        let config = config(method, 0.02);
                        all.push(Config { preset, clip, warm_up, momentum, rest, bf16, exchange, ..config });
                    }
                }
            }
        }
        let momentum = Momentum::Adam(Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 });
        for clip in [None, Some(2.0)] {
            for warm_up in [WarmUp::None, WarmUp::Dense(7)] {
                for exchange in Exchange::ALL.map(Some) {
                    // Second moments are told in parts around where runs of these are interrupted.
                    let (rest, share_moments) = (Rest::TwoBit, Some(4));
                    let config = config(method, 0.02);
                    all.push(Config { momentum, clip, warm_up, exchange, rest, share_moments, ..config });
                }
            }
        }
    }
    all
}

/// Numbers that depend on nothing but the seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The numbers below `n` in some order.
    pub fn order(&mut self, n: usize) -> Vec<usize> {
        let mut keys: Vec<_> = (0..n).map(|i| (self.next(), i)).collect();
        keys.sort_unstable();
        keys.into_iter().map(|(_, i)| i).collect()
    }
}

/// The gradient of a rank at a step: small and large values of both signs.
pub fn gradient(rank: usize, step: u64, layer: usize, size: usize) -> Vec<f32> {
    let mut random = Random((rank as u64) << 48 | step << 16 | layer as u64);
    let mut value = || {
        let x = (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        x * x * x
    };
    (0..size).map(|_| value()).collect()
}

pub fn initial_weights(layers: &[Layer]) -> Vec<Vec<f32>> {
    layers.iter().enumerate().map(|(i, layer)| gradient(999, 0, i, layer.size)).collect()
}

/// One rank: its weights, an optimizer that gives momentum to dense updates only, and the synchronizer.
pub struct Replica {
    pub sync: Synchronizer,
    pub weights: Vec<Vec<f32>>,
    /// The optimizer's momentum, as PyTorch keeps it.
    pub buffers: Vec<Vec<f32>>,
    momentum: Momentum,
}

impl Replica {
    pub fn new(config: Config, comm: Comm) -> Result<Self, SyncError> {
        Self::of(layers(), config, comm)
    }

    pub fn of(layers: Vec<Layer>, config: Config, comm: Comm) -> Result<Self, SyncError> {
        let (rank, ranks) = (comm.rank(), comm.size());
        // Two ranks on each host, where that is possible and nothing else was said.
        let host = config.host.unwrap_or((rank / if ranks % 2 == 0 { 2 } else { 1 }).to_string());
        let config = Config { host: Some(host), ..config };
        let weights = initial_weights(&layers);
        let buffers = layers.iter().map(|layer| vec![0.0; layer.size]).collect();
        let momentum = config.momentum;
        Ok(Replica { sync: Synchronizer::new(layers, config, comm)?, weights, buffers, momentum })
    }

    pub fn sizes(&self) -> Vec<usize> {
        self.sync.layers().iter().map(|layer| layer.size).collect()
    }

    pub fn gradients(&self) -> Vec<Vec<f32>> {
        let (rank, step) = (self.sync.rank().0, self.sync.step());
        self.sizes().into_iter().enumerate().map(|(i, size)| gradient(rank, step, i, size)).collect()
    }

    /// A whole step with the gradients of this rank, the last layer first.
    pub fn step(&mut self) -> Result<(), SyncError> {
        self.step_in((0..self.weights.len()).rev().collect())
    }

    /// A whole step whose gradients come in an order.
    pub fn step_in(&mut self, order: Vec<usize>) -> Result<(), SyncError> {
        let mut gradients = self.gradients();
        for layer in order {
            self.sync.submit(layer, std::mem::take(&mut gradients[layer]))?;
        }
        self.sync.finish()?;
        self.apply()
    }

    pub fn apply(&mut self) -> Result<(), SyncError> {
        let m = self.momentum.coefficient();
        for layer in 0..self.weights.len() {
            if let Some(Update::Dense(g)) = self.sync.update(layer) {
                for ((w, b), g) in self.weights[layer].iter_mut().zip(&mut self.buffers[layer]).zip(g) {
                    *b = m * *b + g;
                    let nesterov = matches!(self.momentum, Momentum::Nesterov(_));
                    *w -= LR * if nesterov { g + m * *b } else { *b };
                }
            } else {
                self.sync.apply(layer, &mut self.weights[layer], LR)?;
            }
        }
        Ok(())
    }

    pub fn check(&self) -> Result<u64, SyncError> {
        let weights: Vec<&[f32]> = self.weights.iter().map(Vec::as_slice).collect();
        self.sync.check_replicas(&weights)
    }

    /// The update of every layer, added up over the ranks.
    pub fn updates(&self) -> Vec<Vec<f64>> {
        let sum = |(layer, size)| {
            let mut sum = vec![0f64; size];
            match self.sync.update(layer).unwrap() {
                Update::Dense(g) => sum.iter_mut().zip(g).for_each(|(sum, g)| *sum = f64::from(*g)),
                Update::Sparse(messages) => messages.iter().for_each(|message| {
                    message.iter().for_each(|(index, value)| sum[index as usize] += f64::from(value));
                }),
            }
            sum
        };
        self.sizes().into_iter().enumerate().map(sum).collect()
    }
}

/// Dense SGD in f64 with momentum as PyTorch defines it: the weights after every step.
pub fn dense_sgd(layers: &[Layer], ranks: usize, steps: u64, momentum: Momentum) -> Vec<Vec<Vec<f64>>> {
    let (m, lr) = (f64::from(momentum.coefficient()), f64::from(LR));
    let mut weights: Vec<Vec<f64>> =
        initial_weights(layers).iter().map(|w| w.iter().map(|x| f64::from(*x)).collect()).collect();
    let mut buffers: Vec<Vec<f64>> = layers.iter().map(|layer| vec![0.0; layer.size]).collect();
    let mut trajectory = Vec::new();
    for step in 0..steps {
        for (i, layer) in layers.iter().enumerate() {
            let all: Vec<_> = (0..ranks).map(|rank| gradient(rank, step, i, layer.size)).collect();
            for (at, (w, b)) in weights[i].iter_mut().zip(&mut buffers[i]).enumerate() {
                let g = all.iter().map(|g| f64::from(g[at])).sum::<f64>() / ranks as f64;
                *b = m * *b + g;
                *w -= lr * if matches!(momentum, Momentum::Nesterov(_)) { g + m * *b } else { *b };
            }
        }
        trajectory.push(weights.clone());
    }
    trajectory
}

/// Equal up to rounding.
pub fn assert_close(got: &[Vec<f32>], expected: &[Vec<f64>], what: &str) {
    for (layer, (got, expected)) in got.iter().zip(expected).enumerate() {
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let off = (f64::from(*got) - expected).abs();
            assert!(
                off <= 1e-4 * (1.0 + expected.abs()),
                "{what}: layer {layer} element {i}: {got}, expected {expected}"
            );
        }
    }
}

/// Weights as bits, in which -0.0 is not 0.0.
pub fn bits(weights: &[Vec<f32>]) -> Vec<Vec<u32>> {
    weights.iter().map(|w| w.iter().map(|x| x.to_bits()).collect()).collect()
}

/// A communicator whose messages to all are changed on the way.
pub struct Damaging<F> {
    pub comm: Comm,
    /// Gets the tag and the bytes of an allgather, or of each message of an all-to-all.
    pub damage: F,
}

impl<F: Fn(Tag, &mut Vec<u8>) + Send + Sync> Communicator for Damaging<F> {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.size()
    }

    fn name(&self) -> &'static str {
        self.comm.name()
    }

    fn allgather(&self, tag: Tag, mut message: Vec<u8>) -> Pending<Gathered> {
        (self.damage)(tag, &mut message);
        self.comm.allgather(tag, message)
    }

    fn alltoall(&self, tag: Tag, mut messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        messages.iter_mut().for_each(|message| (self.damage)(tag, message));
        self.comm.alltoall(tag, messages)
    }

    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>> {
        self.comm.allreduce(tag, values)
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.comm.barrier(tag)
    }

    fn give_up(&self, reason: &str) {
        self.comm.give_up(reason);
    }
}

/// A communicator that flips the last bit of each frame of a step.
pub fn damaged_at(step: u64, comm: Comm) -> Comm {
    let damage = move |tag: Tag, message: &mut Vec<u8>| {
        if tag.step == step
            && tag.op < 1000
            && let Some(last) = message.last_mut()
        {
            *last ^= 1;
        }
    };
    Arc::new(Damaging { comm, damage })
}

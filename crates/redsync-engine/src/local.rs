//! Local steps: every rank trains by itself for some steps, with any optimizer, and then the ranks agree on common weights.
//! Comes in: the weights of this rank after its own steps. Goes out: the weights that all ranks go on from. What must hold: the common
//! weights are equal on all ranks, bit by bit, and everybody continues from exactly them.
//!
//! ```text
//! W  weights that all ranks had after the last exchange      v  what this rank has not yet told of its own way
//! after H steps of its own, at weights w:                    v = keep * v + (W - w) / N
//! the largest of v are sent, and taken out of v:             W = W - rate * (sum over the ranks of what was sent),  w = W
//! ```
//!
//! It is a synchronizer whose gradients are differences of weights, so selection, codes, warm-up, errors and state are its own. With
//! [`Method::Sgd`](crate::Method::Sgd) it is plain averaging of weights.

use crate::error::SyncError;
use crate::synchronizer::Synchronizer;

/// The local steps of one rank.
///
/// ```
/// use redsync_comm::local;
/// use redsync_engine::{Config, Kind, Layer, Local, Method, Synchronizer};
/// use std::sync::Arc;
///
/// let run = |(rank, comm)| {
///     std::thread::spawn(move || {
///         let layers = vec![Layer::new("weight", 2_000, Kind::Weight)];
///         let config = Config { method: Method::RgcTwoBit, density: 1.0 / 64.0, keep: 0.95, ..Config::default() };
///         let mut sync = Synchronizer::new(layers, config, Arc::new(comm))?;
///         let mut weights = vec![0f32; 2_000];
///         let mut local = Local::new(8, 1.0, [&weights[..]])?;
///         for step in 0..24 {
///             weights[rank * 100 + step] += 1.0; // a step of an optimizer of one's own
///             if local.step() {
///                 local.agree(&mut sync, &mut [&mut weights])?;
///             }
///         }
///         assert_eq!(sync.step(), 3); // exchanges
///         sync.check_replicas(&[&weights])
///     })
/// };
/// let ranks: Vec<_> = local::group(2).into_iter().enumerate().map(run).collect();
/// let hashes: Vec<u64> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(hashes[0], hashes[1]);
/// # Ok::<(), redsync_engine::SyncError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Local {
    every: u64,
    rate: f32,
    shared: Vec<Vec<f32>>,
    since: u64,
}

impl Local {
    /// Exchanges after every so many steps; what the ranks found is applied at a rate, usually 1. The weights, one slice for each layer
    /// of the synchronizer, are equal on all ranks.
    pub fn new<'a>(
        every: u64,
        rate: f32,
        weights: impl IntoIterator<Item = &'a [f32]>,
    ) -> Result<Self, SyncError> {
        if every == 0 {
            return Err(SyncError::Layers("every must be a whole number of steps from 1 on, got 0".into()));
        }
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(SyncError::Layers(format!("what ranks found cannot be applied at the rate {rate}")));
        }
        let shared = weights.into_iter().map(<[f32]>::to_vec).collect();
        Ok(Local { every, rate, shared, since: 0 })
    }

    /// One step was made. Says whether it is time to [`Local::agree`]; that may also be done earlier, by all ranks.
    pub fn step(&mut self) -> bool {
        self.since += 1;
        self.since >= self.every
    }

    /// Steps since the last exchange.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// The weights on which the ranks agreed last, one slice for each layer.
    pub fn shared(&self) -> Vec<&[f32]> {
        self.shared.iter().map(|layer| &layer[..]).collect()
    }

    /// Continues between two exchanges, as read from a checkpoint: the weights on which the ranks agreed last, and the steps since. After
    /// an error nothing has changed.
    pub fn restore(&mut self, shared: Vec<Vec<f32>>, since: u64) -> Result<(), SyncError> {
        let lengths = |layers: &[Vec<f32>]| layers.iter().map(Vec::len).collect::<Vec<_>>();
        if lengths(&shared) != lengths(&self.shared) || since >= self.every {
            return Err(SyncError::Layers("these are not the common weights of this model".into()));
        }
        (self.shared, self.since) = (shared, since);
        Ok(())
    }

    /// Exchanges what this rank found, and sets its weights to those on which all ranks agree. All ranks call it after the same number
    /// of steps; after none there is nothing to agree on.
    pub fn agree(&mut self, sync: &mut Synchronizer, weights: &mut [&mut [f32]]) -> Result<(), SyncError> {
        let fits = |(ours, theirs): (&Vec<f32>, &&mut [f32])| ours.len() == theirs.len();
        if weights.len() != self.shared.len() || !self.shared.iter().zip(&*weights).all(fits) {
            return Err(SyncError::Order("these are not the weights with which local steps began".into()));
        }
        if self.since == 0 {
            return Ok(());
        }
        // As a backward pass would yield them: frames and buckets are cut in this order.
        for (layer, (shared, own)) in self.shared.iter().zip(&*weights).enumerate().rev() {
            let found: Vec<f32> = shared.iter().zip(&**own).map(|(shared, own)| shared - own).collect();
            sync.submit(layer, found)?;
        }
        sync.finish()?;
        sync.stands_for(std::mem::take(&mut self.since));
        for (layer, (shared, own)) in self.shared.iter_mut().zip(weights).enumerate() {
            sync.apply(layer, shared, self.rate)?;
            own.copy_from_slice(shared);
        }
        Ok(())
    }
}

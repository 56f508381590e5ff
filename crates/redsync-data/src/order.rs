//! Which rank sees what, when: the sizes of a run come in, indices of samples or windows of text go out.
//! What must hold: every rank derives the same order from the same numbers without talking to others, and how a global
//! batch is split among ranks does not change what is in it.

use crate::OrderError;
use crate::random::{self, Purpose, Stream};

/// The order of samples: a new permutation in each epoch, cut into global batches, each cut among the ranks.
///
/// One rank with a batch of 4B and four ranks with B see the same global batches. The samples of an epoch that do not
/// fill a global batch are left out; in the next epoch these are others.
#[derive(Clone, Debug)]
pub struct Epochs {
    len: u32,
    ranks: usize,
    batch: usize,
    seed: u64,
    epoch: Option<u64>,
    permutation: Vec<u32>,
}

impl Epochs {
    /// The order of `len` samples for `ranks` ranks that take `batch` samples each at every step.
    pub fn new(len: usize, ranks: usize, batch: usize, seed: u64) -> Result<Self, OrderError> {
        at_least_one(&[("ranks", ranks), ("samples in a batch", batch)])?;
        let needed = ranks as u128 * batch as u128;
        if needed > len as u128 {
            return Err(OrderError::FewSamples { len, ranks, batch, needed });
        }
        let len = u32::try_from(len).map_err(|_| OrderError::ManySamples { len })?;
        Ok(Epochs { len, ranks, batch, seed, epoch: None, permutation: Vec::new() })
    }

    /// The number of steps in an epoch, at least 1.
    pub fn steps_per_epoch(&self) -> usize {
        self.len as usize / (self.ranks * self.batch)
    }

    /// The samples of a rank at a step of an epoch.
    ///
    /// The permutation of the last epoch asked for is kept, so ask in order.
    ///
    /// # Panics
    ///
    /// If there is no such step or rank.
    pub fn indices(&mut self, epoch: u64, step: usize, rank: usize) -> &[u32] {
        assert!(step < self.steps_per_epoch(), "step {step} of {}", self.steps_per_epoch());
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        if self.epoch != Some(epoch) {
            let mut stream = Stream::new(Purpose::Epoch, self.seed, epoch);
            random::permute(self.len, &mut stream, &mut self.permutation);
            self.epoch = Some(epoch);
        }
        let start = (step * self.ranks + rank) * self.batch;
        &self.permutation[start..start + self.batch]
    }

    /// The seed of an epoch for [`ImageSet::train_batch`](crate::ImageSet::train_batch).
    pub fn epoch_seed(&self, epoch: u64) -> u64 {
        random::derive(Purpose::EpochSeed, self.seed, epoch)
    }
}

/// A text cut into ranks * batch streams of equal length that run side by side; a rank owns `batch` neighbouring ones.
///
/// Each step shows the next window of `bptt` tokens of each stream, so that a recurrent network can carry its state from
/// step to step. Left out are the tokens behind the last stream and, of each stream, what does not fill a window.
#[derive(Clone, Copy, Debug)]
pub struct Streams<'a> {
    tokens: &'a [u32],
    ranks: usize,
    batch: usize,
    bptt: usize,
    stream_len: usize,
}

impl<'a> Streams<'a> {
    /// Cuts a text. It costs nothing: the text is only borrowed.
    pub fn new(tokens: &'a [u32], ranks: usize, batch: usize, bptt: usize) -> Result<Self, OrderError> {
        at_least_one(&[("ranks", ranks), ("streams in a batch", batch), ("tokens in a window", bptt)])?;
        let (len, streams) = (tokens.len(), ranks as u128 * batch as u128);
        // One token more than a window: the last target.
        let needed = streams.saturating_mul(bptt as u128 + 1);
        if needed > len as u128 {
            return Err(OrderError::FewTokens { len, ranks, batch, bptt, needed });
        }
        Ok(Streams { tokens, ranks, batch, bptt, stream_len: len / (ranks * batch) })
    }

    /// The number of windows in each stream, at least 1.
    pub fn steps_per_epoch(&self) -> usize {
        (self.stream_len - 1) / self.bptt
    }

    /// Inputs and targets of a rank at a step. Both are time-major: token t of stream b is element `t * batch + b`, and
    /// the target of a token is the one that follows it in its stream.
    ///
    /// # Panics
    ///
    /// If there is no such step or rank.
    pub fn window(&self, step: usize, rank: usize) -> (Vec<u32>, Vec<u32>) {
        assert!(step < self.steps_per_epoch(), "step {step} of {}", self.steps_per_epoch());
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let from = |shift: usize| {
            let times = step * self.bptt + shift..(step + 1) * self.bptt + shift;
            let at = |time| self.streams_of(rank).map(move |start| self.tokens[start + time]);
            times.flat_map(at).collect()
        };
        (from(0), from(1))
    }

    /// Where each stream of a rank begins.
    fn streams_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (len, first) = (self.stream_len, rank * self.batch);
        (first..first + self.batch).map(move |row| row * len)
    }
}

/// A text cut into windows of `bptt` tokens, one behind the other, that are shown in a new random order in each epoch: for networks that
/// carry nothing from window to window. Neighbouring windows are of one subject, so in the order of the text the gradients of many
/// steps would point the same way.
///
/// As with [`Epochs`], a global batch has the same windows however many ranks share it. Left out are the tokens behind the last window,
/// and the windows of an epoch that do not fill a global batch.
#[derive(Clone, Debug)]
pub struct Windows<'a> {
    tokens: &'a [u32],
    bptt: usize,
    epochs: Epochs,
}

impl<'a> Windows<'a> {
    /// Cuts a text. It is only borrowed.
    pub fn new(
        tokens: &'a [u32],
        ranks: usize,
        batch: usize,
        bptt: usize,
        seed: u64,
    ) -> Result<Self, OrderError> {
        at_least_one(&[("ranks", ranks), ("windows in a batch", batch), ("tokens in a window", bptt)])?;
        let len = tokens.len();
        // One token more than the windows: the last target.
        let needed =
            (ranks as u128).saturating_mul(batch as u128).saturating_mul(bptt as u128).saturating_add(1);
        if needed > len as u128 {
            return Err(OrderError::FewTokens { len, ranks, batch, bptt, needed });
        }
        Ok(Windows { tokens, bptt, epochs: Epochs::new((len - 1) / bptt, ranks, batch, seed)? })
    }

    /// The number of steps in an epoch, at least 1.
    pub fn steps_per_epoch(&self) -> usize {
        self.epochs.steps_per_epoch()
    }

    /// Inputs and targets of a rank at a step of an epoch, time-major as those of [`Streams::window`].
    ///
    /// # Panics
    ///
    /// If there is no such step or rank.
    pub fn window(&mut self, epoch: u64, step: usize, rank: usize) -> (Vec<u32>, Vec<u32>) {
        let (tokens, bptt) = (self.tokens, self.bptt);
        let windows = self.epochs.indices(epoch, step, rank);
        let from = |shift: usize| {
            let at = |time: usize| windows.iter().map(move |window| tokens[*window as usize * bptt + time]);
            (shift..bptt + shift).flat_map(at).collect()
        };
        (from(0), from(1))
    }
}

fn at_least_one(counts: &[(&'static str, usize)]) -> Result<(), OrderError> {
    match counts.iter().find(|(_, count)| *count == 0) {
        Some(&(what, _)) => Err(OrderError::Zero { what }),
        None => Ok(()),
    }
}

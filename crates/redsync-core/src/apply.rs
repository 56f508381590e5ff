//! Adds decoded messages to weights or to a dense gradient.
//! Comes in: one sparse vector per rank. Goes out: the target, changed. What must hold: every element receives its
//! contributions in rank order, so all replicas get the same bits, whatever the number of threads.
//!
//! The messages are merged block by block of the target: all ranks' elements of one block are added while the block is
//! in the cache, instead of one walk over all of memory per rank.

use crate::sparse::Sparse;
use crate::workspace::{PARALLEL_FROM, Workspace};
use thiserror::Error;

/// Elements of the target that are updated together: half of a common second-level cache.
const BLOCK: usize = 1 << 16;
/// From one element in this many on, most cache lines of a block are touched: then it is fetched as a whole, ahead.
const FETCH_WHOLE_FROM: usize = 64;

/// A message that does not fit its target.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the message of rank {rank} is of a layer with {theirs} elements, the target has {ours}")]
pub struct ApplyError {
    /// Position of the message.
    pub rank: usize,
    /// Elements of the message's layer.
    pub theirs: usize,
    /// Elements of the target.
    pub ours: usize,
}

/// `target += scale * sum of messages`, in rank order. For weights, `scale` is minus the learning rate.
///
/// ```
/// use redsync_core::{Sparse, Workspace, apply};
/// let messages: Vec<Sparse> = Vec::new(); // one per rank, from the decoder
/// let mut weights = vec![1.0; 4];
/// apply::add(&mut weights, &messages, -0.1, &mut Workspace::new(1))?;
/// assert_eq!(weights, [1.0; 4]);
/// # Ok::<(), apply::ApplyError>(())
/// ```
pub fn add(
    target: &mut [f32],
    messages: &[Sparse],
    scale: f32,
    workspace: &mut Workspace,
) -> Result<(), ApplyError> {
    run::<false>(target, messages, scale, workspace)
}

/// `target = scale * sum of messages`: a dense gradient for frameworks that want one.
pub fn fill(
    target: &mut [f32],
    messages: &[Sparse],
    scale: f32,
    workspace: &mut Workspace,
) -> Result<(), ApplyError> {
    run::<true>(target, messages, scale, workspace)
}

/// The factor by which weights shrink at each step, so that decay is as strong as in dense momentum SGD, where the
/// momentum repeats it: weights are equal on all ranks, so decay is applied locally and never sent.
///
/// ```
/// let factor = redsync_core::apply::decay(0.1, 5e-4, 0.9);
/// assert!((factor - (1.0 - 0.1 * 5e-4 / 0.1)).abs() < 1e-9);
/// ```
pub fn decay(learning_rate: f64, weight_decay: f64, momentum: f64) -> f64 {
    1.0 - learning_rate * weight_decay / (1.0 - momentum)
}

fn run<const FILL: bool>(
    target: &mut [f32],
    messages: &[Sparse],
    scale: f32,
    workspace: &mut Workspace,
) -> Result<(), ApplyError> {
    let ours = target.len();
    if let Some((rank, message)) = messages.iter().enumerate().find(|(_, m)| m.dense_len() != ours) {
        return Err(ApplyError { rank, theirs: message.dense_len(), ours });
    }
    let total: usize = messages.iter().map(Sparse::len).sum();
    let fetch = total * FETCH_WHOLE_FROM >= ours;
    let job = Job { messages, scale, fetch };
    let threads = if ours < PARALLEL_FROM { 1 } else { workspace.threads() };
    workspace.cursors.clear();
    workspace.cursors.resize(threads * messages.len(), 0);
    job.split::<FILL>(target, 0, threads, &mut workspace.cursors);
    Ok(())
}

/// Reads a block from one end to the other, which memory answers much faster than the scattered additions that follow.
fn fetch(block: &[f32]) {
    const LINE: usize = 16;
    std::hint::black_box(block.iter().step_by(LINE).fold(0, |all, x| all ^ x.to_bits()));
}

struct Job<'a> {
    messages: &'a [Sparse],
    scale: f32,
    fetch: bool,
}

impl Job<'_> {
    /// Gives every thread its own range of the target.
    fn split<const FILL: bool>(
        &self,
        target: &mut [f32],
        base: usize,
        threads: usize,
        cursors: &mut [usize],
    ) {
        if threads == 1 {
            return self.range::<FILL>(target, base, cursors);
        }
        let half = threads / 2;
        let mid = target.len() * half / threads;
        let (left, right) = target.split_at_mut(mid);
        let (left_cursors, right_cursors) = cursors.split_at_mut(half * self.messages.len());
        rayon::join(
            || self.split::<FILL>(left, base, half, left_cursors),
            || self.split::<FILL>(right, base + mid, threads - half, right_cursors),
        );
    }

    /// One thread's range, whose first element has index `base`; one cursor per message.
    fn range<const FILL: bool>(&self, target: &mut [f32], base: usize, cursors: &mut [usize]) {
        for (cursor, message) in cursors.iter_mut().zip(self.messages) {
            *cursor = message.indices.partition_point(|index| (*index as usize) < base);
        }
        let mut begin = base;
        for block in target.chunks_mut(BLOCK) {
            if FILL {
                block.fill(0.0);
            } else if self.fetch {
                fetch(block);
            }
            for (cursor, message) in cursors.iter_mut().zip(self.messages) {
                *cursor = self.add_part(block, begin, message, *cursor);
            }
            begin += block.len();
        }
    }

    /// Adds the elements of one message that lie in a block; returns where the rest begins.
    fn add_part(&self, block: &mut [f32], begin: usize, message: &Sparse, cursor: usize) -> usize {
        let rest = &message.indices[cursor..];
        let end = begin + block.len();
        let mut taken = 0;
        match message.mean {
            Some(mean) => {
                let step = self.scale * mean;
                for index in rest.iter().map(|i| *i as usize).take_while(|i| *i < end) {
                    block[index - begin] += step;
                    taken += 1;
                }
            }
            None => {
                let values = &message.values[cursor..];
                for (index, value) in rest.iter().zip(values) {
                    if *index as usize >= end {
                        break;
                    }
                    block[*index as usize - begin] += self.scale * value;
                    taken += 1;
                }
            }
        }
        cursor + taken
    }
}

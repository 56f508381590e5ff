//! States of all old ranks come in, the state of one rank among a new number goes out.

use super::{LayerState, Saved, StateError};
use redsync_core::Memory;

impl Saved {
    /// What rank `rank` of `ranks` continues with, from the states of all old ranks, in any order.
    ///
    /// The sums over the ranks of u and of v stay what they were: the new rank takes the sum of the old ranks `rank`,
    /// `rank + ranks`, and so on, with the memory of the first of them; a rank beyond the old number starts from zero. Its second
    /// moments are the means of those that it takes; beyond the old number, those of an old rank. With the old number of ranks
    /// everything is that of the old rank, to the bit. `extra` is that of the old rank 0, as replicas are identical.
    pub fn reshare(mut saved: Vec<Saved>, rank: usize, ranks: usize) -> Result<Saved, StateError> {
        if rank >= ranks {
            return Err(StateError::NoRank { rank, ranks });
        }
        saved.sort_by_key(|state| state.rank);
        check_complete(&saved)?;
        let beyond = rank >= saved.len();
        let extra = saved.first_mut().map(|first| std::mem::take(&mut first.extra)).unwrap_or_default();
        let mut taken = saved.into_iter().skip(if beyond { 0 } else { rank }).step_by(ranks);
        let Some(mut new) = taken.next() else {
            return Err(StateError::Missing { rank: 0, ranks });
        };
        if beyond {
            new.layers.iter_mut().for_each(clear);
        } else {
            let mut count = 1.0;
            for other in taken {
                add(&mut new, &other);
                count += 1.0;
            }
            let squares = new.layers.iter_mut().filter_map(|layer| layer.second.as_mut());
            squares.flat_map(|second| &mut second.own).for_each(|x| *x /= count);
        }
        let new = Saved { rank, ranks, extra, ..new };
        new.check().map_err(|why| StateError::Sum { rank, why })?;
        Ok(new)
    }
}

/// Adds u and v of a state with the same layers; v in units of the rate of the first, since a rank that was not asked for a layer
/// for some steps has an older one.
fn add(to: &mut Saved, other: &Saved) {
    for (layer, more) in to.layers.iter_mut().zip(&other.layers) {
        layer.u.iter_mut().zip(&more.u).for_each(|(sum, u)| *sum += u);
        let factor = layer.rate.zip(more.rate).map_or(1.0, |(ours, theirs)| theirs / ours);
        layer.v.iter_mut().zip(&more.v).for_each(|(sum, v)| *sum += factor * v);
        if let (Some(second), Some(more)) = (&mut layer.second, &more.second) {
            second.own.iter_mut().zip(&more.own).for_each(|(sum, x)| *sum += x);
            second.steps = second.steps.max(more.steps);
        }
    }
}

fn clear(layer: &mut LayerState) {
    layer.u.fill(0.0);
    layer.v.fill(0.0);
    layer.memory = Memory::default();
}

/// Whether sorted states are those of all ranks of one step, each once.
fn check_complete(saved: &[Saved]) -> Result<(), StateError> {
    let Some(first) = saved.first() else {
        return Err(StateError::Missing { rank: 0, ranks: 1 });
    };
    for (rank, state) in saved.iter().enumerate() {
        if state.rank >= state.ranks {
            return Err(StateError::NoRank { rank: state.rank, ranks: state.ranks });
        }
        if state.rank > rank {
            return Err(StateError::Missing { rank, ranks: state.ranks });
        }
        if state.rank < rank {
            return Err(StateError::Twice { rank: state.rank });
        }
        first.check_agrees(state, |rank| format!("rank {rank}"))?;
    }
    match saved.len() < first.ranks {
        true => Err(StateError::Missing { rank: saved.len(), ranks: first.ranks }),
        false => Ok(()),
    }
}

//! States of all old ranks come in, the state of one rank among a new number goes out.

use super::{LayerState, Saved, StateError};
use crate::hosts::Seat;
use redsync_core::Memory;
use std::collections::HashSet;
use std::ops::Range;

impl Saved {
    /// What rank `rank` of `ranks` continues with, from the states of all old ranks, in any order.
    ///
    /// The sums over the ranks of u and of v, what owners keep included, stay what they were: the new rank takes the sum of the old ranks `rank`,
    /// `rank + ranks`, and so on, with the memory of the first of them; a rank beyond the old number starts from zero. Its second
    /// moments are the means of those that it takes; beyond the old number, those of an old rank; what others told is forgotten. With the old number of ranks
    /// everything is that of the old rank, to the bit. `extra` is that of the old rank 0, as replicas are identical.
    pub fn reshare(mut saved: Vec<Saved>, rank: usize, ranks: usize) -> Result<Saved, StateError> {
        if rank >= ranks {
            return Err(StateError::NoRank { rank, ranks });
        }
        saved.sort_by_key(|state| state.rank);
        check_complete(&saved)?;
        let mut saved = join_hosts(saved);
        if let Some(first) = saved.first() {
            saved.iter().try_for_each(|other| first.check_agrees(other, |rank| format!("host {rank}")))?;
        }
        if saved.len() != ranks {
            saved.iter_mut().for_each(fold_kept);
        }
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
        if new.ranks != ranks {
            // What the others told was of other ranks; they tell it again.
            let squares = new.layers.iter_mut().filter_map(|layer| layer.second.as_mut());
            squares.for_each(|second| second.given.clear());
        }
        let new = Saved { rank, ranks, extra, ..new };
        new.check().map_err(|why| StateError::Sum { rank, why })?;
        Ok(new)
    }
}

/// One state for each host, of the parts that its ranks have; states without hosts as they are. They are complete and of one step.
fn join_hosts(saved: Vec<Saved>) -> Vec<Saved> {
    let Some(first) = saved.first().and_then(|first| first.seat) else { return saved };
    let mut hosts: Vec<Vec<Saved>> = (0..first.hosts).map(|_| Vec::new()).collect();
    for state in saved {
        let host = state.seat.map_or(0, |seat| seat.host);
        hosts[host].push(state);
    }
    let join = |(host, mut ranks): (usize, Vec<Saved>)| {
        ranks.sort_by_key(|state| state.seat.map(|seat| seat.number));
        let mut ranks = ranks.into_iter();
        let mut whole = ranks.next()?;
        for other in ranks {
            whole.layers.iter_mut().zip(other.layers).for_each(|(whole, part)| append(whole, part));
        }
        Some(Saved { rank: host, ranks: first.hosts, seat: None, ..whole })
    };
    hosts.into_iter().enumerate().filter_map(join).collect()
}

/// The next part of a layer. What the selector remembers is of the first that has elements, what others told is forgotten.
fn append(whole: &mut LayerState, part: LayerState) {
    if whole.size == 0 {
        (whole.momentum, whole.memory, whole.rate) = (part.momentum, part.memory, part.rate);
    }
    whole.size += part.size;
    whole.u.extend(part.u);
    whole.v.extend(part.v);
    if let (Some(second), Some(more)) = (&mut whole.second, part.second) {
        second.own.extend(more.own);
        second.steps = second.steps.max(more.steps);
        second.given.clear();
    }
}

impl Saved {
    /// Of the state of a host, what the rank at a seat there has: parts of layers, given for each.
    pub(crate) fn seated(mut self, rank: usize, seat: Seat, parts: &[Range<usize>]) -> Saved {
        for (layer, part) in self.layers.iter_mut().zip(parts) {
            let cut = |values: &mut Vec<f32>| *values = values.get(part.clone()).unwrap_or_default().to_vec();
            layer.size = part.len();
            cut(&mut layer.u);
            cut(&mut layer.v);
            if let Some(second) = &mut layer.second {
                cut(&mut second.own);
                cut(&mut second.given);
            }
        }
        Saved { rank, ranks: seat.hosts * seat.on_each, seat: Some(seat), ..self }
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

/// What a rank keeps as an owner becomes part of what it has not sent: another number of ranks has other owners.
fn fold_kept(saved: &mut Saved) {
    let rank = saved.rank;
    for layer in &mut saved.layers {
        let Some(kept) = layer.kept.take() else { continue };
        let factor = layer.rate.zip(kept.rate).map_or(1.0, |(ours, theirs)| theirs / ours);
        layer.rate = layer.rate.or(kept.rate);
        kept.add_to(&mut layer.v, rank, factor);
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
        if let Some(seat) = state.seat.filter(|seat| !seat.is_one_of(state.ranks)) {
            return Err(StateError::Sum { rank, why: format!("there is no such seat: {seat:?}") });
        }
        if state.layers.iter().filter_map(|layer| layer.kept.as_ref()).any(|kept| !kept.cut.is_sound()) {
            return Err(StateError::Sum { rank, why: "what its owners kept makes no sense".into() });
        }
    }
    let seats: HashSet<_> = saved.iter().filter_map(|state| state.seat).map(|s| (s.host, s.number)).collect();
    if first.seat.is_some() && seats.len() != saved.len() {
        return Err(StateError::Sum { rank: 0, why: "two ranks have the same place on a host".into() });
    }
    match saved.len() < first.ranks {
        true => Err(StateError::Missing { rank: saved.len(), ranks: first.ranks }),
        false => Ok(()),
    }
}

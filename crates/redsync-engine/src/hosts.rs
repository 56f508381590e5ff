//! Ranks of one host sum their gradients densely among themselves, each a part of every layer; only sums are compressed, and only by
//! the rank whose part it is. So hosts exchange what single ranks would, and a residual is divided among the ranks of a host.
//! Comes in: which rank is on which host. Goes out: the two groups a rank is in, its parts, and the bytes that travel inside a host. What
//! must hold: parts follow from sizes and the number of ranks on a host alone; what comes from a rank of the same host is checked too.

use crate::config::Config;
use crate::error::SyncError;
use crate::hello;
use crate::layer::Layer;
use redsync_comm::{Among, Communicator, Gathered, Tag};
use redsync_core::Sparse;
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;

/// Layers of fewer elements for each rank of a host are not cut: one rank has them whole.
const LEAST_PART: usize = 256;

/// Marks the sums inside a host before an exchange; its number is that of the group.
const BEFORE: u32 = 1 << 29;
/// Marks what ranks of a host tell each other after it.
const AFTER: u32 = 1 << 28;

/// The name of the host of this rank, for [`Config::host`]: with so many ranks on each host, one after the other, which of them that is;
/// otherwise what the communicator says (MPI knows which ranks share memory), or what the machine is called.
///
/// ```
/// use redsync_engine::host_of;
/// let ranks = redsync_comm::local::group(6);
/// assert_eq!(host_of(&ranks[5], Some(4)).as_deref(), Some("1"));
/// ```
pub fn host_of(comm: &dyn Communicator, ranks_per_host: Option<usize>) -> Option<String> {
    match ranks_per_host {
        Some(each) => Some((comm.rank() / each.max(1)).to_string()),
        None => comm.host().or_else(machine),
    }
}

/// What this machine is called, if it says so.
fn machine() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME"));
    name.ok().map(|name| name.trim().to_string()).filter(|name| !name.is_empty())
}

/// Where a rank sits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Seat {
    /// Its host, from 0.
    pub host: usize,
    /// How many hosts there are.
    pub hosts: usize,
    /// Its number on the host, from 0.
    pub number: usize,
    /// How many ranks every host has.
    pub on_each: usize,
}

impl Seat {
    /// Whether there is such a seat among so many ranks.
    pub(crate) fn is_one_of(&self, ranks: usize) -> bool {
        let fits = self.hosts.checked_mul(self.on_each) == Some(ranks);
        fits && self.host < self.hosts && self.number < self.on_each
    }

    /// The part of a layer of `n` elements that this rank compresses. Layers that are too small to be cut are dealt out by their
    /// number in the model.
    pub fn part(&self, layer: usize, n: usize) -> Range<usize> {
        part(layer, n, self.number, self.on_each)
    }
}

fn part(layer: usize, n: usize, number: usize, on_each: usize) -> Range<usize> {
    let cut = |number: usize| (n as u128 * number as u128 / on_each as u128) as usize;
    match (n < LEAST_PART * on_each, layer % on_each == number) {
        (false, _) => cut(number)..cut(number + 1),
        (true, true) => 0..n,
        (true, false) => n..n,
    }
}

/// The hosts of a job as one rank sees them.
pub(crate) struct Hosts {
    pub seat: Seat,
    /// The ranks of this host.
    pub inside: Among,
    /// The ranks of all hosts that have this rank's number there.
    pub across: Arc<Among>,
}

impl Hosts {
    /// Every rank says where it is.
    pub fn find(config: &Config, comm: &Arc<dyn Communicator>) -> Result<Hosts, SyncError> {
        let names = hello::gather(&**comm, &json!(config.host), config)?;
        let names: Vec<Option<&str>> = names.iter().map(|name| name.as_str()).collect();
        let groups = group(&names).map_err(SyncError::Layers)?;
        let host = groups.iter().position(|ranks| ranks.contains(&comm.rank())).unwrap_or_default();
        let number = groups[host].iter().position(|rank| *rank == comm.rank()).unwrap_or_default();
        let (hosts, on_each) = (groups.len(), groups[host].len());
        let across = groups.iter().map(|ranks| ranks[number]).collect();
        Ok(Hosts {
            seat: Seat { host, hosts, number, on_each },
            inside: Among::new(comm.clone(), groups[host].clone()),
            across: Arc::new(Among::new(comm.clone(), across)),
        })
    }

    /// The parts of this rank, as layers of their own.
    pub fn parts(&self, layers: &[Layer]) -> Vec<Layer> {
        let part = |(number, layer): (usize, &Layer)| {
            let size = self.seat.part(number, layer.size).len();
            Layer { size, ..layer.clone() }
        };
        layers.iter().enumerate().map(part).collect()
    }

    /// The part of a layer that another rank of this host has.
    fn part_of(&self, number: usize, layer: usize, n: usize) -> Range<usize> {
        part(layer, n, number, self.seat.on_each)
    }

    /// What each rank of this host gets of the gradients of some layers: whether there is one, then the values of its parts. `values`
    /// has the layers one after the other; `buffers` are filled again, as far as there are any.
    pub fn letters(
        &self,
        layers: &[(usize, usize)],
        present: &[bool],
        values: &[f32],
        buffers: &mut Vec<Vec<u8>>,
    ) -> Vec<Vec<u8>> {
        let letter = |number: usize| {
            let mut letter = buffers.pop().unwrap_or_default();
            letter.clear();
            letter.extend(present.iter().map(|present| u8::from(*present)));
            let mut before = 0;
            for (layer, n) in layers {
                let part = self.part_of(number, *layer, *n);
                letter
                    .extend_from_slice(bytemuck::cast_slice(&values[before + part.start..before + part.end]));
                before += n;
            }
            letter
        };
        (0..self.seat.on_each).map(letter).collect()
    }

    /// The tag of the sums before an exchange.
    pub fn before(tag: Tag) -> Tag {
        Tag { op: tag.op | BEFORE, ..tag }
    }

    /// The tag of what follows it.
    pub fn after(tag: Tag) -> Tag {
        Tag { op: tag.op | AFTER, ..tag }
    }

    /// The sums of this rank's parts, added in the order of the ranks; None for a layer of which no rank has a gradient. None at all
    /// if a rank has nothing to send at this step.
    pub fn sums(
        &self,
        layers: &[(usize, usize)],
        came: &Gathered,
    ) -> Result<Option<Vec<Option<Vec<f32>>>>, SyncError> {
        if came.iter().any(<[u8]>::is_empty) {
            return Ok(None);
        }
        let lengths: Vec<usize> = layers.iter().map(|(layer, n)| self.seat.part(*layer, *n).len()).collect();
        let expected = layers.len() + 4 * lengths.iter().sum::<usize>();
        for (number, letter) in came.iter().enumerate() {
            let flags = letter.iter().take(layers.len());
            if letter.len() != expected || flags.into_iter().any(|flag| *flag > 1) {
                let (rank, got) = (self.inside.members()[number], letter.len());
                return Err(SyncError::Failed(format!(
                    "rank {rank} of this host sent gradients that make no sense: {got} bytes, expected {expected}"
                )));
            }
        }
        let mut begin = layers.len();
        let sum = |(at, length): (usize, usize)| {
            let range = begin..begin + 4 * length;
            begin = range.end;
            let with: Vec<&[u8]> =
                came.iter().filter(|letter| letter[at] == 1).map(|letter| &letter[range.clone()]).collect();
            let (first, others) = with.split_first()?;
            let mut sum: Vec<f32> = bytemuck::pod_collect_to_vec(first);
            for other in others {
                let values = other.chunks_exact(4).map(|x| f32::from_ne_bytes(word(x)));
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
            Some(sum)
        };
        Ok(Some(lengths.iter().copied().enumerate().map(sum).collect()))
    }

    /// The updates of this rank's parts, for the others of its host: of each layer one vector per host.
    pub fn tell(updates: &[Vec<Sparse>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for update in updates.iter().flatten() {
            bytes.extend((update.len() as u32).to_ne_bytes());
            bytes.extend_from_slice(bytemuck::cast_slice(update.indices()));
            bytes.extend(update.iter().flat_map(|(_, value)| value.to_ne_bytes()));
        }
        bytes
    }

    /// What all ranks of this host told: for each layer one vector per host, of the whole layer. None if one of them has nothing, because
    /// the step does not count.
    pub fn hear(
        &self,
        layers: &[(usize, usize)],
        told: &Gathered,
    ) -> Result<Option<Vec<Vec<Sparse>>>, SyncError> {
        if told.iter().any(<[u8]>::is_empty) && !layers.is_empty() {
            return Ok(None);
        }
        let mut letters: Vec<&[u8]> = told.iter().collect();
        let mut all = Vec::with_capacity(layers.len());
        for (layer, n) in layers {
            let mut hosts = Vec::with_capacity(self.seat.hosts);
            for _ in 0..self.seat.hosts {
                let (mut indices, mut values) = (Vec::new(), Vec::new());
                for (number, letter) in letters.iter_mut().enumerate() {
                    let part = self.part_of(number, *layer, *n);
                    let read = read(letter, &part, &mut indices, &mut values);
                    read.ok_or_else(|| self.senseless(number))?;
                }
                let sparse = Sparse::from_parts(*n as u32, indices, values);
                hosts.push(
                    sparse.map_err(|why| SyncError::Failed(format!("an update inside the host: {why}")))?,
                );
            }
            all.push(hosts);
        }
        match letters.iter().position(|letter| !letter.is_empty()) {
            Some(number) => Err(self.senseless(number)),
            None => Ok(Some(all)),
        }
    }

    fn senseless(&self, number: usize) -> SyncError {
        let rank = self.inside.members()[number];
        SyncError::Failed(format!("rank {rank} of this host told updates that make no sense"))
    }
}

/// Reads one vector, whose indices become those of the whole layer.
fn read(
    letter: &mut &[u8],
    part: &Range<usize>,
    indices: &mut Vec<u32>,
    values: &mut Vec<f32>,
) -> Option<()> {
    let (count, rest) = letter.split_first_chunk::<4>()?;
    let count = u32::from_ne_bytes(*count) as usize;
    if count > part.len() {
        return None;
    }
    let (own, rest) = rest.split_at_checked(4 * count)?;
    let (numbers, rest) = rest.split_at_checked(4 * count)?;
    for index in own.chunks_exact(4).map(|x| u32::from_ne_bytes(word(x))) {
        if index as usize >= part.len() {
            return None;
        }
        indices.push(index + part.start as u32);
    }
    values.extend(numbers.chunks_exact(4).map(|x| f32::from_ne_bytes(word(x))));
    *letter = rest;
    Some(())
}

/// Four bytes; ranks of one host have them in the same order.
fn word(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

/// The ranks of each host, hosts in the order of their first ranks; a sentence if they are not equally many.
fn group(names: &[Option<&str>]) -> Result<Vec<Vec<usize>>, String> {
    let mut hosts: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, name) in names.iter().enumerate() {
        let name = name.ok_or_else(|| format!("rank {rank} does not say on which host it is"))?;
        match hosts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, ranks)) => ranks.push(rank),
            None => hosts.push((name, vec![rank])),
        }
    }
    let first = hosts.first().map(|(name, ranks)| (*name, ranks.len())).unwrap_or_default();
    if let Some((name, ranks)) = hosts.iter().find(|(_, ranks)| ranks.len() != first.1) {
        return Err(format!(
            "sums inside hosts need as many ranks on each: host {} has {}, host {name} {}",
            first.0,
            first.1,
            ranks.len()
        ));
    }
    Ok(hosts.into_iter().map(|(_, ranks)| ranks).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_out_every_layer_and_small_layers_whole() {
        for (n, on_each) in [(0, 3), (1, 4), (1023, 4), (1024, 4), (1025, 4), (10_007, 7), (5, 1)] {
            for layer in 0..9 {
                let parts: Vec<_> = (0..on_each).map(|number| part(layer, n, number, on_each)).collect();
                assert_eq!(parts.iter().map(Range::len).sum::<usize>(), n);
                let cut = parts.iter().filter(|part| !part.is_empty()).count();
                assert!(if n < LEAST_PART * on_each { cut <= 1 } else { cut == on_each });
            }
        }
    }

    #[test]
    fn hosts_with_unequal_numbers_of_ranks_are_refused_in_a_sentence() {
        let names = [Some("a"), Some("b"), Some("a"), Some("b")];
        assert_eq!(group(&names), Ok(vec![vec![0, 2], vec![1, 3]]));
        let refused = group(&[Some("a"), Some("b"), Some("a")]).unwrap_err();
        assert_eq!(refused, "sums inside hosts need as many ranks on each: host a has 2, host b 1");
        assert_eq!(group(&[Some("a"), None]).unwrap_err(), "rank 1 does not say on which host it is");
    }
}

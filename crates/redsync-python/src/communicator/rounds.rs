//! Collectives out of exchanges of blocks and bytes. What a rank brings comes in, what all brought goes out.
//!
//! Every collective begins with a round of blocks of a size that all ranks know (`forecast.rs`): header and, where it fits, the
//! message. There ranks that disagree find out, and one that gave up says why. A second round, of exact sizes, carries what did
//! not fit; a long sum is PyTorch's own among two ranks, among more one round of segments and one of their sums. What must
//! hold: whether there is a further round follows from what all ranks have seen in the first.

use super::block::{HEADER, Header};
use super::desk::{Done, Work};
use super::forecast::Forecast;
use super::torch::{Fault, Lane, Out, Wire};
use redsync_comm::{Call, CommError, Gathered, Kind, sum};
use std::ops::Range;
use std::sync::Arc;

/// A sum whose values, sent to all, take no more bytes than this is not cut into segments: a round costs more.
const WHOLE: usize = 64 << 10;

/// What concerns one peer only, and is as long as this, is not copied for PyTorch.
const LENT: usize = 256 << 10;

/// The collectives of one rank.
pub struct Rounds {
    wire: Wire,
    forecast: Forecast,
    out: Lane,
    into: Lane,
    /// Whether messages like these should go with their headers the next time: not if most peers get none.
    inline: bool,
}

/// What the first round brought.
struct Met {
    /// Bytes of a block.
    block: usize,
    /// One for each rank, ours included.
    headers: Vec<Header>,
}

impl Met {
    fn room(&self) -> usize {
        self.block - HEADER
    }

    /// How much of the message from `rank` is still missing.
    fn rest(&self, rank: usize) -> usize {
        (self.headers[rank].part as usize).saturating_sub(self.room())
    }
}

impl Rounds {
    pub fn new(wire: Wire) -> Rounds {
        Rounds {
            wire,
            forecast: Forecast::default(),
            out: Lane::default(),
            into: Lane::default(),
            inline: true,
        }
    }

    /// Leaves the group.
    pub fn close(self, under_way: bool) {
        self.wire.close(under_way);
    }

    /// Does one collective.
    pub fn perform(&mut self, call: Call, mut work: Work, goes_on: &dyn Fn() -> bool) -> Result<Done, Fault> {
        self.inline = !matches!(work, Work::ScatterFew(_));
        let outcome = self.attempt(call, &mut work, goes_on);
        if let Err(Fault::Failed(_) | Fault::Abandoned) = outcome {
            // PyTorch may still read what it was lent.
            std::mem::forget(work);
        }
        outcome
    }

    fn attempt(&mut self, call: Call, work: &mut Work, goes_on: &dyn Fn() -> bool) -> Result<Done, Fault> {
        let (messages, values) = match work {
            Work::Meet => {
                self.meet(call, &|_| &[], goes_on)?;
                (Vec::new(), Vec::new())
            }
            Work::Gather(message) => {
                let met = self.meet(call, &|_| message.as_slice(), goes_on)?;
                let others = self.collect(&met, &|_| message.as_slice(), goes_on)?;
                (self.with_own(others, std::mem::take(message)), Vec::new())
            }
            Work::Scatter(messages) | Work::ScatterFew(messages) => {
                let met = self.meet(call, &|peer| messages[peer].as_slice(), goes_on)?;
                let others = self.collect(&met, &|peer| messages[peer].as_slice(), goes_on)?;
                (self.with_own(others, std::mem::take(&mut messages[self.wire.rank])), Vec::new())
            }
            Work::Sum(values) => {
                self.sum(call, values, goes_on)?;
                (Vec::new(), std::mem::take(values))
            }
        };
        Ok(Done { messages: Gathered::new(messages), values })
    }

    /// Tells the others, in the place of the next collective, why this rank gives up.
    pub fn say_farewell(&mut self, reason: &str, goes_on: &dyn Fn() -> bool) -> Result<(), Fault> {
        let length = reason.len() as u64;
        let header = Header { call: None, part: length, longest: length };
        self.blocks(|_| (header, reason.as_bytes()), goes_on).map(drop)
    }

    /// The first round. All ranks mean the same collective afterwards.
    fn meet<'a>(
        &mut self,
        call: Call,
        message: &dyn Fn(usize) -> &'a [u8],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Met, Fault> {
        let longest = match call.kind {
            // Values may come in a round of their own.
            Kind::Allreduce => call.length.saturating_mul(size_of::<f32>() as u64),
            _ => (0..self.wire.size).map(|peer| message(peer).len() as u64).max().unwrap_or_default(),
        };
        let header = |part| Header { call: Some(call), part, longest };
        let block = self.blocks(|peer| (header(message(peer).len() as u64), message(peer)), goes_on)?;
        let mut headers = Vec::with_capacity(self.wire.size);
        for rank in 0..self.wire.size {
            headers.push(match self.place(rank) {
                None => header(message(rank).len() as u64),
                Some(place) => self.check(rank, call, &self.into.bytes()[place * block..][..block])?,
            });
        }
        let longest = headers.iter().map(|header| header.longest).max().unwrap_or_default();
        self.forecast.learn(call, if self.inline { longest } else { 0 });
        Ok(Met { block, headers })
    }

    /// Exchanges one block with each peer; their size comes back.
    fn blocks<'a>(
        &mut self,
        content: impl Fn(usize) -> (Header, &'a [u8]),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<usize, Fault> {
        let block = self.forecast.block();
        let bytes = block * self.peers().len();
        if bytes == 0 {
            return Ok(block);
        }
        self.wire.room(&mut self.out, bytes)?;
        self.wire.room(&mut self.into, bytes)?;
        for (peer, place) in self.peers().into_iter().zip(self.out.bytes_mut().chunks_exact_mut(block)) {
            let (header, message) = content(peer);
            header.write(message, place);
        }
        let splits = self.splits(|_| block);
        self.wire.exchange((Out::Lane(&mut self.out), &splits), (&mut self.into, &splits), goes_on)?;
        Ok(block)
    }

    /// What a peer said, if it means the same as this rank.
    fn check(&self, rank: usize, ours: Call, block: &[u8]) -> Result<Header, Fault> {
        let Some(header) = Header::read(block) else {
            return Err(refused(format!("rank {rank} runs another version of this program")));
        };
        let Some(theirs) = header.call else {
            let reason = block[HEADER..].get(..header.part as usize).unwrap_or_default();
            let reason = String::from_utf8_lossy(reason).into_owned();
            return Err(Fault::Cause(CommError::GaveUp { rank, tag: ours.tag, reason, blames: Vec::new() }));
        };
        if !theirs.matches(&ours) {
            return Err(Fault::Cause(CommError::Mismatch { rank, theirs, ours }));
        }
        if header.part > header.longest {
            return Err(refused(format!("rank {rank} contradicts itself about the length of its message")));
        }
        Ok(header)
    }

    /// The messages of all peers, in rank order: what came with the headers, and the rest in a round of its own if anybody has one.
    fn collect<'a>(
        &mut self,
        met: &Met,
        message: &dyn Fn(usize) -> &'a [u8],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, Fault> {
        let mut received = Vec::with_capacity(self.wire.size);
        for (place, rank) in self.peers().into_iter().enumerate() {
            let length = met.headers[rank].part;
            let mut bytes = Vec::new();
            // A length is only a claim until there is memory for it.
            if usize::try_from(length).map_or(true, |length| bytes.try_reserve_exact(length).is_err()) {
                return Err(refused(format!(
                    "rank {rank} sends {length} bytes, for which there is no memory"
                )));
            }
            let inline = (length as usize).min(met.room());
            bytes.extend_from_slice(&self.into.bytes()[place * met.block + HEADER..][..inline]);
            received.push(bytes);
        }
        if met.headers.iter().all(|header| header.longest <= met.room() as u64) {
            return Ok(received);
        }
        let rest = |peer: usize| message(peer).get(met.room()..).unwrap_or_default();
        self.ship(|peer| rest(peer), |peer| met.rest(peer), goes_on)?;
        let mut arrived = self.into.bytes();
        for (rank, bytes) in self.peers().into_iter().zip(&mut received) {
            let (here, later) = arrived.split_at(met.rest(rank));
            bytes.extend_from_slice(here);
            arrived = later;
        }
        Ok(received)
    }

    /// A round of exact sizes: what each peer gets, and how many bytes come from each.
    fn ship<'a>(
        &mut self,
        message: impl Fn(usize) -> &'a [u8],
        expected: impl Fn(usize) -> usize,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Fault> {
        let (splits_out, splits_in) = (self.splits(|peer| message(peer).len()), self.splits(expected));
        if self.wire.size == 1 {
            return Ok(());
        }
        let Some(bytes_in) = splits_in.iter().try_fold(0_usize, |sum, &bytes| sum.checked_add(bytes)) else {
            return Err(refused("the messages of all ranks together are longer than memory".to_string()));
        };
        self.wire.room(&mut self.into, bytes_in)?;
        let peers = self.peers();
        if let [peer] = peers[..]
            && message(peer).len() >= LENT
        {
            let out = Out::Lent(message(peer));
            return self.wire.exchange((out, &splits_out), (&mut self.into, &splits_in), goes_on);
        }
        self.wire.room(&mut self.out, splits_out.iter().sum())?;
        let mut out = self.out.bytes_mut();
        for peer in peers {
            let (place, later) = out.split_at_mut(message(peer).len());
            place.copy_from_slice(message(peer));
            out = later;
        }
        self.wire.exchange((Out::Lane(&mut self.out), &splits_out), (&mut self.into, &splits_in), goes_on)
    }

    /// Sums in rank order, in the place of `values`.
    fn sum(&mut self, call: Call, values: &mut [f32], goes_on: &dyn Fn() -> bool) -> Result<(), Fault> {
        let bytes = size_of_val(values);
        if HEADER + bytes <= self.forecast.block() {
            let met = self.meet(call, &|_| bytemuck::cast_slice(values), goes_on)?;
            let places = |place: usize| place * met.block + HEADER..place * met.block + HEADER + bytes;
            return self.add(values, places);
        }
        // The others conclude the same from the length, which they share.
        self.meet(call, &|_| &[], goes_on)?;
        if self.wire.size == 2 && bytes >= LENT {
            // Of two values the order does not matter.
            return self.wire.sum(values, goes_on);
        }
        if self.wire.size == 2 || bytes * self.wire.size <= WHOLE {
            self.ship(|_| bytemuck::cast_slice(values), |_| bytes, goes_on)?;
            return self.add(values, |place| place * bytes..(place + 1) * bytes);
        }
        self.sum_segments(values, goes_on)
    }

    /// Each rank sums one segment for all.
    fn sum_segments(&mut self, values: &mut [f32], goes_on: &dyn Fn() -> bool) -> Result<(), Fault> {
        let (length, size, own) = (values.len(), self.wire.size, self.wire.rank);
        let segment = |rank: usize| length * rank / size..length * (rank + 1) / size;
        let bytes = |rank: usize| segment(rank).len() * size_of::<f32>();
        self.ship(|peer| bytemuck::cast_slice(&values[segment(peer)]), |_| bytes(own), goes_on)?;
        self.add(&mut values[segment(own)], |place| place * bytes(own)..(place + 1) * bytes(own))?;
        self.ship(|_| bytemuck::cast_slice(&values[segment(own)]), bytes, goes_on)?;
        let mut arrived = self.into.bytes();
        for peer in self.peers() {
            let (here, later) = arrived.split_at(bytes(peer));
            bytemuck::cast_slice_mut(&mut values[segment(peer)]).copy_from_slice(here);
            arrived = later;
        }
        Ok(())
    }

    /// Adds what arrived from each peer, which is at these places, and the values themselves, in rank order.
    fn add(&self, values: &mut [f32], places: impl Fn(usize) -> Range<usize>) -> Result<(), Fault> {
        let mut parts = Vec::with_capacity(self.wire.size);
        for rank in 0..self.wire.size {
            parts.push(match self.place(rank) {
                None => None,
                Some(place) => match bytemuck::try_cast_slice(&self.into.bytes()[places(place)]) {
                    Ok(part) => Some(part),
                    Err(_) => return Err(refused("memory of PyTorch that is not aligned".to_string())),
                },
            });
        }
        sum::in_order(values, &parts);
        Ok(())
    }

    fn with_own(&self, mut messages: Vec<Vec<u8>>, own: Vec<u8>) -> Vec<Arc<Vec<u8>>> {
        messages.insert(self.wire.rank, own);
        messages.into_iter().map(Arc::new).collect()
    }

    fn peers(&self) -> Vec<usize> {
        (0..self.wire.size).filter(|&rank| rank != self.wire.rank).collect()
    }

    /// Where what a peer sends lies among what all send.
    fn place(&self, rank: usize) -> Option<usize> {
        (rank != self.wire.rank).then(|| rank - usize::from(rank > self.wire.rank))
    }

    fn splits(&self, bytes: impl Fn(usize) -> usize) -> Vec<usize> {
        (0..self.wire.size).map(|rank| if rank == self.wire.rank { 0 } else { bytes(rank) }).collect()
    }
}

fn refused(reason: String) -> Fault {
    Fault::Cause(CommError::Engine { engine: super::ENGINE, reason })
}

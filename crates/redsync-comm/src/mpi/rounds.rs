//! The meeting of many ranks. In round `k` a rank passes all it has heard, of itself and the `2^k - 1` ranks before it, on to the
//! rank `2^k` behind it: after `log2 N` rounds, rounded up, everybody has heard of everybody, in as many messages and no more bytes than
//! if each had come directly. Short payloads travel along. Of an all-to-all each message takes the rounds whose bits make up the way
//! from its sender to its reader; what is long says only its length, and an empty one is not mentioned at all.
//!
//! Nothing is compared before the last round: ranks that disagree pass on what they hear all the same, so that all find out.

use super::body::Body;
use super::exchange::{Heard, Meeting};
use super::header::{HEADER, PLACE, decode, encode, foreign, inline_bytes};
use super::library::{Lent, Library};
use crate::{Call, CommError, Kind};
use std::ffi::c_int;

/// Bytes of an all-to-all's message that take the rounds. Each takes half of them, three or four where there are many ranks, so what
/// is longer goes directly: on a slow link so many times its bytes would cost more than a message of its own.
pub(super) const PARCEL_INLINE: usize = 256;

/// Says that this is a message of a round, not a header.
const MAGIC: u32 = u32::from_le_bytes(*b"RSR1");

/// Magic, number of parcels.
const FRONT: usize = 8;

/// Sender, reader, length.
const PARCEL: usize = 16;

/// What is known of a rank.
#[derive(Debug, PartialEq)]
struct Letter {
    call: Call,
    inline: Vec<u8>,
}

/// A message of an all-to-all on its way, or what it will be when it comes directly.
#[derive(Debug, PartialEq)]
struct Parcel {
    from: usize,
    to: usize,
    length: usize,
    inline: Vec<u8>,
}

/// What one rank knows. It does not know MPI, so that its messages can be tested without.
struct Knowledge {
    rank: usize,
    size: usize,
    /// Of this rank, of the one before it, and so on.
    letters: Vec<Letter>,
    parcels: Vec<Parcel>,
}

impl Knowledge {
    /// In how many rounds everybody has heard of everybody.
    fn rounds(&self) -> usize {
        (usize::BITS - (self.size - 1).leading_zeros()) as usize
    }

    /// Who is so many ranks before this one.
    fn before(&self, distance: usize) -> usize {
        (self.rank + self.size - distance % self.size) % self.size
    }

    /// How far it is from one rank on to another.
    fn way(&self, from: usize, to: usize) -> usize {
        (to + self.size - from) % self.size
    }

    /// How many letters travel in a round: as many as the reader does not have.
    fn letters_of(&self, round: usize) -> usize {
        (1 << round).min(self.size - (1 << round))
    }

    /// What a message of a round takes at most, whatever the ranks have started.
    fn room(&self, round: usize) -> usize {
        let parcels = (0..self.size).filter(|way| way >> round & 1 == 1).count();
        FRONT + self.letters_of(round) * PLACE + parcels * (PARCEL + PARCEL_INLINE)
    }

    /// The message of this rank in a round. The parcels in it are gone.
    fn pass_on(&mut self, round: usize) -> Vec<u8> {
        let (rank, size) = (self.rank, self.size);
        let goes = |parcel: &mut Parcel| ((parcel.to + size - rank) % size) >> round & 1 == 1;
        let parcels: Vec<Parcel> = self.parcels.extract_if(.., goes).collect();
        let mut message = Vec::new();
        message.extend(MAGIC.to_le_bytes());
        message.extend((parcels.len() as u32).to_le_bytes());
        for letter in &self.letters[..self.letters_of(round)] {
            message.extend(encode(letter.call, letter.call.length as usize));
            message.extend_from_slice(&letter.inline);
        }
        for parcel in &parcels {
            message.extend((parcel.from as u32).to_le_bytes());
            message.extend((parcel.to as u32).to_le_bytes());
            message.extend((parcel.length as u64).to_le_bytes());
            message.extend_from_slice(&parcel.inline);
        }
        message
    }

    /// Takes in what the rank `2^round` before this one knows. What cannot have come this way is an error.
    fn take_in(&mut self, round: usize, message: &[u8]) -> Result<(), CommError> {
        let peer = self.before(1 << round);
        let read = self.read(round, message);
        let (letters, parcels) = read.ok_or_else(|| foreign(peer))?;
        self.letters.extend(letters);
        self.parcels.extend(parcels);
        Ok(())
    }

    fn read(&self, round: usize, message: &[u8]) -> Option<(Vec<Letter>, Vec<Parcel>)> {
        let mut rest = message;
        let mut next = |bytes: usize| rest.split_off(..bytes);
        let front = next(FRONT)?;
        if number(&front[..4]) != u64::from(MAGIC) {
            return None;
        }
        let mut letters = Vec::new();
        for _ in 0..self.letters_of(round) {
            let (call, length) = decode(next(HEADER)?, 0).ok()?;
            let inline = next(inline_of(call, length))?.to_vec();
            letters.push(Letter { call, inline });
        }
        let mut parcels: Vec<Parcel> = Vec::new();
        for _ in 0..number(&front[4..]) {
            let fixed = next(PARCEL)?;
            let (from, to) = (number(&fixed[..4]) as usize, number(&fixed[4..8]) as usize);
            let length = usize::try_from(number(&fixed[8..])).ok().filter(|length| *length > 0)?;
            if !self.comes_by(round, from, to) {
                return None;
            }
            let inline = next(if length <= PARCEL_INLINE { length } else { 0 })?.to_vec();
            parcels.push(Parcel { from, to, length, inline });
        }
        Some((letters, parcels))
    }

    /// Whether the way from one rank to another leads to this one in this round.
    fn comes_by(&self, round: usize, from: usize, to: usize) -> bool {
        let so_far = (2 << round) - 1;
        from.max(to) < self.size && {
            let way = self.way(from, self.rank);
            way >> round & 1 == 1 && way == self.way(from, to) & so_far
        }
    }

    /// What is for this rank, in rank order, once all rounds are over; `None` if two parcels came from the same rank.
    fn heard(&mut self) -> Option<Vec<(usize, Letter, Option<Parcel>)>> {
        let mut parcels: Vec<Option<Parcel>> = (0..self.size).map(|_| None).collect();
        for parcel in self.parcels.drain(..) {
            if parcels[parcel.from].replace(parcel).is_some() {
                return None;
            }
        }
        let letters = std::mem::take(&mut self.letters);
        let ranks: Vec<usize> = (0..self.size).map(|distance| self.before(distance)).collect();
        let mut heard: Vec<_> = ranks.into_iter().zip(letters).skip(1).collect();
        heard.sort_unstable_by_key(|(rank, _)| *rank);
        Some(heard.into_iter().map(|(rank, letter)| (rank, letter, parcels[rank].take())).collect())
    }
}

pub(super) struct Rounds {
    knowledge: Knowledge,
    tag: c_int,
    /// The round whose message is awaited, and the message if it is coming in.
    round: usize,
    incoming: Option<Lent<Vec<u8>, ()>>,
    outgoing: Vec<Lent<Vec<u8>, ()>>,
    handed_over: bool,
}

impl Rounds {
    pub fn new(lib: &Library, call: Call, body: &dyn Body) -> Rounds {
        let (rank, size) = (lib.rank, lib.size);
        let (mut parcels, mut inline) = (Vec::new(), Vec::new());
        if call.kind == Kind::Alltoall {
            for to in lib.peers() {
                let letter = body.letter(to);
                if letter.length > 0 {
                    let inline = letter.inline.to_vec();
                    parcels.push(Parcel { from: rank, to, length: letter.length, inline });
                }
            }
        } else {
            inline.extend_from_slice(body.letter(rank).inline);
        }
        let knowledge = Knowledge { rank, size, letters: vec![Letter { call, inline }], parcels };
        Rounds { knowledge, tag: 0, round: 0, incoming: None, outgoing: Vec::new(), handed_over: false }
    }

    fn over(&self) -> bool {
        self.round == self.knowledge.rounds()
    }

    /// Sends what is known so far, unless all rounds are over.
    fn pass_on(&mut self, lib: &Library) -> Result<(), CommError> {
        if self.over() {
            return Ok(());
        }
        let message = self.knowledge.pass_on(self.round);
        let (length, to) = (message.len(), (lib.rank + (1 << self.round)) % lib.size);
        let mut message = Lent::new(message);
        let sent = message.send(lib, 0..length, to, self.tag, ());
        self.outgoing.push(message);
        sent
    }

    /// The message of the round, if all of it is here.
    fn arrived(&mut self, lib: &Library) -> Result<Option<Vec<u8>>, CommError> {
        if self.over() {
            return Ok(None);
        }
        if self.incoming.is_none() {
            let from = self.knowledge.before(1 << self.round);
            self.incoming = Lent::come(lib, from, self.tag, self.knowledge.room(self.round))?;
        }
        if let Some(message) = &mut self.incoming {
            message.progress(drop)?;
        }
        Ok(self.incoming.take_if(|message| message.idle()).map(Lent::take))
    }

    fn hand_over(
        &mut self,
        hear: &mut dyn FnMut(Heard<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.handed_over = true;
        let last = self.knowledge.before(1 << (self.round - 1));
        let heard = self.knowledge.heard().ok_or_else(|| foreign(last))?;
        for (peer, Letter { call, inline }, parcel) in heard {
            let (length, inline) = match (call.kind, parcel) {
                (Kind::Alltoall, Some(parcel)) => (parcel.length, parcel.inline),
                (Kind::Alltoall, None) => (0, Vec::new()),
                _ => (call.length as usize, inline),
            };
            hear(Heard { peer, call, length, inline: &inline })?;
        }
        Ok(())
    }
}

impl Meeting for Rounds {
    fn begin(&mut self, lib: &Library, tag: c_int) -> Result<(), CommError> {
        self.tag = tag;
        self.pass_on(lib)
    }

    fn progress(
        &mut self,
        lib: &Library,
        hear: &mut dyn FnMut(Heard<'_>) -> Result<(), CommError>,
    ) -> Result<bool, CommError> {
        let mut moved = false;
        for message in &mut self.outgoing {
            moved |= message.progress(drop)?;
        }
        // Others may be further on: what they send waits in MPI until its round has come.
        while let Some(message) = self.arrived(lib)? {
            self.knowledge.take_in(self.round, &message)?;
            self.round += 1;
            self.pass_on(lib)?;
            moved = true;
        }
        if self.over() && !self.handed_over {
            self.hand_over(hear)?;
        }
        Ok(moved)
    }

    fn missing(&self) -> Vec<usize> {
        if self.handed_over {
            return Vec::new();
        }
        (self.knowledge.letters.len()..self.knowledge.size)
            .map(|distance| self.knowledge.before(distance))
            .collect()
    }

    fn idle(&self) -> bool {
        self.outgoing.iter().all(Lent::idle)
    }
}

/// How many bytes of a call travel with its letter. Those of an all-to-all are in parcels.
fn inline_of(call: Call, length: usize) -> usize {
    if call.kind == Kind::Alltoall { 0 } else { inline_bytes(call.kind, length) }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tag;

    fn call(kind: Kind, length: usize) -> Call {
        Call { kind, tag: Tag { step: 9, op: 4 }, length: length as u64 }
    }

    fn bytes(seed: usize, length: usize) -> Vec<u8> {
        (0..length).map(|i| (seed * 31 + i * 7) as u8).collect()
    }

    /// How long the message from one rank to another is: none, short, as long as travels along, longer.
    fn length(from: usize, to: usize) -> usize {
        [0, 1, 40, PARCEL_INLINE, PARCEL_INLINE + 1, 100_000][(from * 5 + to * 3) % 6]
    }

    fn gathering(size: usize) -> Vec<Knowledge> {
        let letter = |rank: usize| {
            let call = call(Kind::Allgather, [0, 9, 4064, 4065][rank % 4]);
            Letter { call, inline: bytes(rank, inline_of(call, call.length as usize)) }
        };
        let parcels = Vec::new;
        (0..size)
            .map(|rank| Knowledge { rank, size, letters: vec![letter(rank)], parcels: parcels() })
            .collect()
    }

    fn dealing(size: usize) -> Vec<Knowledge> {
        let parcel = |from: usize, to: usize| {
            let (length, short) = (length(from, to), length(from, to) <= PARCEL_INLINE);
            let inline = bytes(from * 100 + to, if short { length } else { 0 });
            Parcel { from, to, length, inline }
        };
        let knowledge = |rank: usize| {
            let letters = vec![Letter { call: call(Kind::Alltoall, 7 * rank), inline: Vec::new() }];
            let peers = (0..size).filter(|to| *to != rank && length(rank, *to) > 0);
            Knowledge { rank, size, letters, parcels: peers.map(|to| parcel(rank, to)).collect() }
        };
        (0..size).map(knowledge).collect()
    }

    fn meet(ranks: &mut [Knowledge]) {
        let size = ranks.len();
        for round in 0..ranks[0].rounds() {
            let messages: Vec<Vec<u8>> = ranks.iter_mut().map(|rank| rank.pass_on(round)).collect();
            for (rank, knowledge) in ranks.iter_mut().enumerate() {
                let message = &messages[(rank + size - (1 << round)) % size];
                assert!(message.len() <= knowledge.room(round));
                knowledge.take_in(round, message).unwrap();
            }
        }
    }

    #[test]
    fn everybody_hears_of_everybody_in_any_number_of_ranks() {
        for size in 2..=21 {
            let mut ranks = gathering(size);
            meet(&mut ranks);
            for knowledge in &mut ranks {
                let own = knowledge.rank;
                let heard = knowledge.heard().unwrap();
                let peers: Vec<usize> = heard.iter().map(|(peer, ..)| *peer).collect();
                assert_eq!(peers, (0..size).filter(|peer| *peer != own).collect::<Vec<_>>());
                for (peer, letter, parcel) in heard {
                    assert_eq!(letter, gathering(size).swap_remove(peer).letters[0]);
                    assert_eq!(parcel, None);
                }
            }
        }
    }

    #[test]
    fn every_parcel_reaches_its_reader_and_nobody_else() {
        for size in 2..=21 {
            let mut ranks = dealing(size);
            meet(&mut ranks);
            for knowledge in &mut ranks {
                let own = knowledge.rank;
                for (peer, letter, parcel) in knowledge.heard().unwrap() {
                    assert_eq!(letter.call, call(Kind::Alltoall, 7 * peer));
                    let sent = dealing(size).swap_remove(peer).parcels;
                    assert_eq!(parcel, sent.into_iter().find(|parcel| parcel.to == own));
                }
            }
        }
    }

    /// Rank 1 of 5 hears in the second round from rank 4, of ranks 4 and 3.
    #[test]
    fn what_cannot_have_come_this_way_is_an_error_that_names_the_sender() {
        let mut ranks = dealing(5);
        let first: Vec<Vec<u8>> = ranks.iter_mut().map(|rank| rank.pass_on(0)).collect();
        for (rank, knowledge) in ranks.iter_mut().enumerate() {
            knowledge.take_in(0, &first[(rank + 4) % 5]).unwrap();
        }
        let message = ranks[4].pass_on(1);
        let refused = |ranks: &mut [Knowledge], message: &[u8]| {
            let cause = ranks[1].take_in(1, message).unwrap_err();
            assert!(cause.to_string().contains("rank 4"), "{cause}");
        };
        // Cut anywhere it lacks something.
        (0..message.len()).for_each(|end| refused(&mut ranks, &message[..end]));
        let parcels = FRONT + 2 * HEADER;
        for (at, value) in [(0, 0xFF), (FRONT, 0xFF), (parcels, 5), (parcels, 1), (parcels + 4, 0)] {
            let mut wrong = message.clone();
            wrong[at] = value;
            refused(&mut ranks, &wrong);
        }
        // Another number of parcels than there are.
        let mut wrong = message.clone();
        wrong[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        refused(&mut ranks, &wrong);
        ranks[1].take_in(1, &message).unwrap();
    }

    #[test]
    fn two_parcels_from_one_rank_are_an_error() {
        let mut ranks = dealing(5);
        meet(&mut ranks);
        let parcel = |byte| Parcel { from: 3, to: 1, length: 1, inline: vec![byte] };
        ranks[1].parcels = vec![parcel(1), parcel(2)];
        assert!(ranks[1].heard().is_none());
    }
}

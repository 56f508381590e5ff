//! One collective in flight: the exchange of headers with every peer, then the body. A header that does not match ours, or
//! that was not written by this version, is an error that names its rank.

use super::body::{Body, INLINE, Tags};
use super::library::{Lent, Library, failed};
use crate::{Call, CommError, Kind, Tag};
use std::ffi::c_int;
use std::ops::Range;

/// Says that this is a header of ours, in this layout. Another layout gets another number.
const MAGIC: u32 = u32::from_le_bytes(*b"RSC2");

/// Magic, kind, step, op, zero, length of the call, length of what is for this peer.
const HEADER: usize = 40;

/// What a peer's header takes at most.
const PLACE: usize = HEADER + INLINE;

/// Collectives that can be in flight before MPI tags repeat; the standard promises tags up to 32767.
const CYCLE: u64 = 8191;

/// The MPI tag of notes, not used by any collective.
pub(super) const NOTES: c_int = 4 * CYCLE as c_int;

pub(super) struct Exchange {
    pub number: u64,
    pub call: Call,
    body: Box<dyn Body>,
    out: Lent<Vec<u8>, ()>,
    /// Where each peer's header lies in `out`, or one for all.
    letters: Vec<Range<usize>>,
    headers: Lent<Vec<u8>, usize>,
}

impl Exchange {
    pub fn new(lib: &Library, number: u64, call: Call, body: Box<dyn Body>) -> Exchange {
        let (mut message, mut letters) = (Vec::new(), Vec::new());
        for peer in 0..if call.kind == Kind::Alltoall { lib.size } else { 1 } {
            let (start, letter) = (message.len(), body.letter(peer));
            message.extend(encode(call, letter.length));
            message.extend_from_slice(letter.inline);
            letters.push(start..message.len());
        }
        let (out, headers) = (Lent::new(message), Lent::new(vec![0; lib.size * PLACE]));
        Exchange { number, call, body, out, letters, headers }
    }

    /// Sends our header to everybody and begins the body.
    pub fn begin(&mut self, lib: &Library) -> Result<(), CommError> {
        let base = (self.number % CYCLE) as c_int * 4;
        let tags = Tags { header: base, payload: base + 1, result: base + 2 };
        for peer in lib.peers() {
            self.headers.receive(lib, peer * PLACE..(peer + 1) * PLACE, peer, tags.header, peer)?;
        }
        for peer in lib.peers() {
            let letter = self.letters[peer.min(self.letters.len() - 1)].clone();
            self.out.send(lib, letter, peer, tags.header, ())?;
        }
        self.body.begin(lib, tags)?;
        self.report();
        Ok(())
    }

    /// Moves on; true when something happened.
    pub fn progress(&mut self, lib: &Library) -> Result<bool, CommError> {
        let mut heard = Vec::new();
        let mut moved = self.out.progress(drop)?;
        moved |= self.headers.progress(|peer| heard.push(peer))?;
        for peer in heard {
            let message = self.headers.read(peer * PLACE..(peer + 1) * PLACE);
            let (header, inline) = message.split_at(HEADER);
            let (theirs, length) = decode(header, peer)?;
            if !theirs.matches(&self.call) {
                return Err(CommError::Mismatch { rank: peer, theirs, ours: self.call });
            }
            self.body.heard(lib, peer, length, &inline[..inline_bytes(theirs.kind, length)])?;
        }
        moved |= self.body.progress(lib)?;
        if moved {
            self.report();
        }
        Ok(moved)
    }

    pub fn done(&self) -> bool {
        self.out.idle() && self.body.done()
    }

    pub fn fail(&self, cause: &CommError) {
        self.body.fail(cause.clone().at(self.call.tag));
    }

    /// Whether the caller has its result or an error.
    pub fn filled(&self) -> bool {
        self.body.filled()
    }

    /// The ranks from which something is missing, in order.
    pub fn missing(&self) -> Vec<usize> {
        let mut missing: Vec<usize> = self.headers.open().copied().collect();
        if missing.is_empty() {
            missing = self.body.missing();
        }
        missing.sort_unstable();
        missing
    }

    fn report(&self) {
        self.body.report(self.missing());
    }
}

/// How many bytes of so many bytes or values travel with the header: all or none.
pub(super) fn inline_bytes(kind: Kind, length: usize) -> usize {
    let bytes = match kind {
        Kind::Allgather | Kind::Alltoall => length,
        Kind::Allreduce => length.saturating_mul(size_of::<f32>()),
        Kind::Barrier => 0,
    };
    if bytes <= INLINE { bytes } else { 0 }
}

fn encode(call: Call, length: usize) -> [u8; HEADER] {
    let kind: u32 = match call.kind {
        Kind::Allgather => 0,
        Kind::Allreduce => 1,
        Kind::Barrier => 2,
        Kind::Alltoall => 3,
    };
    let mut header = [0; HEADER];
    header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[4..8].copy_from_slice(&kind.to_le_bytes());
    header[8..16].copy_from_slice(&call.tag.step.to_le_bytes());
    header[16..20].copy_from_slice(&call.tag.op.to_le_bytes());
    header[24..32].copy_from_slice(&call.length.to_le_bytes());
    header[32..40].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// The call of a peer, and how much of it is for this rank.
fn decode(header: &[u8], peer: usize) -> Result<(Call, usize), CommError> {
    let u32_at = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let kind = match (u32_at(0), u32_at(4)) {
        (MAGIC, 0) => Kind::Allgather,
        (MAGIC, 1) => Kind::Allreduce,
        (MAGIC, 2) => Kind::Barrier,
        (MAGIC, 3) => Kind::Alltoall,
        _ => return Err(failed(&format!("rank {peer} runs another version of this program"))),
    };
    let call = Call { kind, tag: Tag { step: u64_at(8), op: u32_at(16) }, length: u64_at(24) };
    Ok((call, u64_at(32) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_way_and_a_foreign_one_is_named() {
        let call = Call { kind: Kind::Allreduce, tag: Tag { step: u64::MAX - 1, op: 7 }, length: 1 << 40 };
        let mut header = encode(call, 5);
        assert_eq!(decode(&header, 3), Ok((call, 5)));
        header[0] ^= 1;
        assert!(decode(&header, 3).unwrap_err().to_string().contains("rank 3"));
    }
}

//! One collective in flight: the exchange of headers with every peer, then the body. A header that does not match ours, or
//! that was not written by this version, is an error that names its rank.

use super::body::{Body, INLINE, Tags};
use super::library::{Lent, Library, failed};
use crate::{Call, CommError, Kind, Tag};
use std::ffi::c_int;

/// Says that this is a header of ours, in this layout. Another layout gets another number.
const MAGIC: u32 = u32::from_le_bytes(*b"RSC1");

/// Magic, kind, step, op, zero, length.
const HEADER: usize = 32;

/// What a peer's header takes at most.
const PLACE: usize = HEADER + INLINE;

/// Collectives that can be in flight before MPI tags repeat; the standard promises tags up to 32767.
const CYCLE: u64 = 8191;

/// The MPI tag of farewells, not used by any collective.
pub(super) const FAREWELL: c_int = 4 * CYCLE as c_int;

pub(super) struct Exchange {
    pub number: u64,
    pub call: Call,
    body: Box<dyn Body>,
    out: Lent<Vec<u8>, ()>,
    headers: Lent<Vec<u8>, usize>,
}

impl Exchange {
    pub fn new(lib: &Library, number: u64, call: Call, body: Box<dyn Body>) -> Exchange {
        let mut message = encode(call).to_vec();
        message.extend_from_slice(body.inline());
        let (out, headers) = (Lent::new(message), Lent::new(vec![0; lib.size * PLACE]));
        Exchange { number, call, body, out, headers }
    }

    /// Sends our header to everybody and begins the body.
    pub fn begin(&mut self, lib: &Library) -> Result<(), CommError> {
        let base = (self.number % CYCLE) as c_int * 4;
        let tags = Tags { header: base, payload: base + 1, result: base + 2 };
        for peer in lib.peers() {
            self.headers.receive(lib, peer * PLACE..(peer + 1) * PLACE, peer, tags.header, peer)?;
        }
        let length = HEADER + self.body.inline().len();
        for peer in lib.peers() {
            self.out.send(lib, 0..length, peer, tags.header, ())?;
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
            let theirs = decode(header, peer)?;
            if !theirs.matches(&self.call) {
                return Err(CommError::Mismatch { rank: peer, theirs, ours: self.call });
            }
            let length = inline_bytes(theirs);
            self.body.heard(lib, peer, theirs.length as usize, &inline[..length])?;
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

    pub fn fail(&self, cause: CommError) {
        self.body.fail(cause);
    }

    fn report(&self) {
        let mut missing: Vec<usize> = self.headers.open().copied().collect();
        if missing.is_empty() {
            missing = self.body.missing();
        }
        missing.sort_unstable();
        self.body.report(missing);
    }
}

/// Whether the payload of a call travels with its header.
pub(super) fn is_inline(call: Call) -> bool {
    let limit = if call.kind == Kind::Allreduce { INLINE / size_of::<f32>() } else { INLINE };
    call.length <= limit as u64
}

fn inline_bytes(call: Call) -> usize {
    match call.kind {
        _ if !is_inline(call) => 0,
        Kind::Allgather => call.length as usize,
        Kind::Allreduce => call.length as usize * size_of::<f32>(),
        Kind::Barrier => 0,
    }
}

fn encode(call: Call) -> [u8; HEADER] {
    let kind: u32 = match call.kind {
        Kind::Allgather => 0,
        Kind::Allreduce => 1,
        Kind::Barrier => 2,
    };
    let mut header = [0; HEADER];
    header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[4..8].copy_from_slice(&kind.to_le_bytes());
    header[8..16].copy_from_slice(&call.tag.step.to_le_bytes());
    header[16..20].copy_from_slice(&call.tag.op.to_le_bytes());
    header[24..32].copy_from_slice(&call.length.to_le_bytes());
    header
}

fn decode(header: &[u8], peer: usize) -> Result<Call, CommError> {
    let u32_at = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let kind = match (u32_at(0), u32_at(4)) {
        (MAGIC, 0) => Kind::Allgather,
        (MAGIC, 1) => Kind::Allreduce,
        (MAGIC, 2) => Kind::Barrier,
        _ => return Err(failed(&format!("rank {peer} runs another version of this program"))),
    };
    Ok(Call { kind, tag: Tag { step: u64_at(8), op: u32_at(16) }, length: u64_at(24) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_way_and_a_foreign_one_is_named() {
        let call = Call { kind: Kind::Allreduce, tag: Tag { step: u64::MAX - 1, op: 7 }, length: 1 << 40 };
        let mut header = encode(call);
        assert_eq!(decode(&header, 3), Ok(call));
        header[0] ^= 1;
        assert!(decode(&header, 3).unwrap_err().to_string().contains("rank 3"));
    }
}

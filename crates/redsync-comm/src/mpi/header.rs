//! What ranks tell each other about a collective before anything else: kind, tag, lengths. A header that was not written by this
//! version is an error that names its rank.

use super::library::failed;
use crate::{Call, CommError, Kind, Tag};

/// Payload bytes that travel with the header: one message instead of two for what is short anyway.
pub(super) const INLINE: usize = 4064;

/// Magic, kind, step, op, zero, length of the call, length of what is for this peer.
pub(super) const HEADER: usize = 40;

/// What a header takes at most, payload included.
pub(super) const PLACE: usize = HEADER + INLINE;

/// Says that this is a header of ours, in this layout. Another layout gets another number.
const MAGIC: u32 = u32::from_le_bytes(*b"RSC2");

/// How many bytes of so many bytes or values travel with the header: all or none.
pub(super) fn inline_bytes(kind: Kind, length: usize) -> usize {
    let bytes = match kind {
        Kind::Allgather | Kind::Alltoall => length,
        Kind::Allreduce => length.saturating_mul(size_of::<f32>()),
        Kind::Barrier => 0,
    };
    if bytes <= INLINE { bytes } else { 0 }
}

pub(super) fn encode(call: Call, length: usize) -> [u8; HEADER] {
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
pub(super) fn decode(header: &[u8], peer: usize) -> Result<(Call, usize), CommError> {
    let u32_at = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let kind = match (u32_at(0), u32_at(4)) {
        (MAGIC, 0) => Kind::Allgather,
        (MAGIC, 1) => Kind::Allreduce,
        (MAGIC, 2) => Kind::Barrier,
        (MAGIC, 3) => Kind::Alltoall,
        _ => return Err(foreign(peer)),
    };
    let call = Call { kind, tag: Tag { step: u64_at(8), op: u32_at(16) }, length: u64_at(24) };
    let length = u64_at(32);
    if kind != Kind::Alltoall && length != call.length {
        return Err(foreign(peer));
    }
    Ok((call, length as usize))
}

pub(super) fn foreign(peer: usize) -> CommError {
    failed(&format!("rank {peer} runs another version of this program"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_way_and_a_foreign_one_is_named() {
        let call = Call { kind: Kind::Allreduce, tag: Tag { step: u64::MAX - 1, op: 7 }, length: 1 << 40 };
        let dealt = Call { kind: Kind::Alltoall, ..call };
        assert_eq!(decode(&encode(dealt, 5), 3), Ok((dealt, 5)));
        assert!(decode(&encode(call, 5), 3).unwrap_err().to_string().contains("rank 3"));
        let mut header = encode(call, 1 << 40);
        assert_eq!(decode(&header, 3), Ok((call, 1 << 40)));
        header[0] ^= 1;
        assert!(decode(&header, 3).unwrap_err().to_string().contains("rank 3"));
    }
}

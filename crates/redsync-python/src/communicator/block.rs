//! What every rank tells every other at the beginning of a collective: a header and the beginning of a message come in, a block of
//! a size that all ranks know goes out, and back. What must hold: a block of another program, or of another version, is refused.

use redsync_comm::{Call, Kind, Tag};

/// Says that this is a block of ours, in this layout. Another layout gets another number.
const MAGIC: u32 = u32::from_le_bytes(*b"RSP1");

/// Magic, kind, step, op, zero, length, part, longest.
pub const HEADER: usize = 48;

/// The smallest block: what short messages and reasons need, in hardly more time than an empty one.
pub const LEAST: usize = 512;

/// The longest reason that a rank can give, in bytes: it fits into every block.
pub const REASON: usize = LEAST - HEADER;

const GAVE_UP: u32 = 4;

/// What stands in front of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the rank started; None if it has given up, and the payload is its reason.
    pub call: Option<Call>,
    /// Bytes of the message for the rank that reads this.
    pub part: u64,
    /// Bytes of the longest message that the sender has for anybody: all ranks conclude the same from it.
    pub longest: u64,
}

impl Header {
    /// Writes the header and as much of the message as there is room for.
    pub fn write(&self, message: &[u8], block: &mut [u8]) {
        let (header, room) = block.split_at_mut(HEADER);
        let nothing = Call { kind: Kind::Barrier, tag: Tag { step: 0, op: 0 }, length: 0 };
        let kind = match self.call.map(|call| call.kind) {
            Some(Kind::Allgather) => 0,
            Some(Kind::Allreduce) => 1,
            Some(Kind::Barrier) => 2,
            Some(Kind::Alltoall) => 3,
            None => GAVE_UP,
        };
        let call = self.call.unwrap_or(nothing);
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4..8].copy_from_slice(&u32::to_le_bytes(kind));
        header[8..16].copy_from_slice(&call.tag.step.to_le_bytes());
        header[16..20].copy_from_slice(&call.tag.op.to_le_bytes());
        header[20..24].fill(0);
        header[24..32].copy_from_slice(&call.length.to_le_bytes());
        header[32..40].copy_from_slice(&self.part.to_le_bytes());
        header[40..48].copy_from_slice(&self.longest.to_le_bytes());
        let fitting = message.len().min(room.len());
        room[..fitting].copy_from_slice(&message[..fitting]);
    }

    /// Reads a header; None if it is not one of ours.
    pub fn read(block: &[u8]) -> Option<Header> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(block.get(at..at + 8)?.try_into().ok()?));
        let kind = match (u32_at(0)?, u32_at(4)?) {
            (MAGIC, 0) => Some(Kind::Allgather),
            (MAGIC, 1) => Some(Kind::Allreduce),
            (MAGIC, 2) => Some(Kind::Barrier),
            (MAGIC, 3) => Some(Kind::Alltoall),
            (MAGIC, GAVE_UP) => None,
            _ => return None,
        };
        let (tag, length) = (Tag { step: u64_at(8)?, op: u32_at(16)? }, u64_at(24)?);
        let call = kind.map(|kind| Call { kind, tag, length });
        Some(Header { call, part: u64_at(32)?, longest: u64_at(40)? })
    }
}

/// A reason as it fits into a block, cut between two characters.
pub fn cut(reason: &str) -> &str {
    let end = (0..=reason.len().min(REASON)).rev().find(|&end| reason.is_char_boundary(end));
    &reason[..end.unwrap_or(0)]
}

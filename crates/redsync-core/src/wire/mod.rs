//! The message format: what a rank sends at one step. `docs/wire-format.md` describes it for other languages.
//! Comes in: sparse vectors of one or more layers. Goes out: one checksummed frame, and sparse vectors again. What must
//! hold: a peer's bytes are hostile; decoding returns an exact error, never panics, reads past the end, or allocates more
//! than a small multiple of what was received.

mod error;
mod read;
mod rice;
mod write;

pub use error::{BadMessage, FrameError, MessageError};
pub use read::{Frame, Message, Messages};
pub use write::FrameWriter;

/// The version of the format that this crate writes and reads.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"RSYN";
const FRAME_HEADER: usize = 32;
const MESSAGE_HEADER: usize = 24;

/// How indices are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexCode {
    /// 32 bits each, as in the paper.
    Plain,
    /// Rice codes of the gaps: within a few percent of the entropy of a random set.
    #[default]
    Rice,
}

/// The codes of values in a message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueCode {
    F32 = 0,
    Bf16 = 1,
    Mean = 2,
}

impl ValueCode {
    /// Bytes of the values of `count` elements.
    fn bytes(self, count: u32) -> u64 {
        match self {
            ValueCode::F32 => 4 * u64::from(count),
            ValueCode::Bf16 => 2 * u64::from(count),
            ValueCode::Mean => 4 * u64::from(count.min(1)),
        }
    }
}

/// The bits per element that no code of a random set of `count` out of `n` indices can beat on average: the binary
/// entropy of the density, per chosen element.
///
/// ```
/// let bits = redsync_core::wire::bound_bits(1_000_000, 1_000);
/// assert!((bits - 11.41).abs() < 0.01);
/// ```
pub fn bound_bits(n: usize, count: usize) -> f64 {
    let p = count as f64 / n as f64;
    if count == 0 || count >= n {
        return 0.0;
    }
    -(p * p.log2() + (1.0 - p) * (1.0 - p).log2()) / p
}

/// CRC-32 of a frame without its checksum field.
fn checksum(frame: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&frame[..20]);
    hasher.update(&frame[24..]);
    hasher.finalize()
}

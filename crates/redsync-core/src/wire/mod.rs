//! The message format: what a rank sends at one step. `docs/wire-format.md` describes it for other languages.
//! Comes in: sparse vectors of one or more layers. Goes out: one checksummed frame, and sparse vectors again. What must
//! hold: a peer's bytes are hostile; decoding returns an exact error, never panics, reads past the end, or allocates more
//! than a small multiple of what was received. What all ranks agreed on does not travel: a reader brings the [`Shape`] of
//! each message, and the frame carries a fingerprint of the plan that all shapes follow from.

mod eight_bit;
mod error;
mod read;
mod rice;
mod squares;
mod two_bit;
mod varint;
mod write;

pub use error::{BadMessage, FrameError, MessageError};
pub use read::{Frame, Message, Messages};
pub use write::FrameWriter;

use crate::phase::Phase;
use crate::quantize::Values;

/// The version of the format that this crate writes and reads.
pub const VERSION: u16 = 2;

/// Bytes of a frame beside its messages.
pub const FRAME_HEADER: usize = 40;

const MAGIC: [u8; 4] = *b"RSYN";

/// How indices are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexCode {
    /// 32 bits each, as in the paper.
    Plain,
    /// Rice codes of the gaps: within a few percent of the entropy of a random set.
    #[default]
    Rice,
    /// None at all: the message holds every element of the layer, in order, or nothing.
    Every,
}

/// What both sides know of a message before it is sent.
///
/// ```
/// use redsync_core::wire::{Frame, Shape};
/// use redsync_core::{FrameWriter, IndexCode, Phase, Sparse, Values};
/// let sparse = Sparse::from_parts(1000, vec![20, 700], vec![0.5, -1.5])?;
/// let mut writer = FrameWriter::new();
/// writer.begin(7, 0, 0xfeed); // step 7, rank 0, a plan
/// writer.push(&sparse, IndexCode::Rice, Values::Bf16);
///
/// let frame = Frame::parse(writer.finish())?;
/// frame.expect(7, 0, 1, 0xfeed)?;
/// let shape = Shape { n: 1000, phase: Phase::Both, indices: IndexCode::Rice, values: Values::Bf16 };
/// let mut received = Sparse::new();
/// for message in frame.messages() {
///     message?.decode(&shape, &mut received)?;
/// }
/// assert_eq!(received.iter().collect::<Vec<_>>(), [(20, 0.5), (700, -1.5)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Elements of the layer.
    pub n: u32,
    /// The signs that compete.
    pub phase: Phase,
    /// How indices are written.
    pub indices: IndexCode,
    /// How values are written.
    pub values: Values,
}

impl Shape {
    /// Whether messages of this shape exist: one mean stands for elements of one sign that were chosen, four levels for
    /// elements of both.
    fn is_possible(&self) -> bool {
        match self.values {
            Values::F32 | Values::Bf16 | Values::EightBit => true,
            Values::Asq | Values::AsqDropError => {
                self.phase != Phase::Both && self.indices != IndexCode::Every
            }
            Values::TwoBit => self.phase == Phase::Both,
        }
    }

    /// Bytes of the values of `count` elements.
    fn value_bytes(&self, count: u32) -> u64 {
        let count = u64::from(count);
        match self.values {
            Values::F32 => 4 * count,
            Values::Bf16 => 2 * count,
            Values::Asq | Values::AsqDropError => 4 * count.min(1),
            Values::EightBit => eight_bit::SCALE as u64 * count.min(1) + count,
            Values::TwoBit => two_bit::LEVELS as u64 * count.min(1) + count.div_ceil(4),
        }
    }
}

/// Bytes of a message beside its payload.
///
/// ```
/// assert_eq!(redsync_core::wire::message_header(10, 54), 2);
/// assert_eq!(redsync_core::wire::message_header(1_000, 5_438), 4);
/// ```
pub fn message_header(count: u32, payload: u64) -> usize {
    varint::len(count.into()) + varint::len(payload)
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

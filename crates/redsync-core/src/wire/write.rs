//! Sparse vectors in, a frame out.

use super::{FRAME_HEADER, IndexCode, MAGIC, Shape, VERSION, eight_bit, rice, squares, two_bit, varint};
use crate::quantize::{Values, round};
use crate::sparse::Sparse;

/// Writes one frame after the other into one buffer.
///
/// ```
/// use redsync_core::wire::{Frame, FrameWriter};
/// let mut writer = FrameWriter::new();
/// writer.begin(7, 0, 0xfeed); // step 7, rank 0, a plan; compressors add their messages here
/// let bytes = writer.finish();
/// assert_eq!(Frame::parse(bytes)?.step(), 7);
/// # Ok::<(), redsync_core::wire::FrameError>(())
/// ```
#[derive(Debug, Default)]
pub struct FrameWriter {
    bytes: Vec<u8>,
    messages: u16,
}

impl FrameWriter {
    /// A writer with an empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives the writer a buffer to use, for example one that came back from an exchange.
    pub fn reuse(&mut self, buffer: Vec<u8>) {
        self.bytes = buffer;
        self.bytes.clear();
    }

    /// Starts a frame and forgets the one before. `plan` is a fingerprint of what the ranks agreed on.
    pub fn begin(&mut self, step: u64, rank: u32, plan: u64) {
        self.messages = 0;
        self.bytes.clear();
        self.bytes.extend_from_slice(&MAGIC);
        self.bytes.extend_from_slice(&VERSION.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 2]); // messages, at the end
        self.bytes.extend_from_slice(&step.to_le_bytes());
        self.bytes.extend_from_slice(&rank.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 12]); // checksum and length, at the end
        self.bytes.extend_from_slice(&plan.to_le_bytes());
    }

    /// Bytes written so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether no frame was begun.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Messages in the frame so far.
    pub fn messages(&self) -> u16 {
        self.messages
    }

    /// Adds the message of one layer; returns the bytes of its header. Who reads it must expect the same codes.
    ///
    /// # Panics
    /// If no frame was begun, the frame already holds 65,535 messages, or the vector cannot be written in these codes:
    /// [`Values::Asq`] needs a mean, [`Values::EightBit`] a scale, [`Values::TwoBit`] levels, [`IndexCode::Every`] all elements or none.
    pub fn push(&mut self, sparse: &Sparse, indices: IndexCode, values: Values) -> usize {
        assert!(self.bytes.len() >= FRAME_HEADER, "push before begin");
        self.messages = self.messages.checked_add(1).expect("a frame holds at most 65,535 messages");
        let shape = Shape { n: sparse.n, phase: sparse.phase(), indices, values };
        assert!(sparse.is_empty() || fits(sparse, &shape), "a vector that cannot be written as {shape:?}");
        let (n, count) = (sparse.n, sparse.len() as u32);
        let parameter = rice::parameter(n, count);
        let payload = shape.value_bytes(count)
            + match indices {
                IndexCode::Plain => 4 * u64::from(count),
                IndexCode::Rice => rice::bytes(&sparse.indices, parameter),
                IndexCode::Every => 0,
            };
        let out = &mut self.bytes;
        let before = out.len();
        varint::write(count.into(), out);
        varint::write(payload, out);
        let begin = out.len();
        match values {
            Values::F32 => out.extend(sparse.values.iter().flat_map(|v| v.to_le_bytes())),
            Values::Bf16 => out.extend(sparse.values.iter().flat_map(|v| round(*v).to_le_bytes())),
            Values::Asq | Values::AsqDropError => {
                out.extend(sparse.mean.iter().flat_map(|v| v.to_le_bytes()))
            }
            Values::EightBit => eight_bit::write(sparse.scale, &sparse.values, out),
            Values::TwoBit => two_bit::write(sparse.levels, &sparse.values, out),
        }
        match indices {
            IndexCode::Plain => out.extend(sparse.indices.iter().flat_map(|i| i.to_le_bytes())),
            IndexCode::Rice => rice::encode(&sparse.indices, parameter, out),
            IndexCode::Every => {}
        }
        debug_assert_eq!((out.len() - begin) as u64, payload);
        begin - before
    }

    /// Adds a message of second moments, every one of a part of a layer; returns the bytes of its header. Of each is said which power of
    /// two is nearest, down to 2^-15 of the largest. Who reads it must expect as many, and has a guess for each.
    ///
    /// ```
    /// use redsync_core::wire::{Frame, FrameWriter};
    /// let mut writer = FrameWriter::new();
    /// writer.begin(7, 0, 0xfeed);
    /// writer.push_squares([3.0, 0.26, 0.0].into_iter());
    /// let mut guesses = [3.5, 1.0, 0.0]; // within a factor of the root of two of 4, too large, right
    /// for message in Frame::parse(writer.finish())?.messages() {
    ///     message?.squares(&mut guesses)?;
    /// }
    /// assert!(guesses[0] == 3.5 && (guesses[1] - 0.25 * 2f32.sqrt()).abs() < 1e-6 && guesses[2] == 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// If no frame was begun, or the frame already holds 65,535 messages.
    pub fn push_squares(&mut self, squares: impl ExactSizeIterator<Item = f32> + Clone) -> usize {
        assert!(self.bytes.len() >= FRAME_HEADER, "push before begin");
        self.messages = self.messages.checked_add(1).expect("a frame holds at most 65,535 messages");
        let (count, before) = (squares.len() as u32, self.bytes.len());
        varint::write(count.into(), &mut self.bytes);
        varint::write(squares::bytes(count), &mut self.bytes);
        let begin = self.bytes.len();
        squares::write(squares, &mut self.bytes);
        begin - before
    }

    /// Ends the frame.
    ///
    /// # Panics
    /// If no frame was begun.
    pub fn finish(&mut self) -> &[u8] {
        assert!(self.bytes.len() >= FRAME_HEADER, "finish before begin");
        let length = self.bytes.len() as u64;
        self.bytes[6..8].copy_from_slice(&self.messages.to_le_bytes());
        self.bytes[24..32].copy_from_slice(&length.to_le_bytes());
        let checksum = super::checksum(&self.bytes);
        self.bytes[20..24].copy_from_slice(&checksum.to_le_bytes());
        &self.bytes
    }

    /// Ends the frame and hands the buffer over, for an exchange that wants to own it.
    ///
    /// # Panics
    /// If no frame was begun.
    pub fn take(&mut self) -> Vec<u8> {
        self.finish();
        std::mem::take(&mut self.bytes)
    }
}

/// Whether a vector that is not empty can be written in a shape.
fn fits(sparse: &Sparse, shape: &Shape) -> bool {
    let values = match shape.values {
        Values::F32 | Values::Bf16 => sparse.mean.is_none(),
        Values::Asq | Values::AsqDropError => sparse.mean.is_some(),
        Values::EightBit => sparse.scale.is_some(),
        Values::TwoBit => sparse.levels.is_some(),
    };
    shape.is_possible() && values && (shape.indices != IndexCode::Every || sparse.len() == sparse.dense_len())
}

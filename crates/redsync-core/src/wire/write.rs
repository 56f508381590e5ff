//! Sparse vectors in, a frame out.

use super::{FRAME_HEADER, IndexCode, MAGIC, VERSION, ValueCode, rice};
use crate::phase::Phase;
use crate::quantize::{Values, round};
use crate::sparse::Sparse;

/// Writes one frame after the other into one buffer.
///
/// ```
/// use redsync_core::wire::{Frame, FrameWriter};
/// let mut writer = FrameWriter::new();
/// writer.begin(7, 0); // step 7, rank 0; compressors add their messages here
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

    /// Starts a frame and forgets the one before.
    pub fn begin(&mut self, step: u64, rank: u32) {
        self.messages = 0;
        self.bytes.clear();
        self.bytes.extend_from_slice(&MAGIC);
        self.bytes.extend_from_slice(&VERSION.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 2]); // messages, at the end
        self.bytes.extend_from_slice(&step.to_le_bytes());
        self.bytes.extend_from_slice(&rank.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 12]); // checksum and length, at the end
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

    /// Adds the message of one layer.
    ///
    /// # Panics
    /// If no frame was begun, or the frame already holds 65,535 messages.
    pub fn push(&mut self, layer: u32, sparse: &Sparse, indices: IndexCode, values: Values) {
        assert!(self.bytes.len() >= FRAME_HEADER, "push before begin");
        self.messages = self.messages.checked_add(1).expect("a frame holds at most 65,535 messages");
        let count = sparse.len() as u32;
        let value_code = match values {
            _ if sparse.mean.is_some() => ValueCode::Mean,
            // A quantized layer that has nothing to send has no mean either.
            Values::Asq | Values::AsqDropError if sparse.is_empty() && sparse.phase() != Phase::Both => {
                ValueCode::Mean
            }
            Values::Bf16 => ValueCode::Bf16,
            _ => ValueCode::F32,
        };
        let phase = sparse.phase();
        let parameter = if indices == IndexCode::Rice { rice::parameter(sparse.n, count) } else { 0 };
        let out = &mut self.bytes;
        for word in [layer, sparse.n, count] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let index_code = match indices {
            IndexCode::Plain => 0,
            IndexCode::Rice => 1,
        };
        out.extend_from_slice(&[phase.code(), index_code, value_code as u8, parameter]);
        let length_at = out.len();
        out.extend_from_slice(&[0; 8]);
        match value_code {
            ValueCode::F32 => out.extend(sparse.values.iter().flat_map(|v| v.to_le_bytes())),
            ValueCode::Bf16 => out.extend(sparse.values.iter().flat_map(|v| round(*v).to_le_bytes())),
            ValueCode::Mean => out.extend(sparse.mean.iter().flat_map(|v| v.to_le_bytes())),
        }
        match indices {
            IndexCode::Plain => out.extend(sparse.indices.iter().flat_map(|i| i.to_le_bytes())),
            IndexCode::Rice => rice::encode(&sparse.indices, parameter, out),
        }
        let payload = (out.len() - length_at - 8) as u64;
        out[length_at..length_at + 8].copy_from_slice(&payload.to_le_bytes());
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

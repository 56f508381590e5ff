//! Received bytes in, sparse vectors out, or an exact error.

use super::{
    BadMessage, FRAME_HEADER, FrameError, MAGIC, MESSAGE_HEADER, MessageError, VERSION, ValueCode, rice,
};
use crate::phase::Phase;
use crate::sparse::{Sparse, first_bad_index, first_bad_value};
use half::bf16;

/// A frame whose header, length and checksum are right.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    body: &'a [u8],
    step: u64,
    rank: u32,
    messages: u16,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

impl<'a> Frame<'a> {
    /// Checks everything but the messages themselves.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let have = bytes.len();
        if have < FRAME_HEADER {
            return Err(FrameError::Short { have });
        }
        let found = std::array::from_fn(|i| bytes[i]);
        if found != MAGIC {
            return Err(FrameError::Magic { found });
        }
        let theirs = u16::from_le_bytes([bytes[4], bytes[5]]);
        if theirs != VERSION {
            return Err(FrameError::Version { theirs });
        }
        let declared = u64_at(bytes, 24);
        if declared != have as u64 {
            return Err(FrameError::Length { declared, have });
        }
        let (declared, computed) = (u32_at(bytes, 20), super::checksum(bytes));
        if declared != computed {
            return Err(FrameError::Checksum { declared, computed });
        }
        Ok(Frame {
            body: &bytes[FRAME_HEADER..],
            step: u64_at(bytes, 8),
            rank: u32_at(bytes, 16),
            messages: u16::from_le_bytes([bytes[6], bytes[7]]),
        })
    }

    /// The step of the sender.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The rank of the sender.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many messages the frame holds.
    pub fn len(&self) -> u16 {
        self.messages
    }

    /// Whether the frame holds no message.
    pub fn is_empty(&self) -> bool {
        self.messages == 0
    }

    /// Checks that the frame is the one that this step of the exchange expects.
    pub fn expect(&self, step: u64, rank: u32, messages: u16) -> Result<(), FrameError> {
        if self.rank != rank {
            Err(FrameError::Rank { theirs: self.rank, expected: rank })
        } else if self.step != step {
            Err(FrameError::Step { theirs: self.step, ours: step })
        } else if self.messages != messages {
            Err(FrameError::Messages { theirs: self.messages, expected: messages })
        } else {
            Ok(())
        }
    }

    /// The messages in order. After the last an error follows if the frame has bytes left, or ends too early.
    pub fn messages(&self) -> Messages<'a> {
        Messages { rest: self.body, position: 0, messages: self.messages }
    }
}

/// Iterator over the messages of a frame.
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    rest: &'a [u8],
    position: u16,
    messages: u16,
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.position == self.messages {
            let bytes = std::mem::take(&mut self.rest).len();
            return (bytes > 0).then_some(Err(FrameError::Trailing { bytes }));
        }
        let position = self.position;
        self.position += 1;
        let message = Message::split(self.rest);
        if message.is_none() {
            (self.position, self.rest) = (self.messages, &[]);
        }
        Some(message.ok_or(FrameError::Ends { position }).map(|(message, rest)| {
            self.rest = rest;
            message
        }))
    }
}

/// One message: a header, and a payload that was not looked at yet.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    header: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Message<'a> {
    fn split(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (header, rest) = bytes.split_at_checked(MESSAGE_HEADER)?;
        let length = usize::try_from(u64_at(header, 16)).ok()?;
        let (payload, rest) = rest.split_at_checked(length)?;
        Some((Message { header, payload }, rest))
    }

    /// The layer according to the header.
    pub fn layer(&self) -> u32 {
        u32_at(self.header, 0)
    }

    /// Elements of the layer according to the header.
    pub fn dense_len(&self) -> u32 {
        u32_at(self.header, 4)
    }

    /// Elements in the message according to the header.
    pub fn count(&self) -> u32 {
        u32_at(self.header, 8)
    }

    /// Bytes of the message with its header.
    pub fn byte_len(&self) -> usize {
        MESSAGE_HEADER + self.payload.len()
    }

    /// Decodes the message into `sparse`, if it is of the given layer, size and phase. After an error `sparse` holds no
    /// elements.
    pub fn decode(&self, layer: u32, n: u32, phase: Phase, sparse: &mut Sparse) -> Result<(), MessageError> {
        sparse.reset(n, phase);
        self.decode_checked(layer, n, phase, sparse).map_err(|why| {
            sparse.reset(n, phase);
            MessageError { layer: self.layer(), why }
        })
    }

    fn decode_checked(
        &self,
        layer: u32,
        n: u32,
        phase: Phase,
        sparse: &mut Sparse,
    ) -> Result<(), BadMessage> {
        if self.layer() != layer {
            return Err(BadMessage::Layer { expected: layer });
        }
        if self.dense_len() != n {
            return Err(BadMessage::Size { theirs: self.dense_len(), ours: n });
        }
        let theirs = Phase::from_code(self.header[12]).ok_or(BadMessage::UnknownPhase(self.header[12]))?;
        if theirs != phase {
            return Err(BadMessage::Phase { theirs, ours: phase });
        }
        let count = self.count();
        if count > n {
            return Err(BadMessage::Count { count, n });
        }
        let code = self.value_code(phase)?;
        let bytes = self.payload.len() as u64;
        let ill = BadMessage::Payload { count, bytes };
        let (values, indices) = usize::try_from(code.bytes(count))
            .ok()
            .and_then(|at| self.payload.split_at_checked(at))
            .ok_or(ill)?;
        self.read_indices(count, n, indices, sparse)?;
        read_values(code, phase, values, sparse)
    }

    fn value_code(&self, phase: Phase) -> Result<ValueCode, BadMessage> {
        match self.header[14] {
            0 => Ok(ValueCode::F32),
            1 => Ok(ValueCode::Bf16),
            // One mean for all exists for one sign only.
            2 if phase != Phase::Both => Ok(ValueCode::Mean),
            other => Err(BadMessage::UnknownValueCode(other)),
        }
    }

    fn read_indices(&self, count: u32, n: u32, bytes: &[u8], sparse: &mut Sparse) -> Result<(), BadMessage> {
        let ill = Err(BadMessage::Payload { count, bytes: self.payload.len() as u64 });
        let parameter = self.header[15];
        match self.header[13] {
            0 if parameter != 0 => Err(BadMessage::RiceParameter(parameter)),
            0 if bytes.len() as u64 != 4 * u64::from(count) => ill,
            0 => read_plain(n, bytes, &mut sparse.indices),
            1 if parameter > rice::MAX_PARAMETER => Err(BadMessage::RiceParameter(parameter)),
            // Every code has at least 1 + parameter bits: this bounds what is allocated by what was received.
            1 if u64::from(count) * (1 + u64::from(parameter)) > 8 * bytes.len() as u64 => ill,
            1 => {
                sparse.indices.reserve(count as usize);
                rice::decode(bytes, parameter, count, n, &mut sparse.indices)
            }
            other => Err(BadMessage::UnknownIndexCode(other)),
        }
    }
}

fn read_plain(n: u32, bytes: &[u8], indices: &mut Vec<u32>) -> Result<(), BadMessage> {
    let (words, _) = bytes.as_chunks::<4>();
    indices.extend(words.iter().map(|word| u32::from_le_bytes(*word)));
    match first_bad_index(indices, n) {
        Some(position) => Err(BadMessage::Index { position: position as u32, n }),
        None => Ok(()),
    }
}

fn read_values(code: ValueCode, phase: Phase, bytes: &[u8], sparse: &mut Sparse) -> Result<(), BadMessage> {
    match code {
        ValueCode::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            sparse.values.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
        }
        ValueCode::Bf16 => {
            let (words, _) = bytes.as_chunks::<2>();
            sparse.values.extend(words.iter().map(|word| bf16::from_le_bytes(*word).to_f32()));
        }
        ValueCode::Mean => {
            sparse.mean = bytes.first_chunk::<4>().map(|word| f32::from_le_bytes(*word));
            if let Some(mean) = sparse.mean.filter(|mean| phase.lens().see(*mean) <= 0.0) {
                return Err(BadMessage::MeanSign { mean });
            }
        }
    }
    match first_bad_value(sparse.values.iter().chain(&sparse.mean)) {
        Some(position) => {
            let value = sparse.value(position).unwrap_or(f32::NAN);
            Err(BadMessage::Value { position: position as u32, value })
        }
        None => Ok(()),
    }
}

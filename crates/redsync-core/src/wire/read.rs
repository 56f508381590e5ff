//! Received bytes in, sparse vectors out, or an exact error.

use super::{
    BadMessage, FRAME_HEADER, FrameError, IndexCode, MAGIC, MessageError, Shape, VERSION, eight_bit,
    message_header, rice, squares, two_bit, varint,
};
use crate::phase::Phase;
use crate::quantize::Values;
use crate::sparse::{Sparse, first_bad_index, first_bad_value};
use half::bf16;

/// A frame whose header, length and checksum are right.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    body: &'a [u8],
    step: u64,
    rank: u32,
    messages: u16,
    plan: u64,
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
        // Magic and version come first: a whole frame of another version may be shorter than a header of this one.
        if have < 6 {
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
        if have < FRAME_HEADER {
            return Err(FrameError::Short { have });
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
            plan: u64_at(bytes, 32),
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

    /// Checks that the frame is the one that this step of the exchange expects, of the same plan.
    pub fn expect(&self, step: u64, rank: u32, messages: u16, plan: u64) -> Result<(), FrameError> {
        if self.rank != rank {
            Err(FrameError::Rank { theirs: self.rank, expected: rank })
        } else if self.plan != plan {
            Err(FrameError::Plan { theirs: self.plan, ours: plan })
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
        let split = Message::split(position, self.rest);
        match &split {
            Ok((_, rest)) => self.rest = rest,
            Err(_) => (self.position, self.rest) = (self.messages, &[]),
        }
        Some(split.map(|(message, _)| message))
    }
}

/// One message, whose payload was not looked at yet.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    position: u16,
    count: u32,
    payload: &'a [u8],
}

impl<'a> Message<'a> {
    fn split(position: u16, bytes: &'a [u8]) -> Result<(Self, &'a [u8]), FrameError> {
        let ends = FrameError::Ends { position };
        let number = |bytes| {
            varint::read(bytes).map_err(|bad| match bad {
                varint::Bad::Ends => FrameError::Ends { position },
                varint::Bad::Form => FrameError::Number { position },
            })
        };
        let (count, rest) = number(bytes)?;
        let count = u32::try_from(count).map_err(|_| FrameError::Number { position })?;
        let (length, rest) = number(rest)?;
        let (payload, rest) =
            usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length)).ok_or(ends)?;
        Ok((Message { position, count, payload }, rest))
    }

    /// Elements that the message says it holds.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of the message beside values and indices.
    pub fn header_len(&self) -> usize {
        message_header(self.count, self.payload.len() as u64)
    }

    /// Bytes of the whole message.
    pub fn byte_len(&self) -> usize {
        self.header_len() + self.payload.len()
    }

    /// Decodes the message, which was written in this shape, into `sparse`. After an error `sparse` holds no elements.
    pub fn decode(&self, shape: &Shape, sparse: &mut Sparse) -> Result<(), MessageError> {
        sparse.reset(shape.n, shape.phase);
        self.fill(shape, sparse).map_err(|why| {
            sparse.reset(shape.n, shape.phase);
            MessageError { position: self.position, why }
        })
    }

    /// Decodes a message of second moments, of which there must be as many as guesses, numbers that are not negative: each becomes what of
    /// all that the message allows is nearest to it. After an error they are what they were.
    pub fn squares(&self, guesses: &mut [f32]) -> Result<(), MessageError> {
        let (count, bytes) = (self.count, self.payload.len() as u64);
        let n = guesses.len() as u32;
        let read = match () {
            () if count != n => Err(BadMessage::Every { count, n }),
            () if bytes != squares::bytes(n) => Err(BadMessage::Payload { count, bytes }),
            () => squares::read(self.payload, guesses),
        };
        read.map_err(|why| MessageError { position: self.position, why })
    }

    fn fill(&self, shape: &Shape, sparse: &mut Sparse) -> Result<(), BadMessage> {
        let (n, count) = (shape.n, self.count);
        if !shape.is_possible() {
            return Err(BadMessage::Shape(*shape));
        }
        if count > n {
            return Err(BadMessage::Count { count, n });
        }
        let at = usize::try_from(shape.value_bytes(count)).ok();
        let split = at.and_then(|at| self.payload.split_at_checked(at));
        let (values, indices) =
            split.ok_or(BadMessage::Payload { count, bytes: self.payload.len() as u64 })?;
        self.read_indices(shape, indices, sparse)?;
        self.read_values(shape, values, sparse)
    }

    fn read_indices(&self, shape: &Shape, bytes: &[u8], sparse: &mut Sparse) -> Result<(), BadMessage> {
        let (n, count) = (shape.n, self.count);
        let ill = Err(BadMessage::Payload { count, bytes: self.payload.len() as u64 });
        match shape.indices {
            IndexCode::Plain if bytes.len() as u64 != 4 * u64::from(count) => ill,
            IndexCode::Plain => read_plain(n, bytes, &mut sparse.indices),
            IndexCode::Rice => {
                let parameter = rice::parameter(n, count);
                // Every code has at least 1 + parameter bits: this bounds what is allocated by what was received.
                if u64::from(count) * (1 + u64::from(parameter)) > 8 * bytes.len() as u64 {
                    return ill;
                }
                sparse.indices.reserve(count as usize);
                rice::decode(bytes, parameter, count, n, &mut sparse.indices)
            }
            IndexCode::Every if count != 0 && count != n => Err(BadMessage::Every { count, n }),
            IndexCode::Every if !bytes.is_empty() => ill,
            // Values of at least two bits each were received.
            IndexCode::Every => {
                sparse.indices.extend(0..count);
                Ok(())
            }
        }
    }

    fn read_values(&self, shape: &Shape, bytes: &[u8], sparse: &mut Sparse) -> Result<(), BadMessage> {
        match shape.values {
            Values::F32 => {
                let (words, _) = bytes.as_chunks::<4>();
                sparse.values.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
            }
            Values::Bf16 => {
                let (words, _) = bytes.as_chunks::<2>();
                sparse.values.extend(words.iter().map(|word| bf16::from_le_bytes(*word).to_f32()));
            }
            Values::Asq | Values::AsqDropError => return read_mean(shape.phase, bytes, sparse),
            Values::EightBit => return eight_bit::read(bytes, sparse),
            Values::TwoBit => return two_bit::read(bytes, self.count, sparse),
        }
        match first_bad_value(&sparse.values) {
            Some(position) => {
                Err(BadMessage::Value { position: position as u32, value: sparse.values[position] })
            }
            None => Ok(()),
        }
    }
}

fn read_mean(phase: Phase, bytes: &[u8], sparse: &mut Sparse) -> Result<(), BadMessage> {
    sparse.mean = bytes.first_chunk::<4>().map(|word| f32::from_le_bytes(*word));
    match sparse.mean {
        Some(mean) if phase.lens().see(mean) <= 0.0 => Err(BadMessage::MeanSign { mean }),
        Some(value) if !value.is_finite() => Err(BadMessage::Value { position: 0, value }),
        _ => Ok(()),
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

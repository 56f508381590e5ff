//! Every way in which received bytes can be wrong.

use super::{Shape, VERSION};
use thiserror::Error;

/// Why a frame was refused.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum FrameError {
    /// Fewer bytes than a frame header.
    #[error("a frame of {have} bytes is shorter than its header")]
    Short {
        /// Bytes received.
        have: usize,
    },
    /// The first four bytes are not those of a frame.
    #[error("the bytes begin with {found:02x?}: not a RedSync frame")]
    Magic {
        /// What they are.
        found: [u8; 4],
    },
    /// Written by another version of the format.
    #[error("the frame has format version {theirs}, this program reads version {VERSION}")]
    Version {
        /// The version in the frame.
        theirs: u16,
    },
    /// The frame does not have the length that its header says.
    #[error("the frame has {have} bytes, its header says {declared}")]
    Length {
        /// Bytes according to the header.
        declared: u64,
        /// Bytes received.
        have: usize,
    },
    /// The bytes changed on the way.
    #[error("the frame is damaged: its checksum is {computed:08x}, its header says {declared:08x}")]
    Checksum {
        /// Checksum in the header.
        declared: u32,
        /// Checksum of the bytes.
        computed: u32,
    },
    /// The sender's plan is another one: its messages would be misunderstood.
    #[error(
        "the frame belongs to another plan (fingerprint {theirs:016x}, ours {ours:016x}): the ranks do not run the same"
    )]
    Plan {
        /// Fingerprint in the frame.
        theirs: u64,
        /// Fingerprint of the reader's plan.
        ours: u64,
    },
    /// The frame belongs to another step.
    #[error("the frame is of step {theirs}, this rank is at step {ours}")]
    Step {
        /// Step in the frame.
        theirs: u64,
        /// Step of the reader.
        ours: u64,
    },
    /// The frame comes from another rank than expected.
    #[error("the frame is from rank {theirs}, expected rank {expected}")]
    Rank {
        /// Rank in the frame.
        theirs: u32,
        /// Rank expected.
        expected: u32,
    },
    /// The frame ends inside a message.
    #[error("the frame ends inside message {position}")]
    Ends {
        /// Number of the message in the frame, from 0.
        position: u16,
    },
    /// The count or the length of a message is too large, or has more bytes than it needs.
    #[error("message {position} does not begin with two numbers in their shortest form")]
    Number {
        /// Number of the message in the frame, from 0.
        position: u16,
    },
    /// Bytes are left after the last message.
    #[error("{bytes} bytes follow the last message of the frame")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// The frame holds another number of messages than expected.
    #[error("the frame holds {theirs} messages, expected {expected}")]
    Messages {
        /// Messages in the frame.
        theirs: u16,
        /// Messages expected.
        expected: u16,
    },
}

/// Why a message was refused.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("message {position}: {why}")]
pub struct MessageError {
    /// Number of the message in the frame, from 0.
    pub position: u16,
    /// What is wrong.
    pub why: BadMessage,
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BadMessage {
    /// The reader asks for a message that cannot exist: a mean needs one sign and chosen elements, four levels need both
    /// signs.
    #[error("{:?} values cannot be combined with {:?} indices and {}", .0.values, .0.indices, .0.phase)]
    Shape(Shape),
    /// More elements than the layer has.
    #[error("the message has {count} elements, the layer only {n}")]
    Count {
        /// Elements in the message.
        count: u32,
        /// Elements of the layer.
        n: u32,
    },
    /// Some elements where all or none must be.
    #[error("the message has {count} elements, where it must have all {n} or none")]
    Every {
        /// Elements in the message.
        count: u32,
        /// Elements of the layer.
        n: u32,
    },
    /// The payload is too short or too long for its elements.
    #[error("{count} elements do not fit a payload of {bytes} bytes")]
    Payload {
        /// Elements in the message.
        count: u32,
        /// Bytes of the payload.
        bytes: u64,
    },
    /// An index does not follow the one before it, or is outside the layer.
    #[error("the index at position {position} is not between its predecessor and {n}")]
    Index {
        /// Position in the message.
        position: u32,
        /// Elements of the layer.
        n: u32,
    },
    /// The bits end within the code of an index.
    #[error("the codes of the indices end too early, at position {position}")]
    BitsEnd {
        /// Position in the message.
        position: u32,
    },
    /// The unused bits after the last code are not zero, or there are too many.
    #[error("more follows after the last element")]
    Padding,
    /// The scale of values is negative, or they could be infinite.
    #[error("the scale of the values must be finite and not negative, got {scale}")]
    Scale {
        /// The scale.
        scale: f32,
    },
    /// A value is a multiple of its scale that none can be.
    #[error("the value at position {position} cannot be {multiple} times {scale}")]
    Multiple {
        /// Position in the message.
        position: u32,
        /// What it is multiplied by.
        multiple: i8,
        /// The scale.
        scale: f32,
    },
    /// A value is NaN or infinite.
    #[error("the value at position {position} must be finite, got {value}")]
    Value {
        /// Position in the message.
        position: u32,
        /// The value.
        value: f32,
    },
    /// The mean of a quantized message does not have the sign of its phase.
    #[error("mean {mean} does not have the sign of its phase")]
    MeanSign {
        /// The mean.
        mean: f32,
    },
    /// A level is NaN or infinite, or does not have its sign.
    #[error("level {level} must be finite and of its sign, got {value}")]
    Level {
        /// Which of the four.
        level: u8,
        /// Its value.
        value: f32,
    },
}

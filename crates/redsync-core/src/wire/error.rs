//! Every way in which received bytes can be wrong.

use super::VERSION;
use crate::phase::Phase;
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

/// Why a message of one layer was refused.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("message of layer {layer}: {why}")]
pub struct MessageError {
    /// The layer according to the message.
    pub layer: u32,
    /// What is wrong.
    pub why: BadMessage,
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BadMessage {
    /// The message is of another layer than expected.
    #[error("expected layer {expected}")]
    Layer {
        /// The layer expected.
        expected: u32,
    },
    /// The layer has another size here.
    #[error("it has {theirs} elements there, {ours} here")]
    Size {
        /// Elements according to the message.
        theirs: u32,
        /// Elements of the reader's layer.
        ours: u32,
    },
    /// The sender is at another phase.
    #[error("its phase is {theirs}, here it is {ours}")]
    Phase {
        /// Phase in the message.
        theirs: Phase,
        /// Phase of the reader.
        ours: Phase,
    },
    /// The phase is none that this version knows.
    #[error("unknown phase {0}")]
    UnknownPhase(u8),
    /// The index code is none that this version knows.
    #[error("unknown index code {0}")]
    UnknownIndexCode(u8),
    /// The value code is none that this version knows.
    #[error("unknown value code {0}")]
    UnknownValueCode(u8),
    /// The Rice parameter is out of range, or given where none belongs.
    #[error("Rice parameter {0} is not possible")]
    RiceParameter(u8),
    /// More elements than the layer has.
    #[error("{count} of {n} elements")]
    Count {
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
    #[error("the bits end at position {position}")]
    BitsEnd {
        /// Position in the message.
        position: u32,
    },
    /// The unused bits after the last code are not zero.
    #[error("bits are set after the last index")]
    Padding,
    /// A value is NaN or infinite.
    #[error("the value at position {position} is {value}")]
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
}

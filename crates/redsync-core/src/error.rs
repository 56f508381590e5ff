//! What can be wrong with what a caller hands over. A refused input is not accumulated; [`crate::Config::undo`] says what
//! that means to the last bit in a large layer.

use crate::residual::Momentum;
use thiserror::Error;

/// Why a layer refused an input.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Bad {
    /// The gradient has another length than the layer.
    #[error("the gradient has {got} elements, the layer has {expected}")]
    Length {
        /// Elements of the layer.
        expected: usize,
        /// Elements of the gradient.
        got: usize,
    },
    /// The gradient holds NaN or an infinity.
    #[error("the gradient is {value} at element {index}")]
    NotFinite {
        /// The first such element.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// The gradient is finite, but the sum with what was accumulated before is not.
    #[error("the accumulated gradient overflows at element {index}")]
    Overflow {
        /// The first such element.
        index: usize,
    },
    /// The device on which the residual is failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// The gradient is on a device, the residual on the host.
    #[error("the gradient is not in the memory of the host")]
    Elsewhere,
    /// The scale of the gradient (1/N) is not a finite number.
    #[error("the scale of the gradient must be a finite number, got {0}")]
    Scale(f32),
}

impl Bad {
    /// The same of a layer of which this gradient is a part that begins at an element.
    pub fn further(self, begin: usize) -> Bad {
        match self {
            Bad::NotFinite { index, value } => Bad::NotFinite { index: index + begin, value },
            Bad::Overflow { index } => Bad::Overflow { index: index + begin },
            other => other,
        }
    }
}

/// An error of one layer, at one step.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("layer {layer}, step {step}: {why}")]
pub struct LayerError {
    /// The layer's name.
    pub layer: String,
    /// The global step.
    pub step: u64,
    /// What is wrong.
    pub why: Bad,
}

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ConfigError {
    /// The density is not a number above 0 and at most 1.
    #[error("density must be above 0 and at most 1, got {0}")]
    Density(f64),
    /// The momentum is not a number from 0 to below 1.
    #[error("momentum must be at least 0 and below 1, got {0}")]
    Momentum(f32),
    /// Nothing can be divided by what Adam adds to a root that may be zero.
    #[error("eps must be a number large enough to divide by, got {0}")]
    Eps(f32),
    /// What is kept of a residual from step to step is not a number above 0 and at most 1.
    #[error("keep must be above 0 and at most 1, got {0}")]
    Keep(f32),
    /// Sampled selection reuses a threshold of another step, and so of another sign.
    #[error("sampled selection cannot be combined with quantization: choose carried, threshold or trimmed")]
    SampledQuantized,
    /// One mean cannot stand for a whole layer, which has both signs.
    #[error("a layer that is sent whole cannot be quantized to one mean: choose two bits, bf16 or f32")]
    EveryQuantized,
    /// Adam has no kernels for a device.
    #[error("Adam's residual is kept on the host only: choose momentum, or keep the layers on the host")]
    AdamElsewhere,
    /// A device cannot hold the layer, with a sentence.
    #[error("{0}")]
    Device(String),
    /// Indices are 32 bits wide.
    #[error("{0} elements are too many for one layer (at most 2^32 - 1)")]
    TooLong(usize),
}

/// Why a layer's state cannot be replaced or changed; nothing has changed then.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Unfit {
    /// A vector of another length.
    #[error("{what} has {got} elements instead of {expected}")]
    Length {
        /// Which vector.
        what: &'static str,
        /// Elements that it should have.
        expected: usize,
        /// Elements that it has.
        got: usize,
    },
    /// A vector that holds NaN or an infinity.
    #[error("{what} is {value} at element {index}")]
    NotFinite {
        /// Which vector.
        what: &'static str,
        /// The first such element.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A momentum that is not a number from 0 to below 1.
    #[error("momentum must be at least 0 and below 1, got {0}")]
    Coefficient(f32),
    /// An eps of Adam by which nothing can be divided.
    #[error("eps must be a number large enough to divide by, got {0}")]
    Eps(f32),
    /// A learning rate that is negative or not finite.
    #[error("the learning rate must be a positive number, got {0}")]
    Rate(f32),
    /// Momentum keeps its form.
    #[error("momentum cannot change from {from} to {to}")]
    Form {
        /// What the layer has.
        from: Momentum,
        /// What it should have.
        to: Momentum,
    },
    /// The device on which the residual is failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// No step was accumulated since the last one was taken back, or none can be.
    #[error("there is no step that could be taken back")]
    NoStep,
}

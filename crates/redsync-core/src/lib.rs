//! Residual gradient compression for data-parallel training: each rank sends the largest 0.1% of an accumulated
//! gradient and keeps the rest for later steps.
//!
//! ```text
//! gradient --> residual --> select --> quantize --> wire --> (exchange) --> wire --> apply --> weights
//! ```
//!
//! [`Compressor`] is the sending side of one layer, [`wire::Frame`] and [`apply`] are the receiving side. The crate
//! knows no framework, no network and no files, and allocates nothing once its buffers have grown.
//!
//! Two ranks, one layer, one step:
//! ```
//! use redsync_core::{Compressor, Config, FrameWriter, Gradient, Sparse, Workspace, apply, wire::Frame};
//!
//! let mut workspace = Workspace::new(1);
//! let mut weights = vec![1.0f32; 4];
//! let gradients = [[0.0, 8.0, 1.0, 0.0], [0.0, 4.0, 0.0, 2.0]];
//! let mut received = Vec::new();
//! for (rank, gradient) in gradients.iter().enumerate() {
//!     let mut layer = Compressor::new(0, "layer", 4, Config::default())?; // each rank has its own
//!     let mut frame = FrameWriter::new();
//!     frame.begin(0, rank as u32, 0);
//!     layer.compress(0, Gradient::F32(gradient), 1.0 / 2.0, &mut workspace, &mut frame)?;
//!     let frame = Frame::parse(frame.finish())?; // what every other rank does with it
//!     for message in frame.messages() {
//!         let mut sparse = Sparse::new();
//!         message?.decode(&layer.shape(0), &mut sparse)?;
//!         received.push(sparse);
//!     }
//! }
//! apply::add(&mut weights, &received, -0.125, &mut workspace)?;
//! assert_eq!(weights, [1.0, 0.25, 1.0, 1.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod apply;
mod candidates;
mod compressor;
mod density;
mod elements;
mod error;
mod field;
mod gradient;
mod kernel;
mod largest;
mod phase;
mod quantize;
pub mod residual;
mod select;
mod sender;
mod sparse;
pub mod wire;
mod workspace;

pub use compressor::{Compressor, Config, Sending};
pub use density::Density;
pub use elements::Elements;
pub use error::{Bad, ConfigError, LayerError, Unfit};
pub use field::Field;
pub use gradient::Gradient;
pub use half::{bf16, f16};
pub use kernel::{AdamW, Level, StatLanes, add_assign};
pub use phase::{Lens, Phase};
pub use quantize::Values;
pub use residual::{Adam, Momentum, Residual, Second};
pub use select::{Memory, Remembered, Selector, Wanted};
pub use sender::{Look, Sender};
pub use sparse::{Sparse, SparseError};
pub use wire::{FrameWriter, IndexCode};
pub use workspace::Workspace;

//! The synchronizer: gradients go in as backpropagation yields them, updates come out, the same on every rank.
//!
//! ```text
//! submit --> [send] ------------> exchange ----------> [receive] --> finish --> Update
//!             residual, select,    of a group's frame,  check, decode,
//!             quantize, encode     or a dense sum       write to targets
//! ```
//!
//! Compression and exchange proceed while backpropagation goes on; [`Synchronizer::finish`] waits for what is left.
//!
//! ```
//! use redsync_comm::local;
//! use redsync_engine::{Config, Kind, Layer, Method, Synchronizer};
//! use std::sync::Arc;
//!
//! let run = |comm| {
//!     std::thread::spawn(move || {
//!         let layers = vec![Layer::new("weight", 50_000, Kind::Weight), Layer::new("bias", 10, Kind::BiasOrNorm)];
//!         let config = Config { method: Method::RgcAsq, ..Config::default() };
//!         let mut sync = Synchronizer::new(layers, config, Arc::new(comm))?;
//!         let mut weights = [vec![1f32; 50_000], vec![1f32; 10]];
//!         for _ in 0..3 {
//!             sync.submit(1, vec![0.5; 10])?; // in any order, as the backward pass yields them
//!             sync.submit(0, vec![0.25; 50_000])?;
//!             sync.finish()?;
//!             for (layer, weights) in weights.iter_mut().enumerate() {
//!                 sync.apply(layer, weights, 0.1)?; // w -= 0.1 * mean gradient, where it was sent
//!             }
//!         }
//!         sync.check_replicas(&[&weights[0], &weights[1]])
//!     })
//! };
//! let ranks: Vec<_> = local::group(2).into_iter().map(run).collect();
//! let hashes: Vec<u64> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_, _>>()?;
//! assert_eq!(hashes[0], hashes[1]);
//! # Ok::<(), redsync_engine::SyncError>(())
//! ```

mod checkpoint;
mod compressor;
mod config;
pub mod cost;
mod error;
mod exchange;
pub mod file;
mod hand_back;
mod hello;
mod hosts;
mod inbox;
mod layer;
mod layers;
mod local;
pub mod measure;
pub mod models;
pub mod offload;
mod optimizer;
mod pipeline;
pub mod plan;
mod replica;
mod second;
mod source;
pub mod state;
mod stats;
mod synchronizer;
mod target;
mod waiting;

pub use compressor::{Device, Host, LayerCompressor};
pub use config::{Choice, Config, Exchange, FEW, Figures, Method, Preset, Rest, SMALL, Stage, WarmUp};
pub use error::SyncError;
pub use hand_back::Gathered;
pub use hosts::{Seat, host_of};
pub use inbox::{Handed, Submitter};
pub use layer::{Kind, Layer};
pub use local::Local;
pub use optimizer::Optimizer;
pub use plan::choices;
pub use redsync_core::{Adam, Momentum};
pub use replica::replica_hash;
pub use source::{Source, Window};
pub use stats::{LayerStats, StepStats, Traffic};
pub use synchronizer::{Finished, Synchronizer};
pub use target::{Target, TargetError, Update};

/// The programs in documents are tested as examples are.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/rust.md")]
    struct Rust;
}

//! RedSync for Burn: hooks that hand each layer's gradient to the synchronizer while the backward pass still runs, layers and
//! networks that use them, and a trainer.
//!
//! - [`Distributed`] trains any Burn module of one's own on several ranks, with any optimizer of Burn or with momentum in the residual.
//! - [`hook::watch`] is below that: it is all that is needed to feed a `redsync_engine::Synchronizer`.
//! - [`net`] has networks by name, as modules for any loop; [`train`] trains them through [`Distributed`], and `redsync train` is a thin
//!   program around it.

pub mod bench_conv;
pub mod bench_lstm;
#[cfg(feature = "wgpu")]
mod cube;
mod distributed;
pub mod flex;
pub mod hook;
pub mod net;
pub mod ops;
pub mod train;

#[cfg(feature = "wgpu")]
pub use distributed::Copied;
pub use distributed::{Distributed, DistributedError, Lasting, Setup, Watch, on_threads};
pub use redsync_comm::Communicator;
pub use redsync_engine::{Config, Momentum};

//! RedSync for Burn: hooks that hand each layer's gradient to the synchronizer while the backward pass still runs, layers and
//! networks that use them, and a trainer.
//!
//! - [`hook::watch`] serves any Burn model: it is all that is needed to feed a `redsync_engine::Synchronizer`.
//! - [`net`] has networks by name, [`train`] trains them; `redsync train` is a thin program around it.

pub mod bench_conv;
pub mod bench_lstm;
pub mod flex;
pub mod hook;
pub mod net;
pub mod ops;
pub mod train;

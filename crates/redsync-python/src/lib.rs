//! The native half of the Python package `redsync`: everything that touches every element of a gradient.
//!
//! ```text
//! hook --> Layers::compress --> bytes --> (process group of PyTorch) --> Layers::fill --> averaged gradient
//! ```
//!
//! The Python half, `python/redsync`, talks to PyTorch: hooks, threads, collectives, optimizer. It never looks into a
//! message. This half reaches other ranks only in `communicator`, through PyTorch's process group.

mod communicator;
mod layers;
mod memory;

use pyo3::prelude::*;

/// What PyTorch's gradients are compressed with; the package `redsync` is its user.
#[pymodule]
mod _redsync {
    #[pymodule_export]
    use crate::communicator::Group;
    #[cfg(feature = "conformance")]
    #[pymodule_export]
    use crate::communicator::conformance::{
        conformance_cases, conformance_give_up, conformance_run, conformance_time, conformance_try,
    };
    #[pymodule_export]
    use crate::layers::{Layers, RefusedGradient, RefusedMessage, replica_hash};

    /// The version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// The version of the messages.
    #[pymodule_export]
    const WIRE_VERSION: u16 = redsync_core::wire::VERSION;
}

//! The native half of the Python package `redsync`: PyTorch's tensors and process groups for the engine.
//!
//! ```text
//! hook --> Synchronizer.submit --> engine --> process group of PyTorch --> engine --> averaged gradient, in the same place
//! ```
//!
//! The Python half, `python/redsync`, knows models, hooks and optimizers, and never looks into a message.

mod communicator;
mod device;
mod failure;
mod memory;
mod settings;
mod state;
mod synchronizer;
mod tensor;

use pyo3::prelude::*;

/// What PyTorch's gradients are synchronized with; the package `redsync` is its user.
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
    use crate::state::{State, checksum};
    #[pymodule_export]
    use crate::synchronizer::Synchronizer;

    /// The version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}

//! The cost model: what a step costs, dense or compressed, on a platform that is described by a few figures.
//! Comes in: layers, a configuration, a [`Platform`], a number of ranks. Goes out: predicted times, and the size from which
//! a layer is worth compressing. What must hold: pure functions, no clock and no randomness; the terms carry the paper's
//! names. `docs/cost-model.md` derives them.
//!
//! | name | is | unit |
//! | --- | --- | --- |
//! | `p` | ranks | |
//! | `alpha` | start-up of one message | seconds |
//! | `beta` | transfer | seconds per byte |
//! | `m` | elements of a layer (the paper's M) | |
//! | `d` | density (the paper's D) | |
//! | `gamma_1` | decompression | seconds per element that is decompressed |
//! | `gamma_2` | reduction | seconds per element that is added |

mod choose;
mod collective;
mod message;
mod platform;
mod step;

pub use choose::{Candidate, candidates, decide, dense_below};
pub use collective::{
    Allgather, Allreduce, Cost, all_to_all, dense_allreduce, dense_bytes, lg, sparse_allgather,
    sparse_allreduce, sparse_bytes,
};
pub use message::{expected_elements, frame_bytes, message_bits, message_bytes};
pub use platform::{BadPlatform, Decompression, Line, Link, Network, Platform, Rates, Selection};
pub use step::{Compute, Step, Times, training_time};

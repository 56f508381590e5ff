//! RedSync for Burn.
pub mod bench_lstm;
pub mod flex;
pub mod hook;
pub mod ops;

//! RedSync for Burn.
pub mod flex;
pub mod hook;

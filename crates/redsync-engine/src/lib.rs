//! The engine.
pub mod layer;

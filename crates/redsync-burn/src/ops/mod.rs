//! Operations of our own on Burn's tape, where its own are slow or leave a gradient that must be copied before it can be sent.
//! Each is one node: tensors go in, a tensor comes out, and the gradients leave contiguous, in the layout of what they belong to.

mod activation;
pub mod attention;
pub mod conv;
pub mod decode;
pub mod gemm;
pub mod loss;
pub mod lstm;
pub mod norm;
mod panel;

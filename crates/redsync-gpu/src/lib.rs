//! Layers whose u and v are in the memory of a GPU: the kernels of [`redsync_engine::offload`] in CubeCL, for whatever it runs on. With
//! the feature `wgpu` that is Vulkan, Metal and DirectX; `cuda` and `hip` are those. Without any of them the crate is empty.
//!
//! ```text
//! gradient --> accumulate, list what is above the floor --> host: choose, encode --> take out what was sent
//!              (one pass over u and v on the device)         (the code of redsync-core)   (the listed elements only)
//! ```

#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip"))]
pub mod bench;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip"))]
mod device;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip", feature = "lowering"))]
#[allow(unsafe_code)] // A launch cannot check the lengths of its buffers.
pub mod kernels;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip"))]
#[allow(unsafe_code)] // As above; every block says why it holds.
mod layer;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip"))]
mod source;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip"))]
#[allow(unsafe_code)] // As above.
mod weights;

#[cfg(any(feature = "wgpu", feature = "cuda", feature = "hip"))]
pub use {
    device::{Gpu, Traffic},
    layer::GpuLayer,
    source::{GpuGradient, Kind},
    weights::GpuWeights,
};

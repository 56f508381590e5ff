//! The thin layer over Burn's backend for GPUs, as `flex.rs` is for the CPU: how we take its tensors without copies. What must hold: a tensor
//! that comes out is contiguous, whatever its strides and padding were.

use crate::flex::Unserved;
use burn::backend::{Autodiff, BackendTypes, DType, DispatchDevice, TensorMetadata};
use burn::tensor::{Device, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use redsync_engine::offload::DeviceError;
use redsync_gpu::{Gpu, GpuGradient, GpuWeights};

/// The backend under the tape. Burn's feature `fusion` would make it another one.
pub type Inner = CubeBackend;
/// The backend with the tape.
pub type Taped = Autodiff<CubeBackend>;
/// A tensor on the tape, of any rank.
pub type Tracked = <Taped as BackendTypes>::FloatTensorPrimitive;

/// Whether a tensor is on such a device.
pub fn is_here<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.device().inner().as_dispatch(), DispatchDevice::Cube(_))
}

/// The values of anybody's tensor, off the tape and contiguous, shared with it where that is possible.
pub fn served<const D: usize>(tensor: Tensor<D>) -> Result<CubeTensor, Unserved> {
    let (dtype, device) = (tensor.dtype(), tensor.device());
    let unserved = || Unserved::new(dtype, &device);
    if dtype != DType::F32 {
        return Err(unserved());
    }
    tensor.inner().try_into_primitive::<Inner>().map(into_contiguous).map_err(|_| unserved())
}

/// Anybody's tensor as our operations take it.
pub fn try_tape<const D: usize>(tensor: Tensor<D>) -> Result<Tracked, Unserved> {
    let (dtype, device) = (tensor.dtype(), tensor.device());
    tensor.autodiff().try_into_primitive::<Taped>().map_err(|_| Unserved::new(dtype, &device))
}

/// The device as users name it.
pub fn device(tensor: &CubeTensor) -> Device {
    Device::new(tensor.device.clone())
}

/// Number of elements.
pub fn len(tensor: &CubeTensor) -> usize {
    tensor.shape().num_elements()
}

/// A gradient as the backward pass leaves it, not copied unless it was strided.
pub fn gradient(tensor: CubeTensor) -> GpuGradient {
    let tensor = into_contiguous(tensor);
    let len = len(&tensor);
    GpuGradient::new(tensor.handle, len)
}

/// The values of a contiguous tensor, copied to the host.
pub fn read(tensor: &CubeTensor) -> Result<Vec<f32>, DeviceError> {
    GpuWeights::new(&Gpu::on(tensor.client.clone()), tensor.handle.clone(), len(tensor))?.read()
}

/// A tensor of a shape, with a buffer that holds its values row by row.
pub fn tensor(gpu: &Gpu, device: &CubeDevice, shape: &[usize], weights: GpuWeights) -> CubeTensor {
    let shape = Shape::from(shape.to_vec());
    let client = gpu.client().clone();
    CubeTensor::new_contiguous(client, device.clone(), shape, weights.into_buffer(), DType::F32)
}

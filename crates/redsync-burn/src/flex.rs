//! The thin layer over Burn's CPU backend: how we make, read and write its tensors without copies. Burn's interface moves between
//! versions; what moves is met here.

use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{Autodiff, DType, Flex};
use burn::tensor::{Bytes, Device, Shape, Tensor};
use redsync_core::Gradient;
use redsync_engine::Source;

/// The backend under the tape.
pub type Inner = Flex;
/// The backend with the tape.
pub type Taped = Autodiff<Flex>;
/// A tensor on the tape, of any rank.
pub type Tracked = <Taped as burn::backend::BackendTypes>::FloatTensorPrimitive;
/// Activations stay in memory; nothing is computed twice.
pub type Keep = NoCheckpointing;

/// The device on which everything is computed.
pub fn device() -> Device {
    Device::flex().autodiff()
}

/// A tensor from its values, row by row.
pub fn tensor(values: Vec<f32>, shape: &[usize]) -> FlexTensor {
    debug_assert_eq!(values.len(), shape.iter().product::<usize>());
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape.to_vec())), DType::F32)
}

/// The values of a tensor, row by row; a view that is not contiguous is copied first.
pub fn contiguous(tensor: FlexTensor) -> FlexTensor {
    match tensor.is_contiguous() {
        true => tensor,
        false => tensor.to_contiguous(),
    }
}

/// The values of a contiguous tensor.
///
/// # Panics
/// If it is not contiguous: its values do not stand row by row then.
pub fn values(tensor: &FlexTensor) -> &[f32] {
    assert!(tensor.is_contiguous(), "a view that is not contiguous");
    let (begin, size) = (tensor.layout().start_offset(), tensor.layout().num_elements());
    &tensor.storage::<f32>()[begin..begin + size]
}

/// The lengths of a tensor along its axes.
pub fn shape(tensor: &FlexTensor) -> Vec<usize> {
    tensor.layout().shape().to_vec()
}

/// The values of a contiguous tensor, to change: in place unless somebody else shares them.
///
/// # Panics
/// If it is not contiguous.
pub fn values_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    assert!(tensor.is_contiguous(), "a view that is not contiguous");
    let (begin, size) = (tensor.layout().start_offset(), tensor.layout().num_elements());
    &mut tensor.storage_mut::<f32>()[begin..begin + size]
}

/// A tensor that is somewhere else than where we work, or of another type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is of {dtype} on {device}, and only f32 {served}", served = SERVED)]
pub struct Unserved {
    dtype: String,
    device: String,
}

#[cfg(not(feature = "wgpu"))]
const SERVED: &str = "on Burn's CPU backend is served (Device::flex().autodiff())";
#[cfg(feature = "wgpu")]
const SERVED: &str =
    "on Burn's CPU backend (Device::flex().autodiff()) or on a GPU (Device::wgpu(kind).autodiff()) is served";

/// A device without its tape, as errors name it.
pub(crate) fn called(device: &Device) -> String {
    let device = format!("{:?}", device.clone().inner());
    let bare = device.strip_prefix("Device<").and_then(|device| device.strip_suffix('>'));
    bare.unwrap_or(&device).into()
}

impl Unserved {
    pub(crate) fn new(dtype: DType, device: &Device) -> Self {
        Unserved { dtype: format!("{dtype:?}").to_lowercase(), device: called(device) }
    }

    /// Refuses a tensor that is not f32 in the memory of the host.
    pub fn check<const D: usize>(tensor: &Tensor<D>) -> Result<(), Self> {
        match tensor.dtype() == DType::F32 && tensor.device() == Device::flex() {
            true => Ok(()),
            false => Err(Unserved::new(tensor.dtype(), &tensor.device())),
        }
    }
}

/// The values of anybody's tensor, off the tape and contiguous, shared with it where that is possible.
pub fn served<const D: usize>(tensor: Tensor<D>) -> Result<FlexTensor, Unserved> {
    Unserved::check(&tensor)?;
    let (dtype, device) = (tensor.dtype(), tensor.device());
    let inner = tensor.inner().try_into_primitive::<Inner>();
    inner.map(contiguous).map_err(|_| Unserved::new(dtype, &device))
}

/// Anybody's tensor as our operations take it.
pub fn try_tape<const D: usize>(tensor: Tensor<D>) -> Result<Tracked, Unserved> {
    let (dtype, device) = (tensor.dtype(), tensor.device());
    tensor.autodiff().try_into_primitive::<Taped>().map_err(|_| Unserved::new(dtype, &device))
}

/// Leaves the tape: the values alone.
pub fn untape<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    tape(tensor).into_primitive()
}

/// The tensor as our operations take it.
///
/// # Panics
/// If it is not on Burn's CPU backend, as Burn's operations do with tensors of two devices.
pub fn tape<const D: usize>(tensor: Tensor<D>) -> Tracked {
    try_tape(tensor).unwrap_or_else(|why| panic!("a tensor: {why}"))
}

/// What an operation of ours gives: on the tape if one of its tensors was.
pub fn given<const D: usize>(tensor: Tracked, taped: bool) -> Tensor<D> {
    let tensor = Tensor::from_primitive::<Taped>(tensor);
    if taped { tensor } else { tensor.inner() }
}

/// Values that nobody asks gradients of, on the tape if the other tensor is.
pub fn beside<const D: usize, const E: usize>(
    other: &Tensor<E>,
    values: Vec<f32>,
    shape: [usize; D],
) -> Tensor<D> {
    given(Tracked::new(tensor(values, &shape)), other.is_autodiff())
}

/// The tensor as Burn's operations take it.
pub fn untracked<const D: usize>(tensor: FlexTensor) -> Tensor<D> {
    Tensor::from_primitive::<Taped>(Tracked::new(tensor))
}

/// A gradient as the backward pass leaves it, shared with the tape until it is read.
pub struct BurnGradient(FlexTensor);

impl BurnGradient {
    /// Takes a gradient; copies only one that is not contiguous.
    pub fn new(tensor: FlexTensor) -> Self {
        BurnGradient(contiguous(tensor))
    }
}

impl Source for BurnGradient {
    fn len(&self) -> usize {
        values(&self.0).len()
    }

    fn host(&self) -> Option<Gradient<'_>> {
        Some(Gradient::F32(values(&self.0)))
    }
}

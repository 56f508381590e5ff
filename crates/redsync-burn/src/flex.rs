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

/// Leaves the tape: the values alone.
pub fn untape<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    tape(tensor).into_primitive()
}

/// The tensor as our operations take it.
///
/// # Panics
/// If it was not made on [`device`], which only a mistake in this crate can do.
pub fn tape<const D: usize>(tensor: Tensor<D>) -> Tracked {
    tensor.try_into_primitive::<Taped>().expect("all tensors are made on one device")
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

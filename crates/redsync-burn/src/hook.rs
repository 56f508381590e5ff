//! Gradient hooks: a weight goes in with the input of its layer, the same weight comes out, and when the backward pass has its
//! gradient, a function of the user gets it, while the rest of the pass still runs.
//! What must hold: every use of the weight is behind the hook, and the function only hands the gradient on (the tape is locked).

use crate::flex::{Keep, Taped, Unserved, contiguous, try_tape};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Backend, BackendTypes};
use burn::tensor::Tensor;
use std::fmt;
use std::sync::Arc;

/// What is called with a layer's number and its gradient, which is contiguous on the CPU backend.
pub type OnGradient<T = FlexTensor> = Arc<dyn Fn(usize, T) + Send + Sync>;

/// A tensor of a backend, on its tape.
type OnTape<B> = <Autodiff<B> as BackendTypes>::FloatTensorPrimitive;

/// The same weight, watched. A node of the tape is visited by its depth: one with the weight as its only parent would come last,
/// with the layer's input as second parent it comes right behind the layer.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use redsync_burn::hook::watch;
/// use std::sync::{Arc, Mutex};
///
/// let device = Device::flex().autodiff();
/// let weight = Tensor::<2>::ones([2, 3], &device).require_grad();
/// let input = Tensor::<2>::ones([1, 2], &device);
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let keep = seen.clone();
/// let hooked = watch(weight, &input, 7, Arc::new(move |layer, gradient| {
///     keep.lock().unwrap().push((layer, gradient.storage::<f32>().to_vec()));
/// }))?;
/// input.matmul(hooked).sum().backward();
/// assert_eq!(*seen.lock().unwrap(), [(7, vec![1.0; 6])]);
/// # Ok::<(), redsync_burn::flex::Unserved>(())
/// ```
pub fn watch<const D: usize, const E: usize>(
    weight: Tensor<D>,
    input: &Tensor<E>,
    layer: usize,
    on_gradient: OnGradient,
) -> Result<Tensor<D>, Unserved> {
    let (weight, input) = (try_tape(weight)?, try_tape(input.clone())?);
    let on_gradient: OnGradient = Arc::new(move |layer, gradient| on_gradient(layer, contiguous(gradient)));
    Ok(Tensor::from_primitive::<Taped>(watched(weight, input, layer, on_gradient)))
}

/// The same on a GPU. The function must not wait for the device: what it hands on is computed later.
#[cfg(feature = "wgpu")]
pub(crate) fn watch_there<const D: usize, const E: usize>(
    weight: Tensor<D>,
    input: &Tensor<E>,
    layer: usize,
    on_gradient: OnGradient<burn_cubecl::tensor::CubeTensor>,
) -> Result<Tensor<D>, Unserved> {
    use crate::cube;
    let (weight, input) = (cube::try_tape(weight)?, cube::try_tape(input.clone())?);
    Ok(Tensor::from_primitive::<cube::Taped>(watched::<cube::Inner>(weight, input, layer, on_gradient)))
}

fn watched<B: Backend>(
    weight: OnTape<B>,
    input: OnTape<B>,
    layer: usize,
    on_gradient: OnGradient<B::FloatTensorPrimitive>,
) -> OnTape<B> {
    let nodes = [weight.node(), input.node()];
    let prepared = Backward::<B, 2>::prepare::<Keep>(Hook, nodes).compute_bound().stateful();
    let value = weight.primitive().clone();
    match prepared {
        OpsKind::Tracked(node) => node.finish(Watched { layer, on_gradient }, value),
        OpsKind::UnTracked(node) => node.finish(value),
    }
}

#[derive(Debug)]
struct Hook;

struct Watched<T> {
    layer: usize,
    on_gradient: OnGradient<T>,
}

impl<T> Clone for Watched<T> {
    fn clone(&self) -> Self {
        Watched { layer: self.layer, on_gradient: self.on_gradient.clone() }
    }
}

impl<T> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watched({})", self.layer)
    }
}

impl<B: Backend> Backward<B, 2> for Hook {
    type State = Watched<B::FloatTensorPrimitive>;

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        // All uses of the weight come later in the forward pass, so their gradients are summed here.
        let gradient = gradients.consume::<B>(&ops.node);
        (ops.state.on_gradient)(ops.state.layer, gradient);
    }
}

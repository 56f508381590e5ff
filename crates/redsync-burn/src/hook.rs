//! Gradient hooks: a weight goes in with the input of its layer, the same weight comes out, and when the backward pass has its
//! gradient, a function of the user gets it, while the rest of the pass still runs.
//! What must hold: every use of the weight is behind the hook, and the function only hands the gradient on (the tape is locked).

use crate::flex::{Inner, Keep, Taped, Unserved, contiguous, try_tape};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use std::fmt;
use std::sync::Arc;

/// What is called with a layer's number and its gradient, which is contiguous.
pub type OnGradient = Arc<dyn Fn(usize, FlexTensor) + Send + Sync>;

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
    let prepared = Hook.prepare::<Keep>([weight.node(), input.node()]).compute_bound().stateful();
    let value = weight.primitive().clone();
    Ok(Tensor::from_primitive::<Taped>(match prepared {
        OpsKind::Tracked(node) => node.finish(Watched { layer, on_gradient }, value),
        OpsKind::UnTracked(node) => node.finish(value),
    }))
}

#[derive(Debug)]
struct Hook;

#[derive(Clone)]
struct Watched {
    layer: usize,
    on_gradient: OnGradient,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watched({})", self.layer)
    }
}

impl Backward<Inner, 2> for Hook {
    type State = Watched;

    fn backward(self, ops: Ops<Watched, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        // All uses of the weight come later in the forward pass, so their gradients are summed here.
        let gradient = contiguous(gradients.consume::<Inner>(&ops.node));
        (ops.state.on_gradient)(ops.state.layer, gradient);
    }
}

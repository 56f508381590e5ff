//! One layer of LSTM over a window of time as one node of the tape: the input of all steps and the state before them go in, the
//! hidden states of all steps and the state after them come out.
//! What must hold: the formula and the order of gates of PyTorch's `nn.LSTM`, gradients contiguous in the layout of their weights,
//! and bits that do not depend on the number of threads.
//!
//! The hidden units are cut into panels. A panel holds its part of the recurrent weights in the order in which each step reads
//! them, multiplies, and computes its gates at once while they are in the cache. What does not depend on the step before is one
//! product for all steps: the input's share of the gates going forward, the gradients of weights and input going back.

use super::decode::column_sums;
use super::gemm::{Matrix, MatrixMut, Threads, gemm, sharing_pays};
use super::panel::{Panel, Sizes};
use crate::flex::{Inner, Keep, contiguous, given, tape, tensor, values};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

/// What passes from one window to the next: hidden state and cell state, `[B,H]` each, row by row.
pub type State = (Vec<f32>, Vec<f32>);

/// The parameters of a layer: the weights are `[4H,I]` and `[4H,H]`, the biases `[4H]`, in the order of gates i, f, g, o.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Parameters {
    pub weight_ih: Tensor<2>,
    pub weight_hh: Tensor<2>,
    pub bias_ih: Tensor<1>,
    pub bias_hh: Tensor<1>,
}

/// The hidden states `[T,B,H]` of a layer over `x [T,B,I]`, and the state after the last step:
///
/// ```text
/// i, f, o = sigmoid(W x + b + U h + d), g = tanh(W x + b + U h + d)
/// c' = f c + i g, h' = o tanh(c')
/// ```
///
/// The state is not on the tape: gradients end at the beginning of the window.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use redsync_burn::ops::lstm::{Parameters, lstm};
/// let device = Device::flex().autodiff();
/// let x = Tensor::<3>::zeros([3, 2, 5], &device);
/// let parameters = Parameters {
///     weight_ih: Tensor::zeros([16, 5], &device),
///     weight_hh: Tensor::zeros([16, 4], &device),
///     bias_ih: Tensor::zeros([16], &device),
///     bias_hh: Tensor::zeros([16], &device),
/// };
/// let (h, (_, c)) = lstm(x, parameters, (vec![0.0; 8], vec![1.0; 8]));
/// assert_eq!(h.dims(), [3, 2, 4]);
/// assert_eq!(c, [0.125; 8]); // gates of zero halve the cell at each step
/// ```
///
/// # Panics
/// If the shapes do not agree, or one of them is empty.
pub fn lstm(x: Tensor<3>, parameters: Parameters, (h, c): State) -> (Tensor<3>, State) {
    let sizes = sizes(&x, &parameters, (&h, &c));
    let Parameters { weight_ih, weight_hh, bias_ih, bias_hh } = parameters;
    let taped = x.is_autodiff()
        || [&weight_ih, &weight_hh].into_iter().any(Tensor::is_autodiff)
        || [&bias_ih, &bias_hh].into_iter().any(Tensor::is_autodiff);
    let (x, x_node) = tape(x).into_parts();
    let (weight_ih, ih_node) = tape(weight_ih).into_parts();
    let (weight_hh, hh_node) = tape(weight_hh).into_parts();
    let (bias_ih, bias_ih_node) = tape(bias_ih).into_parts();
    let (bias_hh, bias_hh_node) = tape(bias_hh).into_parts();
    let (x, weight_ih, weight_hh) = (contiguous(x), contiguous(weight_ih), contiguous(weight_hh));
    let bias = sum(values(&contiguous(bias_ih)), values(&contiguous(bias_hh)));

    let weights = (values(&weight_ih), values(&weight_hh));
    let mut panels = enter(sizes, values(&x), weights, &bias, &c);
    let out = advance(sizes, &mut panels, &h);
    let after = leave(sizes, &panels, &out);

    let out = tensor(out, &[sizes.steps, sizes.batch, sizes.hidden]);
    let nodes = [x_node, ih_node, hh_node, bias_ih_node, bias_hh_node];
    let out = match Lstm.prepare::<Keep>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(node) => {
            panels.iter_mut().for_each(Panel::forget_weights);
            let state = Remembered { sizes, x, weight_ih, weight_hh, before: h, out: out.clone(), panels };
            node.finish(state, out)
        }
        OpsKind::UnTracked(node) => node.finish(out),
    };
    (given(out, taped), after)
}

fn sizes(x: &Tensor<3>, parameters: &Parameters, (h, c): (&[f32], &[f32])) -> Sizes {
    let Parameters { weight_ih, weight_hh, bias_ih, bias_hh } = parameters;
    let ([steps, batch, input], [gates, hidden]) = (x.dims(), weight_hh.dims());
    assert!(steps * batch * input * hidden > 0, "an empty window or layer");
    assert_eq!(gates, 4 * hidden, "rows of the recurrent weights");
    assert_eq!(weight_ih.dims(), [gates, input], "shape of the input weights");
    [bias_ih, bias_hh].iter().for_each(|bias| assert_eq!(bias.dims(), [gates], "length of a bias"));
    assert_eq!([h.len(), c.len()], [batch * hidden; 2], "length of the state");
    Sizes { steps, batch, input, hidden }
}

fn sum(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Makes the panels, with the input's share in the gates of all steps.
fn enter(sizes: Sizes, x: &[f32], weights: (&[f32], &[f32]), bias: &[f32], c: &[f32]) -> Vec<Panel> {
    let cuts = Panel::cut(sizes.hidden);
    let make = |units| Panel::new(sizes, units, x, weights, bias, c);
    match sharing_pays(sizes.steps * sizes.batch * sizes.input * 4 * sizes.hidden) {
        true => cuts.into_par_iter().map(make).collect(),
        false => cuts.into_iter().map(make).collect(),
    }
}

/// Runs `work` on every panel, on several threads if a step of this size pays for them.
fn on_each(sizes: Sizes, panels: &mut [Panel], work: impl Fn(&mut Panel) + Send + Sync) {
    match sharing_pays(sizes.batch * sizes.hidden * 4 * sizes.hidden) {
        true => panels.par_iter_mut().with_max_len(1).for_each(work),
        false => panels.iter_mut().for_each(work),
    }
}

/// Walks through all steps; gives their hidden states `[T,B,H]`.
fn advance(sizes: Sizes, panels: &mut [Panel], before: &[f32]) -> Vec<f32> {
    let Sizes { steps, batch, hidden, .. } = sizes;
    let mut out = vec![0.0; steps * batch * hidden];
    for step in 0..steps {
        let (past, now) = out.split_at_mut(step * batch * hidden);
        let h = if step == 0 { before } else { &past[(step - 1) * batch * hidden..] };
        on_each(sizes, panels, |panel| panel.advance(step, h));
        panels.iter().for_each(|panel| panel.put_hidden(&mut now[..batch * hidden]));
    }
    out
}

/// The state after the last step.
fn leave(sizes: Sizes, panels: &[Panel], out: &[f32]) -> State {
    let size = sizes.batch * sizes.hidden;
    let mut c = vec![0.0; size];
    panels.iter().for_each(|panel| panel.put_cells(&mut c));
    (out[out.len() - size..].to_vec(), c)
}

#[derive(Debug)]
struct Lstm;

#[derive(Clone, Debug)]
struct Remembered {
    sizes: Sizes,
    x: FlexTensor,
    weight_ih: FlexTensor,
    weight_hh: FlexTensor,
    before: Vec<f32>,
    out: FlexTensor,
    panels: Vec<Panel>,
}

impl Backward<Inner, 5> for Lstm {
    type State = Remembered;

    fn backward(self, ops: Ops<Remembered, 5>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let mut state = ops.state;
        let Sizes { steps, batch, input, hidden } = state.sizes;
        let (rows, gates) = (steps * batch, 4 * hidden);
        let slopes = retreat(state.sizes, &mut state.panels, values(&state.weight_hh), values(&incoming));
        let slopes_by_row = Matrix::new(&slopes, rows, gates);
        let [x_node, ih_node, hh_node, bias_ih_node, bias_hh_node] = ops.parents;

        if let Some(node) = hh_node {
            let earlier = earlier(&state);
            let earlier = Matrix::new(&earlier, rows, hidden);
            gradients
                .register::<Inner>(node.id, product(slopes_by_row.transposed(), earlier, &[gates, hidden]));
        }
        if let Some(node) = ih_node {
            let x = Matrix::new(values(&state.x), rows, input);
            gradients.register::<Inner>(node.id, product(slopes_by_row.transposed(), x, &[gates, input]));
        }
        if bias_ih_node.is_some() || bias_hh_node.is_some() {
            let sums = tensor(column_sums(&slopes, gates), &[gates]);
            for node in [bias_ih_node, bias_hh_node].into_iter().flatten() {
                gradients.register::<Inner>(node.id, sums.clone());
            }
        }
        if let Some(node) = x_node {
            let weight = Matrix::new(values(&state.weight_ih), gates, input);
            gradients.register::<Inner>(node.id, product(slopes_by_row, weight, &[steps, batch, input]));
        }
    }
}

/// `a * b` as a tensor of that shape.
fn product(a: Matrix<'_>, b: Matrix<'_>, shape: &[usize]) -> FlexTensor {
    let mut values = vec![0.0; shape.iter().product()];
    let columns = shape[shape.len() - 1];
    let rows = values.len() / columns;
    gemm(1.0, a, b, 0.0, MatrixMut::new(&mut values, rows, columns), Threads::Pool);
    tensor(values, shape)
}

/// The hidden state before each step, `[T,B,H]`.
fn earlier(state: &Remembered) -> Vec<f32> {
    let out = values(&state.out);
    let mut earlier = Vec::with_capacity(out.len());
    earlier.extend_from_slice(&state.before);
    earlier.extend_from_slice(&out[..out.len() - state.before.len()]);
    earlier
}

/// Walks back through all steps; gives the gradients `[T,B,4H]` of what went into the gates.
fn retreat(sizes: Sizes, panels: &mut [Panel], weight_hh: &[f32], incoming: &[f32]) -> Vec<f32> {
    let Sizes { steps, batch, hidden, .. } = sizes;
    let mut slopes = vec![0.0; steps * batch * 4 * hidden];
    on_each(sizes, panels, |panel| panel.turn_around(weight_hh));
    for step in (0..steps).rev() {
        let (now, later) = slopes.split_at_mut((step + 1) * batch * 4 * hidden);
        let later = later.get(..batch * 4 * hidden);
        let incoming = &incoming[step * batch * hidden..][..batch * hidden];
        on_each(sizes, panels, |panel| panel.retreat(step, incoming, later));
        let now = &mut now[step * batch * 4 * hidden..];
        panels.iter().for_each(|panel| panel.put_slopes(step, now));
    }
    slopes
}

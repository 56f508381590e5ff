//! Layer normalization and GELU, the two operations of a transformer that work row by row and element by element.
//! What must hold: the formulas of PyTorch's `nn.LayerNorm` and `nn.GELU(approximate="tanh")`, and bits that do not depend on the
//! number of threads.

use super::activation::{tanh, wide};
use super::gemm::sharing_pays;
use crate::flex::{Inner, Keep, contiguous, given, shape, tape, tensor, values};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

/// Added to the variance of a row.
const EPS: f32 = 1e-5;
/// Multiplications that an element of either operation takes, about.
const COST: usize = 32;
/// Rows whose gradients of gain and bias are summed on their own, the same for any number of threads.
const STRIP: usize = 64;

/// Each row of `x [N,D]` with mean 0 and variance 1, times `gain [D]`, plus `bias [D]`.
///
/// # Panics
/// If the shapes do not agree.
pub fn layer_norm(x: Tensor<2>, gain: Tensor<1>, bias: Tensor<1>) -> Tensor<2> {
    let [count, width] = x.dims();
    assert_eq!([gain.dims(), bias.dims()], [[width]; 2], "one gain and one bias for each column");
    let taped = x.is_autodiff() || gain.is_autodiff() || bias.is_autodiff();
    let ((x, x_node), (gain, gain_node)) = (tape(x).into_parts(), tape(gain).into_parts());
    let (bias, bias_node) = tape(bias).into_parts();
    let (x, gain, bias) = (contiguous(x), contiguous(gain), contiguous(bias));
    let (mut out, mut known) = (vec![0.0; count * width], vec![(0.0, 0.0); count]);
    {
        let (x, gain, bias) = (values(&x), values(&gain), values(&bias));
        let row = |out: &mut [f32], known: &mut (f32, f32), x: &[f32]| {
            let (mean, scale) = moments(x);
            *known = (mean, scale);
            let columns = out.iter_mut().zip(x).zip(gain.iter().zip(bias));
            columns.for_each(|((out, x), (gain, bias))| *out = (x - mean) * scale * gain + bias);
        };
        match sharing_pays(count * width * COST) {
            true => {
                let rows = out.par_chunks_exact_mut(width).zip(&mut known).zip(x.par_chunks_exact(width));
                rows.for_each(|((out, known), x)| row(out, known, x));
            }
            false => {
                let rows = out.chunks_exact_mut(width).zip(&mut known).zip(x.chunks_exact(width));
                rows.for_each(|((out, known), x)| row(out, known, x));
            }
        }
    }
    let out = tensor(out, &[count, width]);
    let prepared = LayerNorm.prepare::<Keep>([x_node, gain_node, bias_node]).compute_bound().stateful();
    let out = match prepared {
        OpsKind::Tracked(node) => node.finish(Normed { x, gain, known }, out),
        OpsKind::UnTracked(node) => node.finish(out),
    };
    given(out, taped)
}

/// The mean of a row, and one over its deviation.
fn moments(row: &[f32]) -> (f32, f32) {
    let mean = average(row, |x| x);
    let variance = average(row, |x| (x - mean) * (x - mean));
    (mean, 1.0 / (variance + EPS).sqrt())
}

/// The mean of something of each element, summed side by side in lanes.
#[inline(always)]
fn average(row: &[f32], each: impl Fn(f32) -> f32) -> f32 {
    const LANES: usize = 16;
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += each(*x));
    }
    let sum = lanes.iter().sum::<f32>() + rest.iter().map(|x| each(*x)).sum::<f32>();
    sum / row.len() as f32
}

#[derive(Debug)]
struct LayerNorm;

#[derive(Clone, Debug)]
struct Normed {
    x: FlexTensor,
    gain: FlexTensor,
    /// Mean and one over the deviation of each row.
    known: Vec<(f32, f32)>,
}

impl Backward<Inner, 3> for LayerNorm {
    type State = Normed;

    fn backward(self, ops: Ops<Normed, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let Normed { x, gain, known } = ops.state;
        let [x_node, gain_node, bias_node] = ops.parents;
        let sizes = shape(&x);
        let (x, gain, incoming) = (values(&x), values(&gain), values(&incoming));
        let strip = STRIP * sizes[1];
        // Of each strip of rows: the gradient of x, of the gain and of the bias.
        let parts: Vec<[Vec<f32>; 3]> = match sharing_pays(sizes[0] * sizes[1] * COST) {
            true => {
                let strips = x.par_chunks(strip).zip(incoming.par_chunks(strip)).zip(known.par_chunks(STRIP));
                strips.map(|((x, incoming), known)| back(x, incoming, known, gain)).collect()
            }
            false => {
                let strips = x.chunks(strip).zip(incoming.chunks(strip)).zip(known.chunks(STRIP));
                strips.map(|((x, incoming), known)| back(x, incoming, known, gain)).collect()
            }
        };
        let sum = |which: usize| {
            let mut sum = vec![0.0; sizes[1]];
            parts.iter().for_each(|part| sum.iter_mut().zip(&part[which]).for_each(|(sum, x)| *sum += x));
            tensor(sum, &sizes[1..])
        };
        if let Some(node) = gain_node {
            gradients.register::<Inner>(node.id, sum(1));
        }
        if let Some(node) = bias_node {
            gradients.register::<Inner>(node.id, sum(2));
        }
        if let Some(node) = x_node {
            let rows = parts.iter().map(|[rows, ..]| &rows[..]).collect::<Vec<_>>().concat();
            gradients.register::<Inner>(node.id, tensor(rows, &sizes));
        }
    }
}

fn back(x: &[f32], incoming: &[f32], known: &[(f32, f32)], gain: &[f32]) -> [Vec<f32>; 3] {
    let width = gain.len();
    let (mut rows, mut gains, mut biases) = (vec![0.0; x.len()], vec![0.0; width], vec![0.0; width]);
    let all = x.chunks_exact(width).zip(incoming.chunks_exact(width)).zip(known);
    for (((x, incoming), (mean, scale)), out) in all.zip(rows.chunks_exact_mut(width)) {
        let (mut sum, mut product) = (0f64, 0f64);
        for i in 0..width {
            let normed = (x[i] - mean) * scale;
            gains[i] += incoming[i] * normed;
            biases[i] += incoming[i];
            let slope = incoming[i] * gain[i];
            sum += f64::from(slope);
            product += f64::from(slope * normed);
        }
        let (sum, product) = ((sum / width as f64) as f32, (product / width as f64) as f32);
        for i in 0..width {
            let normed = (x[i] - mean) * scale;
            out[i] = scale * (incoming[i] * gain[i] - sum - normed * product);
        }
    }
    [rows, gains, biases]
}

/// The square root of 2/pi, and the weight of the cube in the argument of the hyperbolic tangent.
const ROOT: f32 = 0.797_884_6;
const CUBE: f32 = 0.044_715;
/// Elements of one job.
const CHUNK: usize = 1 << 13;

/// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))` of each element.
pub fn gelu(x: Tensor<2>) -> Tensor<2> {
    let taped = x.is_autodiff();
    let (x, node) = tape(x).into_parts();
    let x = contiguous(x);
    let mut out = values(&x).to_vec();
    each(&mut out, |out| {
        out.iter_mut().for_each(|x| *x = 0.5 * *x * (1.0 + tanh(ROOT * (*x + CUBE * *x * *x * *x))));
    });
    let out = tensor(out, &shape(&x));
    let prepared = Gelu.prepare::<Keep>([node]).compute_bound().stateful();
    let out = match prepared {
        OpsKind::Tracked(node) => node.finish(x, out),
        OpsKind::UnTracked(node) => node.finish(out),
    };
    given(out, taped)
}

/// Runs a loop over parts of a slice, with the machine's vector registers.
fn each(slice: &mut [f32], work: impl Fn(&mut [f32]) + Sync) {
    let run = |part: &mut [f32]| {
        wide(
            #[inline(always)]
            || work(part),
        );
    };
    match sharing_pays(slice.len() * COST) {
        true => slice.par_chunks_mut(CHUNK).for_each(run),
        false => run(slice),
    }
}

#[derive(Debug)]
struct Gelu;

impl Backward<Inner, 1> for Gelu {
    type State = FlexTensor;

    fn backward(self, ops: Ops<FlexTensor, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let x = ops.state;
        let [node] = ops.parents;
        let Some(node) = node else { return };
        let mut slopes = values(&x).to_vec();
        each(&mut slopes, |slopes| {
            slopes.iter_mut().for_each(|slope| {
                let x = *slope;
                let t = tanh(ROOT * (x + CUBE * x * x * x));
                *slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * ROOT * (1.0 + 3.0 * CUBE * x * x);
            });
        });
        slopes.iter_mut().zip(values(&incoming)).for_each(|(slope, incoming)| *slope *= incoming);
        gradients.register::<Inner>(node.id, tensor(slopes, &shape(&x)));
    }
}

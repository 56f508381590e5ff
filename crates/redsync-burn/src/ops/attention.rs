//! Causal attention of several heads as one node of the tape: queries, keys and values of all tokens go in, what each token gathers
//! from those before it and from itself comes out.
//! What must hold: a token sees no later one; the gradient leaves in the layout of its input; bits that do not depend on the number
//! of threads, since one thread computes a head of a stream.

use super::activation::{exp, wide};
use super::gemm::{Matrix, MatrixMut, Threads, gemm, sharing_pays};
use crate::flex::{Inner, Keep, contiguous, given, tape, tensor, values};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

/// How the rows are to be read.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    time: usize,
    streams: usize,
    heads: usize,
    /// Width of a head.
    width: usize,
}

impl Sizes {
    fn row(&self) -> usize {
        self.heads * self.width
    }

    /// A head of a stream as a matrix `[time, width]` in rows of so many columns, which begin at `column`.
    fn part<'a>(&self, values: &'a [f32], columns: usize, (stream, column): (usize, usize)) -> Matrix<'a> {
        let from = stream * columns + column;
        Matrix::strided(&values[from..], [self.time, self.width], [self.streams * columns, 1])
    }

    /// Copies such a matrix to where it belongs.
    fn place(&self, part: &[f32], to: &mut [f32], columns: usize, (stream, column): (usize, usize)) {
        for (time, row) in part.chunks_exact(self.width).enumerate() {
            let at = (time * self.streams + stream) * columns + column;
            to[at..at + self.width].copy_from_slice(row);
        }
    }

    /// All heads of all streams.
    fn parts(&self) -> Vec<(usize, usize)> {
        (0..self.streams).flat_map(|stream| (0..self.heads).map(move |head| (stream, head))).collect()
    }

    /// Runs something for each of them.
    fn each<T: Send>(&self, run: impl Fn(usize, (usize, usize)) -> T + Sync) -> Vec<T> {
        let parts = self.parts();
        match sharing_pays(parts.len() * self.time * self.time * self.width) {
            true => parts.par_iter().enumerate().map(|(at, part)| run(at, *part)).collect(),
            false => parts.iter().enumerate().map(|(at, part)| run(at, *part)).collect(),
        }
    }
}

/// What every token gathers, `[time * streams, D]`: of `qkv [time * streams, 3 D]`, which holds query, key and value of each token, time
/// by time, the `heads` parts of a query are multiplied with those of the keys so far, and the softmax of the products, divided by the
/// root of their width, weights the values.
///
/// # Panics
/// If the shapes do not agree.
pub fn attention(qkv: Tensor<2>, streams: usize, heads: usize) -> Tensor<2> {
    let [rows, columns] = qkv.dims();
    assert!(streams > 0 && heads > 0 && rows.is_multiple_of(streams), "rows of whole streams");
    assert!(columns.is_multiple_of(3 * heads) && columns > 0, "three parts of so many heads");
    let sizes = Sizes { time: rows / streams, streams, heads, width: columns / 3 / heads };
    let taped = qkv.is_autodiff();
    let (qkv, node) = tape(qkv).into_parts();
    let qkv = contiguous(qkv);
    let of = |which: usize, (stream, head): (usize, usize)| {
        sizes.part(values(&qkv), columns, (stream, which * sizes.row() + head * sizes.width))
    };
    let gathered = sizes.each(|_, part| {
        let mut weights = vec![0.0; sizes.time * sizes.time];
        let (time, scale) = (sizes.time, 1.0 / (sizes.width as f32).sqrt());
        let products = MatrixMut::new(&mut weights, time, time);
        gemm(scale, of(0, part), of(1, part).transposed(), 0.0, products, Threads::One);
        weights.chunks_exact_mut(time.max(1)).enumerate().for_each(|(t, row)| soften(row, t + 1));
        let mut out = vec![0.0; time * sizes.width];
        let to = MatrixMut::new(&mut out, time, sizes.width);
        gemm(1.0, Matrix::new(&weights, time, time), of(2, part), 0.0, to, Threads::One);
        (out, weights)
    });
    let mut out = vec![0.0; rows * sizes.row()];
    for ((stream, head), (part, _)) in sizes.parts().into_iter().zip(&gathered) {
        sizes.place(part, &mut out, sizes.row(), (stream, head * sizes.width));
    }
    let out = tensor(out, &[rows, sizes.row()]);
    let prepared = Attention.prepare::<Keep>([node]).compute_bound().stateful();
    let out = match prepared {
        OpsKind::Tracked(node) => {
            let weights = gathered.into_iter().map(|(_, weights)| weights).collect();
            node.finish(Attended { sizes, qkv, weights }, out)
        }
        OpsKind::UnTracked(node) => node.finish(out),
    };
    given(out, taped)
}

/// The softmax of the first `seen` numbers of a row; nothing is left of the others.
fn soften(row: &mut [f32], seen: usize) {
    let (row, unseen) = row.split_at_mut(seen);
    unseen.fill(0.0);
    let largest = row.iter().fold(f32::NEG_INFINITY, |most, x| if *x > most { *x } else { most });
    wide(
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x = exp(*x - largest)),
    );
    let share = 1.0 / row.iter().sum::<f32>();
    row.iter_mut().for_each(|x| *x *= share);
}

#[derive(Debug)]
struct Attention;

#[derive(Clone, Debug)]
struct Attended {
    sizes: Sizes,
    qkv: FlexTensor,
    /// The softmax of each head of each stream, `[time, time]`.
    weights: Vec<Vec<f32>>,
}

impl Backward<Inner, 1> for Attention {
    type State = Attended;

    fn backward(self, ops: Ops<Attended, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let Attended { sizes, qkv, weights } = ops.state;
        let [node] = ops.parents;
        let Some(node) = node else { return };
        let (time, width, columns) = (sizes.time, sizes.width, 3 * sizes.row());
        let of = |which: usize, (stream, head): (usize, usize)| {
            sizes.part(values(&qkv), columns, (stream, which * sizes.row() + head * width))
        };
        let parts = sizes.each(|at, part| {
            let (stream, head) = part;
            let incoming = sizes.part(values(&incoming), sizes.row(), (stream, head * width));
            let softened = Matrix::new(&weights[at], time, time);
            let product = |a: Matrix<'_>, b: Matrix<'_>, scale: f32, columns: usize| {
                let mut out = vec![0.0; time * columns];
                gemm(scale, a, b, 0.0, MatrixMut::new(&mut out, time, columns), Threads::One);
                out
            };
            let value = product(softened.transposed(), incoming, 1.0, width);
            let mut slopes = product(incoming, of(2, part).transposed(), 1.0, time);
            for (slopes, weights) in
                slopes.chunks_exact_mut(time.max(1)).zip(weights[at].chunks_exact(time.max(1)))
            {
                let mean: f32 = slopes.iter().zip(weights).map(|(slope, weight)| slope * weight).sum();
                slopes.iter_mut().zip(weights).for_each(|(slope, weight)| *slope = (*slope - mean) * weight);
            }
            let (slopes, scale) = (Matrix::new(&slopes, time, time), 1.0 / (width as f32).sqrt());
            let query = product(slopes, of(1, part), scale, width);
            let key = product(slopes.transposed(), of(0, part), scale, width);
            [query, key, value]
        });
        let mut gradient = vec![0.0; values(&qkv).len()];
        for ((stream, head), each) in sizes.parts().into_iter().zip(&parts) {
            for (which, part) in each.iter().enumerate() {
                sizes.place(part, &mut gradient, columns, (stream, which * sizes.row() + head * width));
            }
        }
        gradients.register::<Inner>(node.id, tensor(gradient, &[time * sizes.streams, columns]));
    }
}

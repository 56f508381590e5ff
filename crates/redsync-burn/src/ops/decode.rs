//! The two ends of a language model that may share one table: words to rows of the embedding, and hidden states to the scores of
//! all words. What must hold: the gradient of the table leaves row by row, as the table is, without a transposed copy.

use super::gemm::{Matrix, MatrixMut, Threads, gemm, sharing_pays};
use crate::flex::{Inner, Keep, Tracked, contiguous, given, shape, tape, tensor, values};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

/// Scores of all words: `h [N,H]` times the transposed `embedding [V,H]`, plus `bias [V]`.
///
/// # Panics
/// If the shapes do not agree.
pub fn decode(h: Tensor<2>, embedding: Tensor<2>, bias: Tensor<1>) -> Tensor<2> {
    let [count, hidden] = h.dims();
    let [words, width] = embedding.dims();
    assert_eq!(hidden, width, "width of the hidden state and of the embedding");
    assert_eq!(bias.dims(), [words], "one bias for each word");
    let taped = h.is_autodiff() || embedding.is_autodiff() || bias.is_autodiff();
    let ((h, h_node), (embedding, embedding_node)) = (tape(h).into_parts(), tape(embedding).into_parts());
    let (bias, bias_node) = tape(bias).into_parts();
    let (h, embedding, bias) = (contiguous(h), contiguous(embedding), contiguous(bias));
    // The bias stands in every row before the product is added, which saves a pass over the scores.
    let mut scores = Vec::with_capacity(count * words);
    (0..count).for_each(|_| scores.extend_from_slice(values(&bias)));
    let table = Matrix::new(values(&embedding), words, hidden).transposed();
    let h_rows = Matrix::new(values(&h), count, hidden);
    gemm(1.0, h_rows, table, 1.0, MatrixMut::new(&mut scores, count, words), Threads::Pool);
    let scores = tensor(scores, &[count, words]);
    let prepared = Decode.prepare::<Keep>([h_node, embedding_node, bias_node]).compute_bound().stateful();
    let out = match prepared {
        OpsKind::Tracked(node) => node.finish(Decoded { h, embedding }, scores),
        OpsKind::UnTracked(node) => node.finish(scores),
    };
    given(out, taped)
}

#[derive(Debug)]
struct Decode;

#[derive(Clone, Debug)]
struct Decoded {
    h: FlexTensor,
    embedding: FlexTensor,
}

impl Backward<Inner, 3> for Decode {
    type State = Decoded;

    fn backward(self, ops: Ops<Decoded, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let Decoded { h, embedding } = ops.state;
        let [h_node, embedding_node, bias_node] = ops.parents;
        let (count, words, hidden) = (shape(&h)[0], shape(&embedding)[0], shape(&h)[1]);
        let scores = Matrix::new(values(&incoming), count, words);
        if let Some(node) = embedding_node {
            let mut table = vec![0.0; words * hidden];
            let h = Matrix::new(values(&h), count, hidden);
            gemm(1.0, scores.transposed(), h, 0.0, MatrixMut::new(&mut table, words, hidden), Threads::Pool);
            gradients.register::<Inner>(node.id, tensor(table, &[words, hidden]));
        }
        if let Some(node) = bias_node {
            gradients.register::<Inner>(node.id, tensor(column_sums(values(&incoming), words), &[words]));
        }
        if let Some(node) = h_node {
            let mut rows = vec![0.0; count * hidden];
            let table = Matrix::new(values(&embedding), words, hidden);
            gemm(1.0, scores, table, 0.0, MatrixMut::new(&mut rows, count, hidden), Threads::Pool);
            gradients.register::<Inner>(node.id, tensor(rows, &[count, hidden]));
        }
    }
}

/// The sum of all rows of a matrix with so many columns. Each element is summed from the first row to the last.
pub(super) fn column_sums(matrix: &[f32], columns: usize) -> Vec<f32> {
    /// Columns of one job: they stay in the first-level cache.
    const STRIP: usize = 2048;
    let mut sums = vec![0.0; columns];
    let add = |(strip, sums): (usize, &mut [f32])| {
        for row in matrix.chunks_exact(columns) {
            sums.iter_mut().zip(&row[strip * STRIP..]).for_each(|(sum, value)| *sum += value);
        }
    };
    match sharing_pays(matrix.len()) {
        true => sums.par_chunks_mut(STRIP).enumerate().for_each(add),
        false => sums.chunks_mut(STRIP).enumerate().for_each(add),
    }
    sums
}

/// The rows of `embedding [V,H]` for each of N tokens: `[N,H]`.
///
/// # Panics
/// If a token is not below V.
pub fn embed(tokens: &[u32], embedding: Tensor<2>) -> Tensor<2> {
    let [words, hidden] = embedding.dims();
    let taped = embedding.is_autodiff();
    let (embedding, node) = tape(embedding).into_parts();
    let embedding = contiguous(embedding);
    let mut rows = Vec::with_capacity(tokens.len() * hidden);
    for &token in tokens {
        let token = token as usize;
        assert!(token < words, "token {token} of a vocabulary of {words}");
        rows.extend_from_slice(&values(&embedding)[token * hidden..][..hidden]);
    }
    let rows = tensor(rows, &[tokens.len(), hidden]);
    let prepared = Embed.prepare::<Keep>([node]).compute_bound().stateful();
    let rows: Tracked = match prepared {
        OpsKind::Tracked(node) => node.finish(Embedded { tokens: tokens.to_vec(), words, hidden }, rows),
        OpsKind::UnTracked(node) => node.finish(rows),
    };
    given(rows, taped)
}

#[derive(Debug)]
struct Embed;

#[derive(Clone, Debug)]
struct Embedded {
    tokens: Vec<u32>,
    words: usize,
    hidden: usize,
}

impl Backward<Inner, 1> for Embed {
    type State = Embedded;

    fn backward(self, ops: Ops<Embedded, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let Embedded { tokens, words, hidden } = ops.state;
        let [node] = ops.parents;
        if let Some(node) = node {
            let mut table = vec![0.0; words * hidden];
            // In the order of the tokens, on one thread: a word that comes often gets its sum in one order.
            for (&token, row) in tokens.iter().zip(values(&incoming).chunks_exact(hidden.max(1))) {
                let sums = &mut table[token as usize * hidden..][..hidden];
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
            gradients.register::<Inner>(node.id, tensor(table, &[words, hidden]));
        }
    }
}

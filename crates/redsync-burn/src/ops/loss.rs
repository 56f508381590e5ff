//! The loss of a classifier: scores and the right classes go in, the mean cross entropy and the number of right guesses come out.
//! What must hold: no score is too large for it, and the bits do not depend on the number of threads.

use super::activation::{exp, wide};
use super::gemm::sharing_pays;
use crate::flex::{Inner, Keep, contiguous, given, shape, tape, tensor, values};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;
use std::sync::Arc;

/// What one exponential costs, in multiplications, when it is decided whether a second thread pays.
const COST: usize = 4;

/// The mean over N rows of `-log softmax(logits)[target]`, and in how many rows the target has the largest score (of equal ones
/// the first counts). A score that is NaN makes the loss NaN.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use redsync_burn::ops::loss::cross_entropy;
/// let scores = Tensor::<2>::from_floats([[0.0, 1000.0], [5.0, 5.0]], &Device::flex().autodiff());
/// let (loss, correct) = cross_entropy(scores, &[1, 0]);
/// assert_eq!(correct, 2);
/// assert!((loss.into_scalar::<f32>() - 2f32.ln() / 2.0).abs() < 1e-6);
/// ```
///
/// # Panics
/// If there is not one target for each row, or one is no class, or there are no rows.
pub fn cross_entropy(logits: Tensor<2>, targets: &[u32]) -> (Tensor<1>, usize) {
    let [count, classes] = logits.dims();
    assert!(count > 0, "the mean of no rows");
    assert_eq!(count, targets.len(), "one target for each row");
    assert!(targets.iter().all(|&target| (target as usize) < classes), "a target that is no class");
    let taped = logits.is_autodiff();
    let (logits, node) = tape(logits).into_parts();
    let logits = contiguous(logits);
    let each = |(row, &target): (&[f32], &u32)| Judged::new(row, target as usize);
    let rows = values(&logits);
    let judged: Vec<Judged> = match sharing_pays(rows.len() * COST) {
        true => rows.par_chunks_exact(classes).zip(targets).map(each).collect(),
        false => rows.chunks_exact(classes).zip(targets).map(each).collect(),
    };
    let loss = judged.iter().map(|row| row.loss).sum::<f64>() / count as f64;
    let correct = judged.iter().filter(|row| row.correct).count();
    let loss = tensor(vec![loss as f32], &[1]);
    let prepared = CrossEntropy.prepare::<Keep>([node]).compute_bound().stateful();
    let loss = match prepared {
        OpsKind::Tracked(node) => {
            node.finish(Scored { logits, targets: targets.into(), judged: judged.into() }, loss)
        }
        OpsKind::UnTracked(node) => node.finish(loss),
    };
    (given(loss, taped), correct)
}

/// What is known of one row. Its softmax is `exp(score - largest) / sum`.
#[derive(Clone, Copy, Debug)]
struct Judged {
    largest: f32,
    sum: f32,
    loss: f64,
    correct: bool,
}

impl Judged {
    fn new(row: &[f32], target: usize) -> Judged {
        let (largest, sum) = wide(
            #[inline(always)]
            || {
                let largest = largest(row);
                (largest, sum_of_exp(row, largest))
            },
        );
        let loss = sum.ln() + largest as f64 - row[target] as f64;
        let correct = row[target] == largest && !row[..target].contains(&largest);
        Judged { largest, sum: sum as f32, loss, correct }
    }
}

/// Numbers treated side by side; a multiple of any vector register.
const LANES: usize = 32;

#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        lanes
            .iter_mut()
            .zip(chunk)
            .for_each(|(lane, &score)| *lane = if score > *lane { score } else { *lane });
    }
    lanes
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |largest, &score| if score > largest { score } else { largest })
}

/// In f64 from one chunk to the next: a vocabulary has many words of little weight.
#[inline(always)]
fn sum_of_exp(row: &[f32], largest: f32) -> f64 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0f64; LANES];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &score)| *lane += exp(score - largest) as f64);
    }
    let rest: f64 = rest.iter().map(|&score| exp(score - largest) as f64).sum();
    lanes.iter().sum::<f64>() + rest
}

#[derive(Debug)]
struct CrossEntropy;

#[derive(Clone, Debug)]
struct Scored {
    logits: FlexTensor,
    targets: Arc<[u32]>,
    judged: Arc<[Judged]>,
}

impl Backward<Inner, 1> for CrossEntropy {
    type State = Scored;

    fn backward(self, ops: Ops<Scored, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = gradients.consume::<Inner>(&ops.node);
        let Scored { mut logits, targets, judged } = ops.state;
        let [node] = ops.parents;
        let Some(node) = node else { return };
        let sizes = shape(&logits);
        let scale = values(&contiguous(incoming))[0] / sizes[0] as f32;
        let spread =
            |row: &mut [f32], judged: &Judged, target: u32| spread(row, judged, target as usize, scale);
        let shared = sharing_pays(sizes[0] * sizes[1] * COST);
        let over = |rows: &mut [f32]| match shared {
            true => {
                let rows = rows.par_chunks_exact_mut(sizes[1]).zip(&judged[..]).zip(&targets[..]);
                rows.for_each(|((row, judged), &target)| spread(row, judged, target));
            }
            false => {
                let rows = rows.chunks_exact_mut(sizes[1]).zip(&judged[..]).zip(&targets[..]);
                rows.for_each(|((row, judged), &target)| spread(row, judged, target));
            }
        };
        // The scores are mostly needed no longer, and then the gradient takes their place.
        let (begin, size) = (logits.layout().start_offset(), logits.layout().num_elements());
        let gradient = match logits.try_storage_mut::<f32>() {
            Some(rows) => {
                over(&mut rows[begin..begin + size]);
                logits
            }
            None => {
                let mut rows = values(&logits).to_vec();
                over(&mut rows);
                tensor(rows, &sizes)
            }
        };
        gradients.register::<Inner>(node.id, gradient);
    }
}

/// Makes the gradient of one row from its scores: `scale * (softmax - 1 at the target)`.
fn spread(row: &mut [f32], judged: &Judged, target: usize, scale: f32) {
    let share = scale / judged.sum;
    let largest = judged.largest;
    wide(
        #[inline(always)]
        || row.iter_mut().for_each(|score| *score = exp(*score - largest) * share),
    );
    row[target] -= scale;
}

//! A transformer: tokens in, scores of the next token out, by blocks of causal attention and a wide layer between an embedding and its
//! transpose, as GPT-2 has them.
//! What must hold: a window of the text is all that a token sees.

use super::Pass;
use super::weights::{Init, Spec};
use crate::flex::{tensor, untracked};
use crate::ops::attention::attention;
use crate::ops::decode::{decode, embed};
use crate::ops::norm::{gelu, layer_norm};
use burn::tensor::Tensor;
use redsync_engine::Kind;

/// Parameters of a block.
const BLOCK: usize = 12;

/// Blocks of attention whose embedding is also the matrix of the scores.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt {
    /// Width of a token.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Parts of a query, each with attention of its own.
    pub heads: usize,
    /// Tokens of the longest window.
    pub context: usize,
    /// Weights begin normal with this deviation.
    pub begin: f32,
}

impl Gpt {
    /// The parameters for a vocabulary, in forward order. Names are those of `redsync_engine::models`.
    pub(super) fn specs(&self, vocabulary: usize) -> Vec<Spec> {
        let d = self.width;
        let begin = Init::Normal(self.begin);
        // What is added to the stream of a token at each block begins smaller, so that the sum does not grow with depth.
        let end = Init::Normal(self.begin / (2.0 * self.layers as f32).sqrt());
        let mut specs = vec![
            Spec::new("wte.weight", &[vocabulary, d], Kind::Output, begin),
            Spec::new("wpe.weight", &[self.context, d], Kind::Weight, begin),
        ];
        let norm = |name: String| {
            let part = |part: &str, value| {
                Spec::new(format!("{name}.{part}"), &[d], Kind::BiasOrNorm, Init::Constant(value))
            };
            [part("weight", 1.0), part("bias", 0.0)]
        };
        let linear = |name: String, out: usize, from: usize, init: Init| {
            let bias = Spec::new(format!("{name}.bias"), &[out], Kind::BiasOrNorm, Init::Constant(0.0));
            [Spec::new(format!("{name}.weight"), &[out, from], Kind::Weight, init), bias]
        };
        for depth in 0..self.layers {
            specs.extend(norm(format!("h.{depth}.ln_1")));
            specs.extend(linear(format!("h.{depth}.attn.qkv"), 3 * d, d, begin));
            specs.extend(linear(format!("h.{depth}.attn.proj"), d, d, end));
            specs.extend(norm(format!("h.{depth}.ln_2")));
            specs.extend(linear(format!("h.{depth}.mlp.fc"), 4 * d, d, begin));
            specs.extend(linear(format!("h.{depth}.mlp.proj"), d, 4 * d, end));
        }
        specs.extend(norm("ln_f".into()));
        specs
    }

    /// The scores of the token behind each of these, `[tokens, vocabulary]`; they stand time by time, `[time, streams]`.
    ///
    /// # Panics
    /// If the window is longer than the context.
    pub(super) fn run(
        &self,
        pass: &mut Pass,
        tokens: &[u32],
        streams: usize,
        vocabulary: usize,
    ) -> Tensor<2> {
        let time = tokens.len() / streams;
        assert!(time <= self.context, "a window of {time} tokens, and {} at most", self.context);
        // Embeddings have no input on the tape; any tensor without a history has the same depth.
        let root = untracked::<1>(tensor(vec![0.0], &[1]));
        let table: Tensor<2> = pass.weight(0, &root);
        let positions: Vec<u32> = (0..tokens.len()).map(|at| (at / streams) as u32).collect();
        let mut x = embed(tokens, table.clone()) + embed(&positions, pass.weight(1, &root));
        for depth in 0..self.layers {
            let first = 2 + BLOCK * depth;
            let y = self.norm(pass, x.clone(), first);
            let y = attention(self.linear(pass, y, first + 2), streams, self.heads);
            x = x + self.linear(pass, y, first + 4);
            let y = self.norm(pass, x.clone(), first + 6);
            let y = gelu(self.linear(pass, y, first + 8));
            x = x + self.linear(pass, y, first + 10);
        }
        let x = self.norm(pass, x, 2 + BLOCK * self.layers);
        decode(x, table, untracked(tensor(vec![0.0; vocabulary], &[vocabulary])))
    }

    fn norm(&self, pass: &mut Pass, x: Tensor<2>, first: usize) -> Tensor<2> {
        let (gain, bias) = (pass.weight(first, &x), pass.weight(first + 1, &x));
        layer_norm(x, gain, bias)
    }

    fn linear(&self, pass: &mut Pass, x: Tensor<2>, first: usize) -> Tensor<2> {
        let (weight, bias) = (pass.weight(first, &x), pass.weight(first + 1, &x));
        decode(x, weight, bias)
    }
}

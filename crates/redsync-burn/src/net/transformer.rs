//! A transformer: tokens in, scores of the next token out, by blocks of causal attention and a wide layer between an embedding and its
//! transpose, as GPT-2 has them.
//! What must hold: a window of the text is all that a token sees.

use super::Pass;
use super::begin::{Begin, Init};
use super::language::{Embedding, Language};
use crate::flex::beside;
use crate::ops::attention::attention;
use crate::ops::decode::{decode, embed};
use crate::ops::norm::{gelu, layer_norm};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

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

/// The network of a [`Gpt`].
#[derive(Module, Debug)]
pub struct GptNet {
    /// The tokens, and the matrix of the scores.
    pub wte: Embedding,
    /// The places in a window.
    pub wpe: Embedding,
    /// The blocks.
    pub h: Vec<GptBlock>,
    /// The norm behind all blocks.
    pub ln_f: LayerNorm,
    /// Parts of a query, each with attention of its own.
    pub heads: usize,
}

/// A block of a transformer.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct GptBlock {
    pub ln_1: LayerNorm,
    pub attn: Attention,
    pub ln_2: LayerNorm,
    pub mlp: Wide,
}

/// Causal attention: queries, keys and values, and what is made of what they found.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct Attention {
    pub qkv: Projection,
    pub proj: Projection,
}

/// Four times as wide, and back.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct Wide {
    pub fc: Projection,
    pub proj: Projection,
}

/// A norm of each token, with a gain and a bias for each column.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct LayerNorm {
    pub weight: Param<Tensor<1>>,
    pub bias: Param<Tensor<1>>,
}

/// A fully connected layer on tokens, `[to, from]`.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct Projection {
    pub weight: Param<Tensor<2>>,
    pub bias: Param<Tensor<1>>,
}

impl Gpt {
    /// The network for a vocabulary.
    pub fn build(&self, vocabulary: usize, seed: u64) -> Language {
        let (d, usual) = (self.width, Init::Normal(self.begin));
        // What is added to the stream of a token at each block begins smaller, so that the sum does not grow with depth.
        let last = Init::Normal(self.begin / (2.0 * self.layers as f32).sqrt());
        let mut begin = Begin::new(seed);
        let wte = Embedding { weight: begin.next([vocabulary, d], usual) };
        let wpe = Embedding { weight: begin.next([self.context, d], usual) };
        let mut block = || {
            let ln_1 = LayerNorm::new(&mut begin, d);
            let qkv = Projection::new(&mut begin, d, 3 * d, usual);
            let attn = Attention { qkv, proj: Projection::new(&mut begin, d, d, last) };
            let ln_2 = LayerNorm::new(&mut begin, d);
            let fc = Projection::new(&mut begin, d, 4 * d, usual);
            let mlp = Wide { fc, proj: Projection::new(&mut begin, 4 * d, d, last) };
            GptBlock { ln_1, attn, ln_2, mlp }
        };
        let h = (0..self.layers).map(|_| block()).collect();
        let ln_f = LayerNorm::new(&mut begin, d);
        Language::Gpt(GptNet { wte, wpe, h, ln_f, heads: self.heads })
    }
}

impl GptNet {
    /// Tokens of the longest window.
    pub(super) fn context(&self) -> usize {
        self.wpe.weight.lazy_shape()[0]
    }

    /// The scores of the token behind each of these, `[tokens, vocabulary]`; they stand time by time, `[time, streams]`.
    pub(super) fn forward(&self, pass: &mut Pass, tokens: &[u32], streams: usize) -> Tensor<2> {
        let (time, context) = (tokens.len() / streams, self.context());
        assert!(time <= context, "a window of {time} tokens, and {context} at most");
        let table = self.wte.table(pass);
        let places: Vec<u32> = (0..tokens.len()).map(|at| (at / streams) as u32).collect();
        let mut x = embed(tokens, table.clone()) + embed(&places, self.wpe.table(pass));
        for GptBlock { ln_1, attn, ln_2, mlp } in &self.h {
            let y = ln_1.forward(pass, x.clone());
            let y = attention(attn.qkv.forward(pass, y), streams, self.heads);
            x = x + attn.proj.forward(pass, y);
            let y = ln_2.forward(pass, x.clone());
            let y = gelu(mlp.fc.forward(pass, y));
            x = x + mlp.proj.forward(pass, y);
        }
        let x = self.ln_f.forward(pass, x);
        let [vocabulary, _] = table.dims();
        let none = beside(&x, vec![0.0; vocabulary], [vocabulary]);
        decode(x, table, none)
    }
}

impl LayerNorm {
    fn new(begin: &mut Begin, width: usize) -> Self {
        let (weight, bias) = (Init::Constant(1.0), Init::Constant(0.0));
        LayerNorm { weight: begin.next([width], weight), bias: begin.next([width], bias) }
    }

    fn forward(&self, pass: &Pass, x: Tensor<2>) -> Tensor<2> {
        let LayerNorm { weight, bias } = pass.layer(self, &x);
        layer_norm(x, weight.val(), bias.val())
    }
}

impl Projection {
    fn new(begin: &mut Begin, from: usize, to: usize, init: Init) -> Self {
        Projection { weight: begin.next([to, from], init), bias: begin.next([to], Init::Constant(0.0)) }
    }

    fn forward(&self, pass: &Pass, x: Tensor<2>) -> Tensor<2> {
        let Projection { weight, bias } = pass.layer(self, &x);
        decode(x, weight.val(), bias.val())
    }
}

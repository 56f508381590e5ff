//! Language models: words in, scores of the next word out, by layers of LSTM between an embedding and its transpose, or by a
//! transformer.
//! What must hold: the state of an LSTM goes from one window of the text to the next, its gradients do not.

use super::Pass;
use super::begin::{Begin, Init};
use super::transformer::GptNet;
use crate::flex::{tensor, untracked};
use crate::ops::decode::{decode, embed};
use crate::ops::lstm::{Parameters, lstm};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// Layers of LSTM whose embedding is also the matrix of the scores.
#[derive(Clone, Debug, PartialEq)]
pub struct Lstm {
    /// Width of a word, and of the state.
    pub units: usize,
    /// Layers.
    pub layers: usize,
    /// Dropout between them, and before and behind all.
    pub dropout: f32,
    /// Parameters begin uniformly between minus and plus this.
    pub begin: f32,
}

/// What each layer remembers of the text so far: h and c, `[batch, units]`.
pub type State = Vec<(Vec<f32>, Vec<f32>)>;

/// A language model.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub enum Language {
    Lstm(LstmNet),
    Gpt(GptNet),
}

/// The network of an [`Lstm`].
#[derive(Module, Debug)]
pub struct LstmNet {
    /// The words, and the matrix of the scores.
    pub encoder: Embedding,
    /// The layers.
    pub rnn: Vec<LstmLayer>,
    /// What is added to the scores.
    pub decoder: Offset,
    /// Dropout between layers, and before and behind all.
    pub dropout: f32,
}

/// A row for each word, `[words, width]`.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct Embedding {
    pub weight: Param<Tensor<2>>,
}

/// A layer of LSTM, with its gates as PyTorch has them.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct LstmLayer {
    pub weight_ih: Param<Tensor<2>>,
    pub weight_hh: Param<Tensor<2>>,
    pub bias_ih: Param<Tensor<1>>,
    pub bias_hh: Param<Tensor<1>>,
}

/// A number for each word.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct Offset {
    pub bias: Param<Tensor<1>>,
}

impl Embedding {
    /// The table, watched if the pass is. It has no input on the tape; any tensor without a history has the same depth.
    pub(super) fn table(&self, pass: &Pass) -> Tensor<2> {
        pass.layer(self, &untracked::<1>(tensor(vec![0.0], &[1]))).weight.val()
    }
}

impl Lstm {
    /// The network for a vocabulary.
    pub fn build(&self, vocabulary: usize, seed: u64) -> Language {
        let (units, gates, init) = (self.units, 4 * self.units, Init::Uniform(self.begin));
        let mut begin = Begin::new(seed);
        let encoder = Embedding { weight: begin.next([vocabulary, units], init) };
        let mut layer = || LstmLayer {
            weight_ih: begin.next([gates, units], init),
            weight_hh: begin.next([gates, units], init),
            bias_ih: begin.next([gates], init),
            bias_hh: begin.next([gates], init),
        };
        let rnn = (0..self.layers).map(|_| layer()).collect();
        let decoder = Offset { bias: begin.next([vocabulary], Init::Constant(0.0)) };
        Language::Lstm(LstmNet { encoder, rnn, decoder, dropout: self.dropout })
    }
}

impl Language {
    /// The longest window that it can take, if there is one.
    pub fn longest_window(&self) -> Option<usize> {
        match self {
            Language::Lstm(_) => None,
            Language::Gpt(gpt) => Some(gpt.context()),
        }
    }

    /// The state before the first word; a transformer has none.
    pub fn blank(&self, batch: usize) -> State {
        match self {
            Language::Lstm(lstm) => {
                let [_, units] = lstm.encoder.weight.lazy_shape().dims();
                let zeros = || vec![0.0; batch * units];
                lstm.rnn.iter().map(|_| (zeros(), zeros())).collect()
            }
            Language::Gpt(_) => State::new(),
        }
    }

    /// The scores of the word behind each of these, `[words, vocabulary]`; the words stand time by time, `[time, batch]`.
    ///
    /// # Panics
    /// If the window is longer than the network can take.
    pub fn forward(&self, pass: &mut Pass, words: &[u32], batch: usize, state: &mut State) -> Tensor<2> {
        match self {
            Language::Lstm(lstm) => lstm.forward(pass, words, batch, state),
            Language::Gpt(gpt) => gpt.forward(pass, words, batch),
        }
    }
}

impl LstmNet {
    fn forward(&self, pass: &mut Pass, words: &[u32], batch: usize, state: &mut State) -> Tensor<2> {
        let table = self.encoder.table(pass);
        let [_, units] = table.dims();
        let x = pass.dropout(embed(words, table.clone()), self.dropout);
        let mut x = x.reshape([words.len() / batch, batch, units]);
        for (layer, state) in self.rnn.iter().zip(state) {
            let layer = pass.layer(layer, &x);
            let parameters = Parameters {
                weight_ih: layer.weight_ih.val(),
                weight_hh: layer.weight_hh.val(),
                bias_ih: layer.bias_ih.val(),
                bias_hh: layer.bias_hh.val(),
            };
            let (y, last) = lstm(x, parameters, std::mem::take(state));
            *state = last;
            x = pass.dropout(y, self.dropout);
        }
        let x = x.reshape([words.len(), units]);
        let bias = pass.layer(&self.decoder, &x).bias.val();
        decode(x, table, bias)
    }
}

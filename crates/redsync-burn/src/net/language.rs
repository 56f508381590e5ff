//! Language models: words in, scores of the next word out, by layers of LSTM between an embedding and its transpose, or by a
//! transformer.
//! What must hold: the state of an LSTM goes from one window of the text to the next, its gradients do not.

use super::Pass;
use super::transformer::Gpt;
use super::weights::{Init, Spec};
use crate::ops::decode::{decode, embed};
use crate::ops::lstm::{Parameters, lstm};
use burn::tensor::Tensor;
use redsync_engine::Kind;

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
#[derive(Clone, Debug)]
pub struct Language {
    /// The number of different words.
    pub vocabulary: usize,
    specs: Vec<Spec>,
    shape: Shape,
}

#[derive(Clone, Debug)]
enum Shape {
    Lstm(Lstm),
    Gpt(Gpt),
}

impl Gpt {
    /// The network for a vocabulary.
    pub fn build(&self, vocabulary: usize) -> Language {
        Language { vocabulary, specs: self.specs(vocabulary), shape: Shape::Gpt(self.clone()) }
    }
}

impl Lstm {
    /// The network for a vocabulary. Names and order are those of `redsync_engine::models`.
    pub fn build(&self, vocabulary: usize) -> Language {
        let (units, gates, init) = (self.units, 4 * self.units, Init::Uniform(self.begin));
        let mut specs = vec![Spec::new("encoder.weight", &[vocabulary, units], Kind::Output, init)];
        for depth in 0..self.layers {
            let name = |part: &str| format!("rnn.{part}_l{depth}");
            specs.extend([
                Spec::new(name("weight_ih"), &[gates, units], Kind::Weight, init),
                Spec::new(name("weight_hh"), &[gates, units], Kind::Weight, init),
                Spec::new(name("bias_ih"), &[gates], Kind::BiasOrNorm, init),
                Spec::new(name("bias_hh"), &[gates], Kind::BiasOrNorm, init),
            ]);
        }
        specs.push(Spec::new("decoder.bias", &[vocabulary], Kind::BiasOrNorm, Init::Constant(0.0)));
        Language { vocabulary, specs, shape: Shape::Lstm(self.clone()) }
    }
}

impl Language {
    /// The parameters, in forward order.
    pub fn specs(&self) -> &[Spec] {
        &self.specs
    }

    /// The longest window that it can take, if there is one.
    pub fn longest_window(&self) -> Option<usize> {
        match &self.shape {
            Shape::Lstm(_) => None,
            Shape::Gpt(gpt) => Some(gpt.context),
        }
    }

    /// The state before the first word; a transformer has none.
    pub fn blank(&self, batch: usize) -> State {
        match &self.shape {
            Shape::Lstm(lstm) => {
                let zeros = || vec![0.0; batch * lstm.units];
                (0..lstm.layers).map(|_| (zeros(), zeros())).collect()
            }
            Shape::Gpt(_) => State::new(),
        }
    }

    /// The scores of the word behind each of these, `[words, vocabulary]`; the words stand time by time, `[time, batch]`.
    pub fn run(&self, pass: &mut Pass, words: &[u32], batch: usize, state: &mut State) -> Tensor<2> {
        match &self.shape {
            Shape::Lstm(lstm) => lstm.run(pass, words, batch, state),
            Shape::Gpt(gpt) => gpt.run(pass, words, batch, self.vocabulary),
        }
    }
}

impl Lstm {
    fn run(&self, pass: &mut Pass, words: &[u32], batch: usize, state: &mut State) -> Tensor<2> {
        let Lstm { units, layers, dropout: rate, .. } = *self;
        // The embedding has no input on the tape; any tensor without a history has the same depth.
        let encoder: Tensor<2> =
            pass.weight(0, &crate::flex::untracked::<1>(crate::flex::tensor(vec![0.0], &[1])));
        let x = pass.dropout(embed(words, encoder.clone()), rate);
        let mut x = x.reshape([words.len() / batch, batch, units]);
        for (depth, state) in (0..layers).zip(state) {
            let first = 1 + 4 * depth;
            let parameters = Parameters {
                weight_ih: pass.weight(first, &x),
                weight_hh: pass.weight(first + 1, &x),
                bias_ih: pass.weight(first + 2, &x),
                bias_hh: pass.weight(first + 3, &x),
            };
            let (y, last) = lstm(x, parameters, std::mem::take(state));
            *state = last;
            x = pass.dropout(y, rate);
        }
        let x = x.reshape([words.len(), units]);
        let bias = pass.weight(1 + 4 * layers, &x);
        decode(x, encoder, bias)
    }
}

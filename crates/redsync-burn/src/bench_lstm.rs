//! How fast the fused LSTM layer is: sizes go in, times of forward and backward pass of one layer come out, for the fused layer,
//! for the same layer made of Burn's operations, and for Burn's own module.
//! What must hold: the three take turns within every round, so that whatever else the machine does meets all of them.

use crate::flex::device;
use crate::ops::lstm::{Parameters, State, lstm};
use burn::nn::LstmConfig;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Distribution, Tensor};
use redsync_engine::measure::median;
use serde::Serialize;
use std::time::Instant;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LstmSizes {
    /// Units of the layer, and width of its input.
    pub hidden: usize,
    /// Steps of a window.
    pub steps: usize,
    /// Sequences side by side.
    pub batch: usize,
    /// Rounds that count; one more comes before them.
    pub rounds: usize,
}

/// Medians over the rounds, in milliseconds for one forward and backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LstmTimes {
    /// [`lstm`].
    pub fused_ms: f64,
    /// [`composed`].
    pub composed_ms: f64,
    /// `burn::nn::Lstm`.
    pub module_ms: f64,
}

impl LstmTimes {
    /// How many times as fast as the composition the fused layer is.
    pub fn gain(&self) -> f64 {
        self.composed_ms / self.fused_ms
    }
}

/// Measures one layer. With no rounds, all times are 0.
pub fn bench(sizes: LstmSizes) -> LstmTimes {
    let layer = Layer::new(sizes);
    let module = LstmConfig::new(sizes.hidden, sizes.hidden, true).with_batch_first(false).init(&device());
    let mut times = [const { Vec::new() }; 3];
    for round in 0..=sizes.rounds {
        let passes: [&dyn Fn(); 3] = [&|| layer.pass(lstm), &|| layer.pass(composed), &|| {
            drop(module.forward(layer.x(), None).0.sum().backward())
        }];
        for (times, pass) in times.iter_mut().zip(passes) {
            let begin = Instant::now();
            pass();
            if round > 0 {
                times.push(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let [fused_ms, composed_ms, module_ms] = times.map(|mut times| median(&mut times));
    LstmTimes { fused_ms, composed_ms, module_ms }
}

/// Parameters and input of the layer that is measured.
struct Layer {
    sizes: LstmSizes,
    x: Tensor<3>,
    parameters: Parameters,
}

impl Layer {
    fn new(sizes: LstmSizes) -> Layer {
        let LstmSizes { hidden, steps, batch, .. } = sizes;
        let bound = 1.0 / (hidden as f64).sqrt();
        let uniform = Distribution::Uniform(-bound, bound);
        let weight = || Tensor::random([4 * hidden, hidden], uniform, &device());
        let bias = || Tensor::random([4 * hidden], uniform, &device());
        let x = Tensor::random([steps, batch, hidden], Distribution::Uniform(-1.0, 1.0), &device());
        let (weight_ih, weight_hh, bias_ih, bias_hh) = (weight(), weight(), bias(), bias());
        Layer { sizes, x, parameters: Parameters { weight_ih, weight_hh, bias_ih, bias_hh } }
    }

    /// The input, which needs a gradient too, as in all layers but the first.
    fn x(&self) -> Tensor<3> {
        self.x.clone().require_grad()
    }

    fn pass(&self, forward: LstmFunction) {
        let Parameters { weight_ih, weight_hh, bias_ih, bias_hh } = self.parameters.clone();
        let parameters = Parameters {
            weight_ih: weight_ih.require_grad(),
            weight_hh: weight_hh.require_grad(),
            bias_ih: bias_ih.require_grad(),
            bias_hh: bias_hh.require_grad(),
        };
        let zeros = vec![0.0; self.sizes.batch * self.sizes.hidden];
        let (out, _) = forward(self.x(), parameters, (zeros.clone(), zeros));
        out.sum().backward();
    }
}

/// The interface of [`lstm`].
pub type LstmFunction = fn(Tensor<3>, Parameters, State) -> (Tensor<3>, State);

/// What [`lstm`] does, made of Burn's operations: one product for the input of all steps, one per step for the four gates.
///
/// # Panics
/// If the shapes do not agree.
pub fn composed(x: Tensor<3>, parameters: Parameters, (h, c): State) -> (Tensor<3>, State) {
    let Parameters { weight_ih, weight_hh, bias_ih, bias_hh } = parameters;
    let ([steps, batch, input], [gates, hidden]) = (x.dims(), weight_hh.dims());
    let of_state =
        |state: Vec<f32>| Tensor::<1>::from_floats(state.as_slice(), &device()).reshape([batch, hidden]);
    let (mut h, mut c) = (of_state(h), of_state(c));
    let bias = (bias_ih + bias_hh).reshape([1, gates]);
    let of_input = x.reshape([steps * batch, input]).matmul(weight_ih.transpose()) + bias;
    let recurrent = weight_hh.transpose();
    let mut all = Vec::with_capacity(steps);
    for step in 0..steps {
        let sums = of_input.clone().narrow(0, step * batch, batch) + h.matmul(recurrent.clone());
        let gate = |k: usize| sums.clone().slice([0..batch, k * hidden..(k + 1) * hidden]);
        c = sigmoid(gate(1)) * c + sigmoid(gate(0)) * gate(2).tanh();
        h = sigmoid(gate(3)) * c.clone().tanh();
        all.push(h.clone());
    }
    let values = |state: Tensor<2>| state.into_data().iter::<f32>().collect();
    (Tensor::stack(all, 0), (values(h), values(c)))
}

//! The layers networks for images are made of: those that work on images, `[batch, channels, height, width]`, and the one behind them that
//! works on vectors, `[batch, length]`. Each is a module; running one asks the pass for its parameters.

use super::Pass;
use super::begin::{Begin, Init};
use crate::flex::{beside, device, untape, values};
use crate::ops::conv::conv;
use burn::module::{Module, Param, RunningState};
use burn::tensor::module::{adaptive_avg_pool2d, batch_norm, batch_norm_train, max_pool2d};
use burn::tensor::ops::MaxPoolOptions;
use burn::tensor::{Tensor, TensorData};

/// The share of a batch's statistics in the running ones.
const MOMENTUM: f32 = 0.1;
const EPSILON: f64 = 1e-5;

/// A square convolution.
#[derive(Module, Debug)]
pub struct Conv {
    /// Filters, `[to, from, kernel, kernel]`.
    pub weight: Param<Tensor<4>>,
    /// One for each filter.
    pub bias: Option<Param<Tensor<1>>>,
    /// Step along both axes.
    pub stride: usize,
    /// Zeros around.
    pub padding: usize,
}

impl Conv {
    /// Square filters, by channels before and after, and side; with a bias.
    pub(super) fn new(begin: &mut Begin, shape: [usize; 3], stride: usize, padding: usize) -> Self {
        let bare = Conv::bare(begin, shape, stride, padding);
        Conv { bias: Some(begin.next([shape[1]], Init::Constant(0.0))), ..bare }
    }

    /// The same without a bias.
    pub(super) fn bare(
        begin: &mut Begin,
        [from, to, kernel]: [usize; 3],
        stride: usize,
        padding: usize,
    ) -> Self {
        let weight = begin.next([to, from, kernel, kernel], Init::He(from * kernel * kernel));
        Conv { weight, bias: None, stride, padding }
    }

    /// Carries images through.
    pub fn forward(&self, pass: &mut Pass, x: Tensor<4>) -> Tensor<4> {
        let Conv { weight, bias, stride, padding } = pass.layer(self, &x);
        conv(x, weight.val(), bias.map(|bias| bias.val()), stride, padding)
    }
}

/// Batch norm.
#[derive(Module, Debug)]
pub struct Norm {
    /// Factor of each channel.
    pub weight: Param<Tensor<1>>,
    /// Shift of each channel.
    pub bias: Param<Tensor<1>>,
    /// The running mean of each channel, of this rank.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance of each channel, of this rank.
    pub running_var: RunningState<Tensor<1>>,
}

impl Norm {
    pub(super) fn new(begin: &mut Begin, channels: usize) -> Self {
        let all = |value: f32| {
            let values = TensorData::new(vec![value; channels], [channels]);
            RunningState::new(Tensor::from_data(values, &device()))
        };
        Norm {
            weight: begin.next([channels], Init::Constant(1.0)),
            bias: begin.next([channels], Init::Constant(0.0)),
            running_mean: all(0.0),
            running_var: all(1.0),
        }
    }

    /// Carries images through.
    pub fn forward(&self, pass: &mut Pass, x: Tensor<4>) -> Tensor<4> {
        let Norm { weight, bias, running_mean, running_var } = pass.layer(self, &x);
        let (gamma, beta) = (weight.val(), bias.val());
        if !pass.trains() {
            let (mean, variance) = (running_mean.value_sync(), running_var.value_sync());
            return batch_norm(x, gamma, beta, mean, variance, EPSILON);
        }
        let [batch, _, height, width] = x.dims();
        let count = (batch * height * width) as f32;
        let result = batch_norm_train(x, gamma, beta, EPSILON);
        follow(&running_mean, result.mean, 1.0);
        follow(&running_var, result.variance, count / (count - 1.0).max(1.0));
        result.output
    }
}

/// Moves running statistics on by those of a batch, times a factor.
fn follow(running: &RunningState<Tensor<1>>, now: Tensor<1>, factor: f32) {
    let before = running.value_sync();
    let (was, now) = (untape(before.clone()), untape(now));
    let pairs = values(&was).iter().zip(values(&now));
    let moved: Vec<f32> = pairs.map(|(running, now)| running + MOMENTUM * (now * factor - running)).collect();
    let channels = moved.len();
    running.update(beside(&before, moved, [channels]));
}

/// The largest of each window.
#[derive(Module, Debug)]
pub struct MaxPool {
    /// Side of a window.
    pub window: usize,
    /// Step along both axes.
    pub stride: usize,
    /// Border around.
    pub padding: usize,
}

impl MaxPool {
    /// Carries images through.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let options = MaxPoolOptions {
            stride: [self.stride; 2],
            padding: [(self.padding, self.padding); 2],
            ..MaxPoolOptions::new([self.window; 2])
        };
        max_pool2d(x, options)
    }
}

/// The mean over windows that leave this many along both axes.
#[derive(Module, Debug)]
pub struct AveragePool {
    /// Side of what goes out.
    pub side: usize,
}

impl AveragePool {
    /// Carries images through.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        adaptive_avg_pool2d(x, [self.side; 2])
    }
}

/// Every second point, and zeros for the channels that the input does not have.
pub(super) fn subsample(x: Tensor<4>, channels: usize) -> Tensor<4> {
    let x = MaxPool { window: 1, stride: 2, padding: 0 }.forward(x);
    let [batch, from, height, width] = x.dims();
    let zeros =
        |more: usize| beside(&x, vec![0.0; batch * more * height * width], [batch, more, height, width]);
    let before = (channels - from) / 2;
    let (ahead, behind) = (zeros(before), zeros(channels - from - before));
    Tensor::cat(vec![ahead, x, behind], 1)
}

/// A fully connected layer.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[from, to]`.
    pub weight: Param<Tensor<2>>,
    /// `[to]`.
    pub bias: Param<Tensor<1>>,
}

impl Linear {
    /// One before a rectifier.
    pub(super) fn new(begin: &mut Begin, from: usize, to: usize) -> Self {
        Linear::beginning(begin, from, to, Init::He(from))
    }

    /// The one that ends a network.
    pub(super) fn output(begin: &mut Begin, from: usize, to: usize) -> Self {
        Linear::beginning(begin, from, to, Init::Uniform(1.0 / (from as f32).sqrt()))
    }

    fn beginning(begin: &mut Begin, from: usize, to: usize, init: Init) -> Self {
        Linear { weight: begin.next([from, to], init), bias: begin.next([to], Init::Constant(0.0)) }
    }

    /// Carries vectors through.
    pub fn forward(&self, pass: &mut Pass, x: Tensor<2>) -> Tensor<2> {
        let Linear { weight, bias } = pass.layer(self, &x);
        x.matmul(weight.val()) + bias.val().unsqueeze()
    }
}

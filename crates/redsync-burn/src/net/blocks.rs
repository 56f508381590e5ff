//! The blocks networks are made of: those that work on images, those behind them that work on vectors. Building a block
//! registers its parameters; running it asks the pass for them.

use super::weights::{Init, Spec};
use super::{Buffers, Pass};
use crate::flex::{tensor, untape, untracked, values};
use crate::ops::conv::conv;
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use burn::tensor::module::{adaptive_avg_pool2d, batch_norm, batch_norm_train, max_pool2d};
use burn::tensor::ops::MaxPoolOptions;
use redsync_engine::Kind;

/// The share of a batch's statistics in the running ones.
const MOMENTUM: f32 = 0.1;
const EPSILON: f64 = 1e-5;

/// A block that takes and gives images: `[batch, channels, height, width]`.
#[derive(Clone, Debug)]
pub enum Feature {
    /// A square convolution.
    Conv {
        /// Parameter number.
        weight: usize,
        /// Parameter number.
        bias: Option<usize>,
        /// Step along both axes.
        stride: usize,
        /// Zeros around.
        padding: usize,
    },
    /// Batch norm.
    Norm {
        /// Parameter number; the shift is the next one.
        scale: usize,
        /// Buffer number of the running mean; the variance is the next one.
        running: usize,
    },
    /// Rectifier.
    Relu,
    /// The largest of each window.
    MaxPool {
        /// Side of a window.
        window: usize,
        /// Step along both axes.
        stride: usize,
        /// Border around.
        padding: usize,
    },
    /// The mean over windows that leave this many along both axes.
    AveragePool(usize),
    /// What the body makes of the input, plus the input or what the shortcut makes of it, rectified.
    Residual {
        /// The long way.
        body: Vec<Feature>,
        /// The short way.
        shortcut: Vec<Feature>,
    },
    /// Every second point, and zeros for the channels that the input does not have.
    Subsample {
        /// Channels to give.
        channels: usize,
    },
}

/// A block that takes and gives vectors: `[batch, length]`.
#[derive(Clone, Debug)]
pub enum Head {
    /// A fully connected layer, `[from, to]`.
    Linear {
        /// Parameter number; the bias is the next one.
        weight: usize,
    },
    /// Rectifier.
    Relu,
    /// Dropout at this rate.
    Dropout(f32),
}

impl Feature {
    /// Carries images through the block.
    pub fn run(&self, pass: &mut Pass, x: Tensor<4>) -> Tensor<4> {
        match self {
            Feature::Conv { weight, bias, stride, padding } => {
                let (w, b) = (pass.weight(*weight, &x), bias.map(|bias| pass.weight(bias, &x)));
                conv(x, w, b, *stride, *padding)
            }
            Feature::Norm { scale, running } => norm(pass, x, *scale, *running),
            Feature::Relu => relu(x),
            Feature::MaxPool { window, stride, padding } => pool(x, *window, *stride, *padding),
            Feature::AveragePool(side) => adaptive_avg_pool2d(x, [*side; 2]),
            Feature::Residual { body, shortcut } => {
                let short = shortcut.iter().fold(x.clone(), |x, block| block.run(pass, x));
                relu(body.iter().fold(x, |x, block| block.run(pass, x)) + short)
            }
            Feature::Subsample { channels } => subsample(x, *channels),
        }
    }
}

impl Head {
    /// Carries vectors through the block.
    pub fn run(&self, pass: &mut Pass, x: Tensor<2>) -> Tensor<2> {
        match self {
            Head::Linear { weight } => {
                let (w, b): (Tensor<2>, Tensor<1>) = (pass.weight(*weight, &x), pass.weight(weight + 1, &x));
                x.matmul(w) + b.unsqueeze()
            }
            Head::Relu => relu(x),
            Head::Dropout(rate) => pass.dropout(x, *rate),
        }
    }
}

fn norm(pass: &mut Pass, x: Tensor<4>, scale: usize, running: usize) -> Tensor<4> {
    let (gamma, beta) = (pass.weight(scale, &x), pass.weight(scale + 1, &x));
    if !pass.trains() {
        let mut buffer = |number: usize| {
            let values = pass.buffer(number).clone();
            let channels = values.len();
            untracked(tensor(values, &[channels]))
        };
        let (mean, variance) = (buffer(running), buffer(running + 1));
        return batch_norm(x, gamma, beta, mean, variance, EPSILON);
    }
    let [batch, _, height, width] = x.dims();
    let count = (batch * height * width) as f32;
    let result = batch_norm_train(x, gamma, beta, EPSILON);
    let mut follow = |number: usize, statistic: Tensor<1>, factor: f32| {
        let statistic = untape(statistic);
        let pairs = pass.buffer(number).iter_mut().zip(values(&statistic));
        pairs.for_each(|(running, now)| *running += MOMENTUM * (now * factor - *running));
    };
    follow(running, result.mean, 1.0);
    follow(running + 1, result.variance, count / (count - 1.0).max(1.0));
    result.output
}

fn pool(x: Tensor<4>, window: usize, stride: usize, padding: usize) -> Tensor<4> {
    let options = MaxPoolOptions {
        stride: [stride; 2],
        padding: [(padding, padding); 2],
        ..MaxPoolOptions::new([window; 2])
    };
    max_pool2d(x, options)
}

fn subsample(x: Tensor<4>, channels: usize) -> Tensor<4> {
    let x = pool(x, 1, 2, 0);
    let [batch, from, height, width] = x.dims();
    let zeros = |more: usize| {
        untracked(tensor(vec![0.0; batch * more * height * width], &[batch, more, height, width]))
    };
    let before = (channels - from) / 2;
    Tensor::cat(vec![zeros(before), x, zeros(channels - from - before)], 1)
}

/// Collects the parameters and buffers of a network while its blocks are built.
#[derive(Default)]
pub(super) struct Builder {
    pub specs: Vec<Spec>,
    pub buffers: Buffers,
}

impl Builder {
    fn register(&mut self, name: String, shape: &[usize], kind: Kind, init: Init) -> usize {
        self.specs.push(Spec::new(name, shape, kind, init));
        self.specs.len() - 1
    }

    /// A convolution with a bias.
    pub fn conv(&mut self, module: &str, shape: [usize; 3], stride: usize, padding: usize) -> Feature {
        let weight = self.filters(module, shape);
        let bias =
            self.register(format!("{module}.bias"), &[shape[1]], Kind::BiasOrNorm, Init::Constant(0.0));
        Feature::Conv { weight, bias: Some(bias), stride, padding }
    }

    /// A convolution without a bias.
    pub fn bare_conv(&mut self, module: &str, shape: [usize; 3], stride: usize, padding: usize) -> Feature {
        Feature::Conv { weight: self.filters(module, shape), bias: None, stride, padding }
    }

    /// Square filters, by channels before and after, and side.
    fn filters(&mut self, module: &str, [from, to, kernel]: [usize; 3]) -> usize {
        let init = Init::He(from * kernel * kernel);
        self.register(format!("{module}.weight"), &[to, from, kernel, kernel], Kind::Weight, init)
    }

    /// A batch norm.
    pub fn norm(&mut self, module: &str, channels: usize) -> Feature {
        let scale =
            self.register(format!("{module}.weight"), &[channels], Kind::BiasOrNorm, Init::Constant(1.0));
        self.register(format!("{module}.bias"), &[channels], Kind::BiasOrNorm, Init::Constant(0.0));
        self.buffers.extend([vec![0.0; channels], vec![1.0; channels]]);
        Feature::Norm { scale, running: self.buffers.len() - 2 }
    }

    /// A fully connected layer before a rectifier.
    pub fn linear(&mut self, module: &str, from: usize, to: usize) -> Head {
        self.full(module, from, to, Kind::Weight, Init::He(from))
    }

    /// The fully connected layer that ends a network.
    pub fn output(&mut self, module: &str, from: usize, to: usize) -> Head {
        self.full(module, from, to, Kind::Output, Init::Uniform(1.0 / (from as f32).sqrt()))
    }

    fn full(&mut self, module: &str, from: usize, to: usize, kind: Kind, init: Init) -> Head {
        let weight = self.register(format!("{module}.weight"), &[from, to], kind, init);
        self.register(format!("{module}.bias"), &[to], Kind::BiasOrNorm, Init::Constant(0.0));
        Head::Linear { weight }
    }
}

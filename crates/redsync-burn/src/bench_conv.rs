//! How fast our convolution is: shapes go in, times of forward and backward pass come out, for ours and for Burn's.
//! What must hold: the two take turns within every round, so that whatever else the machine does meets both.

use crate::flex::device;
use crate::ops::conv::conv;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Distribution, Tensor};
use redsync_engine::measure::median;
use serde::Serialize;
use std::time::Instant;

/// A convolution of 3x3 filters, without a change of size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ConvSizes {
    /// Images.
    pub batch: usize,
    /// Channels before.
    pub from: usize,
    /// Channels after.
    pub to: usize,
    /// Height and width.
    pub side: usize,
}

/// Medians in milliseconds for one forward and backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ConvTimes {
    /// Ours.
    pub ours_ms: f64,
    /// Burn's.
    pub burn_ms: f64,
}

/// The different convolutions of VGG16 for images of 32x32.
pub fn vgg16_cifar(batch: usize) -> Vec<ConvSizes> {
    let sizes = [(3, 64, 32), (64, 64, 32), (64, 128, 16), (128, 256, 8), (256, 512, 4), (512, 512, 2)];
    sizes.map(|(from, to, side)| ConvSizes { batch, from, to, side }).to_vec()
}

/// Measures one convolution, with so many rounds that count after one that does not.
pub fn bench(sizes: ConvSizes, rounds: usize) -> ConvTimes {
    let ConvSizes { batch, from, to, side } = sizes;
    let random = |shape| Tensor::<4>::random(shape, Distribution::Uniform(-1.0, 1.0), &device());
    let (x, weight) = (random([batch, from, side, side]), random([to, from, 3, 3]));
    let pass = |ours: bool| {
        let (x, weight) = (x.clone().require_grad(), weight.clone().require_grad());
        let out = match ours {
            true => conv(x, weight, None, 1, 1),
            false => conv2d(x, weight, None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1)),
        };
        drop(out.sum().backward());
    };
    let mut times = [const { Vec::new() }; 2];
    for round in 0..=rounds {
        for (times, ours) in times.iter_mut().zip([true, false]) {
            let begin = Instant::now();
            pass(ours);
            if round > 0 {
                times.push(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let [ours_ms, burn_ms] = times.map(|mut times| median(&mut times));
    ConvTimes { ours_ms, burn_ms }
}

//! A network of one's own, an ordinary Burn module with an ordinary training loop, made distributed: four ranks learn handwritten digits
//! together. Beside it, `own_burn_model_alone.rs` is the same program of one process; docs/burn.md shows the difference.
//!
//! ```text
//! cargo run --release --example own_burn_model
//! ```

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor};
use redsync_burn::{Communicator, Config, Distributed, Momentum, on_threads};
use redsync_data::{DataSet, Places, open, order::Epochs};
use std::error::Error;
use std::sync::Arc;

type Failure = Box<dyn Error + Send + Sync>;

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    hidden: Linear,
    out: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Net {
            conv: Conv2dConfig::new([1, 16], [3, 3]).init(device),
            hidden: LinearConfig::new(16 * 36, 64).init(device),
            out: LinearConfig::new(64, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv.forward(images)).flatten(1, 3);
        self.out.forward(relu(self.hidden.forward(x)))
    }
}

fn tensors(pixels: &[f32], labels: &[u32], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let labels: Vec<i64> = labels.iter().map(|label| i64::from(*label)).collect();
    let images = Tensor::<1>::from_floats(pixels, device).reshape([labels.len(), 1, 8, 8]);
    (images, Tensor::from_ints(&labels[..], device))
}

fn main() -> Result<(), Failure> {
    println!("accuracy {:.1}%", on_threads(4, train)?[0]);
    Ok(())
}

fn train(comm: Arc<dyn Communicator>) -> Result<f64, Failure> {
    let device = Device::flex().autodiff();
    let DataSet::Images(digits) = open("digits", &Places::default())? else {
        unreachable!("digits are images")
    };
    let mut order = Epochs::new(digits.train_len(), comm.size(), 16, 1)?;
    let config = Config { momentum: Momentum::Nesterov(0.9), ..Config::default() };
    let (mut net, mut distributed) = Distributed::new(Net::new(&device), config, comm)?;
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for epoch in 0..15 {
        for step in 0..order.steps_per_epoch() {
            let seed = order.epoch_seed(epoch);
            let indices = order.indices(epoch, step, distributed.rank().0);
            digits.train_batch(indices, seed, &mut pixels, &mut labels);
            let (images, labels) = tensors(&pixels, &labels, &device);
            let loss = CrossEntropyLossConfig::new().init(&device).forward(net.forward(images), labels);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = distributed.step(0.02, net, gradients)?;
        }
    }
    digits.test_batch(0..digits.test_len(), &mut pixels, &mut labels);
    let (images, labels) = tensors(&pixels, &labels, &Device::flex());
    let right = net.valid().forward(images).argmax(1).flatten(0, 1).equal(labels).int().sum();
    let right: i64 = right.into_scalar();
    println!("sent {} bytes instead of {}", distributed.traffic().sent(), distributed.traffic().dense);
    Ok(100.0 * right as f64 / digits.test_len() as f64)
}

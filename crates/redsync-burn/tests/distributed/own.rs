//! A module of a user's own, its data and its ranks, for the tests of `Distributed`.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_burn::{Distributed, DistributedError, Watch};
use redsync_comm::{Communicator, local};
use redsync_engine::{Config, Method, Momentum, Rest, WarmUp};
use std::sync::Arc;
use std::time::Duration;

pub const RATE: f64 = 0.05;

pub type Comm = Arc<dyn Communicator>;

pub fn device() -> Device {
    Device::flex().autodiff()
}

pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
}

/// Every rank in a thread of its own; what they return, in rank order.
pub fn run<T: Send + 'static>(
    ranks: usize,
    rank: impl Fn(usize, Comm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let rank = Arc::new(rank);
    let start = |comm: local::Local| {
        let rank = rank.clone();
        std::thread::spawn(move || rank(comm.rank(), Arc::new(comm)))
    };
    let threads: Vec<_> = local::group(ranks).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

/// A little of everything: filters, running statistics, matrices, biases.
#[derive(Module, Debug)]
pub struct Net {
    pub conv: Conv2d,
    pub norm: BatchNorm,
    pub hidden: Vec<Linear>,
    pub out: Linear,
}

impl Net {
    pub fn new() -> Self {
        let device = device();
        Net {
            conv: Conv2dConfig::new([1, 6], [3, 3]).init(&device),
            norm: BatchNormConfig::new(6).init(&device),
            hidden: vec![LinearConfig::new(6 * 36, 40).init(&device)],
            out: LinearConfig::new(40, 5).init(&device),
        }
    }

    /// The loss of a batch of images: how far five numbers are from those that are to come out.
    pub fn loss(&self, images: Tensor<4>, watch: Option<&Watch>) -> Tensor<1> {
        let wanted = images.clone().mean_dim(2).flatten::<2>(1, 3).narrow(1, 0, 5) * 3.0;
        let x = match watch {
            Some(watch) => watch.layer(&self.conv, &images).forward(images),
            None => self.conv.forward(images),
        };
        // Not watched: its gradients come at the end in any case.
        let x = relu(self.norm.forward(x)).flatten(1, 3);
        let hidden = |layer: &Linear, x: Tensor<2>| match watch {
            Some(watch) => watch.layer(layer, &x).forward(x),
            None => layer.forward(x),
        };
        let x = hidden(&self.out, relu(hidden(&self.hidden[0], x)));
        (x - wanted).powf_scalar(2.0).mean()
    }

    pub fn gradients(&self, rank: usize, step: u64) -> GradientsParams {
        GradientsParams::from_grads(self.loss(batch(rank, step), None).backward(), self)
    }
}

/// What a rank sees at a step.
pub fn batch(rank: usize, step: u64) -> Tensor<4> {
    let values = noise(4 * 64, step << 8 | rank as u64);
    Tensor::<1>::from_floats(&values[..], &device()).reshape([4, 1, 8, 8])
}

/// Everything that can be compressed is, and the rest is exact; a hang ends soon.
pub fn config(method: Method, density: f64) -> Config {
    Config {
        method,
        density,
        at_least: 0,
        dense_below: Some(0),
        rest: Rest::F32,
        bf16: false,
        deadline: Duration::from_secs(20),
        ..Config::default()
    }
}

/// Density 1 and no masking: what must be the same as dense training.
pub fn everything(momentum: Momentum, warm_up: WarmUp) -> Config {
    Config { momentum, warm_up, masking: false, ..config(Method::Rgc, 1.0) }
}

/// Makes steps with the updates of `Distributed`.
pub fn steps(
    steps: std::ops::Range<u64>,
    mut net: Net,
    distributed: &mut Distributed,
) -> Result<Net, DistributedError> {
    for step in steps {
        let gradients = net.gradients(distributed.rank().0, step);
        net = distributed.step(RATE, net, gradients)?;
    }
    Ok(net)
}

/// All values of a module, statistics included, as bits.
pub fn bits<M: Module>(model: &M) -> Vec<(String, Vec<u32>)> {
    values(model).into_iter().map(|(path, v)| (path, v.iter().map(|x| x.to_bits()).collect())).collect()
}

/// All values of a module, statistics included, by their paths.
pub fn values<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut all = All::default();
    model.valid().visit(&mut all);
    all.values
}

#[derive(Default)]
struct All {
    path: Vec<String>,
    values: Vec<(String, Vec<f32>)>,
}

impl burn::module::ModuleVisitor for All {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data().try_to_vec().expect("f32");
        self.values.push((self.path.join("."), values));
    }
}

/// Equal up to rounding.
pub fn assert_close(got: &[(String, Vec<f32>)], expected: &[(String, Vec<f32>)]) {
    for ((name, got), (_, expected)) in got.iter().zip(expected) {
        for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!(
                (got - expected).abs() <= 2e-5 * (1.0 + expected.abs()),
                "{name} {at}: {got}, {expected}"
            );
        }
    }
}

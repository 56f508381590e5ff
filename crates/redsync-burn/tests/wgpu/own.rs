//! A small network on any device, the digits, and ranks that write down what they send.

use burn::backend::{WgpuBackend, WgpuDevice, WgpuDeviceKind};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_burn::{Communicator, Watch};
use redsync_comm::{Gathered, Pending, Tag, local};
use redsync_data::order::Epochs;
use redsync_data::{DataSet, ImageSet, Places, open};
use std::sync::{Arc, Mutex};

pub const RANKS: usize = 2;
pub const BATCH: usize = 32;

/// Vulkan on the CPU; without its driver there is an error, not another device.
pub fn wgpu() -> Device {
    Device::new(WgpuDevice::new(WgpuDeviceKind::Cpu).on(WgpuBackend::Vulkan)).autodiff()
}

pub fn flex() -> Device {
    Device::flex().autodiff()
}

#[derive(Module, Debug)]
pub struct Net {
    pub conv: Conv2d,
    pub hidden: Linear,
    pub out: Linear,
}

impl Net {
    /// On every device the same values.
    pub fn new(device: &Device) -> Self {
        let net = Net {
            conv: Conv2dConfig::new([1, 16], [3, 3]).init(device),
            hidden: LinearConfig::new(16 * 36, 64).init(device),
            out: LinearConfig::new(64, 10).init(device),
        };
        net.map(&mut Begin { device: device.clone(), random: Xoshiro256PlusPlus::seed_from_u64(5) })
    }

    pub fn forward(&self, images: Tensor<4>, watch: Option<&Watch>) -> Tensor<2> {
        let x = match watch {
            Some(watch) => watch.layer(&self.conv, &images).forward(images),
            None => self.conv.forward(images),
        };
        let linear = |layer: &Linear, x: Tensor<2>| match watch {
            Some(watch) => watch.layer(layer, &x).forward(x),
            None => layer.forward(x),
        };
        linear(&self.out, relu(linear(&self.hidden, relu(x).flatten(1, 3))))
    }

    /// The gradients of a batch.
    pub fn gradients(
        &self,
        (images, labels): (Tensor<4>, Tensor<1, Int>),
        watch: Option<&Watch>,
    ) -> GradientsParams {
        let loss = CrossEntropyLossConfig::new().init(&images.device());
        let loss = loss.forward(self.forward(images, watch), labels);
        GradientsParams::from_grads(loss.backward(), self)
    }
}

struct Begin {
    device: Device,
    random: Xoshiro256PlusPlus,
}

impl ModuleMapper for Begin {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.shape();
        let size = shape.num_elements();
        let values: Vec<f32> = (0..size).map(|_| self.random.random_range(-0.06..0.06)).collect();
        Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), &self.device))
    }
}

/// The digits, in the order of a run.
pub struct Digits {
    pub images: ImageSet,
    order: Epochs,
}

impl Digits {
    pub fn new() -> Self {
        let Ok(DataSet::Images(images)) = open("digits", &Places::default()) else {
            panic!("digits are images that are always there")
        };
        let order = Epochs::new(images.train_len(), RANKS, BATCH, 1).expect("enough images");
        Digits { images, order }
    }

    pub fn steps_per_epoch(&self) -> usize {
        self.order.steps_per_epoch()
    }

    /// What a rank sees at a step, counted from the first epoch on.
    pub fn batch(&mut self, rank: usize, step: usize, device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
        let (epoch, step) = (step / self.steps_per_epoch(), step % self.steps_per_epoch());
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        let seed = self.order.epoch_seed(epoch as u64);
        let indices = self.order.indices(epoch as u64, step, rank);
        self.images.train_batch(indices, seed, &mut pixels, &mut labels);
        tensors(&pixels, &labels, device)
    }

    /// Percent of the images of the test set that a network names.
    pub fn accuracy(&self, net: &Net, device: &Device) -> f64 {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        self.images.test_batch(0..self.images.test_len(), &mut pixels, &mut labels);
        let (images, labels) = tensors(&pixels, &labels, &device.clone().inner());
        let right = net.valid().forward(images, None).argmax(1).flatten(0, 1).equal(labels).int().sum();
        let right: i64 = right.into_scalar();
        100.0 * right as f64 / self.images.test_len() as f64
    }
}

fn tensors(pixels: &[f32], labels: &[u32], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let labels: Vec<i32> = labels.iter().map(|label| *label as i32).collect();
    let images = Tensor::<1>::from_floats(pixels, device).reshape([labels.len(), 1, 8, 8]);
    (images, Tensor::from_ints(&labels[..], device))
}

/// All parameters of a module, as bits.
pub fn bits(net: &Net) -> Vec<Vec<u32>> {
    let mut all = Bits(Vec::new());
    net.valid().visit(&mut all);
    all.0
}

struct Bits(Vec<Vec<u32>>);

impl ModuleVisitor for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(read(param.val()).into_iter().map(f32::to_bits).collect());
    }
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32")
}

/// Gradients in the memory of the host, one for each parameter.
pub fn taken(net: &Net, gradients: &GradientsParams) -> Vec<Vec<f32>> {
    let mut take = Take { gradients, taken: Vec::new() };
    net.visit(&mut take);
    take.taken
}

struct Take<'a> {
    gradients: &'a GradientsParams,
    taken: Vec<Vec<f32>>,
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.taken.push(read(self.gradients.get::<D>(param.id).expect("a gradient")));
    }
}

/// The same as gradients of a module on its device.
pub fn given(net: &Net, device: &Device, values: &[Vec<f32>]) -> GradientsParams {
    let mut give =
        Give { values: values.iter(), device: device.clone().inner(), given: GradientsParams::new() };
    net.visit(&mut give);
    give.given
}

struct Give<'a> {
    values: std::slice::Iter<'a, Vec<f32>>,
    device: Device,
    given: GradientsParams,
}

impl ModuleVisitor for Give<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = self.values.next().expect("one for each").clone();
        let tensor = Tensor::<D>::from_data(TensorData::new(values, param.shape()), &self.device);
        self.given.register(param.id, tensor);
    }
}

/// Every rank in a thread of its own; what they return, in rank order.
pub fn run<T: Send>(rank: impl Fn(Arc<Recorder>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let start = |comm: local::Local| {
            let rank = &rank;
            scope.spawn(move || rank(Arc::new(Recorder { comm, sent: Mutex::default() })))
        };
        let threads: Vec<_> = local::group(RANKS).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// What a rank sent in the steps of a synchronizer, by step and number of the exchange: bytes of messages, and dense sums as bits.
pub type Log = Vec<(u64, u32, Vec<u8>)>;

/// Ranks that write down what they send.
pub struct Recorder {
    comm: local::Local,
    sent: Mutex<Log>,
}

impl Recorder {
    /// In the order of steps and exchanges.
    pub fn log(&self) -> Log {
        let mut log = self.sent.lock().expect("no panic").clone();
        log.sort();
        log
    }

    fn note(&self, tag: Tag, bytes: Vec<u8>) {
        // Higher numbers are those of agreements, checks and checkpoints.
        if tag.op < 1 << 16 {
            self.sent.lock().expect("no panic").push((tag.step, tag.op, bytes));
        }
    }
}

impl Communicator for Recorder {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.size()
    }

    fn name(&self) -> &'static str {
        self.comm.name()
    }

    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered> {
        self.note(tag, message.clone());
        self.comm.allgather(tag, message)
    }

    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>> {
        self.note(tag, values.iter().flat_map(|x| x.to_le_bytes()).collect());
        self.comm.allreduce(tag, values)
    }

    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        self.note(tag, messages.concat());
        self.comm.alltoall(tag, messages)
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.comm.barrier(tag)
    }

    fn give_up(&self, reason: &str) {
        self.comm.give_up(reason);
    }
}

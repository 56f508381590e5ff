//! How the parameters of a network begin. Comes in: a seed, and what each parameter is to be. Goes out: parameters of Burn, whose values
//! are made when they are first asked for. What must hold: a seed gives the same values on every rank.

use crate::flex::device;
use burn::module::{Param, ParamId};
use burn::tensor::{Shape, Tensor, TensorData};
use rand::SeedableRng;
use rand_distr::{Distribution, Normal, Uniform};
use rand_xoshiro::Xoshiro256PlusPlus;

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Init {
    /// Normal with the variance 2 / fan-in, for layers before a ReLU.
    He(usize),
    /// Normal with this deviation.
    Normal(f32),
    /// Uniform between minus and plus this.
    Uniform(f32),
    /// All the same.
    Constant(f32),
}

impl Init {
    fn values(self, size: usize, seed: u64) -> Vec<f32> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut normal = |deviation: f32| -> Vec<f32> {
            let normal = Normal::new(0.0, deviation).expect("a finite deviation");
            (0..size).map(|_| normal.sample(&mut random)).collect()
        };
        match self {
            Init::Constant(value) => vec![value; size],
            Init::He(fan_in) => normal((2.0 / fan_in as f32).sqrt()),
            Init::Normal(deviation) => normal(deviation),
            Init::Uniform(limit) => {
                let uniform = Uniform::new_inclusive(-limit, limit).expect("a finite limit");
                (0..size).map(|_| uniform.sample(&mut random)).collect()
            }
        }
    }
}

/// Makes the parameters of a network. Each has random numbers of its own, by its place among all.
pub(super) struct Begin {
    seed: u64,
    made: u64,
}

impl Begin {
    pub fn new(seed: u64) -> Self {
        Begin { seed, made: 0 }
    }

    /// The next parameter.
    pub fn next<const D: usize>(&mut self, shape: [usize; D], init: Init) -> Param<Tensor<D>> {
        let own = self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(self.made);
        self.made += 1;
        let make = move |device: &_, trains| {
            let values = init.values(shape.iter().product(), own);
            Tensor::from_data(TensorData::new(values, shape), device).set_require_grad(trains)
        };
        Param::uninitialized(ParamId::new(), make, device(), true, Shape::from(shape))
    }
}

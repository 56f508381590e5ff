//! The weights of one rank: what they are, how they begin, where they are.
//! What must hold: a seed gives the same weights on every rank; between passes nobody else shares a tensor, so that updates are in place.

use crate::flex::{tensor, values};
use burn::backend::flex::FlexTensor;
use rand::SeedableRng;
use rand_distr::{Distribution, Normal, Uniform};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_engine::{Kind, Layer};

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with the variance 2 / fan-in, for layers before a ReLU.
    He(usize),
    /// Normal with this deviation.
    Normal(f32),
    /// Uniform between minus and plus this.
    Uniform(f32),
    /// All the same.
    Constant(f32),
}

/// One parameter tensor.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its name, size and kind, as the synchronizer takes them.
    pub layer: Layer,
    /// Its lengths along the axes.
    pub shape: Vec<usize>,
    /// How it begins.
    pub init: Init,
}

impl Spec {
    /// A parameter.
    pub fn new(name: impl Into<String>, shape: &[usize], kind: Kind, init: Init) -> Self {
        Spec { layer: Layer::new(name.into(), shape.iter().product(), kind), shape: shape.to_vec(), init }
    }

    fn begin(&self, seed: u64) -> Vec<f32> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let size = self.layer.size;
        let mut normal = |deviation: f32| -> Vec<f32> {
            let normal = Normal::new(0.0, deviation).expect("a finite deviation");
            (0..size).map(|_| normal.sample(&mut random)).collect()
        };
        match self.init {
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

/// The weights of one rank.
pub struct Weights {
    tensors: Vec<FlexTensor>,
}

impl Weights {
    /// Weights as a seed begins them.
    pub fn new(specs: &[Spec], seed: u64) -> Self {
        let begin = |(number, spec): (usize, &Spec)| {
            let own = seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(number as u64);
            tensor(spec.begin(own), &spec.shape)
        };
        Weights { tensors: specs.iter().enumerate().map(begin).collect() }
    }

    /// A parameter for a pass: shared, not copied.
    pub fn tensor(&self, number: usize) -> FlexTensor {
        self.tensors[number].clone()
    }

    /// The values of a parameter.
    pub fn values(&self, number: usize) -> &[f32] {
        values(&self.tensors[number])
    }

    /// The values of all parameters.
    pub fn all(&self) -> Vec<&[f32]> {
        self.tensors.iter().map(values).collect()
    }

    /// The values of all parameters, to change, as [`Weights::values_mut`].
    pub fn all_mut(&mut self) -> Vec<&mut [f32]> {
        self.tensors.iter_mut().map(|tensor| tensor.storage_mut::<f32>()).collect()
    }

    /// The values of a parameter, to change. In place unless a pass still shares them.
    pub fn values_mut(&mut self, number: usize) -> &mut [f32] {
        self.tensors[number].storage_mut::<f32>()
    }
}

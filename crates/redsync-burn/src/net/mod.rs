//! Networks: parameters by name and number, and the pass that carries an input through them.
//! What must hold: parameter numbers are those of the synchronizer's layers; every weight a pass uses is watched when it trains.

mod blocks;
mod classifier;
mod config;
mod language;
mod transformer;
mod weights;

pub use blocks::{Feature, Head};
pub use classifier::{Classifier, SmallResNet, Vgg};
pub use config::{Architecture, Input, NAMES, UnknownModel};
pub use language::{Language, Lstm, State};
pub use transformer::Gpt;
pub use weights::{Init, Spec, Weights};

use crate::flex::{Taped, Tracked, tensor, untracked};
use crate::hook::{OnGradient, watch};
use burn::tensor::Tensor;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A network: what goes in and how it gets through.
#[derive(Clone, Debug)]
pub enum Net {
    /// Images in, classes out.
    Images(Classifier),
    /// Words in, next words out.
    Words(Language),
}

impl Net {
    /// The parameters, in forward order.
    pub fn specs(&self) -> &[Spec] {
        match self {
            Net::Images(net) => net.specs(),
            Net::Words(net) => net.specs(),
        }
    }

    /// The running statistics it keeps beside its parameters, as they begin.
    pub fn buffers(&self) -> Buffers {
        match self {
            Net::Images(net) => net.buffers(),
            Net::Words(_) => Buffers::default(),
        }
    }

    /// The number of its parameters.
    pub fn parameters(&self) -> usize {
        self.specs().iter().map(|spec| spec.layer.size).sum()
    }
}

/// Running means and variances of the batch norms: local to a rank, averaged where ranks must agree.
pub type Buffers = Vec<Vec<f32>>;

/// What is done with an input.
pub enum Purpose {
    /// Gradients go to the function; the number makes this pass's random choices its own.
    Train {
        /// What gets the gradients.
        on_gradient: OnGradient,
        /// Seeds dropout.
        random: u64,
    },
    /// Running statistics instead of the batch's, no dropout, no gradients.
    Judge,
}

/// One walk of an input through a network.
pub struct Pass<'a> {
    weights: &'a Weights,
    buffers: &'a mut Buffers,
    purpose: Purpose,
    /// Dropouts so far: each has its own random numbers.
    dropouts: u64,
}

impl<'a> Pass<'a> {
    /// A pass with these weights.
    pub fn new(weights: &'a Weights, buffers: &'a mut Buffers, purpose: Purpose) -> Self {
        Pass { weights, buffers, purpose, dropouts: 0 }
    }

    /// A weight, watched if this pass trains; `input` is what the layer gets.
    pub fn weight<const D: usize, const E: usize>(&self, number: usize, input: &Tensor<E>) -> Tensor<D> {
        let value = self.weights.tensor(number);
        match &self.purpose {
            Purpose::Judge => untracked(value),
            Purpose::Train { on_gradient, .. } => {
                let leaf = Tensor::from_primitive::<Taped>(Tracked::new(value).require_grad());
                watch(leaf, input, number, on_gradient.clone()).expect("all tensors are made on one device")
            }
        }
    }

    /// The running statistics with this number, to read or, when training, to move on.
    pub fn buffer(&mut self, number: usize) -> &mut Vec<f32> {
        &mut self.buffers[number]
    }

    /// Whether this pass trains.
    pub fn trains(&self) -> bool {
        matches!(self.purpose, Purpose::Train { .. })
    }

    /// Drops elements at a rate and scales the rest up; nothing when judging.
    pub fn dropout<const D: usize>(&mut self, x: Tensor<D>, rate: f32) -> Tensor<D> {
        let Purpose::Train { random, .. } = self.purpose else { return x };
        if rate <= 0.0 {
            return x;
        }
        self.dropouts += 1;
        let mut random =
            Xoshiro256PlusPlus::seed_from_u64(random ^ self.dropouts.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (dims, keep) = (x.dims(), 1.0 / (1.0 - rate));
        let limit = (f64::from(rate) * 2f64.powi(32)) as u32;
        let mut mask = Vec::with_capacity(dims.iter().product());
        mask.extend(
            (0..dims.iter().product::<usize>())
                .map(|_| if random.random::<u32>() < limit { 0.0 } else { keep }),
        );
        x * untracked(tensor(mask, &dims))
    }
}

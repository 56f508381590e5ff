//! One walk of an input through a network: whether it trains, and who gets the gradients.
//! What must hold: a pass with the same number makes the same random choices.

use crate::Watch;
use crate::flex::beside;
use burn::module::Module;
use burn::tensor::Tensor;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// One walk of an input through a network.
pub struct Pass<'a> {
    watch: Option<&'a Watch>,
    /// What seeds dropout; None when judging.
    random: Option<u64>,
    /// Dropouts so far: each has its own random numbers.
    dropouts: u64,
}

impl Pass<'static> {
    /// A pass that trains; the number makes its random choices its own.
    pub fn training(random: u64) -> Self {
        Pass { watch: None, random: Some(random), dropouts: 0 }
    }

    /// Running statistics instead of the batch's, and no dropout.
    pub fn judging() -> Self {
        Pass { watch: None, random: None, dropouts: 0 }
    }
}

impl<'a> Pass<'a> {
    /// The same, and layers hand over their gradients during the backward pass.
    pub fn watched(self, watch: &Watch) -> Pass<'_> {
        Pass { watch: Some(watch), random: self.random, dropouts: self.dropouts }
    }

    /// A layer, watched if this pass is; `input` is what it gets.
    pub(super) fn layer<L: Module, const D: usize>(&self, layer: &L, input: &Tensor<D>) -> L {
        self.watch.map_or_else(|| layer.clone(), |watch| watch.layer(layer, input))
    }

    /// Whether this pass trains.
    pub(super) fn trains(&self) -> bool {
        self.random.is_some()
    }

    /// Drops elements at a rate and scales the rest up; nothing when judging.
    pub(super) fn dropout<const D: usize>(&mut self, x: Tensor<D>, rate: f32) -> Tensor<D> {
        let Some(random) = self.random.filter(|_| rate > 0.0) else { return x };
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
        let mask = beside(&x, mask, dims);
        x * mask
    }
}

//! Seeds and numbers come in, random numbers and permutations go out.
//! What must hold: the same seeds give the same results in every version, on every machine. So nothing here is left to
//! the distributions of a library, which may change; xoshiro256++ and SplitMix64 are fixed by definition.

use rand_xoshiro::rand_core::{Rng, SeedableRng};
use rand_xoshiro::{SplitMix64, Xoshiro256PlusPlus};

/// What random numbers are for. Equal seeds and indices for two purposes must not give equal numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    Epoch = 1,
    EpochSeed = 2,
    Augment = 3,
    Limit = 4,
    Split = 5,
    Class = 6,
    TrainImage = 7,
    TestImage = 8,
}

/// Random numbers of their own for one index under one seed.
pub(crate) struct Stream(Xoshiro256PlusPlus);

impl Stream {
    pub(crate) fn new(purpose: Purpose, seed: u64, index: u64) -> Self {
        let mixed = scramble(scramble(scramble(purpose as u64) ^ seed) ^ index);
        Stream(Xoshiro256PlusPlus::seed_from_u64(mixed))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in `0..end`. Some come up more often than others, by less than one part in 2^32.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u32
    }

    /// A number in `-1.0..1.0`, in steps of 2^-23: exact in f32.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}

/// Writes a random permutation of `0..len`.
pub(crate) fn permute(len: u32, stream: &mut Stream, into: &mut Vec<u32>) {
    into.clear();
    into.extend(0..len);
    for last in (1..len).rev() {
        into.swap(last as usize, stream.below(last + 1) as usize);
    }
}

/// Another seed for an index under a seed, for callers that hand seeds on.
pub(crate) fn derive(purpose: Purpose, seed: u64, index: u64) -> u64 {
    Stream::new(purpose, seed, index).bits()
}

fn scramble(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}

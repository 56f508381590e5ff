//! Made-up gradients: the same for the same seed and step, whatever the number of threads.

use clap::ValueEnum;
use rand::{Rng, RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal, StudentT};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use serde::Serialize;

/// A distribution of gradients.
#[derive(Clone, Copy, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dist {
    /// Standard normal
    Normal,
    /// Uniform between -1 and 1
    Uniform,
    /// Student's t with 3 degrees of freedom: heavy tails
    Student,
    /// 99% zeros, the others standard normal
    Zeros,
}

impl std::fmt::Display for Dist {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

const BLOCK: usize = 1 << 16;

/// A generator of its own for every part of every step.
pub fn generator(seed: u64, step: u64, part: u64) -> Xoshiro256PlusPlus {
    let mixed = [seed, step, part].into_iter().fold(0u64, |hash, x| {
        (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_add(0x632b_e59b_d9b4_e019)
    });
    Xoshiro256PlusPlus::seed_from_u64(mixed)
}

impl Dist {
    /// Fills a gradient for one step.
    pub fn fill(self, gradient: &mut [f32], seed: u64, step: u64) {
        gradient.par_chunks_mut(BLOCK).enumerate().for_each(|(part, block)| {
            self.fill_block(block, &mut generator(seed, step, part as u64));
        });
    }

    fn fill_block(self, block: &mut [f32], random: &mut impl Rng) {
        match self {
            Dist::Normal => block.iter_mut().for_each(|x| *x = StandardNormal.sample(random)),
            Dist::Uniform => block.iter_mut().for_each(|x| *x = random.random_range(-1.0..1.0)),
            Dist::Student => {
                let student = StudentT::new(3.0f32).expect("3 is a number of degrees of freedom");
                block.iter_mut().for_each(|x| *x = student.sample(random));
            }
            Dist::Zeros => block.iter_mut().for_each(|x| {
                *x = if random.random_range(0..100) == 0 { StandardNormal.sample(random) } else { 0.0 };
            }),
        }
    }
}

/// `k` random sorted indices below `n`.
pub fn indices(n: usize, k: usize, random: &mut impl Rng) -> Vec<u32> {
    // One in every stretch of n/k: sorted at once, and as scattered as a random set.
    let mut chosen = Vec::with_capacity(k);
    let stride = n as f64 / k as f64;
    for i in 0..k {
        let begin = (i as f64 * stride) as usize;
        let end = (((i + 1) as f64 * stride) as usize).clamp(begin + 1, n);
        chosen.push(random.random_range(begin..end) as u32);
    }
    chosen
}

//! Images of the size and number of ImageNet, made from a seed and an index: nothing is stored, nothing is fetched.
//! What must hold: a class can be learned from some images and recognized in others, values have mean 0 and variance 1 over
//! all classes, and the same index gives the same bits on every machine.
//!
//! A class is a sum of a few slow waves, different in each channel. An image is the pattern of its class, a little shifted,
//! under noise. There are only sums and products in it: sines differ from one C library to the next.

use crate::image::{Channel, ImageSet};
use crate::random::{Purpose, Stream};

const SEED: u64 = 0x7379_6e74_6865_7469;
const SIDE: usize = 224;
const WAVES: usize = 4;
/// Waves over the width of an image, at most.
const FASTEST: u32 = 4;
/// Pixels by which a pattern is shifted, at most: small against the shortest wave, 56 pixels.
const SHIFT: u32 = 16;
/// Noise is uniform between plus and minus this. The mean square of `wave` is 8/15 and that of an amplitude 1/3, so the
/// pattern has the variance 4 * 1/3 * (8/15)^2, and this noise what is missing to 1.
const NOISE: f32 = 1.364_63;

/// The set that is opened by name.
pub(crate) fn imagenet() -> ImageSet {
    ImageSet::made("synthetic-imagenet", Synthetic { seed: SEED })
}

/// Images made from a seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Synthetic {
    seed: u64,
}

impl Synthetic {
    pub const SHAPE: [usize; 3] = [3, SIDE, SIDE];
    pub const CLASSES: usize = 1_000;
    /// Images to train and to test.
    pub const LENGTHS: (usize, usize) = (1_281_167, 50_000);
    pub const CHANNELS: [Channel; 3] = [Channel { mean: 0.0, std: 1.0 }; 3];

    /// Draws a training image and returns its label.
    pub(crate) fn train_image(&self, index: usize, out: &mut [f32]) -> u32 {
        assert!(index < Self::LENGTHS.0, "image {index} of {}", Self::LENGTHS.0);
        self.image(Purpose::TrainImage, index, out)
    }

    /// Draws a test image and returns its label.
    pub(crate) fn test_image(&self, index: usize, out: &mut [f32]) -> u32 {
        assert!(index < Self::LENGTHS.1, "image {index} of {}", Self::LENGTHS.1);
        self.image(Purpose::TestImage, index, out)
    }

    fn image(&self, purpose: Purpose, index: usize, out: &mut [f32]) -> u32 {
        let label = index % Self::CLASSES;
        let mut class = Stream::new(Purpose::Class, self.seed, label as u64);
        let mut own = Stream::new(purpose, self.seed, index as u64);
        let shift = [own.below(SHIFT), own.below(SHIFT)];
        let waves: [Wave; WAVES] = std::array::from_fn(|_| Wave::draw(&mut class, shift));
        for (at, row) in out.chunks_exact_mut(SIDE).enumerate() {
            let (channel, y) = (at / SIDE, at % SIDE);
            draw_row(&waves, channel, y, row);
            add_noise(&mut own, row);
        }
        label as u32
    }
}

/// A wave along the columns times one along the rows, with an amplitude for each channel.
struct Wave {
    x: [f32; SIDE],
    y: [f32; SIDE],
    amplitudes: [f32; 3],
}

impl Wave {
    fn draw(class: &mut Stream, [shift_x, shift_y]: [u32; 2]) -> Self {
        let mut along = |shift: u32| {
            let (frequency, phase) = (1 + class.below(FASTEST), class.signed());
            std::array::from_fn(|at| {
                let turns = (frequency * (at as u32 + shift)) as f32 / SIDE as f32 + phase;
                wave(turns - turns.floor())
            })
        };
        let (x, y) = (along(shift_x), along(shift_y));
        Wave { x, y, amplitudes: std::array::from_fn(|_| class.signed()) }
    }
}

/// A period in `0.0..1.0`: two parabolas that look like a sine, between -1 and 1.
fn wave(turn: f32) -> f32 {
    let turn = turn - 0.5;
    8.0 * turn * (1.0 - 2.0 * turn.abs())
}

fn draw_row(waves: &[Wave; WAVES], channel: usize, y: usize, row: &mut [f32]) {
    let heights = waves.each_ref().map(|wave| wave.amplitudes[channel] * wave.y[y]);
    for (x, pixel) in row.iter_mut().enumerate() {
        *pixel = waves.iter().zip(heights).map(|(wave, height)| height * wave.x[x]).sum();
    }
}

fn add_noise(own: &mut Stream, row: &mut [f32]) {
    const STEP: f32 = NOISE / 32_768.0;
    for pixels in row.chunks_exact_mut(4) {
        let mut bits = own.bits();
        for pixel in pixels {
            *pixel += (f32::from(bits as u16) - 32_767.5) * STEP;
            bits >>= 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(test: bool, index: usize) -> Vec<f32> {
        let (synthetic, mut out) = (Synthetic { seed: SEED }, vec![0.0; 3 * SIDE * SIDE]);
        let label =
            if test { synthetic.test_image(index, &mut out) } else { synthetic.train_image(index, &mut out) };
        assert_eq!(label as usize, index % Synthetic::CLASSES);
        out
    }

    #[test]
    fn a_class_is_recognized_in_images_not_seen_before() {
        let classes = 0..20usize;
        let seen = classes.clone().map(|class| {
            let images = (0..4).map(|more| image(false, class + more * Synthetic::CLASSES));
            images.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).expect("four images")
        });
        let seen: Vec<Vec<f32>> = seen.collect();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        for class in classes.clone() {
            let new = image(true, class);
            let best = classes.clone().max_by(|&a, &b| dot(&seen[a], &new).total_cmp(&dot(&seen[b], &new)));
            assert_eq!(best, Some(class));
        }
    }

    #[test]
    fn values_have_mean_0_and_variance_1() {
        let all: Vec<f64> = (0..100).flat_map(|index| image(false, index * 37)).map(f64::from).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64;
        assert!(mean.abs() < 0.01, "mean {mean}");
        // 100 classes of 1,000, each with its own few amplitudes.
        assert!((variance - 1.0).abs() < 0.1, "variance {variance}");
    }

    #[test]
    fn the_same_index_gives_the_same_bits_and_another_gives_others() {
        assert_eq!(image(false, 77), image(false, 77));
        assert_ne!(image(false, 77), image(true, 77));
        assert_ne!(image(false, 77), image(false, 77 + Synthetic::CLASSES));
    }
}

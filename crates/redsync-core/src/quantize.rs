//! Values as they are sent: f32, rounded to bf16 or to eight bits, one of four levels, or one mean for all (Alternating Signs
//! Quantization).
//! Comes in: the chosen elements. Goes out: values for the wire, and what stays in the residual. What must hold: sent plus
//! rest is what was there, except where the error is dropped on purpose.

use crate::kernel::Key;
use crate::phase::Phase;
use half::bf16;

/// How values travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Values {
    /// 32 bits each.
    #[default]
    F32,
    /// 16 bits each, rounded to nearest; the rounding error stays in the residual.
    Bf16,
    /// One mean for all elements, which are all of one sign: Alternating Signs Quantization. The difference between each
    /// element and the mean stays in the residual.
    Asq,
    /// The same, but the difference is dropped, as in the paper.
    AsqDropError,
    /// Two bits each, which choose among four levels: the means of small and large elements of either sign. The
    /// difference between each element and its level stays in the residual.
    TwoBit,
    /// Eight bits each: a whole multiple, -127 to 127, of a 127th of the largest. The difference stays in the residual.
    EightBit,
}

impl Values {
    /// Whether one value stands for all.
    pub fn is_quantized(self) -> bool {
        matches!(self, Values::Asq | Values::AsqDropError)
    }

    /// The signs that compete at a step: one at a time with quantization.
    pub fn phase(self, step: u64) -> Phase {
        if self.is_quantized() { Phase::of_step(step) } else { Phase::Both }
    }
}

/// The mean of the chosen elements: summed in f64 in index order, the same on every machine.
pub(crate) fn asq(keys: &[Key]) -> f32 {
    let sum: f64 = keys.iter().map(|key| f64::from(key.value())).sum();
    (sum / keys.len().max(1) as f64) as f32
}

/// Four levels for elements of both signs, and which element has which.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Levels {
    /// From this magnitude on an element is large.
    boundary: f64,
    /// Small positive, large positive, small negative, large negative; the sign bit is always that of the bin.
    pub levels: [f32; 4],
}

impl Levels {
    /// The level of an element.
    #[inline]
    pub fn of(&self, value: f32) -> f32 {
        self.levels[bin(value, self.boundary)]
    }
}

#[inline]
fn bin(value: f32, boundary: f64) -> usize {
    2 * usize::from(value < 0.0) + usize::from(f64::from(value.abs()) >= boundary)
}

/// Quantizes to four levels: the mean magnitude divides small from large, and each level is the mean of its bin, rounded
/// to bf16; 0 for a bin without elements. Zero is small and positive. All sums are in f64 in index order, the same on
/// every machine.
pub(crate) fn two_bit(values: impl Iterator<Item = f32> + Clone) -> Levels {
    let (mut sum, mut count) = (0.0, 0u64);
    for value in values.clone() {
        (sum, count) = (sum + f64::from(value.abs()), count + 1);
    }
    // Where all is zero, zero is small nevertheless: any f32 but zero is above this.
    let boundary = (sum / count.max(1) as f64).max(f64::MIN_POSITIVE);
    // Adding -0.0 changes nothing, not even a zero's sign. Four sums side by side do not wait for each other.
    let (mut sums, mut counts) = ([0.0, 0.0, -0.0, -0.0], [0u64; 4]);
    for value in values {
        let bin = bin(value, boundary);
        for i in 0..4 {
            sums[i] += if i == bin { f64::from(value) } else { -0.0 };
            counts[i] += u64::from(i == bin);
        }
    }
    let level = |i: usize| round((sums[i] / counts[i].max(1) as f64) as f32).to_f32();
    Levels { boundary, levels: std::array::from_fn(level) }
}

/// The scale of which all values are multiples, -127 to 127, once they are rounded: a 127th of the largest.
pub(crate) fn eight_bit(values: impl Iterator<Item = f32>) -> f32 {
    let scale = values.fold(0f32, |most, value| most.max(value.abs())) / 127.0;
    // The rounded quotient may be a hair too large.
    if (127.0 * scale).is_finite() { scale } else { scale.next_down() }
}

/// The multiple of a scale that is nearest to a value, of which the scale is one of [`eight_bit`].
pub(crate) fn multiple(value: f32, scale: f32) -> i8 {
    // Nothing is a multiple of zero but zero; the cast keeps to the range of an i8.
    if scale == 0.0 { 0 } else { ((value / scale).round() as i8).max(-127) }
}

/// Rounds to bf16; a finite value stays finite.
pub(crate) fn round(value: f32) -> bf16 {
    let rounded = bf16::from_f32(value);
    if rounded.is_finite() { rounded } else { bf16::MAX.copysign(rounded) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rounding_to_bf16_never_overflows() {
        assert_eq!(round(f32::MAX), bf16::MAX);
        assert_eq!(round(-f32::MAX), -bf16::MAX);
        assert_eq!(round(1.0), bf16::ONE);
    }

    #[test]
    fn the_mean_does_not_overflow() {
        let keys: Vec<Key> = (0..9).map(|i| Key::new(f32::MAX, i)).collect();
        assert_eq!(asq(&keys), f32::MAX);
        assert_eq!(asq(&[]), 0.0);
    }

    #[test]
    fn few_elements_have_levels_of_their_own() {
        let sent = |values: &[f32]| {
            let levels = two_bit(values.iter().copied());
            values.iter().map(|value| levels.of(*value)).collect::<Vec<_>>()
        };
        for values in [&[][..], &[3.0], &[-0.5], &[1.0, 2.0], &[1.0, -1.0], &[-5.0, -1.0, 8.0], &[0.0, 0.0]] {
            assert_eq!(sent(values), values);
        }
        assert_eq!(sent(&[f32::MAX, -f32::MAX]), [bf16::MAX.to_f32(), bf16::MIN.to_f32()]);
        assert_eq!(sent(&[0.0, 2.0, -0.0]), [0.0, 2.0, 0.0]);
        assert_eq!(sent(&[1.001]), [bf16::from_f32(1.001).to_f32()]);
    }

    proptest! {
        /// Against one list per bin.
        #[test]
        fn levels_are_the_means_of_their_bins(
            values in proptest::collection::vec(prop_oneof![Just(0f32), -1f32..1.0, -1e-40f32..1e-40], 1..200),
        ) {
            let found = two_bit(values.iter().copied());
            let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
            let boundary = mean(&values.iter().map(|x| f64::from(x.abs())).collect::<Vec<_>>());
            for i in 0..4 {
                let belongs = |x: &f32| {
                    let large = *x != 0.0 && f64::from(x.abs()) >= boundary;
                    (large, *x < 0.0) == (i % 2 == 1, i >= 2)
                };
                let bin: Vec<f32> = values.iter().copied().filter(belongs).collect();
                prop_assert!(bin.iter().all(|x| found.of(*x).to_bits() == found.levels[i].to_bits()));
                let wide: Vec<f64> = bin.iter().map(|x| f64::from(*x)).collect();
                let level = if bin.is_empty() { 0.0 } else { round(mean(&wide) as f32).to_f32() };
                prop_assert_eq!(found.levels[i], level);
                prop_assert_eq!(found.levels[i].is_sign_negative(), i >= 2);
            }
        }
    }
}

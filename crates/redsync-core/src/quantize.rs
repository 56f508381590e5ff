//! Values as they are sent: f32, rounded to bf16, or one mean for all (Alternating Signs Quantization).
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

/// Rounds to bf16; a finite value stays finite.
pub(crate) fn round(value: f32) -> bf16 {
    let rounded = bf16::from_f32(value);
    if rounded.is_finite() { rounded } else { bf16::MAX.copysign(rounded) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

//! Which elements of a residual compete for a place in the message.
//! Comes in: a step number. Goes out: a phase, the same on every rank. What must hold: without quantization both
//! signs compete by magnitude; with Alternating Signs Quantization one sign at a time, alternating by step.

/// The signs that compete at one step.
///
/// ```
/// use redsync_core::Phase;
/// assert_eq!(Phase::of_step(6), Phase::Positive);
/// assert_eq!(Phase::of_step(7), Phase::Negative);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The largest magnitudes, whatever their sign.
    Both,
    /// The largest positive elements only.
    Positive,
    /// The smallest negative elements only.
    Negative,
}

impl Phase {
    /// The phase of Alternating Signs Quantization at a global step: even steps send positive elements, odd steps
    /// negative ones.
    pub fn of_step(step: u64) -> Self {
        if step.is_multiple_of(2) { Phase::Positive } else { Phase::Negative }
    }

    /// How a pass sees elements in this phase.
    pub fn lens(self) -> Lens {
        match self {
            Phase::Both => Lens { keep: 0x7fff_ffff, flip: 0 },
            Phase::Positive => Lens { keep: !0, flip: 0 },
            Phase::Negative => Lens { keep: !0, flip: 0x8000_0000 },
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Phase::Both => 0,
            Phase::Positive => 1,
            Phase::Negative => 2,
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Phase::Both => "both signs",
            Phase::Positive => "positive",
            Phase::Negative => "negative",
        })
    }
}

/// Two bit operations that turn "competes in this phase" into "is greater than a floor that is not negative": one
/// loop serves all three phases.
#[derive(Clone, Copy, Debug)]
pub struct Lens {
    /// Bits of an element that stay.
    pub keep: u32,
    /// Bits that are turned over then.
    pub flip: u32,
}

impl Lens {
    /// The size of `x` as this phase sees it; at most zero when `x` does not compete.
    #[inline(always)]
    pub fn see(self, x: f32) -> f32 {
        f32::from_bits((x.to_bits() & self.keep) ^ self.flip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lens_shows_only_the_sign_that_competes() {
        assert_eq!(Phase::Both.lens().see(-2.0), 2.0);
        assert_eq!(Phase::Positive.lens().see(-2.0), -2.0);
        assert_eq!(Phase::Negative.lens().see(-2.0), 2.0);
        assert_eq!(Phase::Negative.lens().see(2.0), -2.0);
        for phase in [Phase::Both, Phase::Positive, Phase::Negative] {
            assert!(phase.lens().see(0.0) <= 0.0 && phase.lens().see(-0.0) <= 0.0);
        }
    }
}

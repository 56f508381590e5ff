//! exp, sigmoid and tanh of f32, written without branches so that the compiler makes vector instructions of loops over them.
//! A number goes in, one within a few units in the last place comes out. What must hold: the same bits with any instruction set
//! (no fused multiply-add), and NaN stays NaN.

/// 2^23 * 1.5: a number of this size has no bits left behind the point, so adding it rounds to a whole number.
const ROUNDER: f32 = 12_582_912.0;
/// ln 2 with few bits, whose product with any exponent is exact, and the rest of it.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
/// Beyond these, exp would leave the normal numbers.
const LEAST: f32 = -87.0;
const MOST: f32 = 88.0;

/// x = n ln 2 + r with a small r: gives 2^n and e^r - 1.
#[inline(always)]
fn split_exp(x: f32) -> (f32, f32) {
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // The lowest bits of `shifted` are n: moved into the exponent they are 2^n.
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    // The series of e^r - 1; with |r| <= 0.35 the first term left out is below 2^-25 of the sum.
    let series = 1.0 / 720.0 + r * (1.0 / 5040.0);
    let series = 1.0 / 24.0 + r * (1.0 / 120.0 + r * series);
    let series = 0.5 + r * (1.0 / 6.0 + r * series);
    (power, r + r * r * series)
}

/// e^x for x from -87 to 88; outside, the value at the nearer end.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let (power, rest) = split_exp(x.clamp(LEAST, MOST));
    power + power * rest
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent, by e^2x - 1, which keeps all digits near zero.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // At 10 the result has long been 1 in f32.
    let (power, rest) = split_exp(2.0 * x.clamp(-10.0, 10.0));
    let less_one = (power - 1.0) + power * rest;
    less_one / (less_one + 2.0)
}

/// Runs a loop compiled for the vector registers that this machine has, not for the smallest machine of its kind.
#[inline(always)]
pub fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = pulp::x86::V3::try_new() {
        return avx2.vectorize(work);
    }
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_over(from: f32, to: f32) -> impl Iterator<Item = f32> {
        (0..=200_000).map(move |i| from + (to - from) * (i as f32 / 200_000.0))
    }

    fn worst(points: impl Iterator<Item = f32>, ours: fn(f32) -> f32, exact: fn(f64) -> f64) -> f64 {
        points
            .filter(|&x| x != 0.0)
            .map(|x| (ours(x) as f64 / exact(x as f64) - 1.0).abs())
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_that_of_std() {
        assert!(worst(all_over(-87.0, 88.0), exp, f64::exp) < 3e-7);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn sigmoid_is_that_of_std() {
        assert!(worst(all_over(-87.0, 87.0), sigmoid, |x| 1.0 / (1.0 + (-x).exp())) < 4e-7);
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
        assert!(sigmoid(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn tanh_is_that_of_std_also_near_zero() {
        assert!(worst(all_over(-12.0, 12.0), tanh, f64::tanh) < 4e-7);
        assert!(worst(all_over(-1e-3, 1e-3), tanh, f64::tanh) < 4e-7);
        assert!(worst(all_over(1e-30, 1e-20), tanh, f64::tanh) < 4e-7);
        assert_eq!(tanh(0.0), 0.0);
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    }

    #[test]
    fn nan_stays() {
        assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
    }

    #[test]
    fn wide_loops_give_the_same_bits() {
        let plain: Vec<u32> = all_over(-90.0, 90.0).map(|x| (sigmoid(x) + tanh(x)).to_bits()).collect();
        let mut values: Vec<f32> = all_over(-90.0, 90.0).collect();
        wide(
            #[inline(always)]
            || values.iter_mut().for_each(|x| *x = sigmoid(*x) + tanh(*x)),
        );
        assert!(values.iter().map(|x| x.to_bits()).eq(plain));
    }
}

//! How many elements a message may carry.

use crate::error::ConfigError;

/// The fraction of a layer that is sent at one step: above 0, at most 1.
///
/// ```
/// use redsync_core::Density;
/// let density = Density::new(0.001)?;
/// assert_eq!(density.k(1_000_000), 1000);
/// assert_eq!(density.k(10), 1);
/// assert_eq!(density.k(0), 0);
/// # Ok::<(), redsync_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Density(f64);

impl Default for Density {
    /// 0.1%, the paper's.
    fn default() -> Self {
        Density(0.001)
    }
}

impl Density {
    /// Checks that the fraction makes sense.
    pub fn new(fraction: f64) -> Result<Self, ConfigError> {
        if fraction > 0.0 && fraction <= 1.0 {
            Ok(Density(fraction))
        } else {
            Err(ConfigError::Density(fraction))
        }
    }

    /// The fraction.
    pub fn fraction(self) -> f64 {
        self.0
    }

    /// The number of elements to send of `n`: max(1, ceil(n * density)), and none of none.
    pub fn k(self, n: usize) -> usize {
        // The product may be off by one rounding; 0.1% of 1,000 is 1, never 2.
        let exact = n as f64 * self.0 * (1.0 - 4.0 * f64::EPSILON);
        (exact.ceil() as usize).max(1).min(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused() {
        for bad in [0.0, -0.1, 1.0001, f64::NAN, f64::INFINITY] {
            assert!(Density::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn k_is_the_ceiling_and_never_more_than_n() {
        for (fraction, n, k) in
            [(0.001, 3000, 3), (0.001, 3001, 4), (1.0, 17, 17), (0.25, 3, 1), (0.999, 2, 2)]
        {
            assert_eq!(Density::new(fraction).unwrap().k(n), k, "{fraction} of {n}");
        }
    }
}

//! Rice codes of sorted indices: each gap to the index before (minus one; the first index itself) is written as quotient
//! in unary (zeros, then a one) and remainder in `parameter` bits, least significant bit first.

use super::BadMessage;

/// 2^64 divided by the golden ratio.
const GOLDEN: u128 = 0x9e37_79b9_7f4a_7c15;

/// The parameter with the fewest expected bits for `count` random indices out of `n`. Both sides derive it, so it takes
/// integers only, which are the same everywhere.
///
/// A gap is geometric: with density p its quotient is at least one with probability q = (1-p)^(2^b), and a code has
/// b + 1 + q/(1-q) bits on average. One bit more in b makes q its square, and helps as long as q + q^2 > 1: as long as q is
/// above the inverse of the golden ratio. At most 31 for any n.
pub(super) fn parameter(n: u32, count: u32) -> u8 {
    if count == 0 {
        return 0;
    }
    let mut q = (u128::from(n - count) << 64) / u128::from(n);
    let mut b = 0;
    while q > GOLDEN {
        q = (q * q) >> 64;
        b += 1;
    }
    b
}

/// Bytes that [`encode`] appends.
pub(super) fn bytes(indices: &[u32], parameter: u8) -> u64 {
    let Some(first) = indices.first() else { return 0 };
    let gaps = indices.windows(2).map(|pair| u64::from((pair[1] - pair[0] - 1) >> parameter));
    let unary = u64::from(first >> parameter) + gaps.sum::<u64>();
    (unary + indices.len() as u64 * (1 + u64::from(parameter))).div_ceil(8)
}

/// Appends the codes, padded with zero bits to a whole byte.
pub(super) fn encode(indices: &[u32], parameter: u8, out: &mut Vec<u8>) {
    let mut writer = BitWriter { out, bits: 0, used: 0 };
    let mut next = 0u32;
    for index in indices {
        let gap = index - next;
        // The last index may be the largest u32; nothing follows it.
        next = index.wrapping_add(1);
        writer.zeros(gap >> parameter);
        let rest = u64::from(gap) & ((1u64 << parameter) - 1);
        writer.put(rest << 1 | 1, u32::from(parameter) + 1);
    }
    writer.finish();
}

/// Reads `count` codes that fill `bytes` exactly and appends the indices.
pub(super) fn decode(
    bytes: &[u8],
    parameter: u8,
    count: u32,
    n: u32,
    indices: &mut Vec<u32>,
) -> Result<(), BadMessage> {
    let mut reader = BitReader { bytes, position: 0 };
    let (mut next, width) = (0u64, u32::from(parameter));
    let mask = (1u64 << parameter) - 1;
    for position in 0..count {
        let ends = BadMessage::BitsEnd { position };
        let window = reader.window();
        let zeros = window.trailing_zeros();
        let gap = if zeros + 1 + width <= BitReader::WINDOW {
            reader.position += u64::from(zeros + 1 + width);
            u64::from(zeros) << parameter | (window >> zeros >> 1) & mask
        } else {
            let quotient = reader.zeros().ok_or_else(|| ends.clone())?;
            if quotient > u64::from(n >> parameter) {
                return Err(BadMessage::Index { position, n });
            }
            let rest = reader.window() & mask;
            reader.position += u64::from(width);
            (quotient << parameter) + rest
        };
        if reader.position > reader.end() {
            return Err(ends);
        }
        let index = next + gap;
        if index >= u64::from(n) {
            return Err(BadMessage::Index { position, n });
        }
        indices.push(index as u32);
        next = index + 1;
    }
    reader.finish()
}

struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    bits: u64,
    used: u32,
}

impl BitWriter<'_> {
    /// Appends the lowest `width` (at most 32) bits of `bits`, which has no others.
    #[inline]
    fn put(&mut self, bits: u64, width: u32) {
        self.bits |= bits << self.used;
        self.used += width;
        if self.used >= 32 {
            self.out.extend_from_slice(&(self.bits as u32).to_le_bytes());
            self.bits >>= 32;
            self.used -= 32;
        }
    }

    #[inline]
    fn zeros(&mut self, mut count: u32) {
        while count > 32 {
            self.put(0, 32);
            count -= 32;
        }
        self.put(0, count);
    }

    fn finish(self) {
        let bytes = self.used.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.bits.to_le_bytes()[..bytes]);
    }
}

struct BitReader<'a> {
    bytes: &'a [u8],
    /// In bits.
    position: u64,
}

impl BitReader<'_> {
    /// Bits of a window that are always the stream's.
    const WINDOW: u32 = 57;

    fn end(&self) -> u64 {
        8 * self.bytes.len() as u64
    }

    /// The bits from the position on, at least [`Self::WINDOW`] of them; zeros past the end.
    #[inline]
    fn window(&self) -> u64 {
        let at = (self.position / 8) as usize;
        let word = match self.bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
            Some(word) => *word,
            None => {
                let mut word = [0; 8];
                let rest = self.bytes.get(at..).unwrap_or(&[]);
                word[..rest.len()].copy_from_slice(rest);
                word
            }
        };
        u64::from_le_bytes(word) >> (self.position % 8)
    }

    /// Skips zeros and the one behind them; None if the bits end first. Bounded by the number of bytes.
    fn zeros(&mut self) -> Option<u64> {
        let mut total = 0u64;
        loop {
            if self.position >= self.end() {
                return None;
            }
            let zeros = self.window().trailing_zeros();
            if zeros < Self::WINDOW {
                self.position += u64::from(zeros) + 1;
                return Some(total + u64::from(zeros));
            }
            total += u64::from(Self::WINDOW);
            self.position += u64::from(Self::WINDOW);
        }
    }

    /// After the last code less than a byte may be left, all zeros.
    fn finish(self) -> Result<(), BadMessage> {
        let left = self.end() - self.position;
        if left >= 8 || (left > 0 && self.window() != 0) { Err(BadMessage::Padding) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_parameter_follows_the_density() {
        assert_eq!(parameter(16_777_216, 16_778), 9);
        assert_eq!(parameter(1000, 10), 6);
        assert_eq!(parameter(1000, 250), 1);
        assert_eq!(parameter(7, 7), 0);
        assert_eq!(parameter(u32::MAX, 1), 31);
        assert_eq!(parameter(0, 0), 0);
    }

    /// The expectation itself, for every parameter.
    fn expected_bits(n: u32, count: u32, b: u8) -> f64 {
        let ln_q = (-f64::from(count) / f64::from(n)).ln_1p() * 2f64.powi(b.into());
        f64::from(b) + 1.0 + 1.0 / (-ln_q).exp_m1()
    }

    /// A run of zeros as long as a peer likes must not overflow on the way to an index.
    #[test]
    fn a_quotient_beyond_the_layer_is_refused() {
        for parameter in [0, 5, 31] {
            let mut bytes = vec![0u8; 100];
            bytes.extend([0x80, 0, 0, 0, 0]);
            let refused = decode(&bytes, parameter, 1, 4, &mut Vec::new());
            assert_eq!(refused, Err(BadMessage::Index { position: 0, n: 4 }));
        }
    }

    fn indices() -> impl Strategy<Value = (u32, Vec<u32>)> {
        prop_oneof![Just(1u32), 2u32..300, Just(1 << 20), Just(u32::MAX)].prop_flat_map(|n| {
            let set = proptest::collection::btree_set(0..n, 0..(n as usize).min(200));
            (Just(n), set.prop_map(|set| set.into_iter().collect()))
        })
    }

    proptest! {
        #[test]
        fn no_parameter_is_better_than_the_derived_one(n in 1u32.., shift in 0u32..32, part: u32) {
            let n = (n >> shift).max(1);
            for count in [1, n, 1 + part % n, 1 + (part % n) / 1000] {
                let b = parameter(n, count);
                prop_assert!(b <= 31);
                let best = (0..=31).map(|b| expected_bits(n, count, b)).fold(f64::INFINITY, f64::min);
                let ours = expected_bits(n, count, b);
                prop_assert!(ours <= best * (1.0 + 1e-6), "{} of {}: {} against {}", count, n, ours, best);
            }
        }

        #[test]
        fn what_is_encoded_is_decoded((n, indices) in indices(), b in 0u8..=31) {
            // The unary part is proportional to n >> b: keep it small for large n.
            let b = if n > 1 << 20 { b.max(20) } else { b };
            let mut bytes = Vec::new();
            encode(&indices, b, &mut bytes);
            prop_assert_eq!(super::bytes(&indices, b), bytes.len() as u64);
            let mut back = Vec::new();
            decode(&bytes, b, indices.len() as u32, n, &mut back).unwrap();
            prop_assert_eq!(&back, &indices);
            // One byte more or less is noticed.
            let count = indices.len() as u32;
            if count > 0 {
                let short = &bytes[..bytes.len() - 1];
                prop_assert!(decode(short, b, count, n, &mut Vec::new()).is_err());
            }
            bytes.push(0);
            prop_assert!(decode(&bytes, b, count, n, &mut Vec::new()).is_err());
        }

        #[test]
        fn any_bytes_end_in_indices_or_an_error(
            bytes in proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..64),
            b in 0u8..=31, count in 0u32..600, n in 0u32..=u32::MAX,
        ) {
            let mut indices = Vec::new();
            if decode(&bytes, b, count, n, &mut indices).is_ok() {
                prop_assert_eq!(indices.len(), count as usize);
                prop_assert!(indices.is_sorted_by(|a, b| a < b) && indices.iter().all(|i| *i < n));
                let mut again = Vec::new();
                encode(&indices, b, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}

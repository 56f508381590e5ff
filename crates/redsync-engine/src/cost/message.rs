//! The bytes of a message, from the density alone: those of the real encoding, headers included.

use redsync_core::wire::{FRAME_HEADER, message_header};
use redsync_core::{Density, IndexCode, Selector, Values};

/// Elements that a selector sends on average: threshold search stops anywhere between k and 2k.
pub fn expected_elements(m: usize, d: Density, selector: Selector) -> f64 {
    let k = d.k(m) as f64;
    match selector {
        Selector::Threshold | Selector::Sampled => (1.5 * k).min(m as f64),
        _ => k,
    }
}

/// Bits of an element of a random set of density `d`, without headers.
///
/// ```
/// use redsync_core::{Density, IndexCode, Values};
/// use redsync_engine::cost::message_bits;
/// let bits = message_bits(Density::default(), IndexCode::Rice, Values::Asq);
/// assert!((bits - 11.5).abs() < 0.05);
/// ```
pub fn message_bits(d: Density, indices: IndexCode, values: Values) -> f64 {
    let index = match indices {
        IndexCode::Plain => 32.0,
        // The best parameter r: r bits, and the quotient of a geometric gap in unary.
        IndexCode::Rice => (0..32).map(|r| rice_bits(d.fraction(), r)).fold(f64::INFINITY, f64::min),
        IndexCode::Every => 0.0,
    };
    index
        + match values {
            Values::F32 => 32.0,
            Values::Bf16 => 16.0,
            Values::TwoBit => 2.0,
            Values::EightBit => 8.0,
            Values::Asq | Values::AsqDropError => 0.0,
        }
}

fn rice_bits(d: f64, r: i32) -> f64 {
    let beyond = (1.0 - d).powf(2f64.powi(r));
    f64::from(r) + 1.0 + beyond / (1.0 - beyond)
}

/// Bytes of a message: its elements, the bits of one, and how values travel, which may be by a mean or levels.
pub fn message_bytes(elements: f64, bits: f64, values: Values) -> f64 {
    let shared = match values {
        Values::F32 | Values::Bf16 => 0.0,
        Values::Asq | Values::AsqDropError | Values::EightBit => 4.0,
        Values::TwoBit => 8.0,
    };
    let payload = (elements * bits / 8.0).ceil() + shared;
    message_header(elements as u32, payload as u64) as f64 + payload
}

/// Bytes of a frame of such messages.
pub fn frame_bytes(messages: impl IntoIterator<Item = (f64, f64, Values)>) -> f64 {
    let message = |(elements, bits, values)| message_bytes(elements, bits, values);
    FRAME_HEADER as f64 + messages.into_iter().map(message).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use redsync_core::{Compressor, Config, FrameWriter, Gradient, Workspace};

    /// The prediction against the encoder itself.
    #[test]
    fn predicted_bytes_are_those_of_the_encoder() {
        let n = 200_000;
        let mut state = 7u64;
        let mut noise = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let gradient: Vec<f32> = (0..n).map(|_| noise()).collect();
        for fraction in [0.001, 0.01, 0.25] {
            for values in [Values::F32, Values::Bf16, Values::Asq, Values::TwoBit, Values::EightBit] {
                for indices in [IndexCode::Plain, IndexCode::Rice] {
                    let density = Density::new(fraction).unwrap();
                    let config = Config { density, values, indices, ..Config::default() };
                    let mut layer = Compressor::new(0, "layer", n, config).unwrap();
                    let (mut workspace, mut frame) = (Workspace::new(1), FrameWriter::new());
                    frame.begin(0, 0, 0);
                    layer.compress(0, Gradient::F32(&gradient), 1.0, &mut workspace, &mut frame).unwrap();
                    let real = frame.finish().len() as f64;
                    let elements = expected_elements(n, density, Selector::Exact);
                    let bits = message_bits(density, indices, values);
                    let predicted = frame_bytes([(elements, bits, values)]);
                    assert!(
                        (predicted / real - 1.0).abs() < 0.02,
                        "{fraction} {values:?}: {predicted} {real}"
                    );
                }
            }
        }
    }
}

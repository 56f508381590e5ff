//! Second moments on a logarithmic scale: the exponent of the largest in one byte, then for each element, in four bits, by how many
//! powers of two it is below.
//! What must hold: what a message says of an element is an interval, the same on every machine. A reader has a guess, its own second
//! moment, and takes what of the interval is nearest to it: ranks that see the same are told what they have, to the bit.

use super::BadMessage;

/// Bytes of the exponent.
const TOP: usize = 1;
/// The furthest below the largest that can be said; it stands for all below, too.
const LOWEST: u32 = 15;
/// The largest exponent of a number.
const LARGEST: u32 = 254;
/// Mantissas from here on are nearer to the next power of two, as ratios: those of the root of two.
const HALF_WAY: u32 = 0x0035_04f3;

/// Bytes of so many elements.
pub(super) fn bytes(count: u32) -> u64 {
    TOP as u64 * u64::from(count.min(1)) + u64::from(count.div_ceil(2))
}

/// The exponent of the nearest power of two, as f32 has it; 0 for what is too small to be divided by.
fn exponent(square: f32) -> u32 {
    let bits = square.max(0.0).to_bits();
    let up = u32::from(bits & 0x007f_ffff >= HALF_WAY);
    match bits >> 23 {
        0 => 0,
        exponent => (exponent + up).min(LARGEST),
    }
}

/// The smallest number of an exponent.
fn smallest(exponent: u32) -> f32 {
    match exponent {
        0 => 0.0,
        1 => f32::MIN_POSITIVE,
        more => f32::from_bits((more - 1) << 23 | HALF_WAY),
    }
}

/// The largest number of an exponent.
fn largest(exponent: u32) -> f32 {
    match exponent {
        LARGEST.. => f32::MAX,
        less => f32::from_bits(smallest(less + 1).to_bits() - 1),
    }
}

/// Appends squares that are finite; nothing if there are none.
pub(super) fn write(squares: impl Iterator<Item = f32> + Clone, out: &mut Vec<u8>) {
    let Some(top) = squares.clone().map(exponent).max() else { return };
    out.push(top as u8);
    let mut codes = squares.map(|square| (top - exponent(square)).min(LOWEST) as u8);
    while let Some(low) = codes.next() {
        out.push(low | codes.next().unwrap_or(0) << 4);
    }
}

/// Reads as many squares as there are guesses, each of which becomes what of its interval is nearest; the bytes have the right length.
pub(super) fn read(payload: &[u8], guesses: &mut [f32]) -> Result<(), BadMessage> {
    let Some((top, codes)) = payload.split_first() else { return Ok(()) };
    let top = u32::from(*top);
    if top > LARGEST {
        return Err(BadMessage::Value { position: 0, value: f32::INFINITY });
    }
    if guesses.len() % 2 == 1 && codes.last().is_some_and(|last| last >> 4 != 0) {
        return Err(BadMessage::Padding);
    }
    let interval = |code: u32| {
        let exponent = top.saturating_sub(code);
        (if code < LOWEST { smallest(exponent) } else { 0.0 }, largest(exponent))
    };
    let intervals: [(f32, f32); LOWEST as usize + 1] = std::array::from_fn(|code| interval(code as u32));
    let both = codes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    for (guess, code) in guesses.iter_mut().zip(both) {
        let (least, most) = intervals[usize::from(code)];
        *guess = guess.max(least).min(most);
    }
    Ok(())
}

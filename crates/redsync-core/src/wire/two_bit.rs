//! Values that are one of four levels: the levels as bf16, then two bits for each element, four elements in a byte.
//! What must hold: levels 0 and 1 have a clear sign bit, levels 2 and 3 a set one, so that sign and one comparison tell
//! the code of a value.

use super::BadMessage;
use crate::sparse::Sparse;
use half::bf16;

/// Bytes of the four levels.
pub(super) const LEVELS: usize = 8;

/// Appends levels and codes of values, each of which is one of the levels; nothing if there are none.
pub(super) fn write(levels: Option<[f32; 4]>, values: &[f32], out: &mut Vec<u8>) {
    let Some(levels) = levels.filter(|_| !values.is_empty()) else { return };
    out.extend(levels.iter().flat_map(|level| bf16::from_f32(*level).to_le_bytes()));
    let bits = levels.map(f32::to_bits);
    debug_assert!(
        values.iter().all(|value| bits.contains(&value.to_bits())),
        "a value is none of the levels"
    );
    let code = |value: f32| {
        let sign = value.to_bits() >> 31;
        let small = if sign == 0 { bits[0] } else { bits[2] };
        sign << 1 | u32::from(value.to_bits() != small)
    };
    let byte = |values: &[f32]| values.iter().rev().fold(0, |byte, value| byte << 2 | code(*value)) as u8;
    let (fours, rest) = values.as_chunks::<4>();
    out.extend(fours.iter().map(|four| byte(four)));
    out.extend((!rest.is_empty()).then(|| byte(rest)));
}

/// Reads the values of `count` elements, whose bytes have the right length.
pub(super) fn read(bytes: &[u8], count: u32, sparse: &mut Sparse) -> Result<(), BadMessage> {
    let Some((head, codes)) = bytes.split_first_chunk::<LEVELS>() else { return Ok(()) };
    let levels: [f32; 4] =
        std::array::from_fn(|i| bf16::from_le_bytes([head[2 * i], head[2 * i + 1]]).to_f32());
    let bad = |(i, level): &(usize, &f32)| !level.is_finite() || level.is_sign_negative() != (*i >= 2);
    if let Some((level, value)) = levels.iter().enumerate().find(bad) {
        return Err(BadMessage::Level { level: level as u8, value: *value });
    }
    let (places, used) = (4 * codes.len(), count as usize);
    let last = codes.last().map_or(0, |byte| u32::from(*byte));
    if last >> (8 - 2 * (places - used)) != 0 {
        return Err(BadMessage::Padding);
    }
    sparse.values.resize(places, 0.0);
    let (fours, _) = sparse.values.as_chunks_mut::<4>();
    for (four, byte) in fours.iter_mut().zip(codes) {
        *four = std::array::from_fn(|i| levels[usize::from(byte >> (2 * i) & 3)]);
    }
    sparse.values.truncate(used);
    sparse.levels = Some(levels);
    Ok(())
}

//! Values that are whole multiples of a scale: the scale as f32, then one signed byte for each element.
//! What must hold: a byte is -127 to 127, and zero where the scale is zero, so that scale and value tell the byte.

use super::BadMessage;
use crate::quantize::multiple;
use crate::sparse::Sparse;

/// Bytes of the scale.
pub(super) const SCALE: usize = 4;

/// Appends the scale and the bytes of values, each of which is a multiple of it; nothing if there are none.
pub(super) fn write(scale: Option<f32>, values: &[f32], out: &mut Vec<u8>) {
    let Some(scale) = scale.filter(|_| !values.is_empty()) else { return };
    out.extend_from_slice(&scale.to_le_bytes());
    out.extend(values.iter().map(|value| multiple(*value, scale).to_le_bytes()[0]));
}

/// Reads values whose bytes have the right length.
pub(super) fn read(bytes: &[u8], sparse: &mut Sparse) -> Result<(), BadMessage> {
    let Some((head, bytes)) = bytes.split_first_chunk::<SCALE>() else { return Ok(()) };
    let scale = f32::from_le_bytes(*head);
    if !(127.0 * scale).is_finite() || scale.is_sign_negative() {
        return Err(BadMessage::Scale { scale });
    }
    let wrong = |byte: &u8| *byte == 0x80 || (scale == 0.0 && *byte != 0);
    if let Some(position) = bytes.iter().position(wrong) {
        let multiple = i8::from_le_bytes([bytes[position]]);
        return Err(BadMessage::Multiple { position: position as u32, multiple, scale });
    }
    sparse.values.extend(bytes.iter().map(|byte| scale * f32::from(i8::from_le_bytes([*byte]))));
    sparse.scale = Some(scale);
    Ok(())
}

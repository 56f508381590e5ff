//! Numbers in as few bytes as they need: seven bits in each byte, lowest first, the highest bit set in all but the last.
//! What must hold: every number has one form, the shortest; what is read is bounded by ten bytes.

/// Why there is no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    /// The bytes end within it.
    Ends,
    /// It has more than 64 bits, or more bytes than it needs.
    Form,
}

/// Bytes of a number.
pub(super) fn len(value: u64) -> usize {
    (70 - (value | 1).leading_zeros() as usize) / 7
}

/// Appends a number.
pub(super) fn write(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The number that the bytes begin with, and the bytes behind it.
pub(super) fn read(bytes: &[u8]) -> Result<(u64, &[u8]), Bad> {
    let mut value = 0;
    for at in 0..10 {
        let byte = *bytes.get(at).ok_or(Bad::Ends)?;
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            // A last byte of zero adds nothing; the tenth has room for one bit.
            let wrong = (at > 0 && byte == 0) || (at == 9 && byte > 1);
            return if wrong { Err(Bad::Form) } else { Ok((value, &bytes[at + 1..])) };
        }
    }
    Err(Bad::Form)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn other_forms_of_a_number_are_refused() {
        assert_eq!(read(&[0x80, 0x00]), Err(Bad::Form));
        assert_eq!(read(&[0xff, 0x80, 0x00]), Err(Bad::Form));
        assert_eq!(read(&[0xff; 10]), Err(Bad::Form));
        let mut most = [0xff; 10];
        most[9] = 1;
        assert_eq!(read(&most), Ok((u64::MAX, &[][..])));
        most[9] = 2;
        assert_eq!(read(&most), Err(Bad::Form));
        assert_eq!(read(&[]), Err(Bad::Ends));
        assert_eq!(read(&[0x80]), Err(Bad::Ends));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(value: u64, shift in 0u32..64, behind: u8) {
            let value = value >> shift;
            let mut bytes = Vec::new();
            write(value, &mut bytes);
            prop_assert_eq!(bytes.len(), len(value));
            bytes.push(behind);
            prop_assert_eq!(read(&bytes), Ok((value, &[behind][..])));
        }

        #[test]
        fn what_is_read_has_one_form(bytes in proptest::collection::vec(any::<u8>(), 0..12)) {
            if let Ok((value, rest)) = read(&bytes) {
                let mut again = Vec::new();
                write(value, &mut again);
                prop_assert_eq!(&again[..], &bytes[..bytes.len() - rest.len()]);
            }
        }
    }
}

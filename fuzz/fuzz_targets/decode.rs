//! Any bytes, as they might come from a peer, read in any shape: decoding ends in a valid sparse vector or an error, and
//! what was accepted can be sent on. The first five bytes choose the shape, the rest is the frame. Every input is tried
//! twice: as it is, and with magic, version, length and checksum made right, so that what lies behind them is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use redsync_core::wire::{FRAME_HEADER, Frame, Shape, VERSION};
use redsync_core::{FrameWriter, IndexCode, Phase, Sparse, Values, Workspace, apply};

const PHASES: [Phase; 3] = [Phase::Both, Phase::Positive, Phase::Negative];
const INDICES: [IndexCode; 3] = [IndexCode::Plain, IndexCode::Rice, IndexCode::Every];
const VALUES: [Values; 5] = [Values::F32, Values::Bf16, Values::Asq, Values::TwoBit, Values::EightBit];

fuzz_target!(|input: &[u8]| {
    let Some((head, bytes)) = input.split_first_chunk::<5>() else { return };
    let shape = shape(*head);
    check(bytes, &shape);
    let mut sealed = bytes.to_vec();
    if sealed.len() >= FRAME_HEADER {
        sealed[..4].copy_from_slice(b"RSYN");
        sealed[4..6].copy_from_slice(&VERSION.to_le_bytes());
        let length = sealed.len() as u64;
        sealed[24..32].copy_from_slice(&length.to_le_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&sealed[..20]);
        hasher.update(&sealed[24..]);
        let checksum = hasher.finalize();
        sealed[20..24].copy_from_slice(&checksum.to_le_bytes());
        check(&sealed, &shape);
    }
});

/// Four bytes of n, one that chooses among the codes.
fn shape([a, b, c, d, codes]: [u8; 5]) -> Shape {
    let codes = usize::from(codes);
    Shape {
        n: u32::from_le_bytes([a, b, c, d]),
        phase: PHASES[codes % 3],
        indices: INDICES[codes / 3 % 3],
        values: VALUES[codes / 9 % 5],
    }
}

fn check(bytes: &[u8], shape: &Shape) {
    let Ok(frame) = Frame::parse(bytes) else { return };
    let mut sparse = Sparse::new();
    for message in frame.messages() {
        let Ok(message) = message else { return };
        if message.decode(shape, &mut sparse).is_err() {
            assert!(sparse.is_empty());
            continue;
        }
        assert_eq!(sparse.len(), message.count() as usize);
        assert!(sparse.indices().is_sorted_by(|a, b| a < b));
        assert!(sparse.indices().last().is_none_or(|last| *last < shape.n));
        assert!(sparse.iter().all(|(_, value)| value.is_finite()));
        send_on(&sparse, shape, message.byte_len());
        if shape.n < 1 << 16 {
            let mut target = vec![0f32; shape.n as usize];
            apply::add(&mut target, std::slice::from_ref(&sparse), 1.0, &mut Workspace::new(1)).unwrap();
        }
    }
}

/// What was accepted can be sent on, in as many bytes, and arrives the same.
fn send_on(sparse: &Sparse, shape: &Shape, bytes: usize) {
    let mut writer = FrameWriter::new();
    writer.begin(0, 0, 0);
    writer.push(sparse, shape.indices, shape.values);
    let frame = Frame::parse(writer.finish()).unwrap();
    let mut again = Sparse::new();
    for message in frame.messages() {
        let message = message.unwrap();
        assert_eq!(message.byte_len(), bytes);
        message.decode(shape, &mut again).unwrap();
    }
    assert_eq!(again.indices(), sparse.indices());
    assert!(again.iter().zip(sparse.iter()).all(|(a, b)| a.1.to_bits() == b.1.to_bits()));
}

//! Any bytes, as they might come from a peer: decoding ends in a valid sparse vector or an error, and what was accepted
//! encodes to the same bytes again. Every input is tried twice: as it is, and with length and checksum made right, so that
//! what lies behind them is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use redsync_core::wire::Frame;
use redsync_core::{FrameWriter, IndexCode, Phase, Sparse, Values, Workspace, apply};

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let mut sealed = bytes.to_vec();
    if sealed.len() >= 32 {
        sealed[..4].copy_from_slice(b"RSYN");
        sealed[4..6].copy_from_slice(&1u16.to_le_bytes());
        let length = sealed.len() as u64;
        sealed[24..32].copy_from_slice(&length.to_le_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&sealed[..20]);
        hasher.update(&sealed[24..]);
        let checksum = hasher.finalize();
        sealed[20..24].copy_from_slice(&checksum.to_le_bytes());
        check(&sealed);
    }
});

fn check(bytes: &[u8]) {
    let Ok(frame) = Frame::parse(bytes) else { return };
    let mut sparse = Sparse::new();
    for message in frame.messages() {
        let Ok(message) = message else { return };
        let (layer, n) = (message.layer(), message.dense_len());
        for phase in [Phase::Both, Phase::Positive, Phase::Negative] {
            if message.decode(layer, n, phase, &mut sparse).is_err() {
                assert!(sparse.is_empty());
                continue;
            }
            assert_eq!(sparse.len(), message.count() as usize);
            assert!(sparse.indices().is_sorted_by(|a, b| a < b));
            assert!(sparse.indices().last().is_none_or(|last| *last < n));
            assert!(sparse.iter().all(|(_, value)| value.is_finite()));
            encode_again(layer, &sparse);
            if n < 1 << 16 {
                let mut target = vec![0f32; n as usize];
                apply::add(&mut target, std::slice::from_ref(&sparse), 1.0, &mut Workspace::new(1)).unwrap();
            }
        }
    }
}

/// What was accepted can be sent on and arrives the same.
fn encode_again(layer: u32, sparse: &Sparse) {
    let values = if sparse.mean().is_some() { Values::Asq } else { Values::F32 };
    for indices in [IndexCode::Plain, IndexCode::Rice] {
        let mut writer = FrameWriter::new();
        writer.begin(0, 0);
        writer.push(layer, sparse, indices, values);
        let frame = Frame::parse(writer.finish()).unwrap();
        let mut again = Sparse::new();
        for message in frame.messages() {
            message.unwrap().decode(layer, sparse.dense_len() as u32, sparse.phase(), &mut again).unwrap();
        }
        assert_eq!(again.indices(), sparse.indices());
        assert!(again.iter().zip(sparse.iter()).all(|(a, b)| a.1.to_bits() == b.1.to_bits()));
    }
}

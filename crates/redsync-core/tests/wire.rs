//! Ruling 20: frames survive the way, and anything else is refused with its exact cause.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::density;
use proptest::prelude::*;
use redsync_core::wire::{BadMessage, Frame, FrameError, VERSION, bound_bits};
use redsync_core::{
    Compressor, Config, FrameWriter, Gradient, IndexCode, Phase, Selector, Sparse, Values, Workspace,
};

const N: usize = 300;

fn frame(values: Values, indices: IndexCode, fraction: f64, step: u64) -> (Vec<u8>, Vec<(u32, f32)>) {
    let config = Config { values, indices, density: density(fraction), ..Config::default() };
    let (mut workspace, mut writer) = (Workspace::new(1), FrameWriter::new());
    writer.begin(step, 3);
    let mut layer = Compressor::new(5, "l", N, config).unwrap();
    let g: Vec<f32> = (0..N).map(|i| ((i * 7919) % 1009) as f32 * 1e-2 - 5.0).collect();
    layer.compress(step, Gradient::F32(&g), 1.0, &mut workspace, &mut writer).unwrap();
    (writer.take(), workspace.message().iter().collect())
}

fn all_kinds() -> Vec<(Values, IndexCode)> {
    let values = [Values::F32, Values::Bf16, Values::Asq];
    values.into_iter().flat_map(|v| [(v, IndexCode::Plain), (v, IndexCode::Rice)]).collect()
}

/// Everything a receiver does.
fn receive(bytes: &[u8], values: Values, step: u64) -> Result<Vec<(u32, f32)>, String> {
    let frame = Frame::parse(bytes).map_err(|e| e.to_string())?;
    frame.expect(step, 3, 1).map_err(|e| e.to_string())?;
    let mut sparse = Sparse::new();
    for message in frame.messages() {
        let message = message.map_err(|e| e.to_string())?;
        message.decode(5, N as u32, values.phase(step), &mut sparse).map_err(|e| e.to_string())?;
    }
    Ok(sparse.iter().collect())
}

/// Makes a changed frame consistent again, so that what lies behind the checksum is tested.
fn reseal(bytes: &mut [u8]) {
    let length = bytes.len() as u64;
    bytes[24..32].copy_from_slice(&length.to_le_bytes());
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..20]);
    hasher.update(&bytes[24..]);
    bytes[20..24].copy_from_slice(&hasher.finalize().to_le_bytes());
}

#[test]
fn every_kind_of_message_arrives_as_it_was_sent() {
    for (values, indices) in all_kinds() {
        for fraction in [0.003, 0.05, 0.5, 1.0] {
            for step in [0, 1] {
                let (bytes, sent) = frame(values, indices, fraction, step);
                assert_eq!(receive(&bytes, values, step).as_ref(), Ok(&sent), "{values:?} {indices:?}");
            }
        }
    }
}

#[test]
fn any_single_flipped_bit_is_noticed() {
    for (values, indices) in all_kinds() {
        let (bytes, _) = frame(values, indices, 0.05, 0);
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::parse(&damaged).is_err(), "bit {bit}");
        }
    }
}

#[test]
fn damage_is_named_exactly() {
    let (bytes, _) = frame(Values::F32, IndexCode::Rice, 0.05, 6);
    assert_eq!(Frame::parse(&bytes[..31]).unwrap_err(), FrameError::Short { have: 31 });
    let mut foreign = bytes.clone();
    foreign[0] = b'X';
    assert_eq!(Frame::parse(&foreign).unwrap_err(), FrameError::Magic { found: *b"XSYN" });
    let mut newer = bytes.clone();
    newer[4] = 9;
    assert_eq!(Frame::parse(&newer).unwrap_err(), FrameError::Version { theirs: 9 });
    let text = FrameError::Version { theirs: 9 }.to_string();
    assert!(text.contains('9') && text.contains(&VERSION.to_string()), "both sides: {text}");
    let declared = bytes.len() as u64;
    let cut = &bytes[..bytes.len() - 1];
    assert_eq!(Frame::parse(cut).unwrap_err(), FrameError::Length { declared, have: cut.len() });
    let mut damaged = bytes.clone();
    *damaged.last_mut().unwrap() ^= 1;
    assert!(matches!(Frame::parse(&damaged).unwrap_err(), FrameError::Checksum { .. }));
    let frame = Frame::parse(&bytes).unwrap();
    assert_eq!(frame.expect(7, 3, 1).unwrap_err(), FrameError::Step { theirs: 6, ours: 7 });
    assert_eq!(frame.expect(6, 2, 1).unwrap_err(), FrameError::Rank { theirs: 3, expected: 2 });
    assert_eq!(frame.expect(6, 3, 2).unwrap_err(), FrameError::Messages { theirs: 1, expected: 2 });
}

#[test]
fn a_message_of_another_layer_size_or_phase_is_refused() {
    let (bytes, _) = frame(Values::Asq, IndexCode::Rice, 0.05, 0);
    let message = Frame::parse(&bytes).unwrap().messages().next().unwrap().unwrap();
    let mut sparse = Sparse::new();
    let mut why = |layer, n, phase| message.decode(layer, n, phase, &mut sparse).unwrap_err().why;
    let n = N as u32;
    assert_eq!(why(4, n, Phase::Positive), BadMessage::Layer { expected: 4 });
    assert_eq!(why(5, n + 1, Phase::Positive), BadMessage::Size { theirs: n, ours: n + 1 });
    let wrong_phase = BadMessage::Phase { theirs: Phase::Positive, ours: Phase::Negative };
    assert_eq!(why(5, n, Phase::Negative), wrong_phase);
    assert!(sparse.is_empty());
}

/// A peer that computes checksums can still send nonsense; each kind has its own error.
#[test]
fn well_sealed_nonsense_is_refused() {
    let (bytes, _) = frame(Values::Asq, IndexCode::Rice, 0.05, 0);
    let tampered = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        reseal(&mut bytes);
        receive(&bytes, Values::Asq, 0).unwrap_err()
    };
    let header = 32;
    for (at, value, expected) in [
        (header + 8, 0xff, "do not fit"),       // count: more than the bits can hold
        (header + 10, 0xff, "of 300 elements"), // count: more than the layer
        (header + 12, 7, "unknown phase 7"),    //
        (header + 13, 9, "unknown index code 9"),
        (header + 14, 9, "unknown value code 9"),
        (header + 15, 32, "Rice parameter 32"),
        (header + 27, 0xc0, "mean"), // sign bit of the mean
    ] {
        let error = tampered(&|bytes: &mut Vec<u8>| bytes[at] = value);
        assert!(error.contains(expected), "{at}: {error}");
    }
    let infinite = tampered(&|b| b[header + 24..header + 28].copy_from_slice(&f32::INFINITY.to_le_bytes()));
    assert!(infinite.contains("is inf"), "{infinite}");
    let longer = tampered(&|b| b.push(0));
    assert!(longer.contains("1 bytes follow"), "{longer}");
    let ends = tampered(&|b| b[header + 16] = 0xff);
    assert!(ends.contains("ends inside message 0"), "{ends}");
    let more = tampered(&|b| b[6] = 2);
    assert!(more.contains("2 messages"), "{more}");
}

#[test]
fn unsorted_or_outside_plain_indices_are_refused() {
    let (bytes, sent) = frame(Values::Asq, IndexCode::Plain, 0.05, 0);
    let first = 32 + 24 + 4;
    let set = |position: usize, index: u32| {
        let mut bytes = bytes.clone();
        bytes[first + 4 * position..][..4].copy_from_slice(&index.to_le_bytes());
        reseal(&mut bytes);
        receive(&bytes, Values::Asq, 0)
    };
    assert!(set(0, sent[0].0).is_ok());
    assert!(set(0, sent[1].0).unwrap_err().contains("position 1"));
    assert!(set(sent.len() - 1, N as u32).unwrap_err().contains(&format!("position {}", sent.len() - 1)));
}

/// The example of docs/wire-format.md, byte by byte.
#[test]
fn the_documented_example_is_what_is_written() {
    let config = Config { values: Values::Asq, density: density(0.25), ..Config::default() };
    let mut layer = Compressor::new(5, "l", 8, config).unwrap();
    let mut writer = FrameWriter::new();
    writer.begin(2, 0);
    let g = [0.0, 1.0, 0.0, -9.0, 3.0, 0.5, 0.0, 0.0];
    layer.compress(2, Gradient::F32(&g), 1.0, &mut Workspace::new(1), &mut writer).unwrap();
    let message =
        [5, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0, 1, 1, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0x0b];
    let frame = writer.finish();
    assert_eq!(frame[32..], message);
    assert_eq!(frame[..20], *b"RSYN\x01\0\x01\0\x02\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(frame[24..32], 61u64.to_le_bytes());
}

#[test]
fn several_layers_share_a_frame() {
    let (mut workspace, mut writer) = (Workspace::new(1), FrameWriter::new());
    writer.begin(4, 0);
    let sizes = [100usize, 0, 7, 5000];
    for (i, n) in sizes.into_iter().enumerate() {
        let mut layer = Compressor::new(i as u32, format!("l{i}"), n, Config::default()).unwrap();
        let g: Vec<f32> = (0..n).map(|j| (j as f32).cos()).collect();
        layer.compress(4, Gradient::F32(&g), 1.0, &mut workspace, &mut writer).unwrap();
    }
    let bytes = writer.take();
    let frame = Frame::parse(&bytes).unwrap();
    assert_eq!((frame.len(), frame.messages().count()), (4, 4));
    for (i, message) in frame.messages().enumerate() {
        let (mut sparse, n) = (Sparse::new(), sizes[i]);
        message.unwrap().decode(i as u32, n as u32, Phase::Both, &mut sparse).unwrap();
        assert_eq!(sparse.len(), density(0.001).k(n));
    }
}

/// The paper's 32 bits per index become at most 3% more than the entropy, headers and checksum included.
#[test]
fn quantized_messages_are_near_the_entropy_bound() {
    use rand::{RngExt, SeedableRng};
    let n = 1 << 21;
    let mut random = rand_xoshiro::Xoshiro256PlusPlus::seed_from_u64(1);
    let g: Vec<f32> = (0..n).map(|_| random.random_range(-1f32..1.0)).collect();
    for fraction in [0.001, 0.01, 0.0625, 0.25] {
        let config = Config {
            values: Values::Asq,
            density: density(fraction),
            selector: Selector::Trimmed,
            ..Config::default()
        };
        let mut layer = Compressor::new(0, "l", n, config).unwrap();
        let mut writer = FrameWriter::new();
        writer.begin(0, 0);
        let count = layer.compress(0, Gradient::F32(&g), 1.0, &mut Workspace::new(1), &mut writer).unwrap();
        let bits = 8.0 * writer.finish().len() as f64 / count as f64;
        let bound = bound_bits(n, count);
        assert!(bits <= 1.03 * bound, "{fraction}: {bits} against {bound}");
    }
}

proptest! {
    /// The same work as the fuzz target does, in short.
    #[test]
    fn mutated_frames_never_panic_and_what_is_accepted_is_valid(
        kind in 0usize..6, edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in 0usize..40, extra in proptest::collection::vec(any::<u8>(), 0..8), sealed: bool,
    ) {
        let (values, indices) = all_kinds()[kind];
        let (mut bytes, _) = frame(values, indices, 0.05, 0);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        bytes.extend(extra);
        if sealed && bytes.len() >= 32 {
            reseal(&mut bytes);
        }
        if let Ok(elements) = receive(&bytes, values, 0) {
            prop_assert!(elements.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert!(elements.iter().all(|(i, x)| (*i as usize) < N && x.is_finite()));
        }
    }
}

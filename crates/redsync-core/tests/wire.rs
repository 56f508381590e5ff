//! Ruling 20: frames survive the way, and anything else is refused with its exact cause.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::density;
use proptest::prelude::*;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_core::wire::{BadMessage, FRAME_HEADER, Frame, FrameError, Shape, VERSION, bound_bits};
use redsync_core::{
    Compressor, Config, FrameWriter, Gradient, IndexCode, Phase, Selector, Sparse, Values, Workspace, bf16,
};

const N: usize = 300;
const PLAN: u64 = 0x0123_4567_89ab_cdef;
const VALUES: [Values; 5] = [Values::F32, Values::Bf16, Values::Asq, Values::TwoBit, Values::EightBit];

/// A frame of step, rank 3 and one message, its shape, and what it holds.
fn frame(values: Values, indices: IndexCode, fraction: f64, step: u64) -> (Vec<u8>, Shape, Vec<(u32, f32)>) {
    let config = Config { values, indices, density: density(fraction), ..Config::default() };
    let (mut workspace, mut writer) = (Workspace::new(1), FrameWriter::new());
    writer.begin(step, 3, PLAN);
    let mut layer = Compressor::new(5, "l", N, config).unwrap();
    let g: Vec<f32> = (0..N).map(|i| ((i * 7919) % 1009) as f32 * 1e-2 - 5.001).collect();
    layer.compress(step, Gradient::F32(&g), 1.0, &mut workspace, &mut writer).unwrap();
    (writer.take(), layer.shape(step), workspace.message().iter().collect())
}

fn all_kinds() -> Vec<(Values, IndexCode)> {
    VALUES.into_iter().flat_map(|v| [(v, IndexCode::Plain), (v, IndexCode::Rice)]).collect()
}

/// Everything a receiver does.
fn receive(bytes: &[u8], shape: &Shape, step: u64) -> Result<Vec<(u32, f32)>, String> {
    let frame = Frame::parse(bytes).map_err(|e| e.to_string())?;
    frame.expect(step, 3, 1, PLAN).map_err(|e| e.to_string())?;
    let mut sparse = Sparse::new();
    for message in frame.messages() {
        let message = message.map_err(|e| e.to_string())?;
        message.decode(shape, &mut sparse).map_err(|e| e.to_string())?;
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

/// A frame around a message that was written by hand.
fn around(message: &[u8]) -> Vec<u8> {
    let mut writer = FrameWriter::new();
    writer.begin(0, 3, PLAN);
    let mut bytes = writer.take();
    bytes[6] = 1;
    bytes.extend(message);
    reseal(&mut bytes);
    bytes
}

fn shape(n: u32, values: Values, indices: IndexCode) -> Shape {
    Shape { n, phase: values.phase(0), indices, values }
}

#[test]
fn every_kind_of_message_arrives_as_it_was_sent() {
    for (values, indices) in all_kinds() {
        for fraction in [0.003, 0.007, 0.05, 0.5, 1.0] {
            for step in [0, 1] {
                let (bytes, shape, sent) = frame(values, indices, fraction, step);
                assert!(!sent.is_empty());
                assert_eq!(receive(&bytes, &shape, step).as_ref(), Ok(&sent), "{values:?} {indices:?}");
            }
        }
    }
}

#[test]
fn all_elements_arrive_without_indices() {
    for values in [Values::F32, Values::Bf16] {
        let dense: Vec<f32> = (0..N).map(|i| bf16::from_f32((i as f32).sin()).to_f32()).collect();
        let sparse = Sparse::from_parts(N as u32, (0..N as u32).collect(), dense).unwrap();
        let mut writer = FrameWriter::new();
        writer.begin(0, 3, PLAN);
        writer.push(&sparse, IndexCode::Every, values);
        let bytes = writer.take();
        let width = if values == Values::F32 { 4 } else { 2 };
        assert_eq!(bytes.len(), FRAME_HEADER + 4 + width * N);
        let received = receive(&bytes, &shape(N as u32, values, IndexCode::Every), 0).unwrap();
        assert_eq!(received, sparse.iter().collect::<Vec<_>>());
    }
    let mut four = vec![0x04, 9];
    four.extend([0x80, 0x3f, 0x00, 0x40, 0x80, 0xbf, 0x00, 0xc0, 0b11_10_01_00]);
    let received = receive(&around(&four), &shape(4, Values::TwoBit, IndexCode::Every), 0).unwrap();
    assert_eq!(received, [(0, 1.0), (1, 2.0), (2, -1.0), (3, -2.0)]);
    let eight = [&[0x03, 7][..], &0.5f32.to_le_bytes(), &[127, 0, 0x81]].concat();
    let received = receive(&around(&eight), &shape(3, Values::EightBit, IndexCode::Every), 0).unwrap();
    assert_eq!(received, [(0, 63.5), (1, 0.0), (2, -63.5)]);
}

#[test]
fn nothing_to_send_costs_two_bytes() {
    for values in VALUES {
        for indices in [IndexCode::Plain, IndexCode::Rice, IndexCode::Every] {
            let shape = shape(N as u32, values, indices);
            let (mut sparse, mut writer) = (Sparse::new(), FrameWriter::new());
            sparse.reset(shape.n, shape.phase);
            writer.begin(0, 3, PLAN);
            writer.push(&sparse, indices, values);
            let bytes = writer.take();
            assert_eq!(bytes.len(), FRAME_HEADER + 2);
            let possible = !(values == Values::Asq && indices == IndexCode::Every);
            assert_eq!(receive(&bytes, &shape, 0).is_ok_and(|sent| sent.is_empty()), possible);
        }
    }
}

#[test]
fn any_single_flipped_bit_is_noticed() {
    for (values, indices) in all_kinds() {
        let (bytes, ..) = frame(values, indices, 0.05, 0);
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::parse(&damaged).is_err(), "bit {bit}");
        }
    }
}

#[test]
fn damage_is_named_exactly() {
    let (bytes, ..) = frame(Values::F32, IndexCode::Rice, 0.05, 6);
    for have in [0, 5, 39] {
        assert_eq!(Frame::parse(&bytes[..have]).unwrap_err(), FrameError::Short { have });
    }
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
    assert_eq!(frame.expect(7, 3, 1, PLAN).unwrap_err(), FrameError::Step { theirs: 6, ours: 7 });
    assert_eq!(frame.expect(6, 2, 1, PLAN).unwrap_err(), FrameError::Rank { theirs: 3, expected: 2 });
    assert_eq!(frame.expect(6, 3, 2, PLAN).unwrap_err(), FrameError::Messages { theirs: 1, expected: 2 });
    assert_eq!(frame.expect(6, 3, 1, 1).unwrap_err(), FrameError::Plan { theirs: PLAN, ours: 1 });
}

/// A whole frame of version 1, 32 bytes of header, with and without a message.
#[test]
fn a_frame_of_version_1_is_told_by_its_version() {
    let empty = b"RSYN\x01\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\x11\x22\x33\x44\x20\0\0\0\0\0\0\0";
    let message =
        [5, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0, 1, 1, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0x0b];
    for old in [empty.to_vec(), [&empty[..], &message].concat()] {
        let error = Frame::parse(&old).unwrap_err();
        assert_eq!(error, FrameError::Version { theirs: 1 });
        assert_eq!(error.to_string(), "the frame has format version 1, this program reads version 2");
    }
}

/// A peer that computes checksums can still send nonsense; each kind has its own error.
#[test]
fn well_sealed_nonsense_is_refused() {
    use BadMessage::*;
    let n = 8;
    let one_half = [0x00, 0x3f]; // as bf16
    let why = |values, indices, head: &[u8], payload: &[u8]| {
        let bytes = around(&[head, &[payload.len() as u8], payload].concat());
        let message = Frame::parse(&bytes).unwrap().messages().next().unwrap().unwrap();
        let mut sparse = Sparse::new();
        let error = message.decode(&shape(n, values, indices), &mut sparse).unwrap_err();
        assert!(sparse.is_empty() && error.position == 0);
        error.why
    };
    let (bf16, mean, two, eight) = (Values::Bf16, Values::Asq, Values::TwoBit, Values::EightBit);
    let (plain, rice, every) = (IndexCode::Plain, IndexCode::Rice, IndexCode::Every);
    let two_mean = 2f32.to_le_bytes();
    let rice_mean = |mean: f32| [&mean.to_le_bytes()[..], &[0x0b]].concat();
    assert_eq!(why(mean, rice, &[9], &rice_mean(2.0)), Count { count: 9, n });
    assert_eq!(why(mean, rice, &[2], &two_mean[..3]), Payload { count: 2, bytes: 3 });
    assert_eq!(why(mean, rice, &[2], &two_mean), Payload { count: 2, bytes: 4 });
    assert_eq!(why(mean, rice, &[2], &rice_mean(-2.0)), MeanSign { mean: -2.0 });
    let infinite = why(mean, rice, &[2], &rice_mean(f32::INFINITY));
    assert_eq!(infinite, Value { position: 0, value: f32::INFINITY });
    assert_eq!(why(mean, rice, &[2], &[&two_mean[..], &[0x8b]].concat()), Padding);
    assert_eq!(why(mean, rice, &[2], &[&two_mean[..], &[0x0b, 0]].concat()), Padding);
    assert_eq!(why(mean, rice, &[2], &[&two_mean[..], &[0x03]].concat()), BitsEnd { position: 1 });
    assert_eq!(why(mean, rice, &[2], &[&two_mean[..], &[0x43]].concat()), Index { position: 1, n });
    assert_eq!(why(mean, every, &[0], &[]), Shape(shape(n, mean, every)));
    let index = |i: u32| [&one_half[..], &i.to_le_bytes()].concat();
    assert_eq!(why(bf16, plain, &[1], &index(8)), Index { position: 0, n });
    assert_eq!(why(bf16, plain, &[1], &index(7)[..5]), Payload { count: 1, bytes: 5 });
    assert_eq!(
        why(bf16, plain, &[1], &[0x80, 0xff, 0, 0, 0, 0]),
        Value { position: 0, value: f32::NEG_INFINITY }
    );
    assert_eq!(why(bf16, plain, &[2], &[0, 0x3f, 0, 0x3f, 5, 0, 0, 0, 5, 0, 0, 0]), Index { position: 1, n });
    assert_eq!(why(bf16, every, &[7], &[0; 14]), Every { count: 7, n });
    assert_eq!(why(bf16, every, &[8], &[0; 17]), Payload { count: 8, bytes: 17 });
    let levels = [0x00, 0x3f, 0x80, 0x3f, 0x00, 0x80, 0x80, 0xbf];
    let with = |at: usize, byte: u8| {
        let mut all = [&levels[..], &[0b1101, 0x0b]].concat();
        all[at] = byte;
        why(two, rice, &[2], &all)
    };
    assert_eq!(with(8, 0b1_1101), Padding);
    assert_eq!(with(1, 0xbf), Level { level: 0, value: -0.5 });
    assert_eq!(with(5, 0x00), Level { level: 2, value: 0.0 });
    assert_eq!(with(7, 0x3f), Level { level: 3, value: 1.0 });
    assert_eq!(with(3, 0x7f), Level { level: 1, value: f32::INFINITY });
    assert_eq!(why(two, rice, &[2], &levels), Payload { count: 2, bytes: 8 });
    // With one of eight elements the parameter is 2: index 0 is the bits `1 0 0`.
    let scaled = |scale: f32, bytes: &[u8]| [&scale.to_le_bytes()[..], bytes].concat();
    for scale in [-0.5, -0.0, f32::INFINITY, f32::MAX / 100.0] {
        assert_eq!(why(eight, rice, &[1], &scaled(scale, &[1, 0x01])), Scale { scale });
    }
    let nan = why(eight, rice, &[1], &scaled(f32::NAN, &[1, 0x01]));
    assert!(matches!(nan, Scale { scale } if scale.is_nan()));
    let wrong = |multiple, scale| Multiple { position: 0, multiple, scale };
    assert_eq!(why(eight, rice, &[1], &scaled(0.5, &[0x80, 0x01])), wrong(-128, 0.5));
    assert_eq!(why(eight, rice, &[1], &scaled(0.0, &[0xff, 0x01])), wrong(-1, 0.0));
    assert_eq!(why(eight, every, &[8], &scaled(0.5, &[0; 9])), Payload { count: 8, bytes: 13 });
}

/// What is no sequence of messages is refused before anything is decoded.
#[test]
fn messages_that_do_not_fill_the_frame_are_refused() {
    let errors = |message: &[u8]| -> Vec<FrameError> {
        let bytes = around(message);
        Frame::parse(&bytes).unwrap().messages().filter_map(Result::err).collect()
    };
    assert_eq!(errors(&[0, 0]), []);
    assert_eq!(errors(&[0, 0, 7, 7]), [FrameError::Trailing { bytes: 2 }]);
    let cut: [&[u8]; 6] = [&[], &[0x80], &[1], &[1, 0x80], &[1, 1], &[1, 0xff, 0xff, 0xff, 0xff, 0x0f]];
    for message in cut {
        assert_eq!(errors(message), [FrameError::Ends { position: 0 }], "{message:?}");
    }
    let long: [&[u8]; 3] = [&[0x80, 0, 0], &[0, 0x80, 0], &[0xff, 0xff, 0xff, 0xff, 0x1f, 0]];
    for message in long {
        assert_eq!(errors(message), [FrameError::Number { position: 0 }], "{message:?}");
    }
    let mut two = around(&[0, 0, 1]);
    two[6] = 2;
    reseal(&mut two);
    let second = Frame::parse(&two).unwrap().messages().nth(1).unwrap();
    assert_eq!(second.unwrap_err(), FrameError::Ends { position: 1 });
}

/// A vector of the wrong kind is a mistake of the caller, and nothing that could be misread is sent.
#[test]
fn what_a_code_cannot_say_is_not_written() {
    let sparse = Sparse::from_parts(8, vec![1, 4], vec![2.0, 2.0]).unwrap();
    for (indices, values) in
        [(IndexCode::Rice, Values::Asq), (IndexCode::Rice, Values::TwoBit), (IndexCode::Every, Values::F32)]
    {
        let refused = std::panic::catch_unwind(|| {
            let mut writer = FrameWriter::new();
            writer.begin(0, 0, 0);
            writer.push(&sparse, indices, values);
        });
        assert!(refused.is_err(), "{indices:?} {values:?}");
    }
}

/// The bytes of every block of docs/wire-format.md that holds nothing but bytes.
fn documented() -> Vec<Vec<u8>> {
    let document = include_str!("../../../docs/wire-format.md");
    let mut blocks = vec![Vec::new()];
    for line in document.lines() {
        let byte = |word: &str| u8::from_str_radix(word, 16).ok().filter(|_| word.len() == 2);
        let bytes: Option<Vec<u8>> =
            line.strip_prefix("    ").and_then(|l| l.split_whitespace().map(byte).collect());
        match (bytes, blocks.last_mut()) {
            (Some(bytes), Some(block)) => block.extend(bytes),
            _ => blocks.push(Vec::new()),
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

/// The examples of docs/wire-format.md, byte by byte.
#[test]
fn the_documented_examples_are_what_is_written() {
    let g = [0.0, 1.0, 0.0, -9.0, 3.0, 0.5, 0.0, 0.0];
    let written = |values, fraction, step| {
        let config = Config { values, density: density(fraction), ..Config::default() };
        let mut layer = Compressor::new(5, "l", 8, config).unwrap();
        let mut writer = FrameWriter::new();
        writer.begin(step, 0, PLAN);
        layer.compress(step, Gradient::F32(&g), 1.0, &mut Workspace::new(1), &mut writer).unwrap();
        writer.take()
    };
    let examples = documented();
    assert_eq!(examples.len(), 4);
    assert_eq!(examples[0], written(Values::Asq, 0.25, 2));
    assert_eq!(examples[1], written(Values::TwoBit, 0.5, 2)[FRAME_HEADER..]);
    let every = Sparse::from_parts(3, vec![0, 1, 2], vec![1.0, 0.0, -2.0]).unwrap();
    let mut writer = FrameWriter::new();
    writer.begin(2, 0, PLAN);
    writer.push(&every, IndexCode::Every, Values::Bf16);
    assert_eq!(examples[2], writer.finish()[FRAME_HEADER..]);
    writer.begin(2, 0, PLAN);
    writer.push_squares([3.0, 0.26, 0.0].into_iter());
    assert_eq!(examples[3], writer.finish()[FRAME_HEADER..]);
}

#[test]
fn several_layers_share_a_frame() {
    let (mut workspace, mut writer) = (Workspace::new(1), FrameWriter::new());
    writer.begin(4, 0, PLAN);
    let sizes = [100usize, 0, 7, 5000];
    for (i, n) in sizes.into_iter().enumerate() {
        let mut layer = Compressor::new(i as u32, format!("l{i}"), n, Config::default()).unwrap();
        let g: Vec<f32> = (0..n).map(|j| (j as f32).cos()).collect();
        layer.compress(4, Gradient::F32(&g), 1.0, &mut workspace, &mut writer).unwrap();
    }
    let bytes = writer.take();
    let frame = Frame::parse(&bytes).unwrap();
    assert_eq!((frame.len(), frame.messages().count()), (4, 4));
    let messages: Vec<_> = frame.messages().map(Result::unwrap).collect();
    assert_eq!(messages.iter().map(|m| m.byte_len()).sum::<usize>(), bytes.len() - FRAME_HEADER);
    for (message, n) in messages.iter().zip(sizes) {
        let mut sparse = Sparse::new();
        message.decode(&shape(n as u32, Values::F32, IndexCode::Rice), &mut sparse).unwrap();
        assert_eq!(sparse.len(), density(0.001).k(n));
    }
    // The wrong layer is refused, and told by its position.
    let error = messages[3].decode(&shape(3, Values::F32, IndexCode::Rice), &mut Sparse::new()).unwrap_err();
    assert_eq!(error.to_string(), "message 3: the message has 5 elements, the layer only 3");
}

/// The paper's 32 bits per index become at most 3% more than the entropy, headers and checksum included.
#[test]
fn quantized_messages_are_near_the_entropy_bound() {
    let n = 1 << 21;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let g: Vec<f32> = (0..n).map(|_| random.random_range(-1f32..1.0)).collect();
    for (fraction, values, value_bits) in [
        (0.001, Values::Asq, 0.0),
        (0.01, Values::Asq, 0.0),
        (0.0625, Values::Asq, 0.0),
        (0.25, Values::Asq, 0.0),
        (0.25, Values::TwoBit, 2.0),
    ] {
        let config =
            Config { values, density: density(fraction), selector: Selector::Trimmed, ..Config::default() };
        let mut layer = Compressor::new(0, "l", n, config).unwrap();
        let mut writer = FrameWriter::new();
        writer.begin(0, 0, PLAN);
        let count = layer.compress(0, Gradient::F32(&g), 1.0, &mut Workspace::new(1), &mut writer).unwrap();
        let bits = 8.0 * writer.finish().len() as f64 / count as f64;
        let bound = bound_bits(n, count) + value_bits;
        assert!(bits <= 1.03 * bound, "{fraction}: {bits} against {bound}");
    }
}

/// Changes a frame here and there: bytes, bits, length; mostly with the checksum made right again.
fn mutate(bytes: &mut Vec<u8>, random: &mut impl Rng) {
    for _ in 0..random.random_range(0..5) {
        // Most often where the messages begin, since all else depends on it.
        let at = match random.random_range(0..4) {
            0 => random.random_range(0..bytes.len()),
            _ => random.random_range(bytes.len().min(FRAME_HEADER)..bytes.len().min(FRAME_HEADER + 14) + 1),
        };
        if let Some(byte) = bytes.get_mut(at) {
            match random.random_range(0..4) {
                0 => *byte = random.random(),
                1 => *byte = [0, 0x7f, 0x80, 0xff][random.random_range(0..4usize)],
                2 => *byte = byte.wrapping_add(1),
                _ => *byte ^= 1 << random.random_range(0..8),
            }
        }
    }
    match random.random_range(0..6) {
        0 => bytes.truncate(random.random_range(0..bytes.len() + 1)),
        1 => bytes.extend((0..random.random_range(0..9)).map(|_| random.random::<u8>())),
        _ => {}
    }
    if bytes.len() >= FRAME_HEADER && random.random_range(0..8) > 0 {
        bytes[..6].copy_from_slice(b"RSYN\x02\0");
        reseal(bytes);
    }
}

/// Decodes changed frames, mostly in the shape they were written in. What is accepted is valid and can be sent on. Returns
/// how many frames had the right checksum, and how many messages were accepted.
fn decode_mutated(frames: u64) -> (u64, u64) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
    let mut kinds = Vec::new();
    for (values, indices) in all_kinds() {
        for fraction in [0.003, 0.05, 0.3] {
            let (bytes, shape, _) = frame(values, indices, fraction, 0);
            kinds.push((bytes, shape));
        }
    }
    let all = [&[8, 10][..], &[0x80, 0x3f, 0, 0x40, 0x80, 0xbf, 0, 0xc0, 0x1b, 0xe4]].concat();
    kinds.push((around(&all), shape(8, Values::TwoBit, IndexCode::Every)));
    let all = [&[8, 12][..], &0.25f32.to_le_bytes(), &[1, 2, 0xff, 0, 127, 0x81, 9, 0]].concat();
    kinds.push((around(&all), shape(8, Values::EightBit, IndexCode::Every)));
    let (mut sealed, mut accepted) = (0, 0);
    let (mut bytes, mut sparse, mut again) = (Vec::new(), Sparse::new(), Sparse::new());
    let mut writer = FrameWriter::new();
    for _ in 0..frames {
        let (original, written) = &kinds[random.random_range(0..kinds.len())];
        let mut shape = *written;
        bytes.clone_from(original);
        mutate(&mut bytes, &mut random);
        match random.random_range(0..12) {
            0 => shape.n = random.random::<u32>() >> random.random_range(0..32),
            1 => shape.values = VALUES[random.random_range(0..4usize)],
            2 => {
                shape.phase = [Phase::Both, Phase::Positive, Phase::Negative][random.random_range(0..3usize)]
            }
            3 => {
                shape.indices =
                    [IndexCode::Plain, IndexCode::Rice, IndexCode::Every][random.random_range(0..3usize)]
            }
            _ => {}
        }
        let Ok(frame) = Frame::parse(&bytes) else { continue };
        sealed += 1;
        for message in frame.messages() {
            let Ok(message) = message else { break };
            if message.decode(&shape, &mut sparse).is_err() {
                assert!(sparse.is_empty());
                continue;
            }
            accepted += 1;
            assert_eq!(sparse.len(), message.count() as usize);
            assert!(sparse.indices().is_sorted_by(|a, b| a < b));
            assert!(sparse.iter().all(|(i, x)| i < shape.n && x.is_finite()));
            writer.begin(frame.step(), frame.rank(), PLAN);
            writer.push(&sparse, shape.indices, shape.values);
            let sent_on = Frame::parse(writer.finish()).unwrap().messages().next().unwrap().unwrap();
            assert_eq!(sent_on.byte_len(), message.byte_len());
            sent_on.decode(&shape, &mut again).unwrap();
            let same = |(a, b): ((u32, f32), (u32, f32))| a.0 == b.0 && a.1.to_bits() == b.1.to_bits();
            assert!(sparse.iter().zip(again.iter()).all(same));
        }
    }
    (sealed, accepted)
}

/// The same work as the fuzz target does, in short.
#[test]
fn mutated_frames_never_panic_and_what_is_accepted_is_valid() {
    let (sealed, accepted) = decode_mutated(50_000);
    // The changes are neither so wild nor so tame that one side is never tried.
    assert!(sealed > 25_000 && (2_000..sealed).contains(&accepted), "{sealed} {accepted}");
}

/// For a release build: `cargo test --release -p redsync-core --test wire -- --ignored --nocapture`.
#[test]
#[ignore = "takes a minute"]
fn ten_million_mutated_frames() {
    let frames = 10_000_000;
    let (sealed, accepted) = decode_mutated(frames);
    println!("{frames} frames, {sealed} with the right checksum, {accepted} messages accepted");
}

/// Any squares, also zero, denormal and huge ones.
fn squares() -> impl Strategy<Value = Vec<f32>> {
    let one = prop_oneof![Just(0f32), Just(f32::MIN_POSITIVE / 3.0), Just(f32::MAX), 0f32..1e-30, 0f32..2.0];
    prop::collection::vec(one, 0..70)
}

proptest! {
    /// A guess that is right stays; another one comes as near as four bits allow, from its side.
    #[test]
    fn second_moments_arrive_near_what_was_sent(squares in squares(), off in prop_oneof![Just(1f32), 0f32..1e6]) {
        let mut writer = FrameWriter::new();
        writer.begin(3, 1, PLAN);
        let header = writer.push_squares(squares.iter().copied());
        prop_assert_eq!(writer.len(), 40 + header + squares.len().div_ceil(2) + usize::from(!squares.is_empty()));
        let frame = Frame::parse(writer.finish()).unwrap();
        let message = frame.messages().next().unwrap().unwrap();
        let mut right = squares.clone();
        message.squares(&mut right).unwrap();
        prop_assert_eq!(&right, &squares);
        let mut guesses: Vec<f32> = squares.iter().map(|square| (square * off).min(f32::MAX)).collect();
        let begin = guesses.clone();
        message.squares(&mut guesses).unwrap();
        let top = squares.iter().copied().fold(0f32, f32::max);
        for ((sent, came), guess) in squares.iter().zip(&guesses).zip(&begin) {
            prop_assert!(came.is_finite() && *came >= 0.0);
            let nearer = (came <= guess && *came >= sent.min(*guess)) || (came >= guess && *came <= sent.max(*guess));
            let near = (0.4999..2.0001).contains(&(f64::from(*came) / f64::from(*sent)));
            let far_below = f64::from(*sent) * 11_000.0 < f64::from(top) && f64::from(*came) * 11_000.0 < f64::from(top);
            let tiny = *sent < 2.0 * f32::MIN_POSITIVE && *came < 2.0 * f32::MIN_POSITIVE;
            prop_assert!(nearer && (near || far_below || tiny || *sent == f32::MAX), "{} as {}, guessed {}", sent, came, guess);
        }
        guesses.push(1.0);
        prop_assert!(message.squares(&mut guesses).is_err());
    }
}

/// Those of second moments, well sealed, and changed ones by the thousand.
#[test]
fn second_moments_that_nobody_wrote_are_refused() {
    let read = |message: &[u8], guesses: &[f32]| {
        let (bytes, mut guesses) = (around(message), guesses.to_vec());
        let frame = Frame::parse(&bytes).unwrap();
        let message = frame.messages().next().unwrap().unwrap();
        message.squares(&mut guesses).map(|()| guesses).map_err(|error| error.to_string())
    };
    assert_eq!(read(&[3, 3, 129, 0x10, 0x0f], &[4.0, 2.0, 1e-20]).unwrap(), [4.0, 2.0, 1e-20]);
    assert_eq!(read(&[0, 0], &[]).unwrap(), [0f32; 0]);
    assert!(read(&[2, 2, 255, 0], &[1.0; 2]).unwrap_err().contains("inf"));
    assert!(read(&[3, 3, 129, 0, 0x10], &[1.0; 3]).unwrap_err().contains("more follows"));
    assert!(
        read(&[3, 2, 129, 0], &[1.0; 3]).unwrap_err().contains("3 elements do not fit a payload of 2 bytes")
    );
    assert!(
        read(&[3, 3, 129, 0, 0], &[1.0; 4])
            .unwrap_err()
            .contains("3 elements, where it must have all 4 or none")
    );
    let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
    let (mut writer, mut accepted) = (FrameWriter::new(), 0);
    writer.begin(0, 0, PLAN);
    writer.push_squares((0..37).map(|i| 1.5f32.powi(i - 20)));
    let original = writer.finish().to_vec();
    for _ in 0..20_000 {
        let (mut bytes, mut guesses) = (original.clone(), [1f32; 37]);
        mutate(&mut bytes, &mut random);
        let Ok(frame) = Frame::parse(&bytes) else { continue };
        for message in frame.messages() {
            let Ok(message) = message else { break };
            match message.squares(&mut guesses) {
                Ok(()) => accepted += 1,
                Err(_) => assert_eq!(guesses, [1.0; 37]),
            }
            assert!(guesses.iter().all(|x| x.is_finite() && *x >= 0.0));
            guesses = [1.0; 37];
        }
    }
    assert!((1_000..19_000).contains(&accepted), "{accepted}");
}

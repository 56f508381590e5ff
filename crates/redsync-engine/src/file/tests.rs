//! Every wrong byte is told, whatever it is; a crash leaves the old file.
#![allow(clippy::unwrap_used)]

use super::read::{Wrong, read_from, take_checksum};
use super::replace::temporary;
use super::*;
use std::fs;

const FORMAT: &str = "test-file";

fn content() -> Content {
    // Names before and after those that the file has of its own.
    let about = [("", "first"), ("a", "1"), ("step", "12"), ("quote \"\u{e9}\"", "a\nb"), ("zz", "")];
    let about = about.map(|(name, text)| (name.to_string(), text.to_string())).into();
    let tensors = [("v/b", vec![0.5, -0.25]), ("u/zz", vec![]), ("a", vec![1.0, -0.0, f32::NAN])];
    Content { about, tensors: tensors.map(|(name, values)| (name.to_string(), values)).into() }
}

fn refs(content: &Content) -> impl Iterator<Item = (&str, &[f32])> {
    content.tensors.iter().map(|(name, values)| (&name[..], &values[..]))
}

fn bytes(content: &Content) -> Vec<u8> {
    let mut file = io::Cursor::new(Vec::new());
    Body::new(FORMAT, &content.about, refs(content)).unwrap().write_to(&mut file).unwrap();
    file.into_inner()
}

fn parse(bytes: &[u8]) -> Result<Content, Wrong> {
    read_from(&mut &bytes[..], bytes.len() as u64, FORMAT)
}

/// As bits, in which -0.0 is not 0.0 and NaN is itself.
fn bits(content: &Content) -> (About, Vec<(String, Vec<u32>)>) {
    let vector = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    (content.about.clone(), refs(content).map(|(name, values)| (name.into(), vector(values))).collect())
}

fn split(bytes: &[u8]) -> (String, Vec<u8>) {
    let size = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let (header, tensors) = bytes[PREFIX..].split_at(size);
    (String::from_utf8(header.into()).unwrap(), tensors.into())
}

/// A file with the right checksum, whatever else is wrong with it.
fn seal(header: &str, tensors: &[u8]) -> Vec<u8> {
    let mut header = header.as_bytes().to_vec();
    take_checksum(&mut header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(tensors);
    let place = PREFIX + OPENING.len();
    let mut crc = Hasher::new();
    crc.update(&file);
    file[place..place + 8].copy_from_slice(hex(crc).as_bytes());
    file
}

/// Why a file is refused in whose header a text was replaced, with the right checksum.
fn refusal(from: &str, to: &str) -> String {
    let (header, tensors) = split(&bytes(&content()));
    assert!(header.contains(from), "{header}");
    parse(&seal(&header.replace(from, to), &tensors)).unwrap_err().of(Path::new("file")).to_string()
}

#[test]
fn what_was_written_comes_back_to_the_bit() {
    let mut long = content();
    let many = (0..2 * CHUNK as u32 + 3).map(f32::from_bits).collect();
    long.tensors.insert("long".into(), many);
    let dir = tempfile::tempdir().unwrap();
    for content in [content(), long, Content { about: About::new(), tensors: BTreeMap::new() }] {
        let path = dir.path().join("file");
        write(&path, FORMAT, &content.about, refs(&content)).unwrap();
        assert_eq!(bits(&read(&path, FORMAT).unwrap()), bits(&content));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn it_is_safetensors_and_the_same_content_gives_the_same_bytes() {
    let file = bytes(&content());
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    assert_eq!(names, ["a", "u/zz", "v/b"]);
    assert_eq!(tensors.tensor("v/b").unwrap().data(), [0, 0, 0, 63, 0, 0, 128, 190]);
    assert_eq!(file, bytes(&content()));
    let (header, tensors) = split(&file);
    assert_eq!(seal(&header, &tensors), file);
    let sum = checksum(FORMAT, &content().about, refs(&content())).unwrap();
    assert_eq!(&file[PREFIX + OPENING.len()..][..8], sum.as_bytes());
}

#[test]
fn every_flipped_byte_is_refused() {
    let good = bytes(&content());
    for i in 0..good.len() {
        for flip in (0..8).map(|bit| 1 << bit).chain([0xff]) {
            let mut bad = good.clone();
            bad[i] ^= flip;
            assert!(parse(&bad).is_err(), "byte {i} flipped by {flip:#x} is accepted");
        }
    }
}

#[test]
fn truncation_at_every_length_and_a_longer_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let mut good = bytes(&content());
    for length in 0..good.len() {
        fs::write(&path, &good[..length]).unwrap();
        let error = read(&path, FORMAT).unwrap_err();
        assert!(matches!(error, FileError::Damaged { .. }), "{length}: {error}");
    }
    good.push(0);
    assert!(matches!(parse(&good), Err(Wrong::Damaged(_))));
}

#[test]
fn a_header_that_does_not_open_with_the_checksum_is_refused() {
    let (header, tensors) = split(&bytes(&content()));
    let mut file = ((header.len() + 1) as u64).to_le_bytes().to_vec();
    file.extend(header.replace("checksum\":", "checksum\" :").bytes().chain(tensors));
    assert!(matches!(parse(&file), Err(Wrong::Damaged(why)) if why.contains("does not open")));
}

#[test]
fn two_exchanged_values_are_refused() {
    let mut file = bytes(&content());
    let end = file.len();
    file[end - 8..].rotate_left(4);
    assert!(matches!(parse(&file), Err(Wrong::Damaged(why)) if why == "its checksum is wrong"));
}

#[test]
fn another_version_or_format_is_refused() {
    let refused = refusal(r#""version":"2""#, r#""version":"3""#);
    assert_eq!(refused, r#"file: the file has version "3", this program reads version "2""#);
    assert!(refusal("test-file", "text-file").ends_with("its format is not test-file"));
    let error = parse(b"\x02\0\0\0\0\0\0\0{}").unwrap_err();
    assert!(matches!(error, Wrong::Damaged(why) if why == "its format is not test-file"));
}

#[test]
fn tensors_that_are_no_vectors_of_floats_are_refused_even_with_the_right_checksum() {
    for (from, to, why) in [
        (r#""dtype":"F32","shape":[2]"#, r#""dtype":"I32","shape":[2]"#, "is I32, expected F32"),
        ("[2]", "[2,1]", "has the shape [2, 1], expected one number"),
        ("[2]", "[18446744073709551615]", "overflow"),
    ] {
        let refused = refusal(from, to);
        assert!(refused.contains(why), "{from} -> {to}: {refused}");
        assert!(refused.starts_with("file: ") && refused.lines().count() == 1, "{refused}");
    }
}

#[test]
fn names_that_would_not_come_back_are_refused() {
    let twice = [("a", &[1.0f32][..]), ("a", &[2.0][..])];
    assert!(checksum(FORMAT, &About::new(), twice).unwrap_err().contains("two vectors"));
    let about = About::from([("version".into(), "7".into())]);
    assert_eq!(checksum(FORMAT, &about, []).unwrap_err(), "version is not for the caller");
}

#[test]
fn a_crash_while_writing_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (old, mut new) = (content(), content());
    new.about.insert("step".into(), "13".into());
    write(&path, FORMAT, &old.about, refs(&old)).unwrap();
    let file = bytes(&new);
    for length in [0, PREFIX, file.len() / 2, file.len()] {
        fs::write(temporary(&path).unwrap(), &file[..length]).unwrap();
        assert_eq!(bits(&read(&path, FORMAT).unwrap()), bits(&old));
    }
    write(&path, FORMAT, &new.about, refs(&new)).unwrap();
    assert_eq!(bits(&read(&path, FORMAT).unwrap()), bits(&new));
    assert!(!temporary(&path).unwrap().exists());
}

#[test]
fn a_failed_write_leaves_the_old_file_and_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let old = content();
    write(&path, FORMAT, &old.about, refs(&old)).unwrap();
    let full = |file: &mut File| file.write_all(b"half").and(Err(io::ErrorKind::StorageFull.into()));
    assert_eq!(replace(&path, full).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert!(!temporary(&path).unwrap().exists());
    fs::create_dir(temporary(&path).unwrap()).unwrap(); // so that the file cannot be created
    let error = write(&path, FORMAT, &About::new(), []).unwrap_err();
    assert!(matches!(error, FileError::Io { .. }));
    assert!(error.to_string().contains("file: "), "{error}");
    assert_eq!(bits(&read(&path, FORMAT).unwrap()), bits(&old));
    assert!(write(Path::new("/"), FORMAT, &About::new(), []).is_err());
    assert!(read(&dir.path().join("nowhere"), FORMAT).unwrap_err().is_missing());
}

//! Files that are right or damaged: each wrong byte that can be told is told, in one line that names the file.

// Clippy allows this in test functions only, not in what they share.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;
use redsync_data::{DataError, DataSet, ImageSet, Places, TextSet, open};
use tempfile::TempDir;

/// A directory of files, and how a data set in it is opened.
struct Files {
    name: &'static str,
    dir: TempDir,
}

impl Files {
    /// Four small idx files: 6 images to train, 3 to test.
    fn idx() -> Self {
        let files = Files { name: "mnist", dir: TempDir::new().unwrap() };
        for (split, count) in [("train", 6u8), ("t10k", 3)] {
            let pixels: Vec<u8> = (0..usize::from(count) * 784).map(|i| (i % 251) as u8).collect();
            files.write(
                &format!("{split}-images-idx3-ubyte"),
                &[&[0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28], &pixels[..]].concat(),
            );
            let labels: Vec<u8> = (0..count).map(|i| 9 - i).collect();
            files.write(
                &format!("{split}-labels-idx1-ubyte"),
                &[&[0, 0, 8, 1, 0, 0, 0, count], &labels[..]].concat(),
            );
        }
        files
    }

    /// Six CIFAR files without anything in them but zeros.
    fn cifar() -> Self {
        let files = Files { name: "cifar10", dir: TempDir::new().unwrap() };
        let names = (1..=5).map(|batch| format!("data_batch_{batch}.bin")).chain(["test_batch.bin".into()]);
        names.for_each(|name| File::create(files.path(&name)).unwrap().set_len(30_730_000).unwrap());
        files
    }

    fn text(train: &str, valid: &str, test: &str) -> Self {
        let files = Files { name: "ptb", dir: TempDir::new().unwrap() };
        for (name, text) in [("ptb.train.txt", train), ("ptb.valid.txt", valid), ("ptb.test.txt", test)] {
            files.write(name, text.as_bytes());
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    /// Changes the bytes of a file.
    fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(name)).unwrap();
        change(&mut bytes);
        self.write(name, &bytes);
    }

    fn open(&self) -> Result<DataSet, DataError> {
        open(self.name, &Places { data_dir: Some(self.dir.path().into()), ..Places::default() })
    }

    /// Opens, and expects an error about this file.
    fn refused(&self, name: &str, why: &str) {
        let error = self.open().unwrap_err().to_string();
        assert_eq!(error, format!("{}: {why}", self.path(name).display()));
    }

    fn images(&self) -> ImageSet {
        match self.open().unwrap() {
            DataSet::Images(images) => images,
            DataSet::Text(_) => panic!("text"),
        }
    }

    fn words(&self) -> TextSet {
        match self.open().unwrap() {
            DataSet::Text(text) => text,
            DataSet::Images(_) => panic!("images"),
        }
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";

fn pixels_of(set: &ImageSet) -> (Vec<f32>, Vec<u32>) {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    let all: Vec<u32> = (0..set.train_len() as u32).collect();
    set.train_batch(&all, 0, &mut pixels, &mut labels);
    (pixels, labels)
}

#[test]
fn idx_files_are_the_same_plain_or_gzipped_in_either_directory() {
    let files = Files::idx();
    let plain = files.images();
    assert_eq!((plain.train_len(), plain.test_len(), plain.shape, plain.classes), (6, 3, [1, 28, 28], 10));
    assert_eq!(pixels_of(&plain).1, [9, 8, 7, 6, 5, 4]);
    let [channel] = plain.channels() else { panic!("one channel") };
    let raw: Vec<f32> =
        pixels_of(&plain).0.iter().map(|x| (x * channel.std + channel.mean).round()).collect();
    assert!(raw.iter().enumerate().all(|(i, &x)| x == (i % 251) as f32));
    fs::create_dir(files.path("mnist")).unwrap();
    for entry in
        fs::read_dir(files.dir.path()).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file())
    {
        let name = format!("mnist/{}.gz", entry.file_name().into_string().unwrap());
        files.write(&name, &gzip(&fs::read(entry.path()).unwrap()));
        fs::remove_file(entry.path()).unwrap();
    }
    assert_eq!(pixels_of(&files.images()), pixels_of(&plain));
}

#[test]
fn damaged_idx_headers_are_refused() {
    let files = Files::idx();
    files.change(IMAGES, |bytes| bytes[3] = 1);
    files.refused(IMAGES, "the magic number is 0x00000801, expected 0x00000803");
    files.change(IMAGES, |bytes| (bytes[3], bytes[15]) = (3, 29));
    files.refused(IMAGES, "a side of the images is 29, expected 28");
    files.change(IMAGES, |bytes| (bytes[15], bytes[4]) = (28, 0xff));
    files.refused(IMAGES, "the header says 4278190086 items, expected 1 to 1000000");
    files.change(IMAGES, |bytes| bytes[4..8].fill(0));
    files.refused(IMAGES, "the header says 0 items, expected 1 to 1000000");
    files.change(IMAGES, |bytes| bytes.truncate(6));
    files.refused(IMAGES, "reading the number of items: failed to fill whole buffer");
}

#[test]
fn idx_files_of_a_wrong_length_are_refused() {
    let files = Files::idx();
    files.change(IMAGES, |bytes| bytes.truncate(4000));
    files.refused(IMAGES, "the file ends 720 bytes too early");
    let files = Files::idx();
    files.change(LABELS, |bytes| bytes.push(0));
    files.refused(LABELS, "the file goes on behind its last item");
    let files = Files::idx();
    files.change(LABELS, |bytes| {
        bytes[7] = 5;
        bytes.truncate(13);
    });
    let why = format!("the file has 5 labels, but {} has 6 images", files.path(IMAGES).display());
    files.refused(LABELS, &why);
}

#[test]
fn idx_labels_out_of_range_are_refused() {
    let files = Files::idx();
    files.change(LABELS, |bytes| bytes[10] = 10);
    files.refused(LABELS, "label 2 is 10, expected less than 10");
}

#[test]
fn damaged_gzip_is_refused() {
    let packed = format!("{IMAGES}.gz");
    let damage = |damage: &dyn Fn(&mut Vec<u8>)| {
        let files = Files::idx();
        let mut bytes = gzip(&fs::read(files.path(IMAGES)).unwrap());
        damage(&mut bytes);
        fs::remove_file(files.path(IMAGES)).unwrap();
        files.write(&packed, &bytes);
        let error = files.open().unwrap_err();
        assert!(matches!(&error, DataError::Damaged { path, .. } if *path == files.path(&packed)), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
    };
    damage(&|bytes| bytes.truncate(bytes.len() / 2));
    damage(&|bytes| bytes.truncate(bytes.len() - 4));
    damage(&|bytes| bytes.clear());
    damage(&|bytes| bytes[0] = 0);
    damage(&|bytes| {
        let checksum = bytes.len() - 8;
        bytes[checksum] ^= 1;
    });
    damage(&|bytes| bytes.extend_from_slice(b"more"));
}

#[test]
fn cifar_files_need_their_exact_length_and_labels_below_ten() {
    let files = Files::cifar();
    let set = files.images();
    assert_eq!((set.train_len(), set.test_len(), set.shape, set.classes), (50_000, 10_000, [3, 32, 32], 10));
    files.change("data_batch_3.bin", |bytes| bytes[3073 * 77] = 10);
    files.refused("data_batch_3.bin", "the label of record 77 is 10, expected less than 10");
    files.change("data_batch_3.bin", |bytes| bytes[3073 * 77] = 9);
    files.change("test_batch.bin", |bytes| bytes.truncate(3073 * 9_999));
    files.refused("test_batch.bin", "the file has 30726927 bytes, expected 30730000");
    File::create(files.path("test_batch.bin")).unwrap().set_len(1 << 36).unwrap();
    files.refused("test_batch.bin", "the file has 68719476736 bytes, expected 30730000");
}

#[test]
fn channels_of_cifar_are_normalized_each_by_itself() {
    let files = Files::cifar();
    // One record with a channel of 100, one of 50 and one of 0; all others are zeros.
    files.change("data_batch_1.bin", |bytes| {
        bytes[1..1025].fill(100);
        bytes[1025..2049].fill(50);
    });
    let set = files.images();
    let share = 1.0 / 50_000f64;
    for (channel, value) in set.channels().iter().zip([100.0, 50.0, 0.0]) {
        let (mean, std) = (value * share, value * (share * (1.0 - share)).sqrt());
        assert!((f64::from(channel.mean) - mean).abs() < 1e-6, "{channel:?}");
        assert!((f64::from(channel.std) - if value > 0.0 { std } else { 1.0 }).abs() < 1e-5, "{channel:?}");
    }
}

#[test]
fn words_are_numbered_as_they_come_and_lines_end_with_a_word() {
    let text = Files::text(" b a \n\n b <unk> c \n", "c d\n", "a a\r\nb").words();
    assert_eq!(text.words, ["b", "a", "<eos>", "<unk>", "c"]);
    assert_eq!(text.vocabulary, 5);
    assert_eq!(text.train, [0, 1, 2, 2, 0, 3, 4, 2]);
    assert_eq!(text.valid, [4, 3, 2], "a word that is not in the vocabulary is unknown");
    assert_eq!(text.test, [1, 1, 2, 0, 2]);
}

#[test]
fn unusable_text_is_refused() {
    let files = Files::text("a b\n", "b\na c\n", "b\n");
    let why = "line 2: the word \"c\" is not in the training text, which has no <unk> either";
    files.refused("ptb.valid.txt", why);
    let files = Files::text("a b\n", "b\n", " \n\n");
    files.refused("ptb.test.txt", "the file has no words");
    files.write("ptb.train.txt", b"ab \xff");
    files.refused("ptb.train.txt", "the file is not UTF-8 at byte 3");
}

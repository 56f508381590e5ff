//! MNIST and its relatives in idx files: images and labels for training and testing come in, plain or gzipped, a set of
//! images goes out. What must hold: headers, lengths and labels are right, and as many labels as images.
//!
//! The number of images may be any: the header says it and the length confirms it.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use crate::DataError;
use crate::image::{Augment, ImageSet, Split};

const CLASSES: usize = 10;
const SIDE: u32 = 28;
/// Magic numbers: two zeros, the type (unsigned byte) and the number of dimensions.
const IMAGES: u32 = 0x0803;
const LABELS: u32 = 0x0801;
/// More is not believed, so that a damaged or hostile header does not fill the memory.
const MOST: u32 = 1_000_000;

/// Loads the four files: images and labels for training, then for testing.
pub(crate) fn load(name: &str, files: &[PathBuf]) -> Result<ImageSet, DataError> {
    let [images, labels, test_images, test_labels] = files else {
        unreachable!("the catalogue has four idx files")
    };
    let (train, test) = (read_split(images, labels)?, read_split(test_images, test_labels)?);
    Ok(ImageSet::held(name, [1, SIDE as usize, SIDE as usize], CLASSES, Augment::None, train, test))
}

fn read_split(images: &Path, labels: &Path) -> Result<Split, DataError> {
    let (count, pixels) = read(images, IMAGES, &[SIDE, SIDE])?;
    let (label_count, label_bytes) = read(labels, LABELS, &[])?;
    if label_count != count {
        let why = format!("the file has {label_count} labels, but {} has {count} images", images.display());
        return Err(DataError::damaged(labels, why));
    }
    if let Some((at, label)) =
        label_bytes.iter().enumerate().find(|(_, label)| usize::from(**label) >= CLASSES)
    {
        return Err(DataError::damaged(
            labels,
            format!("label {at} is {label}, expected less than {CLASSES}"),
        ));
    }
    Ok(Split { pixels, labels: label_bytes })
}

/// The number of items and the bytes of a file with a magic number and items of a shape.
fn read(path: &Path, magic: u32, item: &[u32]) -> Result<(u32, Vec<u8>), DataError> {
    let file = BufReader::new(File::open(path).map_err(|error| DataError::io(path, error))?);
    match path.extension().is_some_and(|extension| extension == "gz") {
        true => parse(MultiGzDecoder::new(file), magic, item),
        false => parse(file, magic, item),
    }
    .map_err(|why| DataError::damaged(path, why))
}

fn parse(mut input: impl Read, magic: u32, item: &[u32]) -> Result<(u32, Vec<u8>), String> {
    let mut number = |what: &str| {
        let mut bytes = [0; 4];
        input.read_exact(&mut bytes).map_err(|error| format!("reading {what}: {error}"))?;
        Ok::<_, String>(u32::from_be_bytes(bytes))
    };
    let found = number("the magic number")?;
    if found != magic {
        return Err(format!("the magic number is {found:#010x}, expected {magic:#010x}"));
    }
    let count = number("the number of items")?;
    if !(1..=MOST).contains(&count) {
        return Err(format!("the header says {count} items, expected 1 to {MOST}"));
    }
    for &side in item {
        let found = number("the dimensions")?;
        if found != side {
            return Err(format!("a side of the images is {found}, expected {side}"));
        }
    }
    let expected = u64::from(count) * item.iter().map(|&side| u64::from(side)).product::<u64>();
    let mut bytes = Vec::new();
    input
        .take(expected + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("reading the items: {error}"))?;
    match bytes.len() as u64 {
        length if length < expected => Err(format!("the file ends {} bytes too early", expected - length)),
        length if length > expected => Err("the file goes on behind its last item".into()),
        _ => Ok((count, bytes)),
    }
}

//! CIFAR-10 in its binary form: six files come in, 50,000 training and 10,000 test images go out.
//! What must hold: each file has exactly 10,000 records of a label below 10 and 3x32x32 bytes; it has no header, so its
//! length is all that shows whether it is complete.

use std::fs;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::image::{Augment, ImageSet, Split};

const CLASSES: usize = 10;
const SHAPE: [usize; 3] = [3, 32, 32];
const IMAGE: usize = 3 * 32 * 32;
const RECORDS: usize = 10_000;

/// Loads the batches; the last one is for testing.
pub(crate) fn load(name: &str, files: &[PathBuf]) -> Result<ImageSet, DataError> {
    let [mut train, mut test] = [Split::default(), Split::default()];
    let [batches @ .., last] = files else { unreachable!("the catalogue has six files") };
    train.pixels.reserve_exact(batches.len() * RECORDS * IMAGE);
    batches.iter().try_for_each(|file| append(file, &mut train))?;
    append(last, &mut test)?;
    Ok(ImageSet::held(name, SHAPE, CLASSES, Augment::FlipCrop { pad: 4 }, train, test))
}

fn append(path: &Path, split: &mut Split) -> Result<(), DataError> {
    let expected = RECORDS * (1 + IMAGE);
    let check = |length: u64| match length == expected as u64 {
        true => Ok(()),
        false => Err(DataError::damaged(path, format!("the file has {length} bytes, expected {expected}"))),
    };
    // Before reading: whatever bears this name may be larger than the memory.
    check(fs::metadata(path).map_err(|error| DataError::io(path, error))?.len())?;
    let bytes = fs::read(path).map_err(|error| DataError::io(path, error))?;
    check(bytes.len() as u64)?;
    for (record, bytes) in bytes.chunks_exact(1 + IMAGE).enumerate() {
        let (label, pixels) = (bytes[0], &bytes[1..]);
        if usize::from(label) >= CLASSES {
            let why = format!("the label of record {record} is {label}, expected less than {CLASSES}");
            return Err(DataError::damaged(path, why));
        }
        split.labels.push(label);
        split.pixels.extend_from_slice(pixels);
    }
    Ok(())
}

//! Handwritten digits, 1,797 images of 8x8 with values from 0 to 16, which come with the crate smartcore: nothing to fetch.
//! What must hold: the split is always the same, 1,500 images to train and 297 to test, and each class is split in the
//! same proportion.

use smartcore::dataset::digits;

use crate::DataError;
use crate::image::{Augment, ImageSet, Split};
use crate::random::{self, Purpose, Stream};

const CLASSES: usize = 10;
const SIDE: usize = 8;
const LARGEST: f32 = 16.0;
const TESTED: usize = 297;
const SPLIT_SEED: u64 = 0x6469_6769_7473;

/// Loads and splits the digits.
pub(crate) fn load() -> Result<ImageSet, DataError> {
    let all = digits::load_dataset();
    let count = all.num_samples;
    if all.num_features != SIDE * SIDE || all.data.len() != count * SIDE * SIDE || all.target.len() != count {
        return Err(DataError::damaged("digits of smartcore", "not images of 8x8 with a label each"));
    }
    let pixels = whole_numbers(&all.data, LARGEST)?;
    let labels = whole_numbers(&all.target, (CLASSES - 1) as f32)?;
    let tested = choose_tested(&labels);
    let [mut train, mut test] = [Split::default(), Split::default()];
    for ((image, &label), &tested) in pixels.chunks_exact(SIDE * SIDE).zip(&labels).zip(&tested) {
        let split = if tested { &mut test } else { &mut train };
        split.pixels.extend_from_slice(image);
        split.labels.push(label);
    }
    Ok(ImageSet::held("digits", [1, SIDE, SIDE], CLASSES, Augment::None, train, test))
}

fn whole_numbers(values: &[f32], largest: f32) -> Result<Vec<u8>, DataError> {
    let convert = |&value: &f32| {
        let whole = value.fract() == 0.0 && (0.0..=largest).contains(&value);
        whole.then_some(value as u8).ok_or(value)
    };
    let converted: Result<_, f32> = values.iter().map(convert).collect();
    converted.map_err(|value| {
        DataError::damaged("digits of smartcore", format!("{value} is not in 0..={largest}"))
    })
}

/// Which images are for testing: shuffled and then sorted by class, every sixth or so, wherever the running share of
/// tested images reaches the next whole number.
fn choose_tested(labels: &[u8]) -> Vec<bool> {
    let mut order = Vec::new();
    random::permute(labels.len() as u32, &mut Stream::new(Purpose::Split, SPLIT_SEED, 0), &mut order);
    order.sort_by_key(|&image| labels[image as usize]);
    let share = |images: usize| images * TESTED / labels.len();
    let mut tested = vec![false; labels.len()];
    for (place, &image) in order.iter().enumerate() {
        tested[image as usize] = share(place + 1) > share(place);
    }
    tested
}

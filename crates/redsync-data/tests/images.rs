//! What batches of images hold: the digits, which are always there.

use std::collections::HashSet;

use redsync_data::order::Epochs;
use redsync_data::{Augment, DataError, DataSet, ImageSet, Places, open};

fn images(name: &str) -> ImageSet {
    match open(name, &Places::default()).expect("needs no files") {
        DataSet::Images(images) => images,
        DataSet::Text(_) => panic!("{name} is text"),
    }
}

fn train(set: &ImageSet, indices: &[u32], seed: u64) -> (Vec<f32>, Vec<u32>) {
    let (mut pixels, mut labels) = (vec![9.0; 3], vec![9; 3]);
    set.train_batch(indices, seed, &mut pixels, &mut labels);
    (pixels, labels)
}

fn test(set: &ImageSet) -> (Vec<f32>, Vec<u32>) {
    let (mut pixels, mut labels) = (vec![9.0; 3], vec![9; 3]);
    set.test_batch(0..set.test_len(), &mut pixels, &mut labels);
    (pixels, labels)
}

fn all(len: usize) -> Vec<u32> {
    (0..len as u32).collect()
}

/// Images as a set, to see what is in both of two lists.
fn bits(pixels: &[f32]) -> HashSet<Vec<u32>> {
    pixels.chunks_exact(64).map(|image| image.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn digits_are_split_by_class_and_nothing_is_lost() {
    let digits = images("digits");
    assert_eq!((digits.shape, digits.classes, digits.augment), ([1, 8, 8], 10, Augment::None));
    assert_eq!((digits.train_len(), digits.test_len()), (1500, 297));
    let (train_pixels, train_labels) = train(&digits, &all(1500), 0);
    let (test_pixels, test_labels) = test(&digits);
    // What is known of the whole set.
    let sizes = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180];
    for (class, size) in sizes.into_iter().enumerate() {
        let count = |labels: &[u32]| labels.iter().filter(|&&label| label as usize == class).count();
        assert_eq!(count(&train_labels) + count(&test_labels), size);
        assert!((29..=31).contains(&count(&test_labels)), "class {class}: {}", count(&test_labels));
    }
    let (train_bits, test_bits) = (bits(&train_pixels), bits(&test_pixels));
    assert_eq!(train_bits.intersection(&test_bits).count(), 0, "an image is in both splits");
    assert_eq!(train_bits.len() + test_bits.len(), 1797);
}

#[test]
fn training_pixels_have_mean_0_and_variance_1_and_go_back_to_the_raw_values() {
    let digits = images("digits");
    let (pixels, _) = train(&digits, &all(1500), 0);
    let mean = pixels.iter().map(|&x| f64::from(x)).sum::<f64>() / pixels.len() as f64;
    let variance = pixels.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / pixels.len() as f64;
    assert!(mean.abs() < 1e-5 && (variance - 1.0).abs() < 1e-5, "mean {mean}, variance {variance}");
    let [channel] = digits.channels() else { panic!("one channel") };
    for x in pixels {
        let raw = x * channel.std + channel.mean;
        assert!((raw - raw.round()).abs() < 1e-4 && (0.0..=16.0).contains(&raw.round()), "{raw}");
    }
}

/// A nearest-centroid classifier gets most test images right: labels and pixels belong together.
#[test]
fn digits_can_be_learned() {
    let digits = images("digits");
    let (pixels, labels) = train(&digits, &all(1500), 0);
    let mut centroids = vec![[0.0f32; 64]; 10];
    for (image, &label) in pixels.chunks_exact(64).zip(&labels) {
        let share = labels.iter().filter(|&&other| other == label).count() as f32;
        centroids[label as usize].iter_mut().zip(image).for_each(|(sum, x)| *sum += x / share);
    }
    let (pixels, labels) = test(&digits);
    let distance = |image: &[f32], class: usize| {
        image.iter().zip(&centroids[class]).map(|(x, c)| (x - c).powi(2)).sum::<f32>()
    };
    let nearest = |image: &[f32]| (0..10).min_by(|&a, &b| distance(image, a).total_cmp(&distance(image, b)));
    let right = pixels
        .chunks_exact(64)
        .zip(&labels)
        .filter(|(image, label)| nearest(image) == Some(**label as usize));
    let right = right.count();
    assert!(right > 250, "{right} of 297");
}

#[test]
fn augmented_images_do_not_depend_on_ranks() {
    let mut digits = images("digits");
    digits.augment = Augment::FlipCrop { pad: 2 };
    let step = |ranks: usize| {
        let mut epochs = Epochs::new(digits.train_len(), ranks, 48 / ranks, 5).unwrap();
        let seed = epochs.epoch_seed(3);
        let parts = (0..ranks).map(|rank| train(&digits, epochs.indices(3, 7, rank), seed));
        parts.reduce(|a, b| ([a.0, b.0].concat(), [a.1, b.1].concat())).unwrap()
    };
    let alone = step(1);
    for ranks in [2, 3, 4, 48] {
        assert_eq!(step(ranks), alone, "{ranks} ranks");
    }
}

#[test]
fn augmented_images_are_the_image_mirrored_and_shifted_over_its_mean() {
    let mut digits = images("digits");
    let (plain, _) = train(&digits, &[11], 0);
    digits.augment = Augment::FlipCrop { pad: 1 };
    let at = |row: isize, column: isize| match (0..8).contains(&row) && (0..8).contains(&column) {
        true => plain[(row * 8 + column) as usize],
        false => 0.0,
    };
    let moved = |flip: bool, down: isize, right: isize| -> Vec<f32> {
        let column = |x: isize| if flip { 7 - (x - right) } else { x - right };
        (0..64).map(|i| at(i / 8 - down, column(i % 8))).collect()
    };
    let shifts = -1..=1;
    let possible: Vec<Vec<f32>> = [false, true]
        .into_iter()
        .flat_map(|flip| shifts.clone().flat_map(move |down| (-1..=1).map(move |right| (flip, down, right))))
        .map(|(flip, down, right)| moved(flip, down, right))
        .collect();
    let mut seen = HashSet::new();
    for seed in 0..400 {
        let (drawn, _) = train(&digits, &[11], seed);
        seen.insert(possible.iter().position(|image| *image == drawn).expect("one of the possible images"));
    }
    assert_eq!(seen.len(), 18, "each of them comes up");
    // Larger than the image: nothing of it may be left, and nothing may go wrong.
    digits.augment = Augment::FlipCrop { pad: 100 };
    (0..100).for_each(|seed| assert_eq!(train(&digits, &[11], seed).0.len(), 64));
}

#[test]
fn a_limit_keeps_the_same_images_each_time_and_smaller_ones_are_part_of_larger_ones() {
    let limited = |train_count, test_count| {
        let mut digits = images("digits");
        digits.limit(train_count, test_count);
        digits
    };
    let (small, large) = (limited(Some(100), Some(10)), limited(Some(700), None));
    assert_eq!((small.train_len(), small.test_len()), (100, 10));
    assert_eq!((large.train_len(), large.test_len()), (700, 297));
    let (few, more) = (train(&small, &all(100), 0), train(&large, &all(700), 0));
    assert_eq!(few.0, more.0[..100 * 64]);
    assert_eq!(few.1, more.1[..100]);
    assert_ne!(few.0, train(&images("digits"), &all(100), 0).0, "not simply the first of the file");
    let mut lifted = small;
    lifted.limit(Some(1500), Some(usize::MAX));
    assert_eq!(train(&lifted, &all(1500), 0), train(&images("digits"), &all(1500), 0));
    assert_eq!(test(&lifted), test(&images("digits")));
}

#[test]
fn synthetic_imagenet_has_the_size_of_imagenet() {
    let set = images("synthetic-imagenet");
    assert_eq!((set.shape, set.classes), ([3, 224, 224], 1000));
    assert_eq!((set.train_len(), set.test_len()), (1_281_167, 50_000));
    let (both, labels) = train(&set, &[1_281_166, 5], 0);
    assert_eq!((both.len(), labels), (2 * 3 * 224 * 224, vec![166, 5]));
    assert_eq!(both[3 * 224 * 224..], train(&set, &[5], 1).0, "an image depends on nothing but its index");
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest_or_with_all() {
    let all = "known are digits, fashion-mnist, mnist, cifar10, ptb, wikitext-2, synthetic-imagenet";
    for (wrong, advice) in [
        ("cifar-10", "did you mean cifar10?"),
        ("MNIST", "did you mean mnist?"),
        ("fasion-mnist", "did you mean fashion-mnist?"),
        ("wikitext", "did you mean wikitext-2?"),
        ("imagenet", all),
        ("", all),
    ] {
        let error = open(wrong, &Places::default()).unwrap_err();
        assert!(matches!(&error, DataError::UnknownName { name, .. } if name == wrong), "{error}");
        assert_eq!(error.to_string(), format!("unknown data set {wrong}: {advice}"));
    }
}

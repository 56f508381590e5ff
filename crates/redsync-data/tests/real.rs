//! The published sets. The digits are always there. The others are checked when asked for, with `--ignored`, and then have to be
//! in the usual places or where `REDSYNC_DATA_DIR` says: a set that is absent is a failure.

use std::env;
use std::path::PathBuf;

use redsync_data::{Augment, DataSet, ImageSet, Places, TextSet, open};

fn opened(name: &str) -> DataSet {
    let places = Places { data_dir: env::var_os("REDSYNC_DATA_DIR").map(PathBuf::from), ..Places::default() };
    open(name, &places).unwrap_or_else(|error| panic!("{error}"))
}

fn images(name: &str) -> ImageSet {
    match opened(name) {
        DataSet::Images(images) => images,
        DataSet::Text(_) => panic!("{name} is text"),
    }
}

fn text(name: &str) -> TextSet {
    match opened(name) {
        DataSet::Text(text) => text,
        DataSet::Images(_) => panic!("{name} is images"),
    }
}

/// Lengths, classes in equal number, and channels with the known mean and deviation, as shares of 255.
fn check_images(name: &str, lengths: (usize, usize), augment: Augment, known: &[(f32, f32)]) {
    let set = images(name);
    assert_eq!((set.train_len(), set.test_len()), lengths);
    assert_eq!(set.augment, augment);
    assert_eq!(set.channels().len(), known.len());
    for (channel, (mean, std)) in set.channels().iter().zip(known) {
        assert!(
            (channel.mean / 255.0 - mean).abs() < 1e-4 && (channel.std / 255.0 - std).abs() < 1e-4,
            "{channel:?}"
        );
    }
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    set.test_batch(0..lengths.1, &mut pixels, &mut labels);
    if name != "mnist" {
        assert!((0..10).all(|class| labels.iter().filter(|&&label| label == class).count() == 1000));
    }
    set.train_batch(&[0, lengths.0 as u32 - 1], 1, &mut pixels, &mut labels);
    assert_eq!((pixels.len(), labels.len()), (2 * set.shape.iter().product::<usize>(), 2));
}

fn check_text(name: &str, vocabulary: usize, lengths: [usize; 3]) {
    let text = text(name);
    assert_eq!((text.vocabulary, text.words.len()), (vocabulary, vocabulary));
    assert_eq!([&text.train, &text.valid, &text.test].map(Vec::len), lengths);
    let largest = [&text.train, &text.valid, &text.test].map(|numbers| numbers.iter().max().copied());
    assert!(largest.iter().all(|number| number.is_some_and(|number| (number as usize) < vocabulary)));
}

/// The sums of all pixels and of all labels are those of the set as it was published.
#[test]
fn digits_are_the_published_ones() {
    let digits = images("digits");
    let [channel] = digits.channels() else { panic!("one channel") };
    let raw = |pixels: &[f32]| -> u64 {
        pixels.iter().map(|x| (x * channel.std + channel.mean).round() as u64).sum()
    };
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    let all: Vec<u32> = (0..digits.train_len() as u32).collect();
    digits.train_batch(&all, 0, &mut pixels, &mut labels);
    let (sum, classes) = (raw(&pixels), labels.iter().sum::<u32>());
    digits.test_batch(0..digits.test_len(), &mut pixels, &mut labels);
    assert_eq!((sum + raw(&pixels), classes + labels.iter().sum::<u32>()), (561_718, 8_070));
}

#[test]
#[ignore = "needs the files of fashion-mnist"]
fn fashion_mnist_is_the_published_one() {
    check_images("fashion-mnist", (60_000, 10_000), Augment::None, &[(0.2860, 0.3530)]);
}

#[test]
#[ignore = "needs the files of mnist"]
fn mnist_is_the_published_one() {
    check_images("mnist", (60_000, 10_000), Augment::None, &[(0.1307, 0.3081)]);
}

#[test]
#[ignore = "needs the files of cifar10"]
fn cifar10_is_the_published_one() {
    let known = [(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)];
    check_images("cifar10", (50_000, 10_000), Augment::FlipCrop { pad: 4 }, &known);
}

#[test]
#[ignore = "needs the files of ptb"]
fn ptb_is_the_published_one() {
    check_text("ptb", 10_000, [929_589, 73_760, 82_430]);
}

#[test]
#[ignore = "needs the files of wikitext-2"]
fn wikitext_2_is_the_published_one() {
    check_text("wikitext-2", 33_278, [2_088_628, 217_646, 245_569]);
}

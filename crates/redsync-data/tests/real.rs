//! The published sets, where they are on this machine: in the usual places, or where `REDSYNC_DATA_DIR` says.

use std::env;
use std::path::PathBuf;

use redsync_data::{Augment, DataError, DataSet, Places, open};

/// A set, unless it is not there. One that is there but cannot be read is a failure.
fn found(name: &str) -> Option<DataSet> {
    let places = Places { data_dir: env::var_os("REDSYNC_DATA_DIR").map(PathBuf::from), ..Places::default() };
    match open(name, &places) {
        Err(DataError::NotFound { .. }) => {
            eprintln!("skipped: {name} is not on this machine");
            None
        }
        opened => Some(opened.expect("a set that is there can be read")),
    }
}

/// Lengths, classes in equal number, and channels with the known mean and deviation, as shares of 255.
fn check_images(name: &str, lengths: (usize, usize), augment: Augment, known: &[(f32, f32)]) {
    let Some(DataSet::Images(set)) = found(name) else { return };
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

#[test]
fn fashion_mnist_is_the_published_one() {
    check_images("fashion-mnist", (60_000, 10_000), Augment::None, &[(0.2860, 0.3530)]);
}

#[test]
fn mnist_is_the_published_one() {
    check_images("mnist", (60_000, 10_000), Augment::None, &[(0.1307, 0.3081)]);
}

#[test]
fn cifar10_is_the_published_one() {
    let known = [(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)];
    check_images("cifar10", (50_000, 10_000), Augment::FlipCrop { pad: 4 }, &known);
}

fn check_text(name: &str, vocabulary: usize, lengths: [usize; 3]) {
    let Some(DataSet::Text(text)) = found(name) else { return };
    assert_eq!((text.vocabulary, text.words.len()), (vocabulary, vocabulary));
    assert_eq!([&text.train, &text.valid, &text.test].map(Vec::len), lengths);
    let largest = [&text.train, &text.valid, &text.test].map(|numbers| numbers.iter().max().copied());
    assert!(largest.iter().all(|number| number.is_some_and(|number| (number as usize) < vocabulary)));
}

#[test]
fn ptb_is_the_published_one() {
    check_text("ptb", 10_000, [929_589, 73_760, 82_430]);
}

#[test]
fn wikitext_2_is_the_published_one() {
    check_text("wikitext-2", 33_278, [2_088_628, 217_646, 245_569]);
}

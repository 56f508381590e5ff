//! Data sets by name: a name and the places to look come in, images or text go out, ready for training.
//! What must hold: what is handed out was checked to the last byte, and depends on the name, seeds and indices alone,
//! never on the number of ranks.
//!
//! ```
//! use redsync_data::{DataSet, Places, open, order::Epochs};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let DataSet::Images(digits) = open("digits", &Places::default())? else { unreachable!("digits are images") };
//! let mut epochs = Epochs::new(digits.train_len(), 4, 25, 1)?; // 4 ranks, 25 images each
//! let (mut pixels, mut labels) = (Vec::new(), Vec::new());
//! let seed = epochs.epoch_seed(0);
//! digits.train_batch(epochs.indices(0, 0, 3), seed, &mut pixels, &mut labels); // epoch 0, step 0, the last rank
//! assert_eq!((pixels.len(), labels.len()), (25 * 64, 25));
//! # Ok(())
//! # }
//! ```

mod catalogue;
mod cifar;
mod digits;
mod error;
mod fetch;
mod idx;
mod image;
pub mod order;
mod places;
mod random;
mod synthetic;
mod text;

pub use error::{DataError, OrderError};
pub use image::{Augment, Channel, ImageSet};
pub use places::Places;
pub use text::TextSet;

use std::path::Path;

use catalogue::{Files, Format, Kind};
use fetch::Server;

/// A data set that was opened.
#[derive(Clone, Debug)]
pub enum DataSet {
    /// Images with one label each.
    Images(ImageSet),
    /// Running text, as numbers of words.
    Text(TextSet),
}

/// The names that [`open`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    catalogue::ALL.iter().map(|entry| entry.name)
}

/// Opens a data set: finds its files, fetches them if they are nowhere and `places` allows it, and checks all of them.
///
/// Among processes that share a cache directory let one open first if something may have to be fetched. It does no harm
/// if all do, but then each of them fetches.
pub fn open(name: &str, places: &Places) -> Result<DataSet, DataError> {
    open_with_progress(name, places, &|_, _| ())
}

/// [`open`], which tells `progress` how many bytes of a file were fetched so far, and of how many if that is known.
///
/// A set may take several files, one after the other; the count then starts again from 0.
pub fn open_with_progress(
    name: &str,
    places: &Places,
    progress: &dyn Fn(u64, Option<u64>),
) -> Result<DataSet, DataError> {
    open_from(name, places, progress, &Outside::real())
}

/// What the caller does not choose: directories that all share, and whom we fetch from. Tests bring their own.
struct Outside<'a> {
    shared: Vec<&'a Path>,
    server: Server,
}

impl Outside<'_> {
    fn real() -> Self {
        Outside { shared: places::shared().into(), server: Server::official() }
    }
}

/// [`open_with_progress`] in given surroundings.
fn open_from(
    name: &str,
    places: &Places,
    progress: &dyn Fn(u64, Option<u64>),
    outside: &Outside,
) -> Result<DataSet, DataError> {
    let entry = catalogue::find(name)?;
    match &entry.kind {
        Kind::Digits => digits::load().map(DataSet::Images),
        Kind::SyntheticImagenet => Ok(DataSet::Images(synthetic::imagenet())),
        Kind::Files(files) => open_files(entry.name, files, places, progress, outside),
    }
}

fn open_files(
    name: &'static str,
    files: &Files,
    places: &Places,
    progress: &dyn Fn(u64, Option<u64>),
    outside: &Outside,
) -> Result<DataSet, DataError> {
    let found = match places.find(name, files, &outside.shared) {
        Ok(found) => found,
        Err(missing) if !places.download => return Err(missing),
        Err(_) => fetch::fetch(files, &places.cache(name)?, &outside.server, progress)?,
    };
    Ok(match files.format {
        Format::Idx => DataSet::Images(idx::load(name, &found)?),
        Format::Cifar => DataSet::Images(cifar::load(name, &found)?),
        Format::Text => DataSet::Text(text::load(name, &found)?),
    })
}

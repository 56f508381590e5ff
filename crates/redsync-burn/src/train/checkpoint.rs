//! Checkpoints: everything from which a training goes on to the same bits.
//!
//! ```text
//! DIR/latest                     the name of the newest complete checkpoint
//! DIR/step-00000120/model.safetensors       weights, momentum, and what the run was (rank 0)
//! DIR/step-00000120/worker-0003.safetensors running statistics, state of a recurrent network, counters (each rank)
//! DIR/step-00000120/rank-0003.safetensors   residuals (each rank, by the synchronizer)
//! ```
//! What must hold: `latest` changes only when all files of a checkpoint are there; every file is checked to the last byte when
//! it is read.

use super::{EpochRecord, TrainError};
use redsync_engine::file::{self, About, Content};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The file with what is the same on all ranks.
pub(super) const MODEL_FILE: &str = "model.safetensors";

/// The format of that file.
pub(super) const MODEL: &str = "redsync-model";
/// The format of a rank's own part.
pub(super) const WORKER: &str = "redsync-worker";

pub(super) fn wrong(path: &Path, why: impl ToString) -> TrainError {
    TrainError::Checkpoint { path: path.to_path_buf(), why: why.to_string() }
}

/// The directory of a step's checkpoint.
pub(super) fn place(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

/// The newest complete checkpoint; None if there is none.
pub(super) fn latest(dir: &Path) -> Result<Option<PathBuf>, TrainError> {
    let file = dir.join("latest");
    let name = match fs::read_to_string(&file) {
        Ok(name) => name,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(wrong(&file, error)),
    };
    match is_name(name.trim()) {
        true => Ok(Some(dir.join(name.trim()))),
        false => Err(wrong(&file, "does not name a checkpoint")),
    }
}

/// Makes a step's checkpoint, whose files are all there, the newest, and removes all but it and the one before.
pub(super) fn complete(dir: &Path, step: u64) -> Result<(), TrainError> {
    let place = place(dir, step);
    let name = place.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let before = latest(dir)?;
    let latest = dir.join("latest");
    file::replace(&latest, |file| file.write_all(name.as_bytes()))
        .map_err(|source| TrainError::Write { path: latest, source })?;
    if before.as_ref() == Some(&place) {
        return Ok(()); // the same step again: the one before is still the one before
    }
    let old = fs::read_dir(dir).map_err(|error| wrong(dir, error))?.flatten().map(|entry| entry.path());
    for old in old.filter(|path| *path != place && Some(path) != before.as_ref() && is_checkpoint(path)) {
        // What cannot be removed takes space, and nothing else.
        let _ = fs::remove_dir_all(old);
    }
    Ok(())
}

/// Whether a directory is one of ours: nobody else's is ever removed.
fn is_checkpoint(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    is_name(&name) && path.join(MODEL_FILE).is_file()
}

fn is_name(name: &str) -> bool {
    name.strip_prefix("step-")
        .is_some_and(|step| !step.is_empty() && step.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The file of a rank's own part.
pub(super) fn worker_file(place: &Path, rank: usize) -> PathBuf {
    place.join(format!("worker-{rank:04}.safetensors"))
}

/// Writes the part of a checkpoint that is one of `format`.
pub(super) fn write<'a>(
    path: &Path,
    format: &str,
    about: &About,
    tensors: impl IntoIterator<Item = &'a (String, &'a [f32])>,
) -> Result<(), TrainError> {
    let tensors = tensors.into_iter().map(|(name, values)| (name.as_str(), *values));
    Ok(file::write(path, format, about, tensors)?)
}

/// What a file holds: vectors to take out, and its description.
pub(super) struct Contents {
    path: PathBuf,
    about: About,
    tensors: BTreeMap<String, Vec<f32>>,
}

impl Contents {
    /// Reads what [`write`] wrote, and nothing else.
    pub fn read(path: PathBuf, format: &str) -> Result<Self, TrainError> {
        let Content { about, tensors } = file::read(&path, format)?;
        Ok(Contents { path, about, tensors })
    }

    /// What is wrong with this file.
    pub fn wrong(&self, why: impl ToString) -> TrainError {
        wrong(&self.path, why)
    }

    /// Its whole description.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// An entry of its description.
    pub fn text(&self, key: &str) -> Result<&str, TrainError> {
        self.about.get(key).map(String::as_str).ok_or_else(|| self.wrong(format!("does not say its {key}")))
    }

    /// An entry of its description that is a number.
    pub fn number<N: FromStr>(&self, key: &str) -> Result<N, TrainError> {
        self.text(key)?.parse().map_err(|_| self.wrong(format!("has a {key} that is no number")))
    }

    /// Whether it has a vector of that name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Takes a vector of a length out.
    pub fn take(&mut self, name: &str, length: usize) -> Result<Vec<f32>, TrainError> {
        match self.tensors.remove(name) {
            Some(values) if values.len() == length => Ok(values),
            Some(values) => {
                Err(self.wrong(format!("{name} has {} elements instead of {length}", values.len())))
            }
            None => Err(self.wrong(format!("has no {name}: it is of another model"))),
        }
    }

    /// Refuses vectors that nobody took.
    pub fn check_empty(&self) -> Result<(), TrainError> {
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => Err(self.wrong(format!("has {name}, which is not of this model"))),
        }
    }
}

/// Epochs as lines; numbers in Rust's text come back with every bit, and what is no number, too.
pub(super) fn write_epochs(records: &[EpochRecord]) -> String {
    let line = |r: &EpochRecord| {
        let EpochRecord { epoch, metric_name, train_loss, test_loss, metric, seconds, .. } = r;
        let EpochRecord { images_per_second, bytes_sent, dense_bytes, .. } = r;
        format!(
            "{epoch} {metric_name} {train_loss} {test_loss} {metric} {seconds} {images_per_second} {bytes_sent} {dense_bytes}"
        )
    };
    records.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// What [`write_epochs`] wrote; older files do not say the bytes.
pub(super) fn read_epochs(text: &str) -> Option<Vec<EpochRecord>> {
    let record = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [epoch, metric_name, numbers @ ..] = &words[..] else { return None };
        let (numbers, bytes) = numbers.split_first_chunk::<5>()?;
        let (bytes_sent, dense_bytes) = match bytes {
            [] => (0, 0),
            [sent, dense] => (sent.parse().ok()?, dense.parse().ok()?),
            _ => return None,
        };
        let numbers = numbers.iter().map(|number| number.parse().ok()).collect::<Option<Vec<f64>>>()?;
        let [train_loss, test_loss, metric, seconds, images_per_second] = numbers.try_into().ok()?;
        Some(EpochRecord {
            epoch: epoch.parse().ok()?,
            metric_name: metric_name.to_string(),
            train_loss,
            test_loss,
            metric,
            seconds,
            images_per_second,
            bytes_sent,
            dense_bytes,
        })
    };
    text.lines().map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_keep_every_bit_even_of_what_is_no_number() {
        let record = |loss: f64| EpochRecord {
            epoch: 2,
            train_loss: loss,
            test_loss: 0.1 + 0.2,
            metric: -0.0,
            metric_name: "accuracy".into(),
            seconds: f64::MIN_POSITIVE,
            images_per_second: 1e300,
            bytes_sent: u64::MAX,
            dense_bytes: 7,
        };
        let records = [record(f64::NAN), record(f64::INFINITY), record(1.0 / 3.0)];
        let read = read_epochs(&write_epochs(&records)).expect("epochs");
        let bits = |records: &[EpochRecord]| -> Vec<[u64; 5]> {
            let numbers =
                |r: &EpochRecord| [r.train_loss, r.test_loss, r.metric, r.seconds, r.images_per_second];
            records.iter().map(|r| numbers(r).map(f64::to_bits)).collect()
        };
        assert_eq!(bits(&read), bits(&records));
        assert_eq!((read[1].bytes_sent, read[1].dense_bytes), (u64::MAX, 7));
        assert_eq!(read_epochs("1 accuracy 1 2 3 4 5").expect("an older file")[0].bytes_sent, 0);
        assert_eq!(read_epochs(""), Some(Vec::new()));
        for damaged in ["1 accuracy 1 2", "1 accuracy 1 2 3 4 5 6", "one accuracy 1 2 3 4 5"] {
            assert_eq!(read_epochs(damaged), None, "{damaged}");
        }
    }
}

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
use redsync_engine::replica_hash;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The file with what is the same on all ranks.
pub(super) const MODEL_FILE: &str = "model.safetensors";

/// Named vectors.
pub(super) type Tensors = Vec<(String, Vec<f32>)>;

/// What a file says of itself besides.
pub(super) type About = BTreeMap<String, String>;

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
    write(&dir.join("latest"), name.as_bytes())?;
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

/// Writes a file so that it is there whole or not at all.
fn write(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let failed = |source| TrainError::Write { path: path.to_path_buf(), source };
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".part");
    let part = path.with_file_name(name);
    let mut file = fs::File::create(&part).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&part, path).map_err(failed)?;
    // The name itself is durable only with its directory.
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.map_or(Ok(()), |parent| fs::File::open(parent).and_then(|dir| dir.sync_all())).map_err(failed)
}

/// The file of a rank's own part.
pub(super) fn worker_file(place: &Path, rank: usize) -> PathBuf {
    place.join(format!("worker-{rank:04}.safetensors"))
}

/// The sum over all values, their names and the description, in a fixed order.
fn checksum(tensors: &Tensors, about: &str) -> String {
    let mut slices: Vec<&[f32]> = tensors.iter().map(|(_, values)| &values[..]).collect();
    let names = tensors.iter().flat_map(|(name, _)| name.bytes().chain([0]));
    let text: Vec<f32> = names.chain(about.bytes()).map(f32::from).collect();
    slices.push(&text);
    format!("{:016x}", replica_hash(&slices))
}

/// Writes tensors and a description into a file.
pub(super) fn write_tensors(path: &Path, mut tensors: Tensors, about: &About) -> Result<(), TrainError> {
    let about = serde_json::to_string(about).map_err(|error| wrong(path, error))?;
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    let metadata =
        HashMap::from([("check".to_string(), checksum(&tensors, &about)), ("about".to_string(), about)]);
    let view = |(name, values)| {
        let view = TensorView::new(Dtype::F32, vec![<Vec<f32>>::len(values)], bytemuck::cast_slice(values));
        view.map(|view| (name, view))
    };
    let views = tensors.iter().map(|(name, values)| view((name, values))).collect::<Result<Vec<_>, _>>();
    let views = views.map_err(|error| wrong(path, error))?;
    let bytes = safetensors::serialize(views, Some(metadata)).map_err(|error| wrong(path, error))?;
    write(path, &bytes)
}

/// What a file holds: vectors to take out, and its description.
pub(super) struct Contents {
    pub path: PathBuf,
    about: About,
    tensors: HashMap<String, Vec<f32>>,
}

impl Contents {
    /// Reads what [`write_tensors`] wrote, and nothing else.
    pub fn read(path: PathBuf) -> Result<Self, TrainError> {
        let bytes = fs::read(&path).map_err(|error| wrong(&path, error))?;
        let damaged = |_| wrong(&path, "is damaged: it is no safetensors file");
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(damaged)?;
        let metadata =
            header.metadata().as_ref().ok_or_else(|| wrong(&path, "is not a checkpoint of a training"))?;
        let (Some(about), Some(check)) = (metadata.get("about"), metadata.get("check")) else {
            return Err(wrong(&path, "is not a checkpoint of a training"));
        };
        let parsed = SafeTensors::deserialize(&bytes).map_err(damaged)?;
        let mut tensors: Tensors = Vec::new();
        for (name, view) in parsed.tensors() {
            if view.dtype() != Dtype::F32 {
                return Err(wrong(&path, format!("{name} is not made of 32-bit numbers")));
            }
            let values = view
                .data()
                .chunks_exact(4)
                .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            tensors.push((name, values.collect()));
        }
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        if checksum(&tensors, about) != *check {
            return Err(wrong(&path, "is damaged: its checksum is wrong"));
        }
        let about = serde_json::from_str(about)
            .map_err(|_| wrong(&path, "is damaged: its description cannot be read"))?;
        Ok(Contents { path, about, tensors: tensors.into_iter().collect() })
    }

    /// What is wrong with this file.
    pub fn wrong(&self, why: impl ToString) -> TrainError {
        wrong(&self.path, why)
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
        match self.tensors.keys().min() {
            None => Ok(()),
            Some(name) => Err(self.wrong(format!("has {name}, which is not of this model"))),
        }
    }
}

/// Epochs as lines; numbers in Rust's text come back with every bit, and what is no number, too.
pub(super) fn write_epochs(records: &[EpochRecord]) -> String {
    let line = |r: &EpochRecord| {
        let EpochRecord { epoch, metric_name, train_loss, test_loss, metric, seconds, images_per_second } = r;
        format!("{epoch} {metric_name} {train_loss} {test_loss} {metric} {seconds} {images_per_second}")
    };
    records.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// What [`write_epochs`] wrote.
pub(super) fn read_epochs(text: &str) -> Option<Vec<EpochRecord>> {
    let record = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [epoch, metric_name, numbers @ ..] = &words[..] else { return None };
        let numbers = numbers.iter().map(|number| number.parse().ok()).collect::<Option<Vec<f64>>>()?;
        let [train_loss, test_loss, metric, seconds, images_per_second] = numbers.try_into().ok()?;
        let (epoch, metric_name) = (epoch.parse().ok()?, metric_name.to_string());
        Some(EpochRecord { epoch, train_loss, test_loss, metric, metric_name, seconds, images_per_second })
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
        };
        let records = [record(f64::NAN), record(f64::INFINITY), record(1.0 / 3.0)];
        let read = read_epochs(&write_epochs(&records)).expect("epochs");
        let bits = |records: &[EpochRecord]| -> Vec<[u64; 5]> {
            let numbers =
                |r: &EpochRecord| [r.train_loss, r.test_loss, r.metric, r.seconds, r.images_per_second];
            records.iter().map(|r| numbers(r).map(f64::to_bits)).collect()
        };
        assert_eq!(bits(&read), bits(&records));
        assert_eq!(read_epochs(""), Some(Vec::new()));
        for damaged in ["1 accuracy 1 2", "1 accuracy 1 2 3 4 5 6", "one accuracy 1 2 3 4 5"] {
            assert_eq!(read_epochs(damaged), None, "{damaged}");
        }
    }
}

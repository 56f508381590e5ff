//! What a training tells: records of steps, layers and epochs for an observer, and the summary at the end. [`Metrics`] is the
//! observer that writes them as JSON lines and as TensorBoard events.

use super::events::Events;
use super::seconds::milliseconds;
use super::{Seconds, TrainError};
use redsync_engine::Traffic;
use redsync_engine::file::replace;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// How a run trains, beside its model and method: what tells two runs of one method apart.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Way {
    pub optimizer: &'static str,
    /// At its highest.
    pub lr: f64,
    pub momentum: f32,
    pub density: f64,
    /// Steps from one exchange to the next.
    pub every: u64,
}

/// What a run is, told once.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct RunRecord {
    pub model: String,
    pub data: String,
    pub method: &'static str,
    pub workers: usize,
    pub comm: &'static str,
    pub seed: u64,
    pub parameters: usize,
    /// Parameters in layers that are compressed.
    pub compressed: usize,
    #[serde(flatten)]
    pub way: Way,
    /// Of one worker.
    pub batch: usize,
    pub epochs: u32,
    pub steps_per_epoch: u64,
    /// The step it begins with; more than 0 when it was resumed.
    pub step: u64,
    pub metric_name: &'static str,
    /// Words instead of images go through.
    pub words: bool,
}

/// Some steps, of rank 0: averages since the last record.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct StepRecord {
    pub epoch: u32,
    pub step: u64,
    pub loss: f64,
    pub lr: f32,
    #[serde(rename = "ms", with = "milliseconds")]
    pub seconds: Seconds,
    pub exposed_ms: f64,
    /// Of a step.
    pub bytes_sent: u64,
    pub dense_bytes: u64,
    /// Images or words of all workers.
    pub per_second: f64,
}

/// A layer at an epoch's end.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct LayerRecord {
    pub epoch: u32,
    pub name: String,
    pub size: usize,
    /// What happens with it once the warm-up is over, as a plan says it.
    pub choice: String,
    /// The share of its elements that the last step sent.
    pub density: f64,
    pub residual_norm: Option<f64>,
    pub bytes_sent: u64,
}

/// An epoch of all workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct EpochRecord {
    pub epoch: u32,
    pub train_loss: f64,
    pub test_loss: f64,
    pub metric: f64,
    pub metric_name: String,
    pub seconds: f64,
    pub images_per_second: f64,
    /// Of one worker, since the run began, and what dense training sends in the same steps.
    pub bytes_sent: u64,
    pub dense_bytes: u64,
}

/// The end of a run: what `redsync train --json` prints.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Summary {
    pub model: String,
    pub data: String,
    pub method: &'static str,
    pub workers: usize,
    pub seed: u64,
    #[serde(flatten)]
    pub way: Way,
    pub metric_name: &'static str,
    pub epochs: Vec<EpochSummary>,
    #[serde(rename = "final")]
    pub end: Final,
    /// Of one worker, over the whole run: its messages and its dense gradients, each counted once.
    pub bytes_sent: u64,
    pub dense_bytes: u64,
    /// Where they went.
    pub traffic: Traffic,
    pub steps: u64,
    pub seconds: Seconds,
    pub replica_hash: String,
}

/// An epoch in the summary.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct EpochSummary {
    pub epoch: u32,
    pub loss: f64,
    pub metric: f64,
}

/// The trained network on the test data; after an interruption what the last epoch's test said, or NaN (null in JSON).
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Final {
    pub loss: f64,
    pub metric: f64,
}

/// Gets what rank 0 has to tell, as it happens.
pub trait Observer {
    /// The run begins.
    fn begin(&mut self, _run: &RunRecord) -> Result<(), TrainError> {
        Ok(())
    }
    /// A step is done; called at every step, to move a bar.
    fn tick(&mut self, _step: u64) {}
    /// Some steps are done.
    fn step(&mut self, _record: &StepRecord) -> Result<(), TrainError> {
        Ok(())
    }
    /// An epoch is done.
    fn epoch(&mut self, _record: &EpochRecord, _layers: &[LayerRecord]) -> Result<(), TrainError> {
        Ok(())
    }
    /// The run is done.
    fn end(&mut self, _summary: &Summary) -> Result<(), TrainError> {
        Ok(())
    }
}

/// Nobody listens.
impl Observer for () {}

/// Writes `metrics.jsonl` and a TensorBoard event file into a directory.
pub struct Metrics {
    dir: PathBuf,
    append: bool,
    /// From the beginning of the run on: one that is refused leaves nothing behind.
    files: Option<(File, Events)>,
}

#[derive(Serialize)]
struct Line<'a, T> {
    kind: &'static str,
    #[serde(flatten)]
    record: &'a T,
}

impl Metrics {
    /// Will write into a directory, which is made if need be; `append` goes on with the file of a run that is resumed.
    pub fn new(dir: &Path, append: bool) -> Self {
        Metrics { dir: dir.to_path_buf(), append, files: None }
    }

    fn path(&self) -> PathBuf {
        self.dir.join("metrics.jsonl")
    }

    /// Opens the files. What a resumed run had written beyond its checkpoint will come again, so it goes.
    fn open(&mut self, run: &RunRecord) -> Result<(), TrainError> {
        let path = self.path();
        let failed = |source| TrainError::Write { path: path.clone(), source };
        std::fs::create_dir_all(&self.dir).map_err(failed)?;
        let old = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other.map_err(failed)?,
        };
        if !old.is_empty() && (!self.append || old.lines().any(|line| is_of_another(line, run))) {
            return Err(TrainError::Setting(format!(
                "{} belongs to another run: choose another directory with --out",
                path.display()
            )));
        }
        let kept: String = old.split_inclusive('\n').filter(|line| is_before(line, run)).collect();
        replace(&path, |file| file.write_all(kept.as_bytes())).map_err(failed)?;
        let lines = OpenOptions::new().append(true).open(&path).map_err(failed)?;
        self.files = Some((lines, Events::new(&self.dir)?));
        Ok(())
    }

    fn write<T: Serialize>(&mut self, kind: &'static str, record: &T) -> Result<(), TrainError> {
        let path = self.path();
        let failed = |source| TrainError::Write { path, source };
        let line = serde_json::to_vec(&Line { kind, record }).map_err(std::io::Error::from);
        let written = line.and_then(|mut line| {
            line.push(b'\n');
            self.files.as_mut().map_or(Ok(()), |(lines, _)| lines.write_all(&line))
        });
        written.map_err(failed)
    }

    fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), TrainError> {
        self.files.as_mut().map_or(Ok(()), |(_, events)| events.scalars(step, scalars))
    }
}

/// Whether a line tells of a run that is not this one.
fn is_of_another(line: &str, run: &RunRecord) -> bool {
    let told: Result<serde_json::Value, _> = serde_json::from_str(line);
    let ours = serde_json::json!({
        "model": run.model, "data": run.data, "method": run.method, "seed": run.seed, "steps_per_epoch": run.steps_per_epoch,
    });
    let differs = |told: &serde_json::Value| {
        ours.as_object().is_some_and(|ours| ours.iter().any(|(key, value)| told[key] != *value))
    };
    told.is_ok_and(|told| told["kind"] == "run" && differs(&told))
}

/// Whether a line is whole, and of a time before the step with which a run begins.
fn is_before(line: &str, run: &RunRecord) -> bool {
    let Ok(record) = serde_json::from_str::<serde_json::Value>(line) else { return false };
    if !line.ends_with('\n') {
        return false;
    }
    let epochs = run.step / run.steps_per_epoch.max(1);
    match record["kind"].as_str() {
        Some("step") => record["step"].as_u64().is_some_and(|step| step <= run.step),
        Some("epoch" | "layer") => record["epoch"].as_u64().is_some_and(|epoch| epoch <= epochs),
        _ => false, // the run itself is told again
    }
}

impl Observer for Metrics {
    fn begin(&mut self, run: &RunRecord) -> Result<(), TrainError> {
        self.open(run)?;
        self.write("run", run)
    }

    fn step(&mut self, record: &StepRecord) -> Result<(), TrainError> {
        self.write("step", record)?;
        let scalars = [
            ("train/loss", record.loss),
            ("train/learning_rate", f64::from(record.lr)),
            ("sync/bytes_sent", record.bytes_sent as f64),
            ("sync/exposed_ms", record.exposed_ms),
            ("train/samples_per_second", record.per_second),
        ];
        self.scalars(record.step, &scalars)
    }

    fn epoch(&mut self, record: &EpochRecord, layers: &[LayerRecord]) -> Result<(), TrainError> {
        self.write("epoch", record)?;
        let step = u64::from(record.epoch);
        self.scalars(step, &[("test/loss", record.test_loss), ("test/metric", record.metric)])?;
        for layer in layers {
            self.write("layer", layer)?;
            if let Some(norm) = layer.residual_norm {
                self.scalars(step, &[(&format!("residual/{}", layer.name), norm)])?;
            }
        }
        Ok(())
    }

    fn end(&mut self, summary: &Summary) -> Result<(), TrainError> {
        #[derive(Serialize)]
        struct End<'a> {
            loss: f64,
            metric: f64,
            bytes_sent: u64,
            dense_bytes: u64,
            traffic: &'a Traffic,
            steps: u64,
            seconds: &'a Seconds,
            replica_hash: &'a str,
        }
        let Summary { end, bytes_sent, dense_bytes, traffic, steps, seconds, replica_hash, .. } = summary;
        let (bytes_sent, dense_bytes, steps) = (*bytes_sent, *dense_bytes, *steps);
        self.write(
            "final",
            &End {
                loss: end.loss,
                metric: end.metric,
                bytes_sent,
                dense_bytes,
                traffic,
                steps,
                seconds,
                replica_hash,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(step: u64) -> RunRecord {
        RunRecord {
            model: "digits-cnn".into(),
            data: "digits".into(),
            method: "rgc",
            workers: 2,
            comm: "local",
            seed: 1,
            parameters: 10,
            compressed: 8,
            way: Way { optimizer: "nesterov", lr: 0.1, momentum: 0.9, density: 0.001, every: 1 },
            batch: 16,
            epochs: 3,
            steps_per_epoch: 10,
            step,
            metric_name: "accuracy",
            words: false,
        }
    }

    fn kinds(dir: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(dir.join("metrics.jsonl")).expect("metrics");
        let record = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("a whole line");
        text.lines().map(|line| record(line)["kind"].as_str().expect("a kind").to_string()).collect()
    }

    #[test]
    fn a_torn_line_and_what_came_after_the_checkpoint_go_when_a_run_is_resumed() {
        let dir = tempfile::tempdir().expect("a directory");
        Metrics::new(dir.path(), false).begin(&run(0)).expect("new metrics");
        let told = std::fs::read_to_string(dir.path().join("metrics.jsonl")).expect("metrics");
        let old = concat!(
            "{\"kind\":\"step\",\"step\":9}\n",
            "{\"kind\":\"epoch\",\"epoch\":1}\n",
            "{\"kind\":\"layer\",\"epoch\":1}\n",
            "{\"kind\":\"step\",\"step\":14}\n",
            "{\"kind\":\"epoch\",\"epoch\":2}\n",
        );
        // The last line lost its end, or only the end of the line.
        for torn in ["{\"kind\":\"step\",\"st", "{\"kind\":\"step\",\"step\":10}"] {
            std::fs::write(dir.path().join("metrics.jsonl"), format!("{told}{old}{torn}"))
                .expect("old metrics");
            Metrics::new(dir.path(), true).begin(&run(12)).expect("resumed metrics");
            assert_eq!(kinds(dir.path()), ["step", "epoch", "layer", "run"]);
        }
    }

    #[test]
    fn metrics_of_another_run_are_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        Metrics::new(dir.path(), false).begin(&run(0)).expect("new metrics");
        let refused = Metrics::new(dir.path(), false).begin(&run(0)).expect_err("a second run");
        assert!(refused.to_string().contains("belongs to another run"), "{refused}");
        let other = RunRecord { seed: 2, ..run(12) };
        let refused = Metrics::new(dir.path(), true).begin(&other).expect_err("resumed in a wrong place");
        assert!(refused.to_string().contains("belongs to another run"), "{refused}");
        assert_eq!(kinds(dir.path()), ["run"]);
    }
}

//! Files that a report is made of: training metrics as JSON lines, and the JSON documents of other commands.
//! What must hold: unknown fields are no error, a damaged file is one line that names file, line and cause.

use anyhow::{Context, Result, anyhow, bail};
use redsync_burn::train::{Seconds, milliseconds};
use redsync_engine::Traffic;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Found {
    pub runs: Vec<Run>,
    pub selections: Vec<Selection>,
    pub steps: Vec<SyncStep>,
    pub plans: Vec<Plan>,
    pub simulations: Vec<Simulation>,
    pub cells: Vec<Cell>,
}

/// A training run.
#[derive(Debug, Default)]
pub struct Run {
    pub meta: Meta,
    /// Its method, and how it differs from other runs of that method; what equal runs but for their seeds share.
    pub way: String,
    pub steps: Vec<Step>,
    pub layers: Vec<Layer>,
    pub epochs: Vec<Epoch>,
    pub last: Option<Last>,
}

impl Run {
    /// What one rank sent in the whole run, and what dense training sends; what its steps sent so far, if it has not ended.
    pub fn sent(&self) -> Option<(f64, f64)> {
        if let Some(last) = &self.last {
            return Some((last.bytes_sent, last.dense_bytes));
        }
        let (mut before, mut sum) = (self.begin(), (0.0, 0.0));
        for step in &self.steps {
            let steps = step.step.saturating_sub(before) as f64;
            before = step.step;
            sum = (sum.0 + steps * step.bytes_sent, sum.1 + steps * step.dense_bytes);
        }
        (!self.steps.is_empty()).then_some(sum)
    }

    /// The step before the first record: a file that goes on after an interruption has all steps, a new one those since then.
    pub fn begin(&self) -> u64 {
        let first = self.steps.first().map_or(0, |step| step.step);
        if first > self.meta.step { self.meta.step } else { 0 }
    }

    /// Goes on from a step: what the file has beyond it will come again.
    fn resume(&mut self, meta: Meta) {
        self.steps.retain(|step| step.step <= meta.step);
        self.epochs.retain(|epoch| epoch.step.is_none_or(|step| step <= meta.step));
        (self.meta, self.last) = (meta, None);
    }
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Meta {
    pub model: String,
    pub data: String,
    pub method: String,
    pub workers: u64,
    pub seed: u64,
    pub parameters: u64,
    /// Older files tell of these four only the density.
    pub density: Option<f64>,
    pub lr: Option<f64>,
    pub momentum: Option<f64>,
    /// Steps from one exchange to the next.
    pub every: Option<u64>,
    /// The step it began with.
    pub step: u64,
}

impl Meta {
    /// Whether ranks exchange weights after some steps of their own.
    pub fn is_local(&self) -> bool {
        self.every.is_some_and(|every| every > 1)
    }

    /// Whether its gradients are summed as they are.
    pub fn is_dense(&self) -> bool {
        self.method == "sgd" && !self.is_local()
    }
}

/// Some steps: averages since the record before.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Step {
    pub step: u64,
    pub loss: Option<f64>,
    pub bytes_sent: f64,
    pub dense_bytes: f64,
    #[serde(rename = "ms", with = "milliseconds")]
    pub seconds: Seconds,
    pub exposed_ms: f64,
}

#[derive(Debug, Deserialize)]
pub struct Layer {
    pub epoch: f64,
    pub name: String,
    pub size: u64,
    pub choice: String,
    #[serde(default)]
    pub density: Option<f64>,
    #[serde(default)]
    pub residual_norm: Option<f64>,
    #[serde(default)]
    pub bytes_sent: f64,
}

/// A loss that is not finite is null in JSON.
#[derive(Debug, Deserialize)]
pub struct Epoch {
    pub epoch: f64,
    #[serde(default)]
    pub train_loss: Option<f64>,
    #[serde(default)]
    pub test_loss: Option<f64>,
    #[serde(default)]
    pub metric: Option<f64>,
    #[serde(default)]
    pub metric_name: String,
    /// The steps until its end, where they are told.
    #[serde(default)]
    pub step: Option<u64>,
    #[serde(default)]
    pub seconds: f64,
    /// Since the run began.
    #[serde(default)]
    pub bytes_sent: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Last {
    pub loss: Option<f64>,
    pub metric: Option<f64>,
    pub bytes_sent: f64,
    pub dense_bytes: f64,
    pub traffic: Traffic,
    pub seconds: Total,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Total {
    pub total: f64,
}

/// `train --json`: a run without its steps.
#[derive(Debug, Deserialize)]
struct Trained {
    #[serde(flatten)]
    meta: Meta,
    #[serde(default)]
    metric_name: String,
    epochs: Vec<TrainedEpoch>,
    #[serde(rename = "final")]
    end: End,
    #[serde(flatten)]
    last: Last,
}

#[derive(Debug, Deserialize)]
struct TrainedEpoch {
    epoch: f64,
    loss: Option<f64>,
    metric: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct End {
    loss: Option<f64>,
    metric: Option<f64>,
}

impl From<Trained> for Run {
    fn from(Trained { meta, metric_name, epochs, end, last }: Trained) -> Self {
        let epoch = |TrainedEpoch { epoch, loss, metric }: TrainedEpoch| Epoch {
            epoch,
            train_loss: loss,
            test_loss: None,
            metric,
            metric_name: metric_name.clone(),
            step: None,
            seconds: 0.0,
            bytes_sent: 0.0,
        };
        let epochs = epochs.into_iter().map(epoch).collect();
        Run {
            meta,
            epochs,
            last: Some(Last { loss: end.loss, metric: end.metric, ..last }),
            ..Run::default()
        }
    }
}

/// `bench select`.
#[derive(Debug, Deserialize)]
pub struct Selection {
    pub n: f64,
    pub density: f64,
    pub rows: Vec<SelectionRow>,
}

#[derive(Debug, Deserialize)]
pub struct SelectionRow {
    pub name: String,
    pub median_ms: f64,
}

/// `bench sync`.
#[derive(Debug, Deserialize)]
pub struct SyncStep {
    pub ranks: u64,
    pub model: String,
    pub method: String,
    #[serde(default)]
    pub auto: bool,
    pub sync_ms: f64,
    #[serde(default)]
    pub bytes_sent_per_step: f64,
    #[serde(default)]
    pub dense_bytes_per_step: f64,
    #[serde(default)]
    pub traffic: Traffic,
    /// In milliseconds there, in seconds here.
    #[serde(with = "milliseconds")]
    pub breakdown: Seconds,
}

impl SyncStep {
    pub fn name(&self) -> &str {
        if self.auto { "auto" } else { &self.method }
    }

    pub fn label(&self) -> String {
        format!("{} on {} ranks, {}", self.model, self.ranks, self.name())
    }
}

/// `plan`.
#[derive(Debug, Deserialize)]
pub struct Plan {
    #[serde(default)]
    pub model: String,
    #[serde(default)]
    pub ranks: u64,
    pub layers: Vec<PlanLayer>,
    pub predicted_ms: std::collections::BTreeMap<String, f64>,
    pub speedup: f64,
    pub dense_wins_from_ranks: Option<u64>,
    pub verdict: String,
}

#[derive(Debug, Deserialize)]
pub struct PlanLayer {
    pub name: String,
    pub size: u64,
    pub choice: String,
    pub why: String,
}

/// `simulate`.
#[derive(Debug, Deserialize)]
pub struct Simulation {
    pub model: String,
    pub platform: String,
    #[serde(default)]
    pub about: String,
    pub curves: Vec<Curve>,
}

#[derive(Debug, Deserialize)]
pub struct Curve {
    pub method: String,
    pub rows: Vec<CurveRow>,
}

#[derive(Debug, Deserialize)]
pub struct CurveRow {
    pub ranks: f64,
    pub step_ms: f64,
    pub scaling: f64,
    pub speedup: f64,
    pub bytes_on_link: f64,
    #[serde(default)]
    pub select_ms: f64,
    #[serde(default)]
    pub encode_ms: f64,
    #[serde(default)]
    pub exchange_ms: f64,
    #[serde(default)]
    pub decode_ms: f64,
    #[serde(default)]
    pub apply_ms: f64,
}

/// One comparison of `lab/predictions`.
#[derive(Debug, Deserialize)]
pub struct Cell {
    pub hosts: u64,
    pub link: String,
    pub model: String,
    pub method: String,
    pub measured_ms: f64,
    pub predicted_ms: Vec<f64>,
}

impl Found {
    /// Reads a run directory or one of many, a file of metrics, or a document of another command.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        if !path.is_dir() {
            return self.add_file(path);
        }
        let own = path.join("metrics.jsonl");
        let files = if own.exists() { vec![own] } else { metrics_below(path)? };
        if files.is_empty() {
            bail!("{}: there is no metrics file (*.jsonl), neither in it nor below", path.display());
        }
        files.iter().try_for_each(|file| self.add_file(file))
    }

    fn add_file(&mut self, file: &Path) -> Result<()> {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let lines = file.extension().is_some_and(|extension| extension == "jsonl");
        let read = if lines { self.add_run(&text) } else { self.add_document(&text) };
        read.with_context(|| file.display().to_string())
    }

    fn add_run(&mut self, text: &str) -> Result<()> {
        let mut run: Option<Run> = None;
        // The last line of a run that goes on may be half written; every other line must be whole.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        for (number, line) in (1..).zip(text[..whole].lines()) {
            if line.trim().is_empty() {
                continue;
            }
            let at = |error: serde_json::Error| anyhow!("line {number}: {}", one_line(&error));
            let value: Value = serde_json::from_str(line).map_err(at)?;
            let kind = value.get("kind").and_then(Value::as_str).map(str::to_owned);
            let kind = kind.with_context(|| format!("line {number}: no \"kind\""))?;
            if kind == "run" {
                let meta = from(value).map_err(at)?;
                self.begin_run(&mut run, meta);
                continue;
            }
            // The trainer tells a resumed run once more, behind what it keeps of the steps before.
            let run = run.get_or_insert_default();
            match &*kind {
                "step" => run.steps.push(from(value).map_err(at)?),
                "layer" => run.layers.push(from(value).map_err(at)?),
                "epoch" => run.epochs.push(from(value).map_err(at)?),
                "final" => run.last = Some(from(value).map_err(at)?),
                _ => {}
            }
        }
        let run = run.filter(|run| run.meta != Meta::default());
        self.runs.push(run.context("no line of the kind \"run\": not the metrics of a training run")?);
        Ok(())
    }

    /// A run begins, or goes on: under PyTorch several may have been added to one file.
    fn begin_run(&mut self, run: &mut Option<Run>, meta: Meta) {
        let same = |old: &Run| {
            old.meta == Meta::default() || old.meta == Meta { step: old.meta.step, ..meta.clone() }
        };
        match run {
            Some(old) if meta.step > 0 && same(old) => old.resume(meta),
            _ => self.runs.extend(run.replace(Run { meta, ..Run::default() })),
        }
    }

    /// A document is known by its fields.
    fn add_document(&mut self, text: &str) -> Result<()> {
        let said = |error: serde_json::Error| anyhow!(one_line(&error));
        let value: Value = serde_json::from_str(text).map_err(said)?;
        let has = |field: &str| value.get(field).is_some();
        if value.is_array() {
            self.cells.extend(from::<Vec<Cell>>(value).map_err(said)?);
        } else if has("curves") {
            self.simulations.push(from(value).map_err(said)?);
        } else if has("predicted_ms") && has("verdict") {
            self.plans.push(from(value).map_err(said)?);
        } else if has("epochs") && has("final") {
            self.runs.push(from::<Trained>(value).map_err(said)?.into());
        } else if has("sync_ms") {
            self.steps.push(from(value).map_err(said)?);
        } else if has("rows") && has("dist") {
            self.selections.push(from(value).map_err(said)?);
        } else {
            bail!("not the output of train, bench select, bench sync, plan, simulate or lab/predictions");
        }
        Ok(())
    }
}

/// Every metrics file in a directory and below, by name.
fn metrics_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect()
    };
    let mut entries = read().with_context(|| format!("cannot read {}", dir.display()))?;
    entries.sort();
    let mut files = Vec::new();
    for entry in entries {
        match entry.is_dir() {
            true => files.extend(metrics_below(&entry)?),
            false if entry.extension().is_some_and(|extension| extension == "jsonl") => files.push(entry),
            false => {}
        }
    }
    Ok(files)
}

fn from<T: DeserializeOwned>(value: Value) -> serde_json::Result<T> {
    serde_json::from_value(value)
}

fn one_line(error: &serde_json::Error) -> String {
    error.to_string().replace('\n', ", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(name: &str, text: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let error = Found::default().add(&path).unwrap_err();
        let text = format!("{error:#}");
        assert!(!text.contains('\n') && text.contains(name), "{text}");
        text
    }

    #[test]
    fn damaged_files_are_one_line_that_names_file_line_and_cause() {
        let run = "{\"kind\":\"run\",\"model\":\"m\"}\n";
        assert!(message("a.jsonl", &format!("{run}{{\"kind\":\"step\",\n{run}")).contains("line 2: EOF"));
        assert!(
            message("a.jsonl", &format!("{run}{{\"kind\":\"epoch\"}}\n"))
                .contains("line 2: missing field `epoch`")
        );
        assert!(message("a.jsonl", "{}\n").contains("line 1: no \"kind\""));
        assert!(message("a.jsonl", "").contains("no line of the kind \"run\""));
        assert!(message("b.json", "{\"a\":1}").contains("not the output of train, bench select"));
        assert!(message("b.json", "{\"curves\":3}").contains("invalid type"));
        assert!(message("b.json", "{\"sync_ms\":1").contains("EOF"));
        assert!(message("b.json", "[{\"hosts\":2}]").contains("missing field `link`"));
    }

    #[test]
    fn a_directory_of_runs_is_all_of_them_and_one_without_any_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let message = format!("{:#}", Found::default().add(dir.path()).unwrap_err());
        assert!(
            message.ends_with("there is no metrics file (*.jsonl), neither in it nor below"),
            "{message}"
        );
        for (place, model) in [("b/sgd", "second"), ("a", "first")] {
            std::fs::create_dir_all(dir.path().join(place)).unwrap();
            let text = format!("{{\"kind\":\"run\",\"model\":\"{model}\"}}\n");
            std::fs::write(dir.path().join(place).join("metrics.jsonl"), text).unwrap();
        }
        let mut found = Found::default();
        found.add(dir.path()).unwrap();
        assert_eq!(found.runs.iter().map(|run| &*run.meta.model).collect::<Vec<_>>(), ["first", "second"]);
    }

    #[test]
    fn a_file_may_hold_a_run_that_goes_on_and_then_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("torch.jsonl");
        let line = |kind: &str, step: u64| {
            format!("{{\"kind\":\"{kind}\",\"model\":\"m\",\"epoch\":1,\"step\":{step}}}\n")
        };
        let told = [
            ("run", 0),
            ("step", 1),
            ("step", 2),
            ("epoch", 2),
            ("run", 1),
            ("step", 2),
            ("run", 0),
            ("step", 1),
        ];
        std::fs::write(&path, told.map(|(kind, step)| line(kind, step)).concat()).unwrap();
        let mut found = Found::default();
        found.add(&path).unwrap();
        let steps = |run: &Run| run.steps.iter().map(|step| step.step).collect::<Vec<_>>();
        assert_eq!(found.runs.iter().map(steps).collect::<Vec<_>>(), [vec![1, 2], vec![1]]);
        assert!(found.runs[0].epochs.is_empty(), "it was beyond the step from which the run went on");
    }

    #[test]
    fn what_train_prints_is_a_run_of_epochs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        let text = r#"{"model": "m", "method": "rgc", "workers": 4, "seed": 2, "metric_name": "accuracy", "bytes_sent": 7, "dense_bytes": 90,
            "epochs": [{"epoch": 1, "loss": 2.5, "metric": 0.25}, {"epoch": 2, "loss": null, "metric": 0.5}],
            "final": {"loss": 1.5, "metric": 0.75}, "seconds": {"total": 3.5}, "steps": 6}"#;
        std::fs::write(&path, text).unwrap();
        let mut found = Found::default();
        found.add(&path).unwrap();
        let Run { meta, steps, epochs, last, .. } = &found.runs[0];
        assert_eq!((&*meta.model, &*meta.method, meta.workers, meta.seed), ("m", "rgc", 4, 2));
        assert!(steps.is_empty());
        let told: Vec<_> =
            epochs.iter().map(|e| (e.epoch, e.train_loss, e.metric, &*e.metric_name)).collect();
        assert_eq!(told, [(1.0, Some(2.5), Some(0.25), "accuracy"), (2.0, None, Some(0.5), "accuracy")]);
        let last = last.as_ref().unwrap();
        assert_eq!((last.loss, last.metric, last.seconds.total), (Some(1.5), Some(0.75), 3.5));
        assert_eq!(found.runs[0].sent(), Some((7.0, 90.0)));
        assert!(message("c.json", r#"{"epochs": 3, "final": {}}"#).contains("invalid type"));
    }

    #[test]
    fn unknown_fields_and_kinds_and_a_half_written_end_are_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let text = "{\"kind\":\"run\",\"model\":\"m\",\"new\":[1]}\n{\"kind\":\"weather\"}\n\
                    {\"kind\":\"epoch\",\"epoch\":1,\"train_loss\":null,\"metric\":0.5}\n{\"kind\":\"epo";
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let mut found = Found::default();
        found.add(dir.path()).unwrap();
        assert_eq!(found.runs[0].meta.model, "m");
        assert_eq!(found.runs[0].epochs.len(), 1);
        assert_eq!(found.runs[0].epochs[0].train_loss, None);
    }
}

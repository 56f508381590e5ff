//! Files that a report is made of: training metrics as JSON lines, and the JSON documents of other commands.
//! What must hold: unknown fields are no error, a damaged file is one line that names file, line and cause.

use anyhow::{Context, Result, anyhow, bail};
use redsync_burn::train::{Seconds, milliseconds};
use redsync_engine::Traffic;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;

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
    pub steps: Vec<Step>,
    pub layers: Vec<Layer>,
    pub epochs: Vec<Epoch>,
    pub last: Option<Last>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Meta {
    pub model: String,
    pub data: String,
    pub method: String,
    pub workers: u64,
    pub seed: u64,
    pub parameters: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Step {
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
    /// Reads a run directory, a file of metrics, or a document of another command.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        let file = if path.is_dir() { path.join("metrics.jsonl") } else { path.to_path_buf() };
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let lines = file.extension().is_some_and(|extension| extension == "jsonl");
        let read = if lines { self.add_run(&text) } else { self.add_document(&text) };
        read.with_context(|| file.display().to_string())
    }

    fn add_run(&mut self, text: &str) -> Result<()> {
        let mut run = Run::default();
        let mut said = false;
        // The last line of a run that goes on may be half written; every other line must be whole.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        for (number, line) in (1..).zip(text[..whole].lines()) {
            if line.trim().is_empty() {
                continue;
            }
            let at = |error: serde_json::Error| anyhow!("line {number}: {}", one_line(&error));
            let value: Value = serde_json::from_str(line).map_err(at)?;
            match value.get("kind").and_then(Value::as_str) {
                Some("run") => (run.meta, said) = (from(value).map_err(at)?, true),
                Some("step") => run.steps.push(from(value).map_err(at)?),
                Some("layer") => run.layers.push(from(value).map_err(at)?),
                Some("epoch") => run.epochs.push(from(value).map_err(at)?),
                Some("final") => run.last = Some(from(value).map_err(at)?),
                Some(_) => {}
                None => bail!("line {number}: no \"kind\""),
            }
        }
        if !said {
            bail!("no line of the kind \"run\": not the metrics of a training run");
        }
        self.runs.push(run);
        Ok(())
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
        } else if has("sync_ms") {
            self.steps.push(from(value).map_err(said)?);
        } else if has("rows") && has("dist") {
            self.selections.push(from(value).map_err(said)?);
        } else {
            bail!("not the output of bench select, bench sync, plan, simulate or lab/predictions");
        }
        Ok(())
    }
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
        assert!(message("b.json", "{\"a\":1}").contains("not the output of bench select"));
        assert!(message("b.json", "{\"curves\":3}").contains("invalid type"));
        assert!(message("b.json", "{\"sync_ms\":1").contains("EOF"));
        assert!(message("b.json", "[{\"hosts\":2}]").contains("missing field `link`"));
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

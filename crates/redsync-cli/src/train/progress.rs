//! What a training shows: a bar on a terminal, a line per epoch elsewhere, and tables at the end. Metrics go to files beside it.

use super::metric;
use crate::bench::{grouped, table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use redsync_burn::train::{
    EpochRecord, LayerRecord, Metrics, Observer, RunRecord, StepRecord, Summary, TrainError,
};
use redsync_engine::Traffic;
use std::io::IsTerminal;
use std::path::Path;

/// Tells of rank 0's training.
pub struct Teller {
    metrics: Metrics,
    bar: ProgressBar,
    run: Option<RunRecord>,
    terminal: bool,
}

impl Teller {
    pub fn new(out: &Path, append: bool) -> Self {
        let metrics = Metrics::new(out, append);
        Teller { metrics, bar: ProgressBar::hidden(), run: None, terminal: std::io::stderr().is_terminal() }
    }

    fn line(&self, text: String) {
        match self.terminal {
            true => self.bar.println(text),
            false => eprintln!("{text}"),
        }
    }

    /// 0.9731 as 97.31%, a perplexity as it is.
    fn metric(&self, value: f64) -> String {
        match self.run.as_ref().map(|run| run.metric_name) {
            Some("accuracy") => format!("accuracy {:.2}%", 100.0 * value),
            _ => format!("perplexity {value:.2}"),
        }
    }
}

impl Observer for Teller {
    fn begin(&mut self, run: &RunRecord) -> Result<(), TrainError> {
        self.metrics.begin(run)?;
        let total = run.steps_per_epoch * u64::from(run.epochs);
        let what = if run.words { "words" } else { "images" };
        self.run = Some(run.clone());
        if self.terminal {
            let style = ProgressStyle::with_template("{bar:28.cyan} {pos}/{len} {elapsed} +{eta} {wide_msg}");
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            self.bar = style.map_or(bar.clone(), |style| bar.with_style(style)).with_position(run.step);
            self.bar.reset_eta();
        }
        self.line(format!(
            "{} on {}: {} parameters, {} of them compressed by {}; {} {} workers, {} {} each; {} epochs of {} steps",
            run.model,
            run.data,
            grouped(run.parameters),
            grouped(run.compressed),
            run.method,
            run.workers,
            run.comm,
            run.batch,
            if run.words { "sequences" } else { what },
            run.epochs,
            grouped(run.steps_per_epoch as usize),
        ));
        Ok(())
    }

    fn tick(&mut self, step: u64) {
        self.bar.set_position(step);
    }

    fn step(&mut self, record: &StepRecord) -> Result<(), TrainError> {
        let what = if self.run.as_ref().is_some_and(|run| run.words) { "words" } else { "images" };
        self.bar.set_message(format!(
            "epoch {} loss {:.3} {:.0} {what}/s sent 1/{:.0}",
            record.epoch,
            record.loss,
            record.per_second,
            record.dense_bytes as f64 / record.bytes_sent.max(1) as f64,
        ));
        self.metrics.step(record)
    }

    fn epoch(&mut self, record: &EpochRecord, layers: &[LayerRecord]) -> Result<(), TrainError> {
        self.line(format!(
            "epoch {:>3}  loss {:.4}  {}  {:.0}/s  {:.1} s  sent so far {}, 1/{:.0} of dense",
            record.epoch,
            record.train_loss,
            self.metric(record.metric),
            record.images_per_second,
            record.seconds,
            size(record.bytes_sent),
            record.dense_bytes as f64 / record.bytes_sent.max(1) as f64,
        ));
        self.metrics.epoch(record, layers)
    }

    fn end(&mut self, summary: &Summary) -> Result<(), TrainError> {
        self.bar.finish_and_clear();
        self.metrics.end(summary)
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// What came out of one training.
pub fn print(summary: &Summary, out: &Path) {
    crate::say!(
        "{} {} after {} steps of {} workers with {}",
        summary.metric_name,
        metric(summary),
        grouped(summary.steps as usize),
        summary.workers,
        summary.method,
    );
    crate::say!(
        "in the whole run each worker sent {}, 1/{:.0} of the {} of dense SGD: {}",
        size(summary.bytes_sent),
        summary.traffic.ratio(),
        size(summary.dense_bytes),
        shares(&summary.traffic),
    );
    let s = &summary.seconds;
    let mut out_table = table(&["phase", "seconds", "share of the steps"]);
    for (name, seconds) in [
        ("forward", s.forward),
        ("backward", s.backward),
        ("wait for exchange", s.exchange),
        ("apply", s.apply),
        ("update", s.update),
        ("beside backward: select", s.select),
        ("beside backward: encode", s.encode),
        ("beside backward: decode", s.decode),
        ("all steps", s.total),
    ] {
        out_table.add_row([
            name.to_string(),
            format!("{seconds:.2}"),
            format!("{:.1}%", 100.0 * seconds / s.total.max(1e-9)),
        ]);
    }
    crate::say!("{out_table}");
    crate::say!("replicas are equal on all workers: {}", summary.replica_hash);
    crate::say!("metrics are in {}", out.display());
}

/// Where bytes went: `warm-up 62%, messages 20%, rest 15%, headers 3%`.
pub fn shares(traffic: &Traffic) -> String {
    let share = |bytes: u64| 100.0 * bytes as f64 / traffic.sent().max(1) as f64;
    let part = |(name, bytes): (&str, u64)| format!("{name} {:.0}%", share(bytes));
    let always = Traffic::default().parts().len() - 1;
    let told = traffic.parts().into_iter().enumerate().filter(|(i, (_, bytes))| *i < always || *bytes > 0);
    told.map(|(_, each)| part(each)).collect::<Vec<_>>().join(", ")
}

/// 12345678 as 12.3 MB.
pub fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        _ if bytes < 1e3 => format!("{bytes:.0} bytes"),
        _ if bytes < 1e6 => format!("{:.1} KB", bytes / 1e3),
        _ if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.2} GB", bytes / 1e9),
    }
}

/// A bar for what is fetched; it appears with the first bytes.
pub fn download_bar(shown: bool) -> ProgressBar {
    match shown {
        true => ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_message("fetching"),
        false => ProgressBar::hidden(),
    }
}

/// So much is fetched.
pub fn downloaded(bar: &ProgressBar, done: u64, total: Option<u64>) {
    if let Some(total) = total {
        bar.set_length(total);
    }
    bar.set_position(done);
}

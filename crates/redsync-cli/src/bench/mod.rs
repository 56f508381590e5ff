//! `redsync bench`: times of the stages, as a table or as JSON, always beside `accumulate`, one plain pass over the
//! same memory: ratios mean something on any machine, times do not.

mod apply;
mod conv;
mod data;
mod device;
mod lstm;
mod select;
mod sync;
mod wire;

pub(crate) use sync::{Comm, parse_exchange, parse_model, parse_ms};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use redsync_core::Density;
use redsync_engine::measure::median;
use serde::Serialize;
use std::time::Instant;

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Selection: every algorithm, over steps of fresh gradients
    ///
    /// Each selector runs its own residual through the same gradients; what it selects is removed, as in training. A
    /// time includes the accumulation. `exact` says whether precisely the k largest were chosen at every step.
    Select(select::Select),
    /// Messages: size against the entropy bound, time to encode and decode
    Wire(wire::Wire),
    /// Decompression: adding the messages of many ranks to the weights
    Apply(apply::Apply),
    /// A whole step among ranks: made-up gradients with the layer sizes of a real model
    ///
    /// Ranks are threads of this process, or with --comm mpi the processes that mpirun starts (only rank 0 prints).
    /// With --compute-ms a backward pass of that length is played, layer by layer, so that overlap can be seen.
    Sync(sync::Sync),
    /// A recurrent layer, forward and backward: our fused one beside Burn's operations
    Lstm(lstm::Lstm),
    /// Convolutions, forward and backward: ours beside Burn's
    Conv(conv::Conv),
}

impl Bench {
    pub fn run(self) -> Result<()> {
        match self {
            Bench::Select(select) => select.run(),
            Bench::Wire(wire) => wire.run(),
            Bench::Apply(apply) => apply.run(),
            Bench::Sync(sync) => sync.run(),
            Bench::Lstm(lstm) => lstm.run(),
            Bench::Conv(conv) => conv.run(),
        }
    }
}

/// What all stages have in common.
#[derive(Debug, Args)]
struct Common {
    /// Elements of the layer; K, M and G stand for 2^10, 2^20 and 2^30
    #[arg(long, default_value = "16M", value_parser = parse_count)]
    n: usize,
    /// Fraction of the elements that is sent
    #[arg(long, default_value = "0.001", value_parser = parse_density)]
    density: Density,
    /// Threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Distribution of the gradients: student has 3 degrees of freedom, zeros is normal but 99% zero
    #[arg(long, value_enum, default_value_t = data::Dist::Normal)]
    dist: data::Dist,
    /// Steps that are measured; the median counts
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,
    /// Seed of the gradients
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

impl Common {
    fn k(&self) -> usize {
        self.density.k(self.n)
    }

    /// Runs the measurement in a thread pool of the chosen size.
    fn in_pool<T: Send>(&self, measure: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads.into()).build();
        pool.context("cannot start the threads")?.install(measure)
    }

    fn describe(&self) -> String {
        format!(
            "{} elements, density {}% (k = {}), {}, {} thread{}",
            grouped(self.n),
            self.density.fraction() * 100.0,
            grouped(self.k()),
            self.dist,
            self.threads,
            if self.threads == 1 { "" } else { "s" },
        )
    }
}

/// What the benches of a network's layers have in common.
#[derive(Debug, Args)]
struct Rounds {
    /// Rounds; the median counts
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    steps: u32,
    /// Threads
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

impl Rounds {
    fn in_pool<T: Send>(&self, run: impl FnOnce() -> T + Send) -> Result<T> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads.into()).build();
        Ok(pool.context("cannot start the threads")?.install(run))
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let count: usize =
        digits.parse().map_err(|_| "expected a number such as 1000000, 64K or 16M".to_string())?;
    let most = u32::MAX as usize;
    count
        .checked_shl(shift)
        .filter(|n| *n >> shift == count && (1..=most).contains(n))
        .ok_or_else(|| format!("expected 1 to {most} elements"))
}

pub(crate) fn parse_density(text: &str) -> Result<Density, String> {
    let fraction: f64 = text.parse().map_err(|_| "expected a number such as 0.001".to_string())?;
    Density::new(fraction).map_err(|error| error.to_string())
}

/// 1234567 as 1,234,567.
pub(crate) fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Milliseconds that a call took.
fn time_ms<T>(call: impl FnOnce() -> T) -> (f64, T) {
    let begin = Instant::now();
    let result = call();
    (begin.elapsed().as_secs_f64() * 1e3, result)
}

/// A bar on standard error, invisible where that is no terminal.
pub(crate) fn progress(steps: u64, what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} [{bar:40}] {pos}/{len} {eta}");
    let bar = ProgressBar::new(steps).with_message(what);
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

pub(crate) fn print_json(document: &impl Serialize) -> Result<()> {
    crate::say!("{}", serde_json::to_string_pretty(document).context("cannot write JSON")?);
    Ok(())
}

pub(crate) fn table(header: &[&str]) -> comfy_table::Table {
    use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_parsed_and_nonsense_is_refused() {
        assert_eq!(parse_count("16M"), Ok(16 << 20));
        assert_eq!(parse_count("1000"), Ok(1000));
        for bad in ["", "M", "-1", "0", "1.5M", "5G", "99999999999999999999", "16X"] {
            assert!(parse_count(bad).is_err(), "{bad}");
        }
        assert!(parse_density("0").is_err() && parse_density("x").is_err() && parse_density("1").is_ok());
    }

    #[test]
    fn numbers_are_grouped_and_medians_are_in_the_middle() {
        assert_eq!((grouped(7), grouped(1234567)), ("7".into(), "1,234,567".into()));
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}

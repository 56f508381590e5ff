//! `redsync report`: one HTML page from training runs, benchmarks, plans and simulations.
//! Comes in: run directories and JSON documents. Goes out: one file that needs nothing else, to be read anywhere.

mod chart;
mod load;
mod methods;
mod page;
mod sections;
mod training;

use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Report {
    /// Directories of one or more runs (compare --out, runs), metrics files (metrics.jsonl, and what redsync.attach(log=...) writes
    /// under PyTorch), and --json outputs of train, bench select, bench sync, plan and simulate
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The page
    #[arg(long, short, default_value = "report.html")]
    out: PathBuf,
    /// Bandwidth of the dense sum that selection is compared with, in Gbit/s
    #[arg(long, default_value_t = 1.0, value_parser = parse_gbit)]
    gbit: f64,
}

fn parse_gbit(text: &str) -> Result<f64, String> {
    let valid = |gbit: &f64| gbit.is_finite() && *gbit > 0.0;
    text.parse().ok().filter(valid).ok_or_else(|| "expected a number above 0".to_string())
}

impl Report {
    pub fn run(self) -> Result<()> {
        let mut found = load::Found::default();
        for path in &self.runs {
            found.add(path)?;
        }
        sections::name_ways(&mut found.runs);
        let page = page::page(&sections::all(&found, self.gbit)?);
        crate::files::write(&self.out, page.as_bytes())?;
        crate::say!("{}", self.out.display());
        Ok(())
    }
}

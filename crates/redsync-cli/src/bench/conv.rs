//! `redsync bench conv`: the convolutions of VGG16 for CIFAR-10, forward and backward, ours and Burn's.

use super::{print_json, table};
use anyhow::{Context, Result};
use clap::Args;
use redsync_burn::bench_conv::{ConvSizes, ConvTimes, bench, vgg16_cifar};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Conv {
    /// Images
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
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

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    sizes: ConvSizes,
    #[serde(flatten)]
    times: ConvTimes,
}

impl Conv {
    pub fn run(self) -> Result<()> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads.into()).build();
        let measure = |sizes| Row { sizes, times: bench(sizes, self.steps as usize) };
        let rows: Vec<Row> = pool
            .context("cannot start the threads")?
            .install(|| vgg16_cifar(self.batch as usize).into_iter().map(measure).collect());
        if self.json {
            return print_json(&rows);
        }
        crate::say!(
            "3x3 convolutions, {} images, {} thread(s): forward and backward",
            self.batch,
            self.threads
        );
        let mut out = table(&["channels", "side", "ours", "Burn's", "ours is faster by"]);
        for Row { sizes, times } in &rows {
            out.add_row([
                format!("{} to {}", sizes.from, sizes.to),
                sizes.side.to_string(),
                format!("{:.2} ms", times.ours_ms),
                format!("{:.2} ms", times.burn_ms),
                format!("{:.1} x", times.burn_ms / times.ours_ms),
            ]);
        }
        crate::say!("{out}");
        Ok(())
    }
}

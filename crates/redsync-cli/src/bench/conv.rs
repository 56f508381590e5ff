//! `redsync bench conv`: the convolutions of VGG16 for CIFAR-10, forward and backward, ours and Burn's.

use super::{Rounds, print_json, table};
use anyhow::Result;
use clap::Args;
use redsync_burn::bench_conv::{ConvSizes, ConvTimes, bench, vgg16_cifar};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Conv {
    /// Images
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
    #[command(flatten)]
    rounds: Rounds,
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
        let Rounds { steps, threads, json } = self.rounds;
        let measure = |sizes| Row { sizes, times: bench(sizes, steps as usize) };
        let rows: Vec<Row> =
            self.rounds.in_pool(|| vgg16_cifar(self.batch as usize).into_iter().map(measure).collect())?;
        if json {
            return print_json(&rows);
        }
        crate::say!("3x3 convolutions, {} images, {} thread(s): forward and backward", self.batch, threads);
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

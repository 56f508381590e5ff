//! `redsync bench lstm`: one recurrent layer, forward and backward, as our one node of the tape and as made of Burn's operations.

use super::{Rounds, print_json, table};
use anyhow::Result;
use clap::Args;
use redsync_burn::bench_lstm::{LstmSizes, LstmTimes, bench};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Lstm {
    /// Units of the layer
    #[arg(long, default_value_t = 650, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    hidden: u32,
    /// Steps of a window
    #[arg(long, default_value_t = 35, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    bptt: u32,
    /// Sequences side by side
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
    #[command(flatten)]
    rounds: Rounds,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    sizes: LstmSizes,
    threads: u16,
    #[serde(flatten)]
    times: LstmTimes,
    gain: f64,
}

impl Lstm {
    pub fn run(self) -> Result<()> {
        let Rounds { steps: rounds, threads, json } = self.rounds;
        let [hidden, steps, batch, rounds] = [self.hidden, self.bptt, self.batch, rounds].map(|n| n as usize);
        let sizes = LstmSizes { hidden, steps, batch, rounds };
        let times = self.rounds.in_pool(|| bench(sizes))?;
        let gain = times.gain();
        if json {
            return print_json(&Report { sizes, threads, times, gain });
        }
        crate::say!(
            "{hidden} units, {steps} steps, {batch} sequences, {threads} thread(s): forward and backward",
        );
        let mut out = table(&["layer", "median", "fused is faster by"]);
        for (name, ms) in [
            ("fused (ours)", times.fused_ms),
            ("composed of Burn's operations, gates together", times.composed_ms),
            ("burn::nn::Lstm", times.module_ms),
        ] {
            out.add_row([name.to_string(), format!("{ms:.2} ms"), format!("{:.1} x", ms / times.fused_ms)]);
        }
        crate::say!("{out}");
        Ok(())
    }
}

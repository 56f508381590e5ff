//! `redsync bench apply`: what adding the messages of all ranks to the weights costs.

use super::{Common, data, grouped, median, print_json, progress, table, time_ms};
use anyhow::Result;
use clap::Args;
use rand_distr::{Distribution, StandardNormal};
use redsync_core::{Level, Sparse, Workspace, add_assign, apply};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Apply {
    #[command(flatten)]
    common: Common,
    /// Ranks whose messages are added
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: u32,
}

#[derive(Debug, Serialize)]
struct Report {
    n: usize,
    k: usize,
    ranks: u32,
    threads: u16,
    apply_ms: f64,
    fill_ms: f64,
    scatter_ms: f64,
    accumulate_ms: f64,
}

impl Apply {
    pub fn run(self) -> Result<()> {
        let report = self.common.in_pool(|| self.measure())?;
        if self.common.json {
            return print_json(&report);
        }
        let mut out = table(&["operation", "median", "passes"]);
        for (name, ms) in [
            ("accumulate (v += g)", report.accumulate_ms),
            ("apply to weights", report.apply_ms),
            ("fill a dense gradient", report.fill_ms),
            ("plain scatter loop", report.scatter_ms),
        ] {
            out.add_row([
                name.to_string(),
                format!("{ms:.2} ms"),
                format!("{:.2}", ms / report.accumulate_ms),
            ]);
        }
        let elements = grouped(self.ranks as usize * report.k);
        crate::say!("{}\n{} ranks, {elements} elements in all\n{out}", self.common.describe(), self.ranks);
        Ok(())
    }

    fn measure(&self) -> Result<Report> {
        let Common { n, threads, steps, seed, .. } = self.common;
        let k = self.common.k();
        let message = |rank: u32| {
            let mut random = data::generator(seed, 0, rank.into());
            let indices = data::indices(n, k, &mut random);
            let values = (0..k).map(|_| StandardNormal.sample(&mut random)).collect();
            Sparse::from_parts(n as u32, indices, values)
        };
        let messages = (0..self.ranks).map(message).collect::<Result<Vec<_>, _>>()?;
        let (mut weights, mut v, g) = (vec![1.0f32; n], vec![1.0f32; n], vec![1.0f32; n]);
        let mut workspace = Workspace::new(threads.into());
        let mut times: [Vec<f64>; 4] = Default::default();
        let bar = progress(steps.into(), "applying");
        for _ in 0..steps {
            times[0].push(time_ms(|| add_assign(Level::best(), &mut v, &g)).0);
            let (ms, done) = time_ms(|| apply::add(&mut weights, &messages, -0.1, &mut workspace));
            done?;
            times[1].push(ms);
            let (ms, done) = time_ms(|| apply::fill(&mut weights, &messages, -0.1, &mut workspace));
            done?;
            times[2].push(ms);
            times[3].push(time_ms(|| scatter(&mut weights, &messages, -0.1)).0);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let [accumulate_ms, apply_ms, fill_ms, scatter_ms] = times.map(|mut times| median(&mut times));
        Ok(Report { n, k, ranks: self.ranks, threads, apply_ms, fill_ms, scatter_ms, accumulate_ms })
    }
}

/// The plain loop, one message after the other over all of memory.
fn scatter(weights: &mut [f32], messages: &[Sparse], scale: f32) {
    for message in messages {
        for (index, value) in message.iter() {
            weights[index as usize] += scale * value;
        }
    }
}

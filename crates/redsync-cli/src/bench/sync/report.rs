//! What `bench sync` says at its end: measured steps of rank 0 go in, a table or a JSON document comes out.

use super::player::Measured;
use super::{Comm, Sync};
use crate::bench::{grouped, median, table};
use crate::train::shares;
use redsync_engine::{Choice, Layer, LayerStats, Traffic};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub struct Report {
    ranks: usize,
    model: String,
    method: &'static str,
    exchange: &'static str,
    auto: bool,
    compressed_layers: usize,
    comm: Comm,
    /// Of one rank: its messages and its dense gradients, each counted once.
    bytes_sent_per_step: u64,
    /// From all others, by the rank that receives most.
    bytes_received_per_step: u64,
    /// With hosts: for the ranks of the same host.
    bytes_inside_per_step: u64,
    dense_bytes_per_step: u64,
    /// Where the bytes of the last step went.
    traffic: Traffic,
    /// The part of both that compressed layers have.
    compressed_bytes_sent: u64,
    compressed_dense_bytes: u64,
    sync_ms: f64,
    step_ms: f64,
    hidden_fraction: f64,
    breakdown: Breakdown,
    steps: u64,
    replica_hash: String,
}

#[derive(Debug, Serialize)]
struct Breakdown {
    select: f64,
    encode: f64,
    /// What is left of the step: waiting for the network.
    exchange: f64,
    decode: f64,
    apply: f64,
}

impl Sync {
    pub(super) fn report(
        &self,
        ranks: usize,
        layers: &[Layer],
        choices: &[Choice],
        alone: &[Measured],
        overlapped: Option<&[Measured]>,
        (how, received, hash): (&'static str, u64, u64),
    ) -> Report {
        let middle = |of: &dyn Fn(&Measured) -> f64, steps: &[Measured]| {
            median(&mut steps.iter().map(of).collect::<Vec<_>>())
        };
        let part = |of: fn(&LayerStats) -> f64| middle(&|m| of(&m.stats.total()), alone);
        let sync_ms = middle(&|m| m.ms, alone);
        let step_ms = overlapped.map_or(sync_ms, |steps| middle(&|m| m.ms, steps));
        let exposed = (step_ms - self.compute_ms).max(0.0);
        let hidden_fraction =
            if overlapped.is_some() { (1.0 - exposed / sync_ms).clamp(0.0, 1.0) } else { 0.0 };
        let [select, encode, decode, apply] =
            [part(|s| s.select_ms), part(|s| s.encode_ms), part(|s| s.decode_ms), part(|s| s.apply_ms)];
        let exchange = (sync_ms - select - encode - decode - apply).max(0.0);
        let last = alone.last().map(|m| &m.stats.layers[..]).unwrap_or(&[]);
        let compressed = |i: &usize| choices[*i].is_sparse();
        Report {
            ranks,
            model: self.model.clone(),
            method: self.method.name(),
            exchange: how,
            auto: self.auto,
            compressed_layers: (0..layers.len()).filter(compressed).count(),
            comm: self.comm,
            bytes_sent_per_step: last.iter().map(|s| s.bytes_sent).sum(),
            bytes_received_per_step: received,
            bytes_inside_per_step: last.iter().map(|s| s.inside_bytes).sum(),
            dense_bytes_per_step: layers.iter().map(|layer| 4 * layer.size as u64).sum(),
            traffic: alone.last().map(|m| m.stats.traffic).unwrap_or_default(),
            compressed_bytes_sent: (0..last.len()).filter(compressed).map(|i| last[i].bytes_sent).sum(),
            compressed_dense_bytes: (0..layers.len())
                .filter(compressed)
                .map(|i| 4 * layers[i].size as u64)
                .sum(),
            sync_ms,
            step_ms,
            hidden_fraction,
            breakdown: Breakdown { select, encode, exchange, decode, apply },
            steps: self.steps,
            replica_hash: format!("{hash:016x}"),
        }
    }

    pub(super) fn print(&self, report: &Report) {
        let ratio = report.dense_bytes_per_step as f64 / report.bytes_sent_per_step.max(1) as f64;
        crate::say!(
            "{} on {} {:?} ranks with {}, {}: {} bytes sent per step, {} received, dense {} ({ratio:.0} times what is sent): {}",
            report.model,
            report.ranks,
            report.comm,
            report.method,
            report.exchange,
            grouped(report.bytes_sent_per_step as usize),
            grouped(report.bytes_received_per_step as usize),
            grouped(report.dense_bytes_per_step as usize),
            shares(&report.traffic),
        );
        let mut out = table(&["phase", "median"]);
        let Breakdown { select, encode, exchange, decode, apply } = &report.breakdown;
        for (name, ms) in [
            ("select", select),
            ("encode", encode),
            ("wait for exchange", exchange),
            ("decode", decode),
            ("apply", apply),
            ("synchronization in all", &report.sync_ms),
        ] {
            out.add_row([name.to_string(), format!("{ms:.2} ms")]);
        }
        if self.compute_ms > 0.0 {
            let name = format!("step with {} ms of backward pass", self.compute_ms);
            out.add_row([name, format!("{:.2} ms", report.step_ms)]);
            out.add_row(["hidden behind it".to_string(), format!("{:.0}%", 100.0 * report.hidden_fraction)]);
        }
        crate::say!("{out}\nreplicas are equal on all ranks: {}", report.replica_hash);
    }
}

//! `redsync bench wire`: how many bits an element costs, and how long encoding and decoding take.

use super::{Common, median, print_json, progress, table, time_ms};
use anyhow::{Context, Result};
use clap::Args;
use redsync_core::wire::{Frame, bound_bits};
use redsync_core::{
    Compressor, Config, FrameWriter, Gradient, IndexCode, Level, Sparse, Values, Workspace, add_assign,
};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Wire {
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Serialize)]
struct Report {
    n: usize,
    k: usize,
    density: f64,
    accumulate_ms: f64,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    encoding: &'static str,
    values: &'static str,
    quantized: bool,
    /// All bits of the frame, headers and checksum included, per element.
    bits_per_element: f64,
    bound_bits: f64,
    encode_ms: f64,
    decode_ms: f64,
}

const VALUES: [(Values, &str, f64); 3] =
    [(Values::F32, "f32", 32.0), (Values::Bf16, "bf16", 16.0), (Values::Asq, "asq", 0.0)];
const CODES: [(IndexCode, &str); 2] = [(IndexCode::Plain, "plain"), (IndexCode::Rice, "rice")];

impl Wire {
    pub fn run(self) -> Result<()> {
        let report = self.common.in_pool(|| self.measure())?;
        if self.common.json {
            return print_json(&report);
        }
        let pass = report.accumulate_ms;
        let mut out =
            table(&["indices", "values", "bits/element", "bound", "over", "encode", "decode", "passes"]);
        for row in &report.rows {
            out.add_row([
                row.encoding.to_string(),
                row.values.to_string(),
                format!("{:.3}", row.bits_per_element),
                format!("{:.3}", row.bound_bits),
                format!("{:.1}%", (row.bits_per_element / row.bound_bits - 1.0) * 100.0),
                format!("{:.3} ms", row.encode_ms),
                format!("{:.3} ms", row.decode_ms),
                format!("{:.3}", (row.encode_ms + row.decode_ms) / pass),
            ]);
        }
        crate::say!("{}\n{out}", self.common.describe());
        crate::say!(
            "bits/element: headers and checksum included. bound: entropy of the set of indices, plus the values."
        );
        crate::say!("passes: encode and decode as a multiple of accumulate (v += g, {pass:.2} ms here).");
        Ok(())
    }

    fn measure(&self) -> Result<Report> {
        let Common { n, density, steps, seed, dist, .. } = self.common;
        let mut gradient = vec![0.0; n];
        dist.fill(&mut gradient, seed, 0);
        let bar = progress(7 * u64::from(steps), "coding");
        let mut v = vec![0.0; n];
        let mut accumulate = Vec::new();
        for _ in 0..steps {
            accumulate.push(time_ms(|| add_assign(Level::best(), &mut v, &gradient)).0);
            bar.inc(1);
        }
        let mut rows = Vec::new();
        for (values, values_name, value_bits) in VALUES {
            for (indices, encoding) in CODES {
                let config = Config { density, values, indices, ..Config::default() };
                let mut row = self.measure_code(&gradient, config, &bar)?;
                row.bound_bits += value_bits;
                rows.push(Row { encoding, values: values_name, ..row });
            }
        }
        bar.finish_and_clear();
        let accumulate_ms = median(&mut accumulate);
        Ok(Report { n, k: self.common.k(), density: density.fraction(), accumulate_ms, rows })
    }

    /// Encodes and decodes what a real selection yields.
    fn measure_code(&self, gradient: &[f32], config: Config, bar: &indicatif::ProgressBar) -> Result<Row> {
        let Common { n, threads, steps, .. } = self.common;
        let mut workspace = Workspace::new(threads.into());
        let mut layer = Compressor::new(0, "bench", n, config)?;
        layer.accumulate(0, Gradient::F32(gradient), 1.0, &mut workspace)?;
        layer.select(0, &mut workspace);
        let chosen = workspace.message();
        let (mut writer, mut decoded) = (FrameWriter::new(), Sparse::new());
        let (mut encode, mut decode, mut bytes) = (Vec::new(), Vec::new(), 0);
        for _ in 0..steps {
            let (ms, length) = time_ms(|| {
                writer.begin(0, 0);
                layer.encode(chosen, &mut writer);
                writer.finish().len()
            });
            encode.push(ms);
            bytes = length;
            let frame = writer.finish();
            let (ms, done) = time_ms(|| -> Result<()> {
                let message = Frame::parse(frame)?.messages().next().context("the frame is empty")??;
                Ok(message.decode(0, n as u32, layer.phase(0), &mut decoded)?)
            });
            done?;
            decode.push(ms);
            anyhow::ensure!(
                decoded.indices() == chosen.indices(),
                "decoding did not give back what was encoded"
            );
            bar.inc(1);
        }
        let count = chosen.len();
        Ok(Row {
            encoding: "",
            values: "",
            quantized: config.values.is_quantized(),
            bits_per_element: 8.0 * bytes as f64 / count as f64,
            bound_bits: bound_bits(n, count),
            encode_ms: median(&mut encode),
            decode_ms: median(&mut decode),
        })
    }
}

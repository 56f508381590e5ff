//! `redsync bench wire`: how many bits an element costs, what headers cost, and how long encoding and decoding take.
//! Comes in: made-up gradients. Goes out: one row for each code, at the chosen size and density, then at those where
//! headers or values weigh most: small layers, and a quarter of the elements with two bits each.

use super::{Common, grouped, median, print_json, progress, table, time_ms};
use anyhow::{Context, Result};
use clap::Args;
use redsync_core::wire::{FRAME_HEADER, Frame, bound_bits};
use redsync_core::{
    Compressor, Config, Density, FrameWriter, Gradient, IndexCode, Level, Sparse, Values, Workspace,
    add_assign,
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
    /// Bytes of a frame beside its messages.
    frame_header_bytes: usize,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    n: usize,
    elements: usize,
    encoding: &'static str,
    values: &'static str,
    quantized: bool,
    /// Bytes of the message beside its elements, mean and levels.
    message_header_bytes: usize,
    /// All bits of the message, its header included, per element.
    message_bits_per_element: f64,
    /// All bits of a frame of this message alone, headers and checksum included, per element.
    bits_per_element: f64,
    bound_bits: f64,
    encode_ms: f64,
    decode_ms: f64,
}

const VALUES: [(Values, &str, f64); 5] = [
    (Values::F32, "f32", 32.0),
    (Values::Bf16, "bf16", 16.0),
    (Values::Asq, "asq", 0.0),
    (Values::TwoBit, "two-bit", 2.0),
    (Values::EightBit, "eight-bit", 8.0),
];
const CODES: [(IndexCode, &str); 2] = [(IndexCode::Plain, "plain"), (IndexCode::Rice, "rice")];
/// Sizes of small layers.
const SMALL: [usize; 2] = [1_000, 10_000];
const QUARTER: f64 = 0.25;

/// What one row measures.
struct Case {
    n: usize,
    density: Density,
    values: usize,
    code: usize,
}

impl Wire {
    pub fn run(self) -> Result<()> {
        let report = self.common.in_pool(|| self.measure())?;
        if self.common.json {
            return print_json(&report);
        }
        let pass = report.accumulate_ms;
        let mut out = table(&[
            "indices",
            "values",
            "n",
            "elements",
            "header",
            "bits/element",
            "in frame",
            "bound",
            "over",
            "encode",
            "decode",
            "passes",
        ]);
        for row in &report.rows {
            out.add_row([
                row.encoding.to_string(),
                row.values.to_string(),
                grouped(row.n),
                grouped(row.elements),
                format!("{} B", row.message_header_bytes),
                format!("{:.3}", row.message_bits_per_element),
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
            "header: bytes of a message beside its elements; a frame adds {} bytes, however many messages it holds.",
            report.frame_header_bytes
        );
        crate::say!(
            "bits/element: of the message, header included. in frame: of a frame of this message alone, checksum included."
        );
        crate::say!(
            "bound: entropy of the set of indices, plus the values. over: the frame above the bound."
        );
        crate::say!("passes: encode and decode as a multiple of accumulate (v += g, {pass:.2} ms here).");
        Ok(())
    }

    fn cases(&self) -> Result<Vec<Case>> {
        let Common { n, density, .. } = self.common;
        let mut cases = Vec::new();
        for values in 0..VALUES.len() {
            cases.extend((0..CODES.len()).map(|code| Case { n, density, values, code }));
        }
        for n in SMALL {
            cases.extend((0..VALUES.len()).map(|values| Case {
                n,
                density: Density::default(),
                values,
                code: 1,
            }));
        }
        let density = Density::new(QUARTER)?;
        cases.extend([2, 3].map(|values| Case { n, density, values, code: 1 }));
        Ok(cases)
    }

    fn measure(&self) -> Result<Report> {
        let Common { n, density, steps, seed, dist, .. } = self.common;
        let cases = self.cases()?;
        let mut gradient = vec![0.0; n.max(SMALL[1])];
        dist.fill(&mut gradient, seed, 0);
        let bar = progress((1 + cases.len() as u64) * u64::from(steps), "coding");
        let mut v = vec![0.0; n];
        let mut accumulate = Vec::new();
        for _ in 0..steps {
            accumulate.push(time_ms(|| add_assign(Level::best(), &mut v, &gradient[..n])).0);
            bar.inc(1);
        }
        let rows = cases
            .iter()
            .map(|case| self.measure_code(&gradient[..case.n], case, &bar))
            .collect::<Result<_>>()?;
        bar.finish_and_clear();
        let accumulate_ms = median(&mut accumulate);
        let (k, density) = (self.common.k(), density.fraction());
        Ok(Report { n, k, density, accumulate_ms, frame_header_bytes: FRAME_HEADER, rows })
    }

    /// Encodes and decodes what a real selection yields.
    fn measure_code(&self, gradient: &[f32], case: &Case, bar: &indicatif::ProgressBar) -> Result<Row> {
        let Common { threads, steps, .. } = self.common;
        let ((values, values_name, value_bits), (indices, encoding)) =
            (VALUES[case.values], CODES[case.code]);
        let config = Config { density: case.density, values, indices, ..Config::default() };
        let mut workspace = Workspace::new(threads.into());
        let mut layer = Compressor::new(0, "bench", case.n, config)?;
        layer.accumulate(0, Gradient::F32(gradient), 1.0, &mut workspace)?;
        layer.select(0, &mut workspace);
        let chosen = workspace.message();
        let (mut writer, mut decoded) = (FrameWriter::new(), Sparse::new());
        let (mut encode, mut decode, mut bytes, mut message_bytes) = (Vec::new(), Vec::new(), 0, (0, 0));
        for _ in 0..steps {
            let (ms, length) = time_ms(|| {
                writer.begin(0, 0, 0);
                layer.encode(chosen, &mut writer);
                writer.finish().len()
            });
            encode.push(ms);
            bytes = length;
            let frame = writer.finish();
            let (ms, done) = time_ms(|| -> Result<(usize, usize)> {
                let message = Frame::parse(frame)?.messages().next().context("the frame is empty")??;
                message.decode(&layer.shape(0), &mut decoded)?;
                Ok((message.header_len(), message.byte_len()))
            });
            message_bytes = done?;
            decode.push(ms);
            anyhow::ensure!(decoded.iter().eq(chosen.iter()), "decoding did not give back what was encoded");
            bar.inc(1);
        }
        let (n, elements) = (case.n, chosen.len());
        let bits = |bytes: usize| 8.0 * bytes as f64 / elements as f64;
        Ok(Row {
            n,
            elements,
            encoding,
            values: values_name,
            quantized: values.is_quantized(),
            message_header_bytes: message_bytes.0,
            message_bits_per_element: bits(message_bytes.1),
            bits_per_element: bits(bytes),
            bound_bits: bound_bits(n, elements) + value_bits,
            encode_ms: median(&mut encode),
            decode_ms: median(&mut decode),
        })
    }
}

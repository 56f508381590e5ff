//! What `redsync bench select --device` measures, without the program and Burn: a name of a device, elements, steps, and selectors.
//!
//! ```text
//! cargo run --release -p redsync-gpu --features wgpu --example select -- software 16777216 20 carried trimmed
//! ```

use redsync_core::Config;
use redsync_gpu::{Gpu, bench};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, n, steps, only @ ..] = &arguments[..] else {
        return Err(
            "expected a device, a number of elements, a number of steps, and selectors or none".into()
        );
    };
    let gpu = Gpu::open(device)?;
    let only: Vec<&str> = only.iter().map(String::as_str).collect();
    let rows = bench::select(&gpu, n.parse()?, Config::default(), steps.parse()?, &only, nearly_normal)?;
    let pass = rows.first().map_or(1.0, |row| row.median_ms);
    for row in rows {
        println!(
            "{}: {:.2} ms, {:.2} passes, {} to {} selected, {:.2} bytes moved per element, {:.1} copied per selected, the host's \
             bits: {}",
            row.name,
            row.median_ms,
            row.median_ms / pass,
            row.selected_min,
            row.selected_max,
            row.moved,
            row.copied,
            row.host_bits
        );
    }
    Ok(())
}

/// Sums of four uniform numbers, the same for the same step.
fn nearly_normal(gradient: &mut [f32], step: u64) {
    let mut state = (step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    gradient.fill_with(|| uniform() + uniform() + uniform() + uniform());
}

//! `redsync bench select --device`: the same question where u and v are in the memory of a GPU.

#[cfg(feature = "gpu")]
pub use on_device::run;

/// The feature is off: an error that says how to switch it on.
#[cfg(not(feature = "gpu"))]
pub fn run(_: &super::Common, device: &str, _: &[&'static str]) -> anyhow::Result<()> {
    anyhow::bail!(
        "this redsync has no devices, so no {device}: build it with cargo build --release --features gpu (Vulkan, Metal, \
         DirectX), or with gpu-cuda or gpu-hip"
    )
}

#[cfg(feature = "gpu")]
mod on_device {
    use crate::bench::data::Dist;
    use crate::bench::{Common, print_json, progress, table};
    use anyhow::Result;
    use redsync_core::Config;
    use redsync_gpu::{Gpu, bench};
    use serde::Serialize;

    #[derive(Serialize)]
    struct Report<'a> {
        n: usize,
        k: usize,
        density: f64,
        device: &'a str,
        runtime: &'static str,
        dist: Dist,
        rows: Vec<Row>,
    }

    #[derive(Serialize)]
    struct Row {
        name: String,
        median_ms: f64,
        passes: f64,
        selected_min: usize,
        selected_max: usize,
        moved_bytes_per_element: f64,
        copied_bytes_per_selected: f64,
        host_bits: bool,
    }

    pub fn run(common: &Common, device: &str, only: &[&'static str]) -> Result<()> {
        let gpu = Gpu::open(device)?;
        let rows = common.in_pool(|| measure(common, &gpu, only))?;
        let Common { n, density, dist, .. } = *common;
        if common.json {
            let (k, runtime) = (common.k(), gpu.name());
            return print_json(&Report { n, k, density: density.fraction(), device, runtime, dist, rows });
        }
        let mut out =
            table(&["selector", "median", "passes", "selected", "moved", "copied", "the host's bits"]);
        for row in &rows {
            let plain = row.selected_max == 0;
            let unless_plain = |text: String| if plain { String::new() } else { text };
            out.add_row([
                row.name.clone(),
                format!("{:.2} ms", row.median_ms),
                format!("{:.2}", row.passes),
                unless_plain(match (row.selected_min, row.selected_max) {
                    (least, most) if least == most => format!("{least}"),
                    (least, most) => format!("{least} to {most}"),
                }),
                format!("{:.2}", row.moved_bytes_per_element),
                unless_plain(format!("{:.1}", row.copied_bytes_per_selected)),
                if row.host_bits { "yes" } else { "no" }.to_string(),
            ]);
        }
        crate::say!("{}, {} ({device})\n{out}", common.describe(), gpu.name());
        crate::say!(
            "A time includes the accumulation, the choice on the host and the taking out; passes: as a multiple of accumulate (v += g) on \
             the same device. moved: bytes of the device's memory per element of the layer; copied: bytes between host and device per \
             element that was sent."
        );
        Ok(())
    }

    fn measure(common: &Common, gpu: &Gpu, only: &[&'static str]) -> Result<Vec<Row>> {
        let Common { n, density, dist, steps, seed, .. } = *common;
        let config = Config { density, ..Config::default() };
        let bar = progress(u64::from(steps), "selecting");
        let rows = bench::select(gpu, n, config, steps.into(), only, |gradient, step| {
            dist.fill(gradient, seed, step);
            bar.set_position(step);
        })?;
        bar.finish_and_clear();
        let pass = rows.first().map_or(1.0, |row| row.median_ms);
        let row = |row: bench::Row| Row {
            passes: row.median_ms / pass,
            name: row.name,
            median_ms: row.median_ms,
            selected_min: row.selected_min,
            selected_max: row.selected_max,
            moved_bytes_per_element: row.moved,
            copied_bytes_per_selected: row.copied,
            host_bits: row.host_bits,
        };
        Ok(rows.into_iter().map(row).collect())
    }
}

#[cfg(all(test, not(feature = "gpu")))]
mod tests {
    use super::super::{Common, data::Dist};
    use redsync_core::Density;

    #[test]
    fn without_devices_the_error_says_how_to_have_them() {
        let (density, dist) = (Density::default(), Dist::Normal);
        let common = Common { n: 1, density, threads: 1, dist, steps: 1, seed: 1, json: false };
        let error = super::run(&common, "wgpu", &[]).unwrap_err().to_string();
        assert!(error.contains("so no wgpu: build it with cargo build --release --features gpu"), "{error}");
    }
}

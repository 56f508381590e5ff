//! What the page shows, from what was found: each section only if there is something for it.

use super::chart::{Axes, Series, bars, lines, short};
use super::load::{Cell, Found, Run, Simulation};
use super::page::{Section, figure, grid, legend, table, text};
use anyhow::Result;
use redsync_burn::train::Seconds;
use redsync_engine::Traffic;
use std::collections::BTreeMap;

/// Every section that has content, in reading order.
pub fn all(found: &Found, gbit: f64) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    if !found.runs.is_empty() {
        sections.push(summary(&found.runs));
        sections.push(training(&found.runs)?);
        sections.push(layers(&found.runs)?);
    }
    if found.runs.iter().any(|run| !run.steps.is_empty()) || !found.steps.is_empty() {
        sections.push(phases(found)?);
    }
    if !found.plans.is_empty() {
        sections.push(plans(found));
    }
    let cells = comparisons(found);
    if !cells.is_empty() {
        sections.push(predictions(&cells)?);
    }
    if !found.simulations.is_empty() {
        sections.push(scaling(&found.simulations)?);
    }
    if !found.selections.is_empty() {
        sections.push(selection(found, gbit)?);
    }
    Ok(sections)
}

fn name(run: &Run) -> String {
    format!("{} · {} workers · seed {}", run.meta.method, run.meta.workers, run.meta.seed)
}

/// Runs of one model on one data set belong into one chart.
fn by_task(runs: &[Run]) -> BTreeMap<String, Vec<&Run>> {
    let mut tasks: BTreeMap<String, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        tasks.entry(format!("{} on {}", run.meta.model, run.meta.data)).or_default().push(run);
    }
    tasks
}

fn number(value: Option<f64>) -> String {
    value.map_or("–".into(), |value| format!("{value:.4}"))
}

fn summary(runs: &[Run]) -> Section {
    let row = |run: &Run| {
        let last = run.last.as_ref();
        let epoch = run.epochs.last();
        let metric = last.and_then(|last| last.metric).or(epoch.and_then(|epoch| epoch.metric));
        let ratio = last.filter(|last| last.bytes_sent > 0.0).map(|last| last.dense_bytes / last.bytes_sent);
        vec![
            format!("{} on {}", run.meta.model, run.meta.data),
            run.meta.method.clone(),
            last.map_or("–".into(), |last| format!("{}B", short(last.bytes_sent))),
            last.map_or("–".into(), |last| format!("{}B", short(last.dense_bytes))),
            ratio.map_or("–".into(), |ratio| format!("1/{}", short(ratio))),
            run.meta.workers.to_string(),
            run.meta.seed.to_string(),
            short(run.meta.parameters as f64),
            number(last.and_then(|last| last.loss).or(epoch.and_then(|epoch| epoch.test_loss))),
            epoch.map_or(String::new(), |epoch| epoch.metric_name.clone()),
            number(metric),
            last.map_or("–".into(), |last| format!("{} s", short(last.seconds.total))),
        ]
    };
    let header = [
        "training",
        "method",
        "sent",
        "dense",
        "ratio",
        "workers",
        "seed",
        "parameters",
        "loss",
        "metric",
        "value",
        "time",
    ];
    let intro = "Sent: everything that one rank sent in the whole run, warm-up included. Dense: what dense training sends in as many steps.".into();
    Section { title: "Runs", intro, body: table(&header, runs.iter().map(row)) }
}

fn training(runs: &[Run]) -> Result<Section> {
    let mut figures = String::new();
    for (task, runs) in by_task(runs) {
        let curve = |of: fn(&super::load::Epoch) -> Option<f64>| -> Vec<Series> {
            let points = |run: &Run| run.epochs.iter().filter_map(|e| Some((e.epoch, of(e)?))).collect();
            runs.iter()
                .map(|run| Series { name: name(run), points: points(run), ..Series::default() })
                .collect()
        };
        let metric =
            runs.iter().flat_map(|run| &run.epochs).map(|e| e.metric_name.as_str()).find(|m| !m.is_empty());
        for (title, y, series) in [
            ("training loss", "loss", curve(|e| e.train_loss)),
            ("test loss", "loss", curve(|e| e.test_loss)),
            (metric.unwrap_or("metric"), "", curve(|e| e.metric)),
        ] {
            if series.iter().all(|series| series.points.is_empty()) {
                continue;
            }
            let axes = Axes { x: "epoch", y, log_x: false, log_y: false };
            let svg = lines(axes, &series)?;
            figures.push_str(&figure(&format!("{task}: {title}"), "by epoch", &legend(&series), &svg));
        }
    }
    let intro = "Equal seeds and epochs compare; equal curves are the point of residual compression.".into();
    Ok(Section { title: "Training", intro, body: grid(&figures) })
}

fn phases(found: &Found) -> Result<Section> {
    let mut names = Vec::new();
    let mut parts = Vec::new();
    let mut sent: Vec<(String, f64, f64, Traffic)> = Vec::new();
    for run in found.runs.iter().filter(|run| !run.steps.is_empty()) {
        let count = run.steps.len() as f64;
        let mut mean = [0.0; 8];
        for step in &run.steps {
            mean.iter_mut().zip(step.seconds.phases()).for_each(|(sum, phase)| *sum += 1e3 * phase / count);
        }
        let exposed = run.steps.iter().map(|step| step.exposed_ms).sum::<f64>() / count;
        names.push(format!("{}, {}: {} ms exposed", run.meta.model, name(run), short(exposed)));
        parts.push(mean.to_vec());
        if let Some(last) = &run.last {
            let label = format!("{}, {}", run.meta.model, name(run));
            sent.push((label, last.bytes_sent, last.dense_bytes, last.traffic));
        }
    }
    for step in &found.steps {
        let label = format!("{} on {} ranks, {}", step.model, step.ranks, step.name());
        names.push(label.clone());
        parts.push(step.breakdown.times(1e3).phases().to_vec());
        sent.push((label, step.bytes_sent_per_step, step.dense_bytes_per_step, step.traffic));
    }
    let phases: Vec<_> = Seconds::PHASES.iter().map(|name| (name.to_string(), false)).collect();
    let caption = "mean of one step; what overlaps is counted in each phase";
    let mut figures = figure("Time by phase", caption, &phases, &bars("ms", &names, &parts)?);
    if !sent.is_empty() {
        let header = ["run or step", "bytes sent", "dense", "share"];
        let row = |(name, sent, dense, _): &(String, f64, f64, Traffic)| {
            let share = if *dense > 0.0 { format!("{:.3}%", 100.0 * sent / dense) } else { "–".into() };
            vec![name.clone(), short(*sent), short(*dense), share]
        };
        let names: Vec<String> = sent.iter().map(|(name, ..)| name.clone()).collect();
        // Older files do not say where their bytes went.
        let parts = |(_, sent, _, traffic): &(String, f64, f64, Traffic)| {
            let mut parts = traffic.parts().map(|(_, bytes)| bytes as f64).to_vec();
            parts.push((sent - traffic.sent() as f64).max(0.0));
            parts
        };
        let values: Vec<Vec<f64>> = sent.iter().map(parts).collect();
        let unknown = values.iter().any(|parts| parts[4] > 0.0).then_some("not told");
        let names_of_parts = Traffic::default().parts().map(|(name, _)| name).into_iter().chain(unknown);
        let legend: Vec<_> = names_of_parts.map(|name| (name.to_string(), false)).collect();
        let caption = "of one rank: what it sent, by where it went";
        figures.push_str(&figure("Bytes", caption, &legend, &bars("B", &names, &values)?));
        figures.push_str(&format!(
            "<figure><h3>Bytes against dense</h3>{}</figure>",
            table(&header, sent.iter().map(row))
        ));
    }
    Ok(Section { title: "Time and bytes", intro: String::new(), body: grid(&figures) })
}

/// How many layers a chart can show.
const MOST_LINES: usize = 6;

fn layers(runs: &[Run]) -> Result<Section> {
    let mut figures = String::new();
    for run in runs.iter().filter(|run| !run.layers.is_empty()) {
        let last = run.layers.iter().map(|layer| layer.epoch).fold(f64::NEG_INFINITY, f64::max);
        let mut now: Vec<_> = run.layers.iter().filter(|layer| layer.epoch == last).collect();
        now.sort_by_key(|layer| std::cmp::Reverse(layer.size));
        let compressed: Vec<_> =
            now.iter().filter(|layer| layer.residual_norm.is_some()).take(MOST_LINES).collect();
        let curve = |of: fn(&super::load::Layer) -> Option<f64>| -> Vec<Series> {
            let line = |name: &String| Series {
                name: name.clone(),
                points: run
                    .layers
                    .iter()
                    .filter(|l| l.name == *name)
                    .filter_map(|l| Some((l.epoch, of(l)?)))
                    .collect(),
                ..Series::default()
            };
            compressed.iter().map(|layer| line(&layer.name)).collect()
        };
        for (title, y, log_y, series) in [
            ("residual", "norm", false, curve(|l| l.residual_norm)),
            ("density", "share sent", true, curve(|l| l.density)),
        ] {
            if series.iter().any(|series| !series.points.is_empty()) {
                let axes = Axes { x: "epoch", y, log_x: false, log_y };
                let title = format!("{}, {}: {title}", run.meta.model, name(run));
                figures.push_str(&figure(
                    &title,
                    "of the largest compressed layers",
                    &legend(&series),
                    &lines(axes, &series)?,
                ));
            }
        }
        let row = |layer: &&super::load::Layer| {
            vec![
                layer.name.clone(),
                short(layer.size as f64),
                layer.choice.clone(),
                layer.density.map_or("–".into(), |d| format!("{:.3}%", 100.0 * d)),
                layer.residual_norm.map_or("–".into(), short),
                short(layer.bytes_sent),
            ]
        };
        let header = ["layer", "elements", "choice", "density", "residual", "bytes sent"];
        let title = text(&format!("{}, {}: after epoch {last}", run.meta.model, name(run)));
        figures
            .push_str(&format!("<figure><h3>{title}</h3>{}</figure>", table(&header, now.iter().map(row))));
    }
    let intro = "What each layer sent, and what it keeps back: a residual that grows without end would be a sign of trouble.".into();
    Ok(Section { title: "Layers", intro, body: grid(&figures) })
}

fn plans(found: &Found) -> Section {
    let mut body = String::new();
    for plan in &found.plans {
        body.push_str(&format!(
            "<p class=\"verdict\">{} on {} ranks: {}</p>",
            text(&plan.model),
            plan.ranks,
            text(&plan.verdict)
        ));
        let end = plan.dense_wins_from_ranks.map_or("never".into(), |ranks| format!("from {ranks} ranks on"));
        let times =
            plan.predicted_ms.iter().map(|(method, ms)| vec![method.clone(), format!("{} ms", short(*ms))]);
        body.push_str(&table(&["method", "predicted step"], times));
        body.push_str(&format!(
            "<p class=\"soft\">Speed-up {:.2}; dense wins again: {end}.</p>",
            plan.speedup
        ));
        let row = |layer: &super::load::PlanLayer| {
            vec![layer.name.clone(), short(layer.size as f64), layer.choice.clone(), layer.why.clone()]
        };
        let shown = plan.layers.iter().filter(|layer| !layer.why.starts_with("a bias or norm"));
        body.push_str(&table(&["layer", "elements", "choice", "why"], shown.map(row)));
    }
    Section { title: "Plans", intro: "What the cost model expects, and what it would do.".into(), body }
}

/// A prediction and what came of it.
struct Compared {
    label: String,
    predicted: f64,
    measured: f64,
    method: String,
}

/// The lab's cells, and every plan with the measured steps of the same model and ranks.
fn comparisons(found: &Found) -> Vec<Compared> {
    let cell = |cell: &Cell| {
        let logs: f64 = cell.predicted_ms.iter().map(|ms| ms.ln()).sum();
        Compared {
            label: format!("{} · {} hosts · {}", cell.model, cell.hosts, cell.link),
            predicted: (logs / cell.predicted_ms.len().max(1) as f64).exp(),
            measured: cell.measured_ms,
            method: cell.method.clone(),
        }
    };
    let mut all: Vec<Compared> = found.cells.iter().map(cell).collect();
    for plan in &found.plans {
        for step in found.steps.iter().filter(|step| step.model == plan.model && step.ranks == plan.ranks) {
            if let Some(predicted) = plan.predicted_ms.get(step.name()) {
                let label = format!("{} · {} ranks", step.model, step.ranks);
                let (predicted, measured) = (*predicted, step.sync_ms);
                all.push(Compared { label, predicted, measured, method: step.name().into() });
            }
        }
    }
    all
}

fn predictions(cells: &[Compared]) -> Result<Section> {
    let mut methods: Vec<&str> = cells.iter().map(|cell| cell.method.as_str()).collect();
    methods.sort_unstable();
    methods.dedup();
    let points = |method: &&str| Series {
        name: method.to_string(),
        points: cells
            .iter()
            .filter(|cell| cell.method == **method)
            .map(|c| (c.measured, c.predicted))
            .collect(),
        scattered: true,
        ..Series::default()
    };
    let mut series: Vec<Series> = methods.iter().map(points).collect();
    let ends = cells.iter().map(|cell| cell.measured).filter(|ms| *ms > 0.0);
    let (low, high) = ends.fold((f64::INFINITY, 0f64), |(a, b), x| (a.min(x), b.max(x)));
    let exact = vec![(low, low), (high, high)];
    series.push(Series { name: "exactly".into(), points: exact, dashed: true, scattered: false });
    let axes = Axes { x: "measured ms", y: "predicted ms", log_x: true, log_y: true };
    let mut errors: Vec<f64> =
        cells.iter().map(|cell| (cell.predicted / cell.measured - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let middle = errors.get(errors.len() / 2).copied().unwrap_or(0.0);
    let caption = format!("{} steps, median error {:.0}%", cells.len(), 100.0 * middle);
    let mut body = figure("Predicted against measured", &caption, &legend(&series), &lines(axes, &series)?);
    let row = |cell: &Compared| {
        let error = format!("{:+.0}%", 100.0 * (cell.predicted / cell.measured - 1.0));
        vec![cell.label.clone(), cell.method.clone(), short(cell.measured), short(cell.predicted), error]
    };
    let header = ["where", "method", "measured ms", "predicted ms", "error"];
    body.push_str(&format!("<figure>{}</figure>", table(&header, cells.iter().map(row))));
    let intro = "Step times that the cost model expected, from figures measured beside them.".into();
    Ok(Section { title: "Predictions", intro, body: grid(&body) })
}

fn scaling(simulations: &[Simulation]) -> Result<Section> {
    let mut figures = String::new();
    for simulation in simulations {
        let Simulation { model, platform, about, curves } = simulation;
        let curve = |of: fn(&super::load::CurveRow) -> f64| -> Vec<Series> {
            let points =
                |curve: &super::load::Curve| curve.rows.iter().map(|row| (row.ranks, of(row))).collect();
            curves
                .iter()
                .map(|c| Series { name: c.method.clone(), points: points(c), ..Series::default() })
                .collect()
        };
        for (title, y, log_y, mut series) in [
            ("scaling", "times one rank", true, curve(|row| row.scaling)),
            ("speed-up over sgd", "times", false, curve(|row| row.speedup)),
            ("bytes on a link", "bytes", true, curve(|row| row.bytes_on_link)),
        ] {
            if title == "scaling" {
                let ranks = curves
                    .first()
                    .map_or(Vec::new(), |c| c.rows.iter().map(|r| (r.ranks, r.ranks)).collect());
                series.push(Series { name: "linear".into(), points: ranks, dashed: true, scattered: false });
            }
            let axes = Axes { x: "ranks", y, log_x: true, log_y };
            figures.push_str(&figure(
                &format!("{model} on {platform}: {title}"),
                about,
                &legend(&series),
                &lines(axes, &series)?,
            ));
        }
        let Some(curve) = curves.iter().find(|curve| curve.method == "rgc+asq") else { continue };
        let names: Vec<String> = curve
            .rows
            .iter()
            .map(|row| format!("{} ranks, step {} ms", row.ranks, short(row.step_ms)))
            .collect();
        let parts: Vec<Vec<f64>> = curve
            .rows
            .iter()
            .map(|row| vec![row.select_ms, row.encode_ms, row.exchange_ms, row.decode_ms, row.apply_ms])
            .collect();
        let phases: Vec<_> = ["select", "encode", "exchange", "decode", "apply"]
            .iter()
            .map(|name| (name.to_string(), false))
            .collect();
        let title = format!("{model} on {platform}: rgc+asq by phase");
        figures.push_str(&figure(&title, "hidden or not", &phases, &bars("ms", &names, &parts)?));
    }
    let intro = "From the cost model alone.".into();
    Ok(Section { title: "Scaling, simulated", intro, body: grid(&figures) })
}

fn selection(found: &Found, gbit: f64) -> Result<Section> {
    let mut names: Vec<&str> = Vec::new();
    for row in found.selections.iter().flat_map(|selection| &selection.rows) {
        if !names.contains(&row.name.as_str()) {
            names.push(&row.name);
        }
    }
    let line = |name: &&str| {
        let at =
            |s: &super::load::Selection| Some((s.n, s.rows.iter().find(|row| row.name == **name)?.median_ms));
        let mut points: Vec<(f64, f64)> = found.selections.iter().filter_map(at).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: name.to_string(), points, ..Series::default() }
    };
    let mut series: Vec<Series> = names.iter().map(line).collect();
    // A dense sum sends nearly two copies of the gradient over each link.
    let dense = |s: &super::load::Selection| (s.n, 1e3 * 2.0 * 4.0 * s.n * 8.0 / (gbit * 1e9));
    let mut points: Vec<(f64, f64)> = found.selections.iter().map(dense).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    series.push(Series {
        name: format!("dense allreduce at {gbit} Gbit/s"),
        points,
        dashed: true,
        scattered: false,
    });
    let density = found.selections.first().map_or(0.0, |selection| selection.density);
    let axes = Axes { x: "elements", y: "ms", log_x: true, log_y: true };
    let caption = format!("selecting {}% of a layer, its accumulation included", 100.0 * density);
    let body = figure("Selection against size", &caption, &legend(&series), &lines(axes, &series)?);
    let intro = "Selection has to cost less than the exchange that it replaces.".into();
    Ok(Section { title: "Selection", intro, body: grid(&body) })
}

//! What the page shows, from what was found: each section only if there is something for it.

use super::chart::{Axes, Series, bars, lines, short};
use super::load::{Cell, Found, Meta, Run, Simulation, SyncStep};
use super::methods::{methods, rank};
use super::page::{Section, figure, grid, legend, table, text};
use super::training::training;
use anyhow::Result;
use redsync_burn::train::Seconds;
use redsync_engine::Traffic;
use std::collections::BTreeMap;

/// Every section that has content, in reading order.
pub fn all(found: &Found, gbit: f64) -> Result<Vec<Section>> {
    let mut sections = Vec::new();
    if !found.runs.is_empty() {
        sections.push(methods(&found.runs));
        sections.push(training(&found.runs)?);
    }
    if found.runs.iter().any(|run| !run.steps.is_empty()) || !found.steps.is_empty() {
        sections.push(phases(found)?);
    }
    if found.runs.iter().any(compresses) {
        sections.push(layers(&found.runs)?);
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

/// What a run is called in a legend.
pub fn name(run: &Run) -> String {
    format!("{} · {} workers · seed {}", run.way, run.meta.workers, run.meta.seed)
}

/// A setting in which runs of one method may differ, in words.
type Setting = fn(&Meta) -> Option<String>;

/// Names the ways of runs: a method, and of its settings those in which runs of it on one task differ.
pub fn name_ways(runs: &mut [Run]) {
    let settings: [Setting; 3] = [
        |meta| meta.density.filter(|_| meta.method != "sgd").map(|d| format!("{}%", short(100.0 * d))),
        |meta| meta.momentum.map(|m| format!("momentum {}", short(m))),
        |meta| meta.lr.map(|lr| format!("rate {}", short(lr))),
    ];
    for run in runs.iter_mut() {
        run.way = match run.meta.every.filter(|_| run.meta.is_local()) {
            Some(every) => format!("{} every {every}", run.meta.method),
            None => run.meta.method.clone(),
        };
    }
    for setting in settings {
        let told: Vec<_> = runs.iter().map(|run| (task(run), run.way.clone(), setting(&run.meta))).collect();
        for (run, (task, way, value)) in runs.iter_mut().zip(&told) {
            let differs = told.iter().any(|other| other.0 == *task && other.1 == *way && other.2 != *value);
            if let Some(value) = value.as_ref().filter(|_| differs) {
                run.way = format!("{way}, {value}");
            }
        }
    }
}

/// What a run trains; PyTorch does not say on which data.
pub fn task(run: &Run) -> String {
    match &*run.meta.data {
        "" => run.meta.model.clone(),
        data => format!("{} on {data}", run.meta.model),
    }
}

/// Runs of one model on one data set belong into one chart, dense ones first, as methods are known.
pub fn by_task(runs: &[Run]) -> BTreeMap<String, Vec<&Run>> {
    let mut tasks: BTreeMap<String, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        tasks.entry(task(run)).or_default().push(run);
    }
    let key = |run: &&Run| (rank(&run.meta.method), run.meta.is_local(), run.way.clone(), run.meta.seed);
    tasks.values_mut().for_each(|runs| runs.sort_by_cached_key(key));
    tasks
}

fn phases(found: &Found) -> Result<Section> {
    let mut names = Vec::new();
    let mut parts = Vec::new();
    let mut sent: Vec<Sent> = Vec::new();
    for run in by_task(&found.runs).into_values().flatten().filter(|run| !run.steps.is_empty()) {
        let count = run.steps.len() as f64;
        let mut mean = [0.0; 8];
        for step in &run.steps {
            mean.iter_mut().zip(step.seconds.phases()).for_each(|(sum, phase)| *sum += 1e3 * phase / count);
        }
        let exposed = run.steps.iter().map(|step| step.exposed_ms).sum::<f64>() / count;
        names.push(format!("{}, {}: {} ms exposed", run.meta.model, name(run), short(exposed)));
        parts.push(mean.to_vec());
        if let Some(last) = &run.last {
            sent.push((format!("{}, {}", run.meta.model, name(run)), last.bytes_sent, last.traffic));
        }
    }
    for step in &found.steps {
        names.push(step.label());
        parts.push(step.breakdown.times(1e3).phases().to_vec());
        sent.push((step.label(), step.bytes_sent_per_step, step.traffic));
    }
    let phases: Vec<_> = Seconds::PHASES.iter().map(|name| (name.to_string(), false)).collect();
    let caption = "mean of one step; what overlaps is counted in each phase";
    let mut figures = figure("Time by phase", caption, &phases, &bars("ms", &names, &parts)?);
    if !sent.is_empty() {
        figures.push_str(&bytes(&sent)?);
    }
    if !found.steps.is_empty() {
        let header = ["step", "bytes sent", "dense", "share"];
        let row = |step: &SyncStep| {
            let (sent, dense) = (step.bytes_sent_per_step, step.dense_bytes_per_step);
            let share = if dense > 0.0 { format!("{:.3}%", 100.0 * sent / dense) } else { "–".into() };
            vec![step.label(), short(sent), short(dense), share]
        };
        let rows = table(&header, found.steps.iter().map(row));
        figures.push_str(&format!("<figure><h3>Bytes of a step against dense</h3>{rows}</figure>"));
    }
    Ok(Section { title: "Time and bytes", intro: String::new(), body: grid(&figures) })
}

/// What sent something, how much, and where that went.
type Sent = (String, f64, Traffic);

fn bytes(sent: &[Sent]) -> Result<String> {
    let names: Vec<String> = sent.iter().map(|(name, ..)| name.clone()).collect();
    // Older files do not say where their bytes went.
    let parts = |(_, sent, traffic): &Sent| {
        let mut parts = traffic.parts().map(|(_, bytes)| bytes as f64).to_vec();
        parts.push((sent - traffic.sent() as f64).max(0.0));
        parts
    };
    let values: Vec<Vec<f64>> = sent.iter().map(parts).collect();
    // What nobody sent needs no colour: only Adam has second moments, only older files are silent.
    let all = Traffic::default().parts().map(|(name, _)| name).into_iter().chain(["not told"]);
    let used = |i: usize| i < 4 || values.iter().any(|parts| parts[i] > 0.0);
    let legend: Vec<_> =
        all.enumerate().filter(|(i, _)| used(*i)).map(|(_, name)| (name.to_string(), false)).collect();
    let only_used = |parts: &Vec<f64>| {
        parts.iter().enumerate().filter(|(i, _)| used(*i)).map(|(_, part)| *part).collect()
    };
    let values: Vec<Vec<f64>> = values.iter().map(only_used).collect();
    let caption = "of one rank: what it sent, by where it went";
    Ok(figure("Bytes", caption, &legend, &bars("B", &names, &values)?))
}

/// Whether it says of a layer what it keeps back.
fn compresses(run: &Run) -> bool {
    run.layers.iter().any(|layer| layer.residual_norm.is_some())
}

/// How many layers a chart can show.
const MOST_LINES: usize = 6;

fn layers(runs: &[Run]) -> Result<Section> {
    let mut figures = String::new();
    for run in by_task(runs).into_values().flatten().filter(|run| compresses(run)) {
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
            ("residual", "norm", true, curve(|l| l.residual_norm)),
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
    let intro = "What each layer sent, and what it keeps back. What waits is kept in units of the present learning rate, so it grows where \
                 the rate falls; one that grew at a constant rate would be a sign of trouble.".into();
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
    series.push(Series { name: "exactly".into(), points: exact, dashed: true, ..Series::default() });
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
                series.push(Series {
                    name: "linear".into(),
                    points: ranks,
                    dashed: true,
                    ..Series::default()
                });
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
    let intro = "From the cost model alone. sgd is dense; the others gather, unless their name says by which exchange their messages travel; \
                 auto is what `redsync plan` chooses for each number of ranks."
        .into();
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
        ..Series::default()
    });
    let density = found.selections.first().map_or(0.0, |selection| selection.density);
    let axes = Axes { x: "elements", y: "ms", log_x: true, log_y: true };
    let caption = format!("selecting {}% of a layer, its accumulation included", 100.0 * density);
    let body = figure("Selection against size", &caption, &legend(&series), &lines(axes, &series)?);
    let intro = "Selection has to cost less than the exchange that it replaces.".into();
    Ok(Section { title: "Selection", intro, body: grid(&body) })
}

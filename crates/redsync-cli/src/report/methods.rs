//! The table of methods: the runs of a task by method and settings, means over their seeds, against those that were dense.

use super::chart::short;
use super::load::{Meta, Run, Step};
use super::page::{Section, table, text};
use super::sections::by_task;

/// Methods by name, and what of a compressed layer each sends.
const SENDS: [(&str, &str); 5] = [
    ("sgd", "everything, 32 bits per value (dense)"),
    ("rgc", "the largest values, each for itself"),
    ("rgc+2bit", "the largest values, two bits each"),
    ("rgc+asq", "the largest of one sign, their mean for all"),
    ("rgc-naive", "the largest values, found by a full sort"),
];

/// The place of a method in tables and charts: dense first.
pub fn rank(method: &str) -> usize {
    SENDS.iter().position(|(known, _)| *known == method).unwrap_or(SENDS.len())
}

pub fn methods(runs: &[Run]) -> Section {
    let mut body = String::new();
    for (task, runs) in by_task(runs) {
        let mut ways: Vec<Vec<&Run>> = Vec::new();
        for run in &runs {
            match ways.iter_mut().find(|way| way[0].way == run.way) {
                Some(way) => way.push(run),
                None => ways.push(vec![run]),
            }
        }
        let dense = ways.iter().filter(|way| way[0].meta.is_dense());
        // That which ended best, if there are several.
        let dense =
            dense.min_by(|a, b| mean_loss(a).total_cmp(&mean_loss(b))).and_then(|way| mean(way, metric));
        let metric = runs.iter().flat_map(|run| &run.epochs).map(|epoch| &*epoch.metric_name).next_back();
        let metric = metric.filter(|name| !name.is_empty()).unwrap_or("metric");
        let header = [
            "method",
            "of a layer it sends",
            "runs",
            metric,
            "against dense",
            "loss",
            "sent",
            "of dense",
            "step",
            "waiting",
        ];
        let rows = ways.iter().map(|way| row(metric, way, dense));
        let first = runs.first().map_or(&Meta::default(), |run| &run.meta).clone();
        let parameters = match first.parameters {
            0 => String::new(), // not told
            parameters => format!("{} parameters, ", short(parameters as f64)),
        };
        let title = format!("{task}: {parameters}{} workers", first.workers);
        body.push_str(&format!("<h3>{}</h3>\n{}", text(&title), table(&header, rows)));
    }
    let intro = "Means over the runs of a method that differ in nothing but their seeds, smallest and largest in brackets. Sent: everything that one worker sent in the whole \
                 run, warm-up included. Step, and waiting for the exchange in it: on the network on which it ran; threads of one \
                 machine have none.";
    Section { title: "Methods", intro: intro.into(), body }
}

fn row(metric_name: &str, runs: &[&Run], dense: Option<f64>) -> Vec<String> {
    let none = || "–".to_string();
    let Run { meta, way, .. } = runs[0];
    let sends = SENDS.iter().find(|(name, _)| *name == meta.method);
    let sends = sends.map_or_else(none, |(_, what)| match meta.is_local() {
        true => format!("of differences of weights: {what}"),
        false => (*what).into(),
    });
    let value = mean(runs, metric);
    let (sent, whole) = (mean(runs, |run| Some(run.sent()?.0)), mean(runs, |run| Some(run.sent()?.1)));
    let ms = |of: fn(&Step) -> f64| {
        let per_run = |run: &Run| mean_of(run.steps.iter().map(of));
        mean(runs, per_run).filter(|ms| *ms > 0.0).map_or_else(none, |ms| format!("{} ms", short(ms)))
    };
    vec![
        way.clone(),
        sends,
        runs.len().to_string(),
        value.map_or_else(none, |value| told(metric_name, value) + &spread(metric_name, runs)),
        match (value, dense) {
            (Some(value), Some(dense)) if !meta.is_dense() => difference(metric_name, value, dense),
            _ => none(),
        },
        mean(runs, loss).map_or_else(none, |loss| format!("{loss:.4}")),
        sent.map_or_else(none, |bytes| format!("{}B", short(bytes))),
        match (sent, whole) {
            (Some(sent), Some(whole)) if sent > 0.0 => format!("1/{}", short(whole / sent)),
            _ => none(),
        },
        ms(|step| 1e3 * step.seconds.total),
        ms(|step| step.exposed_ms),
    ]
}

fn metric(run: &Run) -> Option<f64> {
    let last = run.last.as_ref().and_then(|last| last.metric);
    last.or_else(|| run.epochs.last().and_then(|epoch| epoch.metric))
}

fn loss(run: &Run) -> Option<f64> {
    let last = run.last.as_ref().and_then(|last| last.loss);
    let of_epoch = || run.epochs.last().and_then(|epoch| epoch.test_loss.or(epoch.train_loss));
    last.or_else(of_epoch).or_else(|| run.steps.last().and_then(|step| step.loss))
}

fn mean_loss(runs: &[&Run]) -> f64 {
    mean(runs, loss).unwrap_or(f64::INFINITY)
}

fn mean_of(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

fn mean(runs: &[&Run], of: impl Fn(&Run) -> Option<f64>) -> Option<f64> {
    mean_of(runs.iter().filter_map(|run| of(run)))
}

/// An accuracy is told in percent.
fn told(name: &str, value: f64) -> String {
    if name == "accuracy" { format!("{:.2}%", 100.0 * value) } else { format!("{value:.2}") }
}

fn spread(name: &str, runs: &[&Run]) -> String {
    let all: Vec<f64> = runs.iter().filter_map(|run| metric(run)).collect();
    let (low, high) = all.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(*x), b.max(*x)));
    if all.len() > 1 { format!(" ({} to {})", told(name, low), told(name, high)) } else { String::new() }
}

fn difference(name: &str, value: f64, dense: f64) -> String {
    match name {
        "accuracy" => format!("{:+.2} points", 100.0 * (value - dense)),
        _ => format!("{:+.1}%", 100.0 * (value / dense - 1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::load::{Last, Meta};
    use crate::report::sections::name_ways;

    fn run(method: &str, metric: f64) -> Run {
        let meta = Meta { method: method.into(), model: "m".into(), data: "d".into(), ..Meta::default() };
        let last = Last { metric: Some(metric), bytes_sent: 10.0, dense_bytes: 1000.0, ..Last::default() };
        Run { meta, way: method.into(), last: Some(last), ..Run::default() }
    }

    #[test]
    fn seeds_of_a_method_share_a_row_and_are_set_against_dense() {
        let html = methods(&[run("rgc", 110.0), run("sgd", 100.0), run("rgc", 130.0)]).body;
        let rows: Vec<&str> = html.lines().filter(|line| line.starts_with("<tr><td")).collect();
        assert_eq!(rows.len(), 2);
        assert!(rows[0].contains("(dense)") && rows[1].contains("120.00 (110.00 to 130.00)"), "{html}");
        assert!(rows[1].contains("+20.0%") && rows[1].contains("1/100"), "{html}");
    }

    #[test]
    fn runs_of_different_settings_have_rows_of_their_own_and_only_exchanged_gradients_are_dense() {
        let with = |method: &str, density: f64, every: u64, seed: u64, loss: f64| {
            let mut run = run(method, 100.0 * loss);
            run.meta = Meta { density: Some(density), every: Some(every), seed, ..run.meta };
            run.last = run.last.map(|last| Last { loss: Some(loss), ..last });
            run
        };
        let mut runs = [
            with("rgc", 0.01, 1, 1, 3.0),
            with("rgc", 0.001, 1, 1, 4.0),
            with("rgc", 0.01, 1, 2, 3.0),
            with("rgc", 0.01, 8, 1, 5.0),
            with("sgd", 0.01, 8, 1, 1.0),
            with("sgd", 0.01, 1, 1, 2.0),
        ];
        runs[5].meta.lr = Some(0.1);
        name_ways(&mut runs);
        let ways = ["rgc, 1%", "rgc, 0.1%", "rgc, 1%", "rgc every 8", "sgd every 8", "sgd"];
        assert_eq!(runs.each_ref().map(|run| &*run.way), ways);
        let html = methods(&runs).body;
        let rows: Vec<&str> = html.lines().filter(|line| line.starts_with("<tr><td")).collect();
        let against = [">sgd</td>", "-50.0%", "+100.0%", "+50.0%", "+150.0%"];
        assert_eq!(rows.len(), against.len(), "{html}");
        for (row, expected) in rows.iter().zip(against) {
            assert!(row.contains(expected), "{row}: {expected}");
        }
    }

    #[test]
    fn dense_runs_at_several_rates_are_told_apart_and_the_best_is_the_standard() {
        let at = |lr: f64, momentum: f64, loss: f64| {
            let mut run = run("sgd", loss);
            run.meta = Meta { lr: Some(lr), momentum: Some(momentum), ..run.meta };
            run.last = run.last.map(|last| Last { loss: Some(loss), ..last });
            run
        };
        let mut runs =
            vec![at(0.004, 0.9, 20.0), at(0.003, 0.9, 10.0), at(0.004, 0.5, 40.0), run("rgc", 11.0)];
        name_ways(&mut runs);
        let ways: Vec<&str> = runs.iter().map(|run| &*run.way).collect();
        assert_eq!(
            ways,
            ["sgd, momentum 0.9, rate 0.004", "sgd, momentum 0.9, rate 0.003", "sgd, momentum 0.5", "rgc"]
        );
        assert!(methods(&runs).body.contains("+10.0%"));
    }
}

//! How trainings went: loss by step and epoch, against bytes and against time, and the metric.
//! What must hold: every run of a task is in the same chart, also one that PyTorch made, if it told a loss.

use super::chart::{Axes, Series, lines};
use super::load::{Epoch, Run};
use super::page::{Section, figure, grid, legend};
use super::sections::{by_task, name};
use anyhow::Result;

/// A loss, and what it took to get there.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    steps: f64,
    bytes: f64,
    seconds: f64,
    loss: f64,
}

pub fn training(runs: &[Run]) -> Result<Section> {
    let mut figures = String::new();
    for (task, runs) in by_task(runs) {
        let metric =
            runs.iter().flat_map(|run| &run.epochs).map(|e| e.metric_name.as_str()).find(|m| !m.is_empty());
        let metric = metric.unwrap_or("metric");
        for (title, caption, axes, series) in [
            (
                "training loss against bytes",
                "what one worker has sent so far",
                Axes { x: "bytes", y: "loss", log_x: true, log_y: true },
                walked(&runs, |point| point.bytes),
            ),
            (
                "training loss against time",
                "of the steps, under PyTorch all that passed, on the network on which it ran",
                Axes { x: "seconds", y: "loss", log_x: false, log_y: true },
                walked(&runs, |point| point.seconds),
            ),
            (
                "training loss against steps",
                "mean of the steps since the point before",
                Axes { x: "steps", y: "loss", log_x: false, log_y: true },
                walked(&runs, |point| point.steps),
            ),
            ("training loss", "by epoch", by_epoch("loss", true), epochs(&runs, |e| e.train_loss)),
            ("test loss", "by epoch", by_epoch("loss", true), epochs(&runs, |e| e.test_loss)),
            (metric, "by epoch", by_epoch("", false), epochs(&runs, |e| e.metric)),
        ] {
            if series.iter().any(|series| series.points.len() > 1) {
                let (series, entries) = coloured(&runs, series);
                let svg = lines(axes, &series)?;
                figures.push_str(&figure(&format!("{task}: {title}"), caption, &entries, &svg));
            }
        }
    }
    let intro = "Equal seeds and epochs compare. Equal curves by epoch, and the same loss for a fraction of the bytes, are the \
                 point of residual compression.";
    Ok(Section { title: "Training", intro: intro.into(), body: grid(&figures) })
}

/// One colour for each run, or for each way if one has several runs; and the legend.
fn coloured(runs: &[&Run], series: Vec<Series>) -> (Vec<Series>, Vec<(String, bool)>) {
    let mut ways: Vec<(&str, usize)> = Vec::new();
    for run in runs {
        match ways.iter_mut().find(|(way, _)| *way == run.way) {
            Some((_, count)) => *count += 1,
            None => ways.push((&run.way, 1)),
        }
    }
    if ways.iter().all(|(_, count)| *count == 1) {
        let entries = legend(&series);
        return (series, entries);
    }
    let colour = |run: &Run| ways.iter().position(|(way, _)| *way == run.way);
    let series = series.into_iter().zip(runs).map(|(line, run)| Series { colour: colour(run), ..line });
    let told = |(way, count): &(&str, usize)| match count {
        1 => (way.to_string(), false),
        _ => (format!("{way} · {count} runs"), false),
    };
    (series.collect(), ways.iter().map(told).collect())
}

fn by_epoch(y: &'static str, log_y: bool) -> Axes {
    Axes { x: "epoch", y, log_x: false, log_y }
}

fn epochs(runs: &[&Run], of: fn(&Epoch) -> Option<f64>) -> Vec<Series> {
    let points = |run: &Run| run.epochs.iter().filter_map(|e| Some((e.epoch, of(e)?))).collect();
    let line = |run: &&Run| Series { name: name(run), points: points(run), ..Series::default() };
    runs.iter().map(line).collect()
}

fn walked(runs: &[&Run], x: fn(&Point) -> f64) -> Vec<Series> {
    // What was not told is zero.
    let told = |point: &Point| Some((x(point), point.loss)).filter(|(x, _)| *x > 0.0);
    let points = |run: &Run| points(run).iter().filter_map(told).collect();
    let line = |run: &&Run| Series { name: name(run), points: points(run), ..Series::default() };
    runs.iter().map(line).collect()
}

/// The losses of some steps each; those of epochs, if steps do not tell theirs.
fn points(run: &Run) -> Vec<Point> {
    let mut at = Point { steps: 0.0, bytes: 0.0, seconds: 0.0, loss: 0.0 };
    if run.steps.iter().all(|step| step.loss.is_none()) {
        let reached = |epoch: &Epoch| {
            at.seconds += epoch.seconds;
            Some(Point { bytes: epoch.bytes_sent, loss: epoch.train_loss.or(epoch.test_loss)?, ..at })
        };
        return run.epochs.iter().filter_map(reached).collect();
    }
    let mut before = run.begin();
    let reached = |step: &super::load::Step| {
        let steps = step.step.saturating_sub(before) as f64;
        before = step.step;
        at.steps = step.step as f64;
        at.bytes += steps * step.bytes_sent;
        at.seconds += steps * step.seconds.total;
        Some(Point { loss: step.loss?, ..at })
    };
    run.steps.iter().filter_map(reached).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::load::{Meta, Step};
    use redsync_burn::train::Seconds;

    fn step(step: u64, loss: Option<f64>) -> Step {
        let seconds = Seconds { total: 0.5, ..Seconds::default() };
        Step { step, loss, bytes_sent: 100.0, seconds, ..Step::default() }
    }

    #[test]
    fn bytes_and_seconds_add_up_over_the_steps_between_two_records() {
        let run =
            Run { steps: vec![step(20, Some(3.0)), step(25, None), step(40, Some(1.0))], ..Run::default() };
        let expected = [(20.0, 2000.0, 10.0, 3.0), (40.0, 4000.0, 20.0, 1.0)];
        let expected = expected.map(|(steps, bytes, seconds, loss)| Point { steps, bytes, seconds, loss });
        assert_eq!(points(&run), expected);
        // A file that begins where another run ended.
        let run = Run { meta: Meta { step: 10, ..Meta::default() }, ..run };
        assert_eq!(points(&run)[0], Point { steps: 20.0, bytes: 1000.0, seconds: 5.0, loss: 3.0 });
    }

    #[test]
    fn runs_of_one_method_have_one_colour_and_others_one_each() {
        let run = |method: &str| Run {
            meta: Meta { method: method.into(), ..Meta::default() },
            way: method.into(),
            steps: vec![step(20, Some(3.0)), step(40, Some(1.0))],
            ..Run::default()
        };
        let runs = [run("sgd"), run("rgc"), run("sgd")];
        let of = |runs: &[&Run]| {
            let (series, entries) = coloured(runs, walked(runs, |point| point.bytes));
            let names: Vec<String> = entries.into_iter().map(|(name, _)| name).collect();
            (series.iter().map(|line| line.colour).collect::<Vec<_>>(), names)
        };
        let all: Vec<&Run> = runs.iter().collect();
        let (colours, names) = of(&all);
        assert_eq!(colours, [Some(0), Some(1), Some(0)]);
        assert_eq!(names, ["sgd · 2 runs", "rgc"]);
        let (colours, names) = of(&all[..2]);
        assert_eq!(colours, [None, None]);
        assert_eq!(names, [name(all[0]), name(all[1])]);
    }

    #[test]
    fn epochs_stand_in_where_steps_tell_no_loss() {
        let epoch = |number: f64, loss| Epoch {
            epoch: number,
            train_loss: Some(loss),
            test_loss: None,
            metric: None,
            metric_name: String::new(),
            step: None,
            seconds: 2.0,
            bytes_sent: 10.0 * number,
        };
        let run = Run {
            steps: vec![step(20, None)],
            epochs: vec![epoch(1.0, 3.0), epoch(2.0, 1.0)],
            ..Run::default()
        };
        let expected = [(10.0, 2.0, 3.0), (20.0, 4.0, 1.0)];
        let expected = expected.map(|(bytes, seconds, loss)| Point { steps: 0.0, bytes, seconds, loss });
        assert_eq!(points(&run), expected);
    }
}

//! `redsync bench select`: what choosing the k largest costs, in the steady state.

use super::data::{Dist, generator};
use super::{Common, median, print_json, progress, table, time_ms};
use anyhow::Result;
use clap::Args;
use rand::seq::SliceRandom;
use redsync_core::{
    Adam, AdamW, Compressor, Config, Field, Gradient, LayerError, Level, Momentum, Selector, Sparse,
    Workspace, add_assign,
};
use serde::Serialize;

/// Steps before the measured ones, in which residuals and carried thresholds settle.
const WARM_UP: u64 = 6;
/// Steps after which residuals move to other memory. A pass may be a tenth slower in one place than in another, for reasons beyond
/// a program's reach; nobody shall have a good one, or a bad one, for a whole run.
const MOVE_EVERY: u64 = 3;

#[derive(Debug, Args)]
pub struct Select {
    #[command(flatten)]
    common: Common,
    /// Instructions of the passes: portable, avx2, avx512 or neon; the best of this machine if none are given
    #[arg(long, value_parser = parse_level)]
    level: Option<Level>,
    /// Only this selector beside accumulate, by the name it has in the table; may be repeated
    #[arg(long, value_name = "SELECTOR", value_parser = parse_contestant)]
    only: Vec<&'static str>,
    /// Measure on a device instead, where u and v are in its memory: wgpu, software, cuda or hip
    #[arg(long, conflicts_with = "level")]
    device: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    n: usize,
    k: usize,
    density: f64,
    threads: u16,
    level: &'static str,
    dist: Dist,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    median_ms: f64,
    selected_min: usize,
    selected_max: usize,
    exact: bool,
}

const ACCUMULATE: &str = "accumulate";
const STD: &str = "std-select-nth";
const STD_REUSE: &str = "std-select-nth-reuse";
const ADAMW: &str = "adamw";
const ADAMW_CARRIED: &str = "adamw+carried";
const ADAMW_TOLD: &str = "adamw+carried+told";

/// One algorithm with the state it carries from step to step.
enum Contestant {
    Accumulate(Field),
    Selector(Box<Compressor>, Workspace),
    /// The plain update of one tensor by AdamW, which sends nothing: weights and both moments.
    AdamW([Field; 3]),
    /// The residual of AdamW, with second moments that others told or not.
    AdamWSelector(&'static str, Box<Compressor>, Workspace),
    StdSelectNth {
        v: Field,
    },
    StdSelectNthReuse {
        v: Field,
        magnitudes: Field,
    },
}

/// What happened at one step.
struct Outcome {
    ms: f64,
    selected: usize,
    exact: bool,
}

impl Contestant {
    fn name(&self) -> &'static str {
        match self {
            Contestant::Accumulate(_) => ACCUMULATE,
            Contestant::Selector(compressor, _) => compressor.config().selector.name(),
            Contestant::AdamW(_) => ADAMW,
            Contestant::AdamWSelector(name, ..) => name,
            Contestant::StdSelectNth { .. } => STD,
            Contestant::StdSelectNthReuse { .. } => STD_REUSE,
        }
    }

    /// Moves the residual to new memory, in exchange for that of the one that moved before.
    fn move_away(&mut self) -> Result<()> {
        match self {
            Contestant::Accumulate(v)
            | Contestant::StdSelectNth { v }
            | Contestant::StdSelectNthReuse { v, .. } => {
                let mut next = Field::zeros(v.len());
                next.copy_from_slice(v);
                *v = next;
            }
            Contestant::AdamW(fields) => {
                for field in fields {
                    let mut next = Field::zeros(field.len());
                    next.copy_from_slice(field);
                    *field = next;
                }
            }
            Contestant::Selector(compressor, _) | Contestant::AdamWSelector(_, compressor, _) => {
                let old = compressor.residual();
                let mut next = Compressor::new(0, "bench", old.len(), *compressor.config())?;
                next.restore(old.u(), old.v(), old.second(), compressor.memory(), compressor.rate())?;
                **compressor = next;
            }
        }
        Ok(())
    }

    fn step(&mut self, step: u64, gradient: &[f32], k: usize, level: Level) -> Result<Outcome> {
        match self {
            Contestant::Accumulate(v) => {
                let (ms, ()) = time_ms(|| add_assign(level, v, gradient));
                Ok(Outcome { ms, selected: 0, exact: false })
            }
            Contestant::AdamW([w, m, q]) => {
                let update = AdamW::new(Adam::default(), step + 1, 1e-3, 0.1);
                let (ms, ()) = time_ms(|| update.update(level, w, m, q, gradient));
                Ok(Outcome { ms, selected: 0, exact: false })
            }
            Contestant::Selector(compressor, workspace)
            | Contestant::AdamWSelector(_, compressor, workspace) => {
                let (ms, done) = time_ms(|| {
                    compressor.accumulate(step, Gradient::F32(gradient), 1.0, workspace)?;
                    compressor.select(step, workspace);
                    Ok::<_, LayerError>(())
                });
                done?;
                let chosen = workspace.message();
                let exact = is_top_k(chosen, compressor.residual().v(), k);
                Ok(Outcome { ms, selected: chosen.len(), exact })
            }
            Contestant::StdSelectNth { v } => {
                let (ms, least) = time_ms(|| {
                    add_assign(level, v, gradient);
                    let mut magnitudes: Vec<f32> = v.iter().map(|v| v.abs()).collect();
                    kth_largest(&mut magnitudes, k)
                });
                Ok(take_out(ms, v, least, k))
            }
            Contestant::StdSelectNthReuse { v, magnitudes } => {
                let (ms, least) = time_ms(|| {
                    add_assign(level, v, gradient);
                    for (magnitude, v) in magnitudes.iter_mut().zip(v.iter()) {
                        *magnitude = v.abs();
                    }
                    kth_largest(magnitudes, k)
                });
                Ok(take_out(ms, v, least, k))
            }
        }
    }
}

/// Reads the gradient, so that everyone finds it in the cache as far as it fits, and nothing of the one before that has still to be
/// written back.
fn equal_caches(gradient: &[f32]) {
    std::hint::black_box(gradient.iter().step_by(16).fold(0, |bits, g| bits ^ g.to_bits()));
}

fn kth_largest(magnitudes: &mut [f32], k: usize) -> f32 {
    let at = magnitudes.len() - k;
    *magnitudes.select_nth_unstable_by(at, f32::total_cmp).1
}

/// Takes what the standard library selected out of v; not part of its time.
fn take_out(ms: f64, v: &mut [f32], least: f32, k: usize) -> Outcome {
    let chosen = v.iter_mut().filter(|v| **v != 0.0 && v.abs() >= least);
    let selected = chosen.map(|v| *v = 0.0).count();
    Outcome { ms, selected, exact: selected == k }
}

/// Whether `chosen` are precisely the k largest magnitudes, given what is left of the residual: nothing left may be
/// larger than the least that was chosen, nor as large at a smaller index.
fn is_top_k(chosen: &Sparse, rest: &[f32], k: usize) -> bool {
    let least = chosen.iter().map(|(_, value)| value.abs()).fold(f32::INFINITY, f32::min);
    let last_least = chosen.iter().filter(|(_, value)| value.abs() == least).map(|(index, _)| index).max();
    let none_left = || rest.iter().all(|v| *v == 0.0);
    let beaten =
        |index: usize, v: f32| v.abs() < least || (v.abs() == least && Some(index as u32) > last_least);
    match chosen.len() {
        len if len == k => rest.iter().enumerate().all(|(i, v)| *v == 0.0 || beaten(i, *v)),
        len => len < k && none_left(),
    }
}

/// A level by its name, if this machine has it.
fn parse_level(name: &str) -> Result<Level, String> {
    let here = || Level::ALL.into_iter().filter(|level| level.is_here());
    here().find(|level| level.name() == name).ok_or_else(|| {
        let names: Vec<&str> = here().map(Level::name).collect();
        format!("this machine has {}", names.join(", "))
    })
}

/// The name of a contestant that can be asked for.
fn parse_contestant(name: &str) -> Result<&'static str, String> {
    let names: Vec<&'static str> = Selector::ALL
        .map(Selector::name)
        .into_iter()
        .chain([ADAMW, ADAMW_CARRIED, ADAMW_TOLD, STD_REUSE, STD])
        .collect();
    let found = names.iter().copied().find(|known| *known == name);
    found.ok_or_else(|| redsync_names::nearest(name, &names))
}

impl Select {
    fn level(&self) -> Level {
        self.level.unwrap_or_else(Level::best)
    }

    pub fn run(self) -> Result<()> {
        if let Some(device) = &self.device {
            return super::device::run(&self.common, device, &self.only);
        }
        let rows = self.common.in_pool(|| self.measure())?;
        let Common { n, density, threads, dist, json, .. } = self.common;
        let k = self.common.k();
        if json {
            let level = self.level().name();
            return print_json(&Report { n, k, density: density.fraction(), threads, level, dist, rows });
        }
        let pass = rows.first().map_or(1.0, |row| row.median_ms);
        let std = rows.iter().find(|row| row.name == STD).map(|row| row.median_ms);
        let adamw = rows.iter().find(|row| row.name == ADAMW).map(|row| row.median_ms);
        let header = ["selector", "median", "passes", "of adamw", "vs std", "selected", "exactly top k"];
        let mut out = table(&header);
        for row in &rows {
            let selected = match (row.selected_min, row.selected_max) {
                _ if [ACCUMULATE, ADAMW].contains(&row.name) => String::new(),
                (least, most) if least == most => format!("{least}"),
                (least, most) => format!("{least} to {most}"),
            };
            out.add_row([
                row.name.to_string(),
                format!("{:.2} ms", row.median_ms),
                format!("{:.2}", row.median_ms / pass),
                adamw
                    .filter(|_| row.name.starts_with(ADAMW))
                    .map_or(String::new(), |adamw| format!("{:.2}", row.median_ms / adamw)),
                std.map_or(String::new(), |std| format!("{:.1} x", std / row.median_ms)),
                selected,
                match row.name {
                    ACCUMULATE | ADAMW => "",
                    _ if row.exact => "yes",
                    _ => "no",
                }
                .to_string(),
            ]);
        }
        crate::say!("{}, {}\n{out}", self.common.describe(), self.level());
        crate::say!(
            "A time includes the accumulation; passes: the time as a multiple of accumulate (v += g) alone. adamw is the plain \
             update of weights and both moments, which a residual of AdamW has instead of v += g; of adamw: as a multiple of that."
        );
        Ok(())
    }

    fn measure(&self) -> Result<Vec<Row>> {
        let Common { n, density, threads, dist, steps, seed, .. } = self.common;
        let (k, level) = (self.common.k(), self.level());
        let mut contestants = vec![Contestant::Accumulate(Field::zeros(n))];
        for selector in Selector::ALL {
            let compressor =
                Compressor::new(0, "bench", n, Config { density, selector, ..Config::default() })?;
            let workspace = Workspace::with_level(threads.into(), level);
            contestants.push(Contestant::Selector(Box::new(compressor), workspace));
        }
        contestants.push(Contestant::AdamW([0; 3].map(|_| Field::zeros(n))));
        for (name, told) in [(ADAMW_CARRIED, false), (ADAMW_TOLD, true)] {
            let momentum = Momentum::Adam(Adam::default());
            let config = Config { density, momentum, ranks: 2, ..Config::default() };
            let mut compressor = Compressor::new(0, "bench", n, config)?;
            if told {
                compressor.give_second(0, &vec![0.5; n])?;
            }
            let workspace = Workspace::with_level(threads.into(), level);
            contestants.push(Contestant::AdamWSelector(name, Box::new(compressor), workspace));
        }
        contestants.push(Contestant::StdSelectNthReuse { v: Field::zeros(n), magnitudes: Field::zeros(n) });
        contestants.push(Contestant::StdSelectNth { v: Field::zeros(n) });
        contestants
            .retain(|c| self.only.is_empty() || c.name() == ACCUMULATE || self.only.contains(&c.name()));
        let mut rows: Vec<(Row, Vec<f64>)> = contestants
            .iter()
            .map(|c| Row {
                name: c.name(),
                median_ms: 0.0,
                selected_min: usize::MAX,
                selected_max: 0,
                exact: true,
            })
            .map(|row| (row, Vec::new()))
            .collect();
        let bar = progress(WARM_UP + u64::from(steps), "selecting");
        let mut gradient = Field::zeros(n);
        let mut order: Vec<usize> = (0..contestants.len()).collect();
        for step in 0..WARM_UP + u64::from(steps) {
            dist.fill(&mut gradient, seed, step);
            // In another order at every step, so that nobody always has the same predecessor.
            order.shuffle(&mut generator(seed, step, u64::MAX));
            if step % MOVE_EVERY == 0 {
                order.iter().try_for_each(|at| contestants[*at].move_away())?;
            }
            for at in order.iter().copied() {
                equal_caches(&gradient);
                let outcome = contestants[at].step(step, &gradient, k, level)?;
                if step >= WARM_UP {
                    let (row, times) = &mut rows[at];
                    times.push(outcome.ms);
                    row.selected_min = row.selected_min.min(outcome.selected);
                    row.selected_max = row.selected_max.max(outcome.selected);
                    row.exact &= outcome.exact;
                }
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        let finish = |(mut row, mut times): (Row, Vec<f64>)| {
            row.median_ms = median(&mut times);
            row
        };
        Ok(rows.into_iter().map(finish).collect())
    }
}

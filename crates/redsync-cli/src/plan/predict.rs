//! Predictions for the methods of a model on a platform, and what follows from them: choices, reasons, the verdict.

use anyhow::Result;
use redsync_engine::cost::{self, Compute, Platform, Step, Times};
use redsync_engine::{Choice, Config, Kind, Layer, Method, choices};
use serde::Serialize;

/// A gain below this is not worth a word.
const WORTH: f64 = 1.05;
/// The search for the number of ranks from which dense wins ends here.
const MOST_RANKS: usize = 1 << 16;

/// A model among ranks on a platform.
pub struct Question<'a> {
    pub layers: &'a [Layer],
    /// Density, clipping, preset; the method is each in turn.
    pub config: Config,
    pub platform: &'a Platform,
    pub ranks: usize,
    pub compute: Compute,
}

/// What happens with a layer, and why.
#[derive(Debug, Serialize)]
pub struct Planned {
    pub name: String,
    pub size: usize,
    pub choice: &'static str,
    pub why: String,
}

/// Milliseconds of a step.
#[derive(Debug, Serialize)]
pub struct Predicted {
    pub sgd: f64,
    pub rgc: f64,
    #[serde(rename = "rgc+asq")]
    pub rgc_asq: f64,
    pub auto: f64,
}

#[derive(Debug, Serialize)]
pub struct Answer {
    pub ranks: usize,
    pub layers: Vec<Planned>,
    pub predicted_ms: Predicted,
    /// The phases of the chosen plan and of sgd, in milliseconds.
    pub phases_ms: Phases,
    pub speedup: f64,
    pub dense_wins_from_ranks: Option<usize>,
    pub verdict: String,
}

#[derive(Debug, Serialize)]
pub struct Phases {
    pub sgd: Phase,
    pub auto: Phase,
}

#[derive(Debug, Serialize)]
pub struct Phase {
    pub compute: f64,
    pub select: f64,
    pub encode: f64,
    pub exchange: f64,
    pub decode: f64,
    pub apply: f64,
    pub bytes_sent: f64,
}

impl From<Times> for Phase {
    fn from(t: Times) -> Self {
        Phase {
            compute: 1e3 * t.compute,
            select: 1e3 * t.select,
            encode: 1e3 * t.encode,
            exchange: 1e3 * t.exchange,
            decode: 1e3 * t.decode,
            apply: 1e3 * t.apply,
            bytes_sent: t.bytes_sent.round(),
        }
    }
}

impl Question<'_> {
    /// The times of a method among so many ranks.
    pub fn times(&self, method: Method, ranks: usize) -> Result<Times> {
        let config = Config { method, ..self.config.clone() };
        self.with(&config, ranks, |step| step.times())
    }

    fn with<T>(&self, config: &Config, ranks: usize, f: impl FnOnce(Step<'_>) -> T) -> Result<T> {
        let choices = choices(self.layers, config)?;
        let Question { layers, platform, compute, .. } = *self;
        Ok(f(Step { layers, choices: &choices, config, platform, ranks, compute }))
    }

    /// The configuration that the plan `auto` comes to among so many ranks.
    pub fn auto(&self, ranks: usize) -> Result<Config> {
        let config = Config { method: Method::RgcAsq, ..self.config.clone() };
        let dense_below = cost::dense_below(self.layers, &config, self.platform, ranks, self.compute)?;
        Ok(Config { dense_below: Some(dense_below), ..config })
    }

    pub fn answer(&self) -> Result<Answer> {
        let ms = |times: Times| 1e3 * times.step;
        let config = self.auto(self.ranks)?;
        let auto = self.with(&config, self.ranks, |step| step.times())?;
        let sgd = self.times(Method::Sgd, self.ranks)?;
        let predicted_ms = Predicted {
            sgd: ms(sgd),
            rgc: ms(self.times(Method::Rgc, self.ranks)?),
            rgc_asq: ms(self.times(Method::RgcAsq, self.ranks)?),
            auto: ms(auto),
        };
        let speedup = sgd.step / auto.step;
        let dense_wins_from_ranks = self.dense_wins_from()?;
        Ok(Answer {
            ranks: self.ranks,
            layers: self.with(&config, self.ranks, |step| {
                step.layers.iter().enumerate().map(|(i, _)| planned(&step, i)).collect()
            })?,
            verdict: self.verdict(sgd, auto, dense_wins_from_ranks),
            predicted_ms,
            phases_ms: Phases { sgd: sgd.into(), auto: auto.into() },
            speedup,
            dense_wins_from_ranks,
        })
    }

    /// The smallest number of ranks from which on a dense step is at least as fast as a compressed one, if there is one. Costs
    /// rise smoothly with the ranks, so powers of two are tried first and then the numbers between the last two.
    fn dense_wins_from(&self) -> Result<Option<usize>> {
        let wins = |ranks| -> Result<bool> {
            Ok(self.times(Method::Sgd, ranks)?.step <= self.times(Method::RgcAsq, ranks)?.step)
        };
        let mut above = MOST_RANKS;
        if !wins(above)? {
            return Ok(None);
        }
        while above > 2 && wins(above / 2)? {
            above /= 2;
        }
        if above == 2 {
            return Ok(Some(2));
        }
        let mut below = above / 2;
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            match wins(middle)? {
                true => above = middle,
                false => below = middle,
            }
        }
        Ok(Some(above))
    }

    fn verdict(&self, sgd: Times, auto: Times, dense_wins_from: Option<usize>) -> String {
        let (dense, best) = (1e3 * sgd.step, 1e3 * auto.step);
        let speedup = dense / best;
        if self.ranks < 2 {
            return "It will not help: one rank has nothing to exchange.".into();
        }
        if speedup < WORTH {
            let exposed = 1e3 * sgd.exposed();
            return format!(
                "It will not help: of {} a dense step spends {} on synchronization, and compression would save \
                 less than {:.0}% of the step. Stay with dense SGD.",
                time(dense),
                time(exposed),
                100.0 * (WORTH - 1.0),
            );
        }
        let end = match dense_wins_from {
            Some(ranks) if ranks > self.ranks => format!("; from {ranks} ranks on, dense is faster again"),
            _ => String::new(),
        };
        let bytes = sgd.bytes_sent / auto.bytes_sent;
        format!(
            "It helps: a step takes {} instead of {}, {speedup:.1} times as fast, with {bytes:.0} times fewer bytes{end}.",
            time(best),
            time(dense),
        )
    }
}

fn time(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms if ms >= 1.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.3} ms"),
    }
}

fn planned(step: &Step<'_>, i: usize) -> Planned {
    let layer = &step.layers[i];
    let sparse = step.choices[i].is_sparse();
    let why = if layer.kind == Kind::BiasOrNorm {
        format!("a bias or norm: always whole ({})", step.choices[i])
    } else {
        // What compressing it would cost, also where the plan does not.
        let quantized = step.config.method == Method::RgcAsq && layer.kind != Kind::Output;
        let selector = redsync_core::Selector::Carried;
        let mut choices = step.choices.to_vec();
        if !sparse {
            choices[i] = Choice::Sparse { selector, quantized };
        }
        let step = Step { choices: &choices, ..*step };
        let (dense, compressed) = (step.layer_alone(i, false), step.layer_alone(i, true));
        let sides = format!("by itself dense {}, compressed {}", time(1e3 * dense), time(1e3 * compressed));
        match (sparse, compressed < dense) {
            (true, true) | (false, false) => sides,
            (true, false) => format!("{sides}, but the link is busy with others"),
            (false, true) => format!("{sides}, but it shares or hides its exchange"),
        }
    };
    let choice = if sparse { "sparse" } else { "dense" };
    Planned { name: layer.name.clone(), size: layer.size, choice, why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redsync_engine::Preset;
    use redsync_engine::models::Model;

    fn answer(model: &str, platform: &str, ranks: usize, compute: Compute) -> Answer {
        let layers = Model::named(model).unwrap().layers;
        let described = crate::platform::load(platform).unwrap();
        let paper = Preset::Paper { recurrent: false };
        let config =
            Config { preset: if described.paper { paper } else { Preset::Carried }, ..Config::default() };
        Question { layers: &layers, config, platform: &described.platform, ranks, compute }.answer().unwrap()
    }

    #[test]
    fn a_slow_network_helps_and_an_instant_one_does_not() {
        let slow = answer("vgg16", "1gbe", 4, Compute::default());
        assert!(slow.speedup > 5.0 && slow.verdict.starts_with("It helps: "), "{}", slow.verdict);
        assert!(slow.layers.iter().any(|layer| layer.choice == "sparse"));
        let compute = Compute { forward: 1.0, backward: 2.0, on_cores: false };
        let hidden = answer("resnet50", "100gbe", 4, compute);
        assert!(hidden.verdict.starts_with("It will not help: "), "{}", hidden.verdict);
        assert!(hidden.layers.iter().all(|layer| layer.choice == "dense"));
    }

    #[test]
    fn one_rank_needs_no_plan() {
        let alone = answer("vgg16-cifar", "1gbe", 1, Compute::default());
        assert_eq!(alone.verdict, "It will not help: one rank has nothing to exchange.");
    }

    #[test]
    fn the_end_of_the_gain_is_the_first_number_of_ranks_at_which_dense_is_not_slower() {
        let layers = Model::named("alexnet").unwrap().layers;
        let described = crate::platform::load("10gbe").unwrap();
        let question = Question {
            layers: &layers,
            config: Config::default(),
            platform: &described.platform,
            ranks: 4,
            compute: Compute::default(),
        };
        let from = question.dense_wins_from().unwrap().expect("there is an end");
        let gain = |ranks| {
            question.times(Method::Sgd, ranks).unwrap().step
                / question.times(Method::RgcAsq, ranks).unwrap().step
        };
        assert!(gain(from) <= 1.0 && gain(from - 1) > 1.0, "{from}");
    }
}

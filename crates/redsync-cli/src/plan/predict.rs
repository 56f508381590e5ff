//! Predictions for the methods of a model on a platform, and what follows from them: choices, reasons, the verdict.

use anyhow::Result;
use redsync_core::Momentum;
use redsync_engine::cost::{self, Compute, Platform, Step, Times};
use redsync_engine::{Choice, Config, Exchange, Kind, Layer, Method, Preset, Rest, choices};
use serde::Serialize;

/// Why a layer is never compressed.
pub const ALWAYS_WHOLE: &str = "a bias or norm: always whole";

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
    #[serde(rename = "rgc+2bit")]
    pub rgc_2bit: f64,
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
    /// How messages travel in the chosen plan.
    pub exchange: &'static str,
    /// From how many ranks on owners are faster than gathering.
    pub owners_win_from_ranks: Option<usize>,
    pub verdict: String,
    /// Densities and local steps, in the order of the loss that they end with.
    pub ways: Vec<Way>,
    pub advice: String,
}

/// One way to train.
#[derive(Debug, Serialize)]
pub struct Way {
    pub name: String,
    pub method: &'static str,
    pub density: Option<f64>,
    /// Local steps between two exchanges.
    pub every: Option<u64>,
    pub step_ms: f64,
    pub bytes_per_step: f64,
}

/// A way is good enough if its step is at most so many times as long as the shortest: more speed costs loss.
const NEAR_THE_FASTEST: f64 = 1.25;
/// What local steps send.
const LOCAL_DENSITY: f64 = 1.0 / 64.0;

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
        self.times_by(method, self.config.exchange, ranks)
    }

    /// The same with an exchange.
    pub fn times_by(&self, method: Method, exchange: Option<Exchange>, ranks: usize) -> Result<Times> {
        let config = Config { method, exchange, ..self.config.clone() };
        self.with(&config, ranks, |step| step.times())
    }

    fn with<T>(&self, config: &Config, ranks: usize, f: impl FnOnce(Step<'_>) -> T) -> Result<T> {
        let choices = choices(self.layers, config)?;
        let Question { layers, platform, compute, .. } = *self;
        Ok(f(Step { layers, choices: &choices, config, platform, ranks, compute }))
    }

    /// The configuration that the plan `auto` comes to among so many ranks.
    pub fn auto(&self, ranks: usize) -> Result<Config> {
        self.decided(&self.config, ranks)
    }

    fn decided(&self, config: &Config, ranks: usize) -> Result<Config> {
        let (exchange, limit) = cost::decide(self.layers, config, self.platform, ranks, self.compute)?;
        Ok(Config { dense_below: Some(limit), exchange: Some(exchange), ..config.clone() })
    }

    pub fn answer(&self) -> Result<Answer> {
        let ms = |times: Times| 1e3 * times.step;
        let config = self.auto(self.ranks)?;
        let auto = self.with(&config, self.ranks, |step| step.times())?;
        let sgd = self.times(Method::Sgd, self.ranks)?;
        let predicted_ms = Predicted {
            sgd: ms(sgd),
            rgc: ms(self.times(Method::Rgc, self.ranks)?),
            rgc_2bit: ms(self.times(Method::RgcTwoBit, self.ranks)?),
            rgc_asq: ms(self.times(Method::RgcAsq, self.ranks)?),
            auto: ms(auto),
        };
        let speedup = sgd.step / auto.step;
        let ways = self.ways()?;
        let dense_wins_from_ranks = self.dense_wins_from()?;
        let exchange = config.exchange.unwrap_or(Exchange::Gather).name();
        let owners_win_from_ranks = self.owners_win_from()?;
        Ok(Answer {
            ranks: self.ranks,
            layers: self.with(&config, self.ranks, |step| {
                step.layers.iter().enumerate().map(|(i, _)| planned(&step, i)).collect()
            })?,
            verdict: self.verdict(sgd, auto, dense_wins_from_ranks),
            predicted_ms,
            advice: self.advice(&ways, self.ranks > 1 && speedup >= WORTH),
            ways,
            phases_ms: Phases { sgd: sgd.into(), auto: auto.into() },
            speedup,
            dense_wins_from_ranks,
            exchange,
            owners_win_from_ranks,
        })
    }

    /// What can be chosen for this training, the better its loss the earlier. With SGD a higher density than the one that was asked for
    /// ends no better, unless a training is very short.
    fn ways(&self) -> Result<Vec<Way>> {
        let adam = matches!(self.config.momentum, Momentum::Adam(_));
        let mut densities =
            if adam { vec![0.01, 0.001, self.config.density] } else { vec![self.config.density] };
        densities.sort_by(|a, b| b.total_cmp(a));
        densities.dedup();
        let way = |name: String, config: &Config, every: Option<u64>| -> Result<Way> {
            let times = self.with(config, self.ranks, |step| {
                every.map_or_else(|| step.times(), |h| step.local_times(h))
            })?;
            let method = config.method.name();
            let density = (config.method != Method::Sgd).then_some(config.density);
            let (step_ms, bytes_per_step) = (1e3 * times.step, times.bytes_sent.round());
            Ok(Way { name, method, density, every, step_ms, bytes_per_step })
        };
        let dense = Config { method: Method::Sgd, ..self.config.clone() };
        let mut ways = vec![way("dense".into(), &dense, None)?];
        for density in densities {
            let config = Config { density, rest: Rest::usual(adam, density), ..self.config.clone() };
            let name = format!("{}%, {}", percent(density), config.method.name());
            ways.push(way(name, &self.decided(&config, self.ranks)?, None)?);
        }
        let local = local(&Config { method: Method::RgcTwoBit, ..self.config.clone() });
        for every in [8, 30] {
            ways.push(way(format!("local steps, an exchange every {every}"), &local, Some(every))?);
        }
        Ok(ways)
    }

    /// Which of them to take: dense only where the verdict is that what was asked for does not help, another only where it gains
    /// something.
    fn advice(&self, ways: &[Way], helps: bool) -> String {
        let fastest = ways.iter().map(|way| way.step_ms).fold(f64::INFINITY, f64::min);
        let dense = ways.first().map_or(0.0, |way| way.step_ms);
        let open = |way: &Way| match way.density {
            None => !helps,
            Some(_) => dense >= WORTH * way.step_ms,
        };
        let Some(first) = ways.iter().find(|way| open(way) && way.step_ms <= NEAR_THE_FASTEST * fastest)
        else {
            return String::new();
        };
        let how = match (first.every, first.density) {
            (Some(every), _) => format!(
                "Nothing that exchanges at every step comes near: --every {every}, which costs loss (docs/results.md says how much)"
            ),
            (None, Some(density)) => {
                // The preset `paper` has a limit of its own, and PyTorch's plan is either that or this.
                let (auto, plan) = match self.config.preset {
                    Preset::Carried => (" --auto", "measured"),
                    Preset::Paper { .. } => ("", "paper"),
                };
                let method = first.method;
                format!(
                    "Take --method {method} --density {density}{auto}, in PyTorch attach(..., method=\"{method}\", \
                     density={density}, plan=\"{plan}\")"
                )
            }
            (None, None) => "Take dense".into(),
        };
        let none = if self.compute.backward > 0.0 {
            ""
        } else {
            " How long a step computes was not said: --forward-ms, --backward-ms."
        };
        let (step, best) = (time(first.step_ms), time(fastest));
        format!(
            "{how}: its step of {step} is the first within {:.0}% of the shortest, {best}.{none}",
            100.0 * (NEAR_THE_FASTEST - 1.0)
        )
    }

    /// The smallest number of ranks from which on a dense step is at least as fast as a compressed one, if there is one. Costs
    /// rise smoothly with the ranks, so powers of two are tried first and then the numbers between the last two.
    fn dense_wins_from(&self) -> Result<Option<usize>> {
        self.wins_from(&|ranks| {
            let compressed = |exchange| self.times_by(self.config.method, Some(exchange), ranks);
            let all = self.config.exchange.map_or(Exchange::ALL.to_vec(), |exchange| vec![exchange]);
            let dense = self.times(Method::Sgd, ranks)?.step;
            all.into_iter().try_fold(true, |wins, exchange| Ok(wins && dense <= compressed(exchange)?.step))
        })
    }

    /// The same of owners against gathering.
    fn owners_win_from(&self) -> Result<Option<usize>> {
        self.wins_from(&|ranks| {
            let times = |exchange| self.times_by(self.config.method, Some(exchange), ranks);
            Ok(times(Exchange::Owners)?.step < times(Exchange::Gather)?.step)
        })
    }

    fn wins_from(&self, wins: &dyn Fn(usize) -> Result<bool>) -> Result<Option<usize>> {
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
                "It will not help: of {} a dense step spends {} on synchronization, and {} at {}% would save less than \
                 {:.0}% of the step.",
                time(dense),
                time(exposed),
                self.config.method.name(),
                percent(self.config.density),
                100.0 * (WORTH - 1.0),
            );
        }
        let end = match dense_wins_from {
            Some(ranks) if ranks > self.ranks => format!("; from {ranks} ranks on, dense is faster again"),
            _ => String::new(),
        };
        let bytes = sgd.bytes_sent / auto.bytes_sent;
        format!(
            "It helps: by {} at {}% a step takes {} instead of {}, {speedup:.1} times as fast, with {bytes:.0} times fewer bytes{end}.",
            self.config.method.name(),
            percent(self.config.density),
            time(best),
            time(dense),
        )
    }
}

/// What local steps send: of any optimizer the same, biases and norms as with SGD.
pub fn local(config: &Config) -> Config {
    Config { density: LOCAL_DENSITY, rest: Rest::usual(false, LOCAL_DENSITY), ..config.clone() }
}

/// A fraction in percent, without the digits that come of rounding.
fn percent(fraction: f64) -> f64 {
    (1e6 * fraction).round() / 1e4
}

/// Milliseconds in few digits, with their unit.
pub fn time(ms: f64) -> String {
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
        format!("{ALWAYS_WHOLE} ({})", step.choices[i])
    } else if layer.kind == Kind::Output && step.choices[i] == Choice::DenseTwoBit {
        format!("the output, whole in two bits per element: with Adam it must not wait ({})", step.choices[i])
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
    use redsync_engine::models::Model;

    fn answer(model: &str, platform: &str, ranks: usize, compute: Compute) -> Answer {
        answer_for(Config::default(), model, platform, ranks, compute)
    }

    fn answer_for(config: Config, model: &str, platform: &str, ranks: usize, compute: Compute) -> Answer {
        let layers = Model::named(model).unwrap().layers;
        let described = crate::platform::load(platform).unwrap();
        let paper = Preset::Paper { recurrent: false };
        let config = Config { preset: if described.paper { paper } else { Preset::Carried }, ..config };
        Question { layers: &layers, config, platform: &described.platform, ranks, compute }.answer().unwrap()
    }

    /// What `--optimizer adamw` means.
    fn adamw() -> Config {
        let (method, momentum, density) = (Method::RgcTwoBit, Momentum::Adam(Default::default()), 0.01);
        Config { method, momentum, density, rest: Rest::usual(true, density), ..Config::default() }
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
    fn the_slower_the_network_the_less_is_sent_and_adamw_has_more_to_send() {
        let compute = Compute { forward: 0.05, backward: 0.1, on_cores: false };
        let layers = Model::named("gpt-small").unwrap().layers;
        let ask = |bits_per_second: f64, adam: bool| {
            let network = format!("alpha=1e-3,beta={}", 8.0 / bits_per_second);
            let mut platform = crate::platform::load("1gbe").unwrap().platform;
            platform.network = crate::platform::network(&network).unwrap();
            let config = if adam { adamw() } else { Config::default() };
            Question { layers: &layers, config, platform: &platform, ranks: 4, compute }.answer().unwrap()
        };
        let fast = ask(1e12, true);
        assert!(fast.advice.starts_with("Take dense"), "{}", fast.advice);
        let middle = ask(1e8, true);
        assert!(middle.advice.starts_with("Take --method rgc+2bit --density 0.0"), "{}", middle.advice);
        let slow = ask(1e5, true);
        assert!(slow.advice.contains("--every 30"), "{}", slow.advice);
        let bytes = |answer: &Answer| answer.ways.iter().map(|way| way.bytes_per_step).collect::<Vec<_>>();
        assert!(bytes(&middle).is_sorted_by(|a, b| a > b), "{:?}", bytes(&middle));
        let sgd = bytes(&ask(1e8, false));
        assert!(
            sgd.len() == 4 && sgd[1] < bytes(&middle)[2] && sgd[2..] == bytes(&middle)[3..],
            "second moments are sent with gradients only"
        );
    }

    #[test]
    fn the_advice_follows_the_verdict() {
        let (mut helps, mut does_not) = (0, 0);
        for model in ["resnet44", "resnet50", "vgg16", "gpt-small"] {
            for platform in ["home-cable", "100mbit", "1gbe", "10gbe", "25gbe", "100gbe"] {
                for (ranks, backward) in [(2, 0.0), (4, 0.04), (128, 0.04), (128, 1.0)] {
                    for adam in [false, true] {
                        let compute = Compute { forward: backward / 2.0, backward, on_cores: false };
                        let config = if adam { adamw() } else { Config::default() };
                        let answer = answer_for(config, model, platform, ranks, compute);
                        let told =
                            format!("{model}, {platform}, {ranks}: {} {}", answer.verdict, answer.advice);
                        let (dense, sparse) =
                            (answer.advice.starts_with("Take dense"), answer.advice.starts_with("Take --"));
                        let local = answer.advice.contains("--every");
                        assert!(usize::from(dense) + usize::from(sparse) + usize::from(local) == 1, "{told}");
                        if answer.verdict.starts_with("It helps: ") {
                            helps += 1;
                            assert!(!dense, "{told}");
                            assert_eq!(answer.ways[1].step_ms, answer.predicted_ms.auto, "{told}");
                        } else {
                            does_not += 1;
                            // With AdamW fewer elements than were asked for may help.
                            assert!(!sparse || adam && answer.advice.contains("--density 0.001"), "{told}");
                        }
                    }
                }
            }
        }
        assert!(helps > 10 && does_not > 10, "{helps} {does_not}");
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
        let gathering = Config { exchange: Some(Exchange::Gather), ..question.config.clone() };
        let question = Question { config: gathering, ..question };
        let from = question.dense_wins_from().unwrap().expect("there is an end");
        let gain = |ranks| {
            question.times(Method::Sgd, ranks).unwrap().step
                / question.times(Method::RgcAsq, ranks).unwrap().step
        };
        assert!(gain(from) <= 1.0 && gain(from - 1) > 1.0, "{from}");
        let owners = question.owners_win_from().unwrap().expect("there is a number");
        let times = |exchange, ranks| question.times_by(Method::RgcAsq, Some(exchange), ranks).unwrap().step;
        assert!(times(Exchange::Owners, owners) < times(Exchange::Gather, owners));
        assert!(times(Exchange::Owners, owners - 1) >= times(Exchange::Gather, owners - 1));
    }
}

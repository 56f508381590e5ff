//! The figures that describe machines and their network. They come from a file, from published numbers or from a measurement
//! (`crate::measure`). What must hold: a platform that passed [`Platform::check`] never makes the model divide by zero or give
//! a negative time.
//!
//! Everything is in seconds, bytes and elements.

use super::collective::{Allgather, Allreduce, Cost};
use redsync_core::Selector;
use serde::{Deserialize, Serialize};

/// A figure that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}: expected {expected}")]
pub struct BadPlatform {
    /// Which figure.
    pub name: String,
    /// Its value.
    pub value: f64,
    /// What it should have been.
    pub expected: &'static str,
}

/// `fixed + per * x`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Seconds for each call.
    #[serde(default)]
    pub fixed: f64,
    /// Seconds for each element.
    pub per: f64,
}

impl Line {
    /// A line.
    pub const fn new(fixed: f64, per: f64) -> Self {
        Line { fixed, per }
    }

    /// Its value.
    pub fn at(&self, x: f64) -> f64 {
        self.fixed + self.per * x
    }

    /// The line through two points, as far as it makes sense: neither part is negative.
    pub fn through(a: (f64, f64), b: (f64, f64)) -> Self {
        let per = ((b.1 - a.1) / (b.0 - a.0)).max(0.0);
        Line { fixed: (a.1 - per * a.0).max(0.0), per }
    }
}

/// What the exchange between hosts costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Start-up of a message.
    pub alpha: f64,
    /// Transfer of a byte that a rank sends, while many follow each other.
    pub beta: f64,
    /// How long each message keeps the sender busy besides, where many are under way at once.
    #[serde(default)]
    pub gap: f64,
    /// Core time of a byte that a rank sends: what the exchange takes from the other work of the host.
    #[serde(default)]
    pub work: f64,
    /// Measured: how long one exchange takes by itself, for rising numbers of bytes that a rank sends. Short exchanges are
    /// rarely on the line that `alpha` and `beta` draw.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alone: Vec<(f64, f64)>,
}

impl Link {
    /// The paper's link.
    pub const fn new(alpha: f64, beta: f64) -> Self {
        Link { alpha, beta, gap: 0.0, work: 0.0, alone: Vec::new() }
    }

    /// Rounds of messages one after the other; the next collective waits for the last.
    pub(super) fn one_at_a_time(&self, rounds: f64, bytes: f64) -> Cost {
        Cost { latency: 0.0, occupancy: rounds * self.alpha + bytes * self.beta }
    }

    /// Messages that leave together; only sending them keeps the link busy.
    pub(super) fn all_at_once(&self, rounds: f64, messages: f64, bytes: f64) -> Cost {
        let occupancy = messages * self.gap + bytes * self.beta;
        let alone = self.alone(bytes).unwrap_or(rounds * self.alpha + occupancy);
        Cost { latency: (alone - occupancy).max(0.0), occupancy: occupancy.min(alone) }
    }

    /// Between the measured points on straight lines, beyond the last one with its own slope.
    fn alone(&self, bytes: f64) -> Option<f64> {
        let last = self.alone.last()?;
        let after = self.alone.iter().position(|point| point.0 >= bytes);
        Some(match after {
            Some(0) => self.alone[0].1,
            Some(i) => {
                let (a, b) = (self.alone[i - 1], self.alone[i]);
                a.1 + (b.1 - a.1) * (bytes - a.0) / (b.0 - a.0)
            }
            None => last.1 + (bytes - last.0) * self.beta,
        })
    }
}

/// The network among the ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// How messages are gathered.
    #[serde(default)]
    pub allgather: Allgather,
    /// How dense gradients are summed.
    #[serde(default)]
    pub allreduce: Allreduce,
    /// The link under compressed messages.
    pub sparse: Link,
    /// The link under dense sums; a measured one contains the reduction.
    pub dense: Link,
}

impl Network {
    /// A network of the paper's model: one link for everything.
    pub fn new(alpha: f64, beta: f64) -> Self {
        let link = Link::new(alpha, beta);
        Network { sparse: link.clone(), dense: link, ..Network::default() }
    }
}

/// What choosing costs, for a layer of so many elements; the accumulation is part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// Full selection.
    pub exact: Line,
    /// Trimmed top-k.
    pub trimmed: Line,
    /// Threshold binary search.
    pub threshold: Line,
    /// Threshold search every fifth step.
    pub sampled: Line,
    /// Carried threshold.
    pub carried: Line,
}

impl Selection {
    /// The paper's T_select.
    pub fn t_select(&self, m: usize, selector: Selector) -> f64 {
        let line = match selector {
            Selector::Exact => &self.exact,
            Selector::Trimmed => &self.trimmed,
            Selector::Threshold => &self.threshold,
            Selector::Sampled => &self.sampled,
            Selector::Carried => &self.carried,
        };
        line.at(m as f64)
    }
}

/// What adding compressed messages to the weights costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decompression {
    /// For each layer.
    #[serde(default)]
    pub fixed: f64,
    /// For each element that comes, far from the last one.
    pub gamma_1: f64,
    /// For each element of the layer, where so many come that all of it is read anyway.
    pub pass: f64,
    /// For each element that comes, then.
    pub near: f64,
}

impl Decompression {
    /// Adding `elements` of all ranks together to a layer of `m`.
    pub fn time(&self, m: usize, elements: f64) -> f64 {
        let scattered = self.gamma_1 * elements;
        let all_read = self.pass * m as f64 + self.near * elements;
        self.fixed + scattered.min(all_read)
    }
}

/// What one rank's machine needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Accumulating and choosing.
    pub select: Selection,
    /// Writing a message, per chosen element.
    pub encode: Line,
    /// Reading a message, per element of it.
    pub decode: Line,
    /// Adding messages to the weights.
    pub apply: Decompression,
    /// Taking over a dense gradient, per element.
    pub copy: Line,
    /// Applying a dense gradient, per element.
    pub update: Line,
    /// The norm of the gradients of this rank, per element, where they are clipped.
    #[serde(default)]
    pub clip: f64,
    /// The norm of the summed gradients and their scaling, per element, where all are dense and clipped.
    #[serde(default)]
    pub clip_dense: f64,
    /// The reduction of a dense sum, per element.
    #[serde(default)]
    pub gamma_2: f64,
}

/// Machines and their network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    /// A name for people.
    #[serde(default)]
    pub name: String,
    /// Cores that a rank has for itself; less than one where ranks share a core.
    pub cores: f64,
    /// What slows a core down that also serves exchanges, as a factor of its time. 1 where something else serves them.
    #[serde(default = "one")]
    pub contention: f64,
    /// Seconds of every step among ranks besides: threads that wake each other, and ranks that wait for the last.
    #[serde(default)]
    pub start: f64,
    /// Whether exchanges go on while the framework computes. A library that only works while somebody waits for it, as MPI does
    /// without a thread of its own, hides nothing.
    #[serde(default = "yes")]
    pub background: bool,
    /// Ranks that share a host and its link, for which `network` then stands; 1 where every rank has its own. A measured network knows of
    /// its hosts already.
    #[serde(default = "single")]
    pub ranks_per_host: usize,
    /// Among the ranks.
    pub network: Network,
    /// On each of them.
    pub rates: Rates,
}

fn one() -> f64 {
    1.0
}

fn single() -> usize {
    1
}

fn yes() -> bool {
    true
}

impl Platform {
    /// Whether all figures can be.
    pub fn check(&self) -> Result<(), BadPlatform> {
        let bad = |name: &str, value, expected| Err(BadPlatform { name: name.into(), value, expected });
        let positive = "a number above 0";
        for (name, value) in [("cores", self.cores), ("contention", self.contention)] {
            if !(value.is_finite() && value > 0.0) {
                return bad(name, value, positive);
            }
        }
        for (name, link) in [("sparse", &self.network.sparse), ("dense", &self.network.dense)] {
            if !(link.beta.is_finite() && link.beta > 0.0) {
                return bad(&format!("beta of the {name} link"), link.beta, positive);
            }
            let rising = link.alone.windows(2).all(|pair| pair[0].0 < pair[1].0);
            let sound =
                link.alone.iter().all(|(bytes, time)| *bytes >= 0.0 && time.is_finite() && *time >= 0.0);
            if !(rising && sound) {
                return bad(
                    &format!("a measured point of the {name} link"),
                    f64::NAN,
                    "rising bytes and times from 0 on",
                );
            }
        }
        match self.others().into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((name, value)) => bad(name, value, "a number from 0 on"),
            None => Ok(()),
        }
    }

    /// Every figure that may be zero.
    fn others(&self) -> Vec<(&'static str, f64)> {
        let (r, n) = (&self.rates, &self.network);
        let mut all = vec![
            ("start", self.start),
            ("alpha of the sparse link", n.sparse.alpha),
            ("alpha of the dense link", n.dense.alpha),
            ("gap of the sparse link", n.sparse.gap),
            ("gap of the dense link", n.dense.gap),
            ("work of the sparse link", n.sparse.work),
            ("work of the dense link", n.dense.work),
            ("fixed of apply", r.apply.fixed),
            ("gamma_1", r.apply.gamma_1),
            ("pass of apply", r.apply.pass),
            ("near of apply", r.apply.near),
            ("clip", r.clip),
            ("clip_dense", r.clip_dense),
            ("gamma_2", r.gamma_2),
        ];
        for (name, line) in [
            ("exact selection", r.select.exact),
            ("trimmed selection", r.select.trimmed),
            ("threshold selection", r.select.threshold),
            ("sampled selection", r.select.sampled),
            ("carried selection", r.select.carried),
            ("encode", r.encode),
            ("decode", r.decode),
            ("copy", r.copy),
            ("update", r.update),
        ] {
            all.extend([(name, line.fixed), (name, line.per)]);
        }
        all
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A platform with round figures: 10 Gbit/s, and memory that a core walks over at 4 bytes per nanosecond.
    pub fn round() -> Platform {
        let line = Line::new(5e-6, 1e-9);
        Platform {
            name: "round".into(),
            cores: 4.0,
            contention: 1.0,
            start: 0.0,
            background: true,
            ranks_per_host: 1,
            network: Network::new(20e-6, 0.8e-9),
            rates: Rates {
                select: Selection {
                    exact: Line::new(5e-6, 12e-9),
                    trimmed: Line::new(5e-6, 2e-9),
                    threshold: Line::new(5e-6, 2e-9),
                    sampled: Line::new(5e-6, 1.5e-9),
                    carried: line,
                },
                encode: Line::new(1e-6, 2e-9),
                decode: Line::new(1e-6, 4e-9),
                apply: Decompression { fixed: 1e-6, gamma_1: 20e-9, pass: 0.5e-9, near: 2e-9 },
                copy: line,
                update: line,
                clip: 0.5e-9,
                clip_dense: 1e-9,
                gamma_2: 0.5e-9,
            },
        }
    }

    #[test]
    fn figures_that_cannot_be_are_named() {
        assert_eq!(round().check(), Ok(()));
        let message = |change: fn(&mut Platform)| {
            let mut platform = round();
            change(&mut platform);
            platform.check().expect_err("the figure is wrong").to_string()
        };
        let text = message(|p| p.network.sparse.beta = -1.0);
        assert_eq!(text, "beta of the sparse link is -1: expected a number above 0");
        let text = message(|p| p.rates.apply.gamma_1 = f64::NAN);
        assert_eq!(text, "gamma_1 is NaN: expected a number from 0 on");
        assert!(message(|p| p.cores = 0.0).starts_with("cores is 0"));
        assert!(message(|p| p.network.dense.alone = vec![(2.0, 1.0), (1.0, 1.0)]).contains("dense link"));
    }

    #[test]
    fn a_line_through_two_points_never_has_a_negative_part() {
        assert_eq!(Line::through((1.0, 3.0), (3.0, 7.0)), Line::new(1.0, 2.0));
        assert_eq!(Line::through((1.0, 1.0), (3.0, 7.0)), Line::new(0.0, 3.0));
        assert_eq!(Line::through((1.0, 5.0), (3.0, 4.0)).per, 0.0);
    }

    #[test]
    fn an_exchange_alone_takes_what_was_measured() {
        let alone = vec![(100.0, 1.0), (200.0, 3.0)];
        let link = Link { alone, ..Link::new(0.5, 0.01) };
        let total = |bytes| link.all_at_once(1.0, 3.0, bytes).total();
        assert_eq!([50.0, 100.0, 150.0, 200.0].map(total), [1.0, 1.0, 2.0, 3.0]);
        assert_eq!(total(300.0), 4.0);
        // Many after each other take only what keeps the link busy.
        assert_eq!(link.all_at_once(1.0, 3.0, 200.0).occupancy, 2.0);
    }

    #[test]
    fn decompression_reads_all_once_when_much_comes() {
        let apply = Decompression { fixed: 0.0, gamma_1: 20.0, pass: 1.0, near: 2.0 };
        assert_eq!(apply.time(1000, 1.0), 20.0);
        assert_eq!(apply.time(1000, 1000.0), 3000.0);
    }
}

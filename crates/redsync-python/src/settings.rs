//! What `attach` was told, in names and numbers of Python, as the engine's configuration.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use redsync_core::{Adam, Momentum};
use redsync_engine::{Choice, Config, Exchange, Kind, Layer, Method, Preset, Rest, WarmUp};
use std::collections::BTreeMap;
use std::time::Duration;

/// The settings of a run, by name.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Settings {
    method: String,
    plan: String,
    choices: BTreeMap<String, String>,
    density: f64,
    /// None: the plan's own limit.
    dense_below: Option<usize>,
    /// None: the usual one.
    rest: Option<String>,
    /// None: with Adam, where that is cheap.
    whole_output: Option<bool>,
    /// None: gather, or with figures what is predicted to be faster.
    exchange: Option<String>,
    /// The name of the host that this rank is on.
    host: Option<String>,
    at_least: usize,
    masking: bool,
    lower_momentum: bool,
    keep: f32,
    /// Within how many steps second moments are told; 0 for never.
    share_moments: Option<u64>,
    bf16: bool,
    warm_up: (String, u64),
    clip: Option<f32>,
    clip_power: f32,
    undo: bool,
    deadline: f64,
    threads: usize,
    agree: Vec<(String, String)>,
}

/// A rule by which gradients enter the residual: its name (`plain`, `nesterov` or `adam`) and its numbers; only Adam has more than one.
pub type Rule = (String, f32, f32, f32);

/// One parameter: its name, its number of elements, what it is, and its rule.
pub type Parameter = (String, usize, String, Rule);

fn wrong(what: impl Into<String>) -> PyErr {
    PyValueError::new_err(what.into())
}

/// Momentum as Python says it.
pub fn momentum((name, first, second, third): &Rule) -> Momentum {
    match &name[..] {
        "adam" => Momentum::Adam(Adam { beta1: *first, beta2: *second, eps: *third }),
        "nesterov" => Momentum::Nesterov(*first),
        _ => Momentum::Plain(*first),
    }
}

/// The same the other way round.
pub fn rule(momentum: Momentum) -> Rule {
    match momentum {
        Momentum::Adam(Adam { beta1, beta2, eps }) => ("adam".into(), beta1, beta2, eps),
        Momentum::Nesterov(m) => ("nesterov".into(), m, 0.0, 0.0),
        Momentum::Plain(_) | Momentum::None => ("plain".into(), momentum.coefficient(), 0.0, 0.0),
    }
}

/// A parameter as a layer of the engine.
pub fn layer((name, size, kind, rule): &Parameter) -> Layer {
    let kind = match &kind[..] {
        "output" => Kind::Output,
        "bias-or-norm" => Kind::BiasOrNorm,
        _ => Kind::Weight,
    };
    Layer::new(name, *size, kind).with_momentum(momentum(rule))
}

impl Settings {
    /// Whether machines and network are measured, to decide what is compressed.
    pub fn is_measured(&self) -> bool {
        self.plan == "measured"
    }

    /// What the engine is told of a run with these layers.
    pub fn config(&self, layers: &[Layer]) -> PyResult<Config> {
        let methods = Method::ALL.map(Method::name).join(", ");
        let method = Method::from_name(&self.method)
            .ok_or_else(|| wrong(format!("no method {:?}: choose one of {methods}", self.method)))?;
        let preset = match &self.plan[..] {
            // `auto` is what `carried` was called first.
            "carried" | "auto" | "measured" => Preset::Carried,
            "paper" => Preset::Paper { recurrent: self.clip.is_some() },
            other => {
                let known = "choose carried, measured, paper, or a choice per parameter";
                return Err(wrong(format!("no plan {other:?}: {known}")));
            }
        };
        let warm_up = match (&self.warm_up.0[..], self.warm_up.1) {
            ("dense", steps) => WarmUp::Dense(steps),
            ("ramp", steps) => WarmUp::Ramp(steps),
            (other, _) => return Err(wrong(format!("no warm-up {other:?}: choose dense or ramp"))),
        };
        let rests = Rest::ALL.map(Rest::name).join(", ");
        let none = |name: &String| wrong(format!("no rest {name:?}: choose one of {rests}"));
        let named = |name: &String| Rest::from_name(name).ok_or_else(|| none(name));
        let adam = layers.iter().any(|layer| matches!(layer.momentum, Some(Momentum::Adam(_))));
        let rest = self.rest.as_ref().map_or_else(|| Ok(Rest::usual(adam, self.density)), named)?;
        let exchanges = Exchange::ALL.map(Exchange::name).join(", ");
        let known = |name: &String| {
            let none = || wrong(format!("no exchange {name:?}: choose one of {exchanges}"));
            Exchange::from_name(name).ok_or_else(none)
        };
        let exchange = self.exchange.as_ref().map(known).transpose()?;
        let deadline = Duration::try_from_secs_f64(self.deadline);
        Ok(Config {
            method,
            preset,
            layers: self.choices()?,
            dense_below: self.dense_below,
            rest,
            whole_output: self.whole_output,
            exchange,
            host: self.host.clone(),
            at_least: self.at_least,
            density: self.density,
            warm_up,
            masking: self.masking,
            lower_momentum: self.lower_momentum,
            keep: self.keep,
            share_moments: self.share_moments,
            bf16: self.bf16,
            clip: self.clip,
            clip_power: self.clip_power,
            undo: self.undo,
            deadline: deadline.map_err(|_| {
                wrong(format!("deadline must be a positive number of seconds, got {}", self.deadline))
            })?,
            threads: self.threads,
            agree: self.agree.clone(),
            ..Config::default()
        })
    }

    fn choices(&self) -> PyResult<BTreeMap<String, Choice>> {
        let choice = |(name, text): (&String, &String)| {
            let unknown = |why| wrong(format!("the plan says {text:?} of {name}: {why}"));
            Ok((name.clone(), text.parse().map_err(unknown)?))
        };
        self.choices.iter().map(choice).collect()
    }
}

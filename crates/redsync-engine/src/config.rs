//! What a user chooses for a run: method, plan, density, warm-up, momentum, clipping, deadline.
//! What must hold: every choice that changes a message is the same on all ranks; the hello at the start checks it.

use crate::cost::{Compute, Platform};
use redsync_core::{Momentum, Selector};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// How gradients are synchronized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Method {
    /// Dense allreduce of everything: the baseline.
    #[serde(rename = "sgd")]
    Sgd,
    /// Residual gradient compression.
    #[serde(rename = "rgc")]
    Rgc,
    /// Residual gradient compression, values in two bits: four levels, the means of what they stand for. With the preset `paper` the
    /// same as `rgc`.
    #[serde(rename = "rgc+2bit")]
    RgcTwoBit,
    /// Residual gradient compression with Alternating Signs Quantization.
    #[serde(rename = "rgc+asq")]
    RgcAsq,
    /// Residual gradient compression with full selection: the paper's slow baseline.
    #[serde(rename = "rgc-naive")]
    RgcNaive,
}

impl Method {
    /// Every method.
    pub const ALL: [Method; 5] =
        [Method::Sgd, Method::Rgc, Method::RgcTwoBit, Method::RgcAsq, Method::RgcNaive];

    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Sgd => "sgd",
            Method::Rgc => "rgc",
            Method::RgcTwoBit => "rgc+2bit",
            Method::RgcAsq => "rgc+asq",
            Method::RgcNaive => "rgc-naive",
        }
    }

    /// The method of a name.
    ///
    /// ```
    /// use redsync_engine::Method;
    /// assert_eq!(Method::from_name("rgc+asq"), Some(Method::RgcAsq));
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }
}

/// How layers that may be compressed are treated, unless [`Config::layers`] says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Carried threshold and Rice-coded indices.
    Carried,
    /// As in the paper, with indices of 32 bits.
    Paper {
        /// Threshold search, as the paper has it for recurrent networks, instead of trimmed selection.
        recurrent: bool,
    },
}

impl Preset {
    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Carried => "carried",
            Preset::Paper { .. } => "paper",
        }
    }

    /// Below how many bytes weights are dense, unless a run says otherwise: [`SMALL`], and 128 KB in the paper.
    fn dense_below(self) -> usize {
        match self {
            Preset::Carried => SMALL,
            Preset::Paper { .. } => 128 << 10,
        }
    }
}

/// A choice for one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Dense allreduce.
    Dense,
    /// Every element, eight bits each, the error kept: for layers that are too small to choose from.
    DenseEightBit,
    /// The same with two bits each.
    DenseTwoBit,
    /// Compressed.
    Sparse {
        /// How elements are chosen.
        selector: Selector,
        /// Whether one mean stands for all values.
        quantized: bool,
    },
}

impl Choice {
    /// Whether some elements are chosen; otherwise all are sent.
    pub fn is_sparse(self) -> bool {
        matches!(self, Choice::Sparse { .. })
    }
}

impl std::fmt::Display for Choice {
    /// `dense`, `dense+8bit`, `dense+2bit`, or the selector, with `+asq` if it is quantized.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Choice::Dense => f.write_str("dense"),
            Choice::DenseEightBit => f.write_str("dense+8bit"),
            Choice::DenseTwoBit => f.write_str("dense+2bit"),
            Choice::Sparse { selector, quantized } => {
                write!(f, "{}{}", selector.name(), if *quantized { "+asq" } else { "" })
            }
        }
    }
}

impl std::str::FromStr for Choice {
    type Err = String;

    /// ```
    /// use redsync_engine::Choice;
    /// let choice: Choice = "trimmed+asq".parse().unwrap();
    /// assert_eq!(choice.to_string(), "trimmed+asq");
    /// assert!("topk".parse::<Choice>().unwrap_err().starts_with("choose dense, dense+8bit, dense+2bit, or one of exact"));
    /// ```
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(dense) = [Choice::Dense, Choice::DenseEightBit, Choice::DenseTwoBit]
            .into_iter()
            .find(|c| c.to_string() == text)
        {
            return Ok(dense);
        }
        let (name, quantized) = text.strip_suffix("+asq").map_or((text, false), |name| (name, true));
        let names = || Selector::ALL.map(Selector::name).join(", ");
        let selector = Selector::from_name(name).ok_or_else(|| {
            format!("choose dense, dense+8bit, dense+2bit, or one of {}, with or without +asq", names())
        })?;
        Ok(Choice::Sparse { selector, quantized })
    }
}

/// How small layers, biases and normalization parameters travel beside compressed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Rest {
    /// Every element, eight bits each, the error kept.
    #[serde(rename = "8bit")]
    EightBit,
    /// Every element, two bits each, the error kept: a quarter of that.
    #[serde(rename = "2bit")]
    TwoBit,
    /// As they are, summed by an allreduce.
    #[serde(rename = "f32")]
    F32,
}

impl Rest {
    /// All of them.
    pub const ALL: [Rest; 3] = [Rest::EightBit, Rest::TwoBit, Rest::F32];

    /// What is chosen where nothing was said: eight bits, or two with Adam at a density below [`FEW`], where eight would be most of the bytes.
    pub fn usual(adam: bool, density: f64) -> Self {
        if adam && density < FEW { Rest::TwoBit } else { Rest::EightBit }
    }

    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Rest::EightBit => "8bit",
            Rest::TwoBit => "2bit",
            Rest::F32 => "f32",
        }
    }

    /// The one of a name.
    ///
    /// ```
    /// use redsync_engine::Rest;
    /// assert_eq!(Rest::from_name("2bit"), Some(Rest::TwoBit));
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rest| rest.name() == name)
    }
}

/// How messages travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// Every rank receives every rank's messages: one collective, whose bytes grow with the number of ranks.
    Gather,
    /// Every element has an owner, who adds what all ranks sent of it and sends on the largest: two collectives, whose bytes do not.
    Owners,
    /// Ranks of one host sum gradients densely among themselves, and hosts gather what single ranks would.
    Hosts,
}

impl Exchange {
    /// All of them.
    pub const ALL: [Exchange; 3] = [Exchange::Gather, Exchange::Owners, Exchange::Hosts];

    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Exchange::Gather => "gather",
            Exchange::Owners => "owners",
            Exchange::Hosts => "hosts",
        }
    }

    /// The one of a name.
    ///
    /// ```
    /// use redsync_engine::Exchange;
    /// assert_eq!(Exchange::from_name("owners"), Some(Exchange::Owners));
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|exchange| exchange.name() == name)
    }
}

/// The first steps of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmUp {
    /// Compressed from the first step on.
    None,
    /// Dense for this many steps, as the paper recommends.
    Dense(u64),
    /// By falling densities, in this many steps: 25% for a fortieth of them, 6.25% for three, 1.5625% for nine and 0.4% for 27, as far as
    /// these are above the final one. Each of the four sends a third of what the one before sends and lasts three times as long, so
    /// their messages cost the same: all together what 1/240 of the steps would cost if they were dense. Biases, norms and small
    /// weights come on top, as at every step.
    Ramp(u64),
}

/// What is sent at a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    /// Everything is dense.
    Dense,
    /// Compressed layers are sent at this density.
    Sparse(f64),
}

impl std::fmt::Display for WarmUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WarmUp::None => f.write_str("none"),
            WarmUp::Dense(steps) => write!(f, "{steps} dense steps"),
            WarmUp::Ramp(steps) => write!(f, "a ramp of {steps} steps"),
        }
    }
}

impl WarmUp {
    /// The densities of a ramp before the final one, each with the fortieths of the ramp after which it ends.
    const RAMP: [(f64, u64); 4] = [(0.25, 1), (0.0625, 4), (0.015625, 13), (0.004, 40)];

    /// The step with which it is over.
    pub fn end(self) -> u64 {
        match self {
            WarmUp::Dense(steps) | WarmUp::Ramp(steps) => steps,
            WarmUp::None => 0,
        }
    }

    /// The first step at which compressed layers are sent compressed.
    pub fn first_sparse_step(self) -> u64 {
        match self {
            WarmUp::Dense(steps) => steps,
            WarmUp::None | WarmUp::Ramp(_) => 0,
        }
    }

    /// The stage of a step, given the final density.
    ///
    /// ```
    /// use redsync_engine::{Stage, WarmUp};
    /// assert_eq!(WarmUp::Dense(5).stage(4, 0.001), Stage::Dense);
    /// assert_eq!(WarmUp::Ramp(400).stage(10, 0.001), Stage::Sparse(0.0625));
    /// assert_eq!(WarmUp::Ramp(400).stage(400, 0.001), Stage::Sparse(0.001));
    /// ```
    pub fn stage(self, step: u64, density: f64) -> Stage {
        match self {
            WarmUp::Dense(steps) if step < steps => Stage::Dense,
            WarmUp::Ramp(steps) => {
                let before = |end: u64| u128::from(step) * 40 < u128::from(steps) * u128::from(end);
                let at = Self::RAMP.into_iter().find(|(_, end)| before(*end));
                Stage::Sparse(at.map_or(density, |(ramp, _)| ramp.max(density)))
            }
            _ => Stage::Sparse(density),
        }
    }
}

/// Weights of fewer bytes (about a thousand elements) are too small to choose from: their messages would be mostly headers.
pub const SMALL: usize = 4 << 10;

/// Below this density what is beside the messages has to be small too: [`Rest::usual`] takes two bits with Adam, and its second moments are told rarely.
pub const FEW: f64 = 0.004;

/// Everything a run can choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How gradients are synchronized.
    pub method: Method,
    /// How layers are treated.
    pub preset: Preset,
    /// Choices for layers by name, instead of the preset's.
    pub layers: BTreeMap<String, Choice>,
    /// Weights of fewer bytes are dense; None: as the preset has it, [`SMALL`] or the paper's 128 KB.
    pub dense_below: Option<usize>,
    /// How the rest travels: biases, normalization parameters and weights of less than [`SMALL`] bytes. With the preset `paper` and
    /// the method `rgc-naive` it is as it is.
    pub rest: Rest,
    /// The output layer is sent whole at every step, in two bits per element with the error kept, instead of its largest elements. None: with
    /// Adam and a method that quantizes, if that takes at most three times the bits of all other messages ([`choices`](crate::choices)). What a
    /// network says moves with all of its last layer at once, and Adam moves every element by about one rate: where some wait, the others are
    /// wrong. Of no effect with the preset `paper` and the method `rgc-naive`.
    pub whole_output: Option<bool>,
    /// What the machines and their network need. With these, and the preset `carried`, layers are compressed where that is predicted
    /// to be faster, and `dense_below` is what follows; rank 0's answer is taken by all ranks. Without, `dense_below` is the limit.
    pub figures: Option<Figures>,
    /// How messages travel. None: with `figures` what is then predicted to be faster, otherwise all are gathered.
    pub exchange: Option<Exchange>,
    /// The name of the host that this rank is on, for [`Exchange::Hosts`]; [`host_of`](crate::host_of) finds one.
    pub host: Option<String>,
    /// The fraction of a compressed layer that is sent at a step.
    pub density: f64,
    /// A compressed layer sends at least so many elements at a step, and sixteen times as many during a ramp, but not more than a
    /// sixteenth of itself for that reason: in a small layer 0.1% is a handful, and each element would wait for a thousand steps.
    /// Of no effect with the preset `paper` and the method `rgc-naive`.
    pub at_least: usize,
    /// The first steps.
    pub warm_up: WarmUp,
    /// Momentum of compressed layers, unless a layer has its own; the optimizer behind applies it to dense layers only.
    pub momentum: Momentum,
    /// While less than a sixteenth of a layer is sent, its residual has less momentum, of the same strength: it lasts half as long with each
    /// half of that, such as 0.6 instead of 0.9 at 1.6%, and 0.2 below 0.8%. What waits moves weights later than its gradient came, as momentum
    /// does, and both together last too long. With Adam as soon as not everything is sent: 0.6 instead of 0.9, and never less than that. Of no
    /// effect with the preset `paper` and the method `rgc-naive`.
    pub lower_momentum: bool,
    /// Clear the momentum of what was sent.
    pub masking: bool,
    /// How much of what waits in a residual is still there at the next step: 1 if nothing is forgotten, as it should be for gradients;
    /// a little less for the differences of local steps ([`Local`](crate::Local)).
    pub keep: f32,
    /// Adam's second moments are told to the other ranks within so many steps, a part of them at each, in four bits per element; 0: never,
    /// every rank keeps to its own. None: never, if the output layer goes whole, since there it changes nothing; otherwise 64 steps, or 256 at
    /// a density below [`FEW`], which takes about as many bytes as the messages.
    pub share_moments: Option<u64>,
    /// Send values that are not quantized in fewer bits, the rounding error kept: as bf16 with the method `rgc`, in eight bits with
    /// `rgc+asq`, where they are those of the output layer. With the preset `paper` and the method `rgc-naive` they are f32 in any
    /// case.
    pub bf16: bool,
    /// The largest norm of all gradients together, of which every rank clips its own to a share (ruling 8). They are then clipped before they are accumulated, so the first waits for the
    /// last, and compression overlaps with exchange only. None: each is compressed as soon as it is there.
    pub clip: Option<f32>,
    /// That share among N ranks: N to the power of minus this, where gradients carry 1/N already. Those that have nothing in common add up to the
    /// limit with 0.5, as the paper has it, and equal ones with 1; 0.75 is halfway. Nothing where all is dense.
    pub clip_power: f32,
    /// The last step can be taken back, which costs a second u and v; a loss scale needs it.
    pub undo: bool,
    /// The longest wait for other ranks.
    pub deadline: Duration,
    /// Threads of each pass over a large layer.
    pub threads: usize,
    /// What else must be the same on all ranks, by name, such as the shapes of a framework's tensors.
    pub agree: Vec<(String, String)>,
}

/// What the cost model needs to know of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// The machines and their network, measured or described.
    pub platform: Platform,
    /// What the framework does in a step.
    pub compute: Compute,
}

impl Config {
    /// Whether messages are as in the paper: plain indices and exact values, nothing of ours.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.preset, Preset::Paper { .. }) || self.method == Method::RgcNaive
    }

    /// Refuses a limit that is no norm, or a share that is none.
    pub fn check_clip(&self) -> Result<(), String> {
        match (self.clip, self.clip_power) {
            (Some(clip), _) if !(clip.is_finite() && clip > 0.0) => {
                Err(format!("clip must be a positive norm, got {clip}"))
            }
            (_, power) if !(0.0..=1.0).contains(&power) => {
                Err(format!("clip-power must be from 0 to 1, got {power}"))
            }
            _ => Ok(()),
        }
    }

    /// The part of a limit to which each of so many ranks clips its own gradients, which carry 1/N already.
    pub(crate) fn clip_share(&self, ranks: usize) -> f64 {
        let (n, root) = (ranks as f64, (ranks as f64).sqrt());
        // Roots are rounded alike on every machine.
        match self.clip_power() {
            0.5 => 1.0 / root,
            0.75 => 1.0 / (root * root.sqrt()),
            power => n.powf(-f64::from(power)),
        }
    }

    fn clip_power(&self) -> f32 {
        if self.is_plain() { 0.5 } else { self.clip_power }
    }

    /// How gradients are clipped, as it is compared.
    pub(crate) fn clip_told(&self) -> String {
        match (self.clip, self.clip_power()) {
            (None, _) => "none".into(),
            (Some(clip), power) if power == 0.5 || self.method == Method::Sgd => clip.to_string(),
            (Some(clip), power) => format!("{clip}, to N^-{power} of it on each rank"),
        }
    }

    /// How messages travel, as far as it was decided.
    pub(crate) fn exchange(&self) -> Exchange {
        self.exchange.unwrap_or(Exchange::Gather)
    }

    /// Weights of fewer bytes are dense.
    pub fn limit(&self) -> usize {
        self.dense_below.unwrap_or(self.preset.dense_below())
    }
}

impl Default for Config {
    /// rgc+asq at 0.1%, no warm-up, no momentum, 60 seconds, one thread.
    fn default() -> Self {
        Config {
            method: Method::RgcAsq,
            preset: Preset::Carried,
            layers: BTreeMap::new(),
            dense_below: None,
            rest: Rest::EightBit,
            whole_output: None,
            figures: None,
            exchange: None,
            host: None,
            density: 0.001,
            at_least: 96,
            warm_up: WarmUp::None,
            momentum: Momentum::None,
            lower_momentum: true,
            masking: true,
            keep: 1.0,
            share_moments: None,
            bf16: true,
            clip: None,
            clip_power: 0.75,
            undo: false,
            deadline: Duration::from_secs(60),
            threads: 1,
            agree: Vec::new(),
        }
    }
}

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
    /// Residual gradient compression with Alternating Signs Quantization.
    #[serde(rename = "rgc+asq")]
    RgcAsq,
    /// Residual gradient compression with full selection: the paper's slow baseline.
    #[serde(rename = "rgc-naive")]
    RgcNaive,
}

impl Method {
    /// Every method.
    pub const ALL: [Method; 4] = [Method::Sgd, Method::Rgc, Method::RgcAsq, Method::RgcNaive];

    /// The name by which users choose it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Sgd => "sgd",
            Method::Rgc => "rgc",
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
}

/// A choice for one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Dense allreduce.
    Dense,
    /// Compressed.
    Sparse {
        /// How elements are chosen.
        selector: Selector,
        /// Whether one mean stands for all values.
        quantized: bool,
    },
}

impl std::fmt::Display for Choice {
    /// `dense`, or the selector, with `+asq` if it is quantized.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Choice::Dense => f.write_str("dense"),
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
    /// assert!("topk".parse::<Choice>().unwrap_err().starts_with("choose dense, or one of exact"));
    /// ```
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "dense" {
            return Ok(Choice::Dense);
        }
        let (name, quantized) = text.strip_suffix("+asq").map_or((text, false), |name| (name, true));
        let names = || Selector::ALL.map(Selector::name).join(", ");
        let selector = Selector::from_name(name)
            .ok_or_else(|| format!("choose dense, or one of {}, with or without +asq", names()))?;
        Ok(Choice::Sparse { selector, quantized })
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
    /// The densities 25, 6.25, 1.5625 and 0.4%, this many steps each, as far as they are above the final one.
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
            WarmUp::Ramp(steps) => write!(f, "a ramp of {steps} steps each"),
        }
    }
}

impl WarmUp {
    /// The densities of a ramp before the final one.
    const RAMP: [f64; 4] = [0.25, 0.0625, 0.015625, 0.004];

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
    /// assert_eq!(WarmUp::Ramp(10).stage(15, 0.001), Stage::Sparse(0.0625));
    /// assert_eq!(WarmUp::Ramp(10).stage(40, 0.001), Stage::Sparse(0.001));
    /// ```
    pub fn stage(self, step: u64, density: f64) -> Stage {
        match self {
            WarmUp::Dense(steps) if step < steps => Stage::Dense,
            WarmUp::Ramp(steps) => {
                let at = step.checked_div(steps).and_then(|i| Self::RAMP.get(usize::try_from(i).ok()?));
                Stage::Sparse(at.map_or(density, |ramp| ramp.max(density)))
            }
            _ => Stage::Sparse(density),
        }
    }
}

/// Everything a run can choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// How gradients are synchronized.
    pub method: Method,
    /// How layers are treated.
    pub preset: Preset,
    /// Choices for layers by name, instead of the preset's.
    pub layers: BTreeMap<String, Choice>,
    /// Layers of fewer bytes are dense.
    pub dense_below: usize,
    /// What the machines and their network need. With these, and the preset `carried`, layers are compressed where that is predicted
    /// to be faster, and `dense_below` is what follows; rank 0's answer is taken by all ranks. Without, `dense_below` is the limit.
    pub figures: Option<Figures>,
    /// The fraction of a compressed layer that is sent at a step.
    pub density: f64,
    /// The first steps.
    pub warm_up: WarmUp,
    /// Momentum of compressed layers, unless a layer has its own; the optimizer behind applies it to dense layers only.
    pub momentum: Momentum,
    /// Clear the momentum of what was sent.
    pub masking: bool,
    /// Send values that are not quantized as bf16.
    pub bf16: bool,
    /// The largest norm of all gradients together. They are then clipped before they are accumulated, so the first waits for the
    /// last, and compression overlaps with exchange only. None: each is compressed as soon as it is there.
    pub clip: Option<f32>,
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

impl Default for Config {
    /// rgc+asq at 0.1%, no warm-up, no momentum, 60 seconds, one thread.
    fn default() -> Self {
        Config {
            method: Method::RgcAsq,
            preset: Preset::Carried,
            layers: BTreeMap::new(),
            dense_below: 128 << 10,
            figures: None,
            density: 0.001,
            warm_up: WarmUp::None,
            momentum: Momentum::None,
            masking: true,
            bf16: false,
            clip: None,
            undo: false,
            deadline: Duration::from_secs(60),
            threads: 1,
            agree: Vec::new(),
        }
    }
}

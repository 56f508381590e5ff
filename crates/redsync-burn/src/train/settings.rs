//! Everything a training can choose, with good values for every model.

use super::{Optimizer, Schedule, TrainError};
use crate::net::Architecture;
use redsync_data::{DataSet, Places};
use redsync_engine::{Config, Exchange, Figures, Method, Preset, Rest};
use std::path::PathBuf;
use std::time::Duration;

/// How compression begins, in epochs. [`WarmUp::in_steps`] is the same as the synchronizer takes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WarmUp {
    /// At once.
    None,
    /// After so many dense epochs.
    Dense(f64),
    /// By lower and lower densities, in so many epochs.
    Ramp(f64),
}

impl WarmUp {
    /// The names of all.
    pub const NAMES: [&str; 3] = ["none", "dense", "ramp"];

    /// The one of a name, with so many epochs if it takes any.
    ///
    /// ```
    /// use redsync_burn::train::WarmUp;
    /// assert_eq!(WarmUp::from_name("ramp", 0.5), Some(WarmUp::Ramp(0.5)));
    /// assert_eq!(WarmUp::Ramp(0.5).in_steps(46), redsync_engine::WarmUp::Ramp(23));
    /// ```
    pub fn from_name(name: &str, epochs: f64) -> Option<Self> {
        let all = [WarmUp::None, WarmUp::Dense(epochs), WarmUp::Ramp(epochs)];
        all.into_iter().find(|warm_up| warm_up.name() == name)
    }

    /// What suits a training of so many epochs: a ramp over five of them, or over five sixths of a shorter one. The paper begins
    /// with a dense epoch.
    pub fn usual(preset: Preset, epochs: u32) -> Self {
        match preset {
            Preset::Carried => WarmUp::Ramp((f64::from(epochs) * 5.0 / 6.0).min(5.0)),
            Preset::Paper { .. } => WarmUp::Dense(1.0),
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            WarmUp::None => "none",
            WarmUp::Dense(_) => "dense",
            WarmUp::Ramp(_) => "ramp",
        }
    }

    /// Its epochs.
    pub fn epochs(self) -> f64 {
        match self {
            WarmUp::None => 0.0,
            WarmUp::Dense(epochs) | WarmUp::Ramp(epochs) => epochs,
        }
    }

    /// The same in steps.
    pub fn in_steps(self, steps_per_epoch: u64) -> redsync_engine::WarmUp {
        let steps = (self.epochs() * steps_per_epoch as f64).round() as u64;
        match self {
            WarmUp::None => redsync_engine::WarmUp::None,
            WarmUp::Dense(_) => redsync_engine::WarmUp::Dense(steps),
            WarmUp::Ramp(_) => redsync_engine::WarmUp::Ramp(steps),
        }
    }
}

/// What a training is to do. The fields are documented as the options of `redsync train`.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Settings {
    pub model: String,
    pub data: String,
    pub method: Method,
    pub preset: Preset,
    /// None: gather, or with `auto` what is predicted to be faster.
    pub exchange: Option<Exchange>,
    /// With the exchange `hosts`: how many ranks every host has, one after the other. None: ranks are on the machine they run on.
    pub ranks_per_host: Option<usize>,
    pub density: f64,
    pub at_least: usize,
    pub dense_below: Option<usize>,
    pub rest: Rest,
    /// Whether the output layer is sent whole. None: with AdamW, where that is cheap.
    pub whole_output: Option<bool>,
    pub auto: bool,
    /// With `auto`: what machines and network need, if that is known; otherwise it is measured.
    pub figures: Option<Figures>,
    pub warm_up: WarmUp,
    pub masking: bool,
    pub lower_momentum: bool,
    pub bf16: bool,
    /// Within how many steps second moments are told; 0 for never.
    pub share_moments: Option<u64>,
    /// Local steps: the ranks exchange weights every so many steps, and no gradients.
    pub every: Option<u64>,
    /// The rate at which an exchange of local steps is applied.
    pub outer_rate: f32,
    /// How much of what waits is kept from exchange to exchange.
    pub keep: f32,
    pub epochs: u32,
    pub batch_size: usize,
    pub bptt: usize,
    pub optimizer: Optimizer,
    pub momentum: f32,
    /// Of the second moment of AdamW.
    pub beta2: f32,
    pub lr: f64,
    pub schedule: Schedule,
    pub lr_warm_up_epochs: f64,
    pub weight_decay: f32,
    pub clip: Option<f32>,
    pub clip_power: f32,
    pub seed: u64,
    pub train_limit: Option<usize>,
    pub test_limit: Option<usize>,
    pub threads: usize,
    pub deadline: Duration,
    pub check_every: u64,
    pub log_every: u64,
    pub checkpoint_dir: Option<PathBuf>,
    /// Where a training that is interrupted leaves a checkpoint if it makes no others.
    pub rescue_dir: Option<PathBuf>,
    pub checkpoint_every: u64,
    pub resume: bool,
    /// Ends after this many steps, as if interrupted.
    pub stop_after: Option<u64>,
}

impl Settings {
    /// Good values for a model; its name need not be known.
    ///
    /// ```
    /// use redsync_burn::train::Settings;
    /// assert_eq!(Settings::for_model("lstm-small").data, "ptb");
    /// ```
    pub fn for_model(model: &str) -> Self {
        if let Some((batch_size, bptt, epochs)) = match model {
            "gpt-tiny" => Some((4, 64, 1)),
            "gpt-small" => Some((2, 128, 1)),
            _ => None,
        } {
            let usual = Settings::for_model("").for_adamw();
            let (model, data, clip) = (model.into(), "wikitext-2".into(), Some(1.0));
            let warm_up = WarmUp::usual(Preset::Carried, epochs);
            return Settings {
                model,
                data,
                batch_size,
                bptt,
                epochs,
                clip,
                warm_up,
                lr_warm_up_epochs: 0.1,
                ..usual
            };
        }
        let words = model.starts_with("lstm");
        let (data, epochs, batch_size, lr) = match model {
            "vgg-small" => ("cifar10", 10, 32, 0.1),
            "vgg16-cifar" => ("cifar10", 60, 32, 0.05),
            "resnet20" | "resnet44" => ("cifar10", 120, 32, 0.1),
            "alexnet" | "vgg16" => ("synthetic-imagenet", 1, 8, 0.01),
            "resnet50" => ("synthetic-imagenet", 1, 8, 0.1),
            "lstm-small" => ("ptb", 6, 5, 20.0),
            "lstm-ptb" => ("ptb", 40, 5, 20.0),
            "lstm-wiki2" => ("wikitext-2", 40, 5, 20.0),
            _ => ("digits", 15, 16, 0.02),
        };
        Settings {
            model: model.into(),
            data: data.into(),
            method: Method::RgcAsq,
            preset: Preset::Carried,
            exchange: None,
            ranks_per_host: None,
            density: 0.001,
            at_least: Config::default().at_least,
            dense_below: None,
            rest: Config::default().rest,
            whole_output: None,
            auto: false,
            figures: None,
            warm_up: WarmUp::usual(Preset::Carried, epochs),
            masking: true,
            lower_momentum: true,
            bf16: Config::default().bf16,
            share_moments: None,
            every: None,
            outer_rate: 1.0,
            keep: 1.0,
            epochs,
            batch_size,
            bptt: 35,
            optimizer: if words { Optimizer::Sgd } else { Optimizer::Nesterov },
            momentum: 0.9,
            beta2: 0.95,
            lr,
            schedule: if words { Schedule::Plateau } else { Schedule::Cosine },
            lr_warm_up_epochs: if words { 0.0 } else { 1.0 },
            weight_decay: if words { 0.0 } else { 5e-4 },
            clip: words.then_some(0.25),
            clip_power: Config::default().clip_power,
            seed: 1,
            train_limit: None,
            test_limit: None,
            threads: 1,
            deadline: Duration::from_secs(60),
            check_every: 100,
            log_every: 20,
            checkpoint_dir: None,
            rescue_dir: None,
            checkpoint_every: 1,
            resume: false,
            stop_after: None,
        }
    }

    /// What suits AdamW, which takes steps of about one rate for every weight, whatever the model: a rate and a decay, and 1% of the
    /// elements, in two bits each.
    pub fn for_adamw(self) -> Self {
        let (method, density) = (Method::RgcTwoBit, 0.01);
        Settings { optimizer: Optimizer::AdamW, lr: 1e-3, weight_decay: 0.1, method, density, ..self }
    }

    /// What suits an exchange after every so many local steps: the 1/64 largest differences, in two bits each.
    pub fn for_local_steps(self, every: u64) -> Self {
        let (method, density) = (Method::RgcTwoBit, 1.0 / 64.0);
        Settings { every: Some(every), keep: 0.95, method, density, ..self }
    }

    /// What the ranks are told. With local steps they exchange only now and then.
    pub(super) fn config(&self, steps_per_epoch: u64) -> Config {
        let exchanges_per_epoch = steps_per_epoch.div_ceil(self.every.unwrap_or(1));
        Config {
            method: self.method,
            preset: self.preset,
            exchange: self.exchange,
            dense_below: self.dense_below,
            rest: self.rest,
            whole_output: self.whole_output,
            density: self.density,
            at_least: self.at_least,
            warm_up: self.warm_up.in_steps(exchanges_per_epoch),
            momentum: self.optimizer.momentum(self.momentum, self.beta2),
            masking: self.masking,
            lower_momentum: self.lower_momentum,
            keep: self.keep,
            share_moments: self.share_moments,
            bf16: self.bf16,
            clip: self.clip,
            clip_power: self.clip_power,
            deadline: self.deadline,
            threads: self.threads,
            ..Config::default()
        }
    }

    /// Refuses what makes no sense, before anything is loaded.
    pub fn check(&self) -> Result<(), TrainError> {
        let positive = [("lr", self.lr), ("density", self.density)];
        let refuse = |what: String| Err(TrainError::Setting(what));
        if let Some((name, value)) =
            positive.into_iter().find(|(_, value)| !(*value > 0.0 && value.is_finite()))
        {
            return refuse(format!("{name} must be a positive number, got {value}"));
        }
        if self.density > 1.0 {
            return refuse(format!("density must be at most 1, got {}", self.density));
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return refuse(format!("momentum must be at least 0 and below 1, got {}", self.momentum));
        }
        if !(0.0..1.0).contains(&self.beta2) {
            return refuse(format!("beta2 must be at least 0 and below 1, got {}", self.beta2));
        }
        if !(0.0..1.0).contains(&self.weight_decay) {
            return refuse(format!("weight-decay must be at least 0 and below 1, got {}", self.weight_decay));
        }
        let clipping = Config { clip: self.clip, clip_power: self.clip_power, ..Config::default() };
        clipping.check_clip().map_err(TrainError::Setting)?;
        if !(self.keep > 0.0 && self.keep <= 1.0) {
            return refuse(format!("keep must be above 0 and at most 1, got {}", self.keep));
        }
        if !(self.outer_rate > 0.0 && self.outer_rate.is_finite()) {
            return refuse(format!("outer-rate must be a positive number, got {}", self.outer_rate));
        }
        if self.every.is_none() && (self.keep != 1.0 || self.outer_rate != 1.0) {
            return refuse("keep and outer-rate are options of local steps: give every, too".into());
        }
        if self.every.is_some() && self.auto {
            return refuse("auto cannot be combined with every: local steps exchange no gradients".into());
        }
        let epochs =
            [("warm-up-epochs", self.warm_up.epochs()), ("lr-warm-up-epochs", self.lr_warm_up_epochs)];
        if let Some((name, value)) = epochs.into_iter().find(|(_, value)| !(0.0..1e6).contains(value)) {
            return refuse(format!("{name} must be at least 0 and below 1000000, got {value}"));
        }
        let counts = [
            ("epochs", self.epochs as usize),
            ("batch-size", self.batch_size),
            ("bptt", self.bptt),
            ("threads", self.threads),
            ("every", self.every.unwrap_or(1) as usize),
            ("ranks-per-host", self.ranks_per_host.unwrap_or(1)),
            ("log-every", self.log_every as usize),
            ("check-every", self.check_every as usize),
            ("checkpoint-every", self.checkpoint_every as usize),
            ("train-limit", self.train_limit.unwrap_or(1)),
            ("test-limit", self.test_limit.unwrap_or(1)),
        ];
        match counts.into_iter().find(|(_, count)| *count == 0) {
            Some((name, _)) => refuse(format!("{name} must be at least 1, got 0")),
            None => Ok(()),
        }
    }

    /// Whether the network is a transformer: it takes bytes of a text, and carries nothing from window to window.
    pub(super) fn takes_bytes(&self) -> bool {
        Architecture::named(&self.model).is_ok_and(|network| network.takes_bytes())
    }

    /// Opens the data, cut to the limits. The function hears how much of a download is done.
    pub fn open(&self, places: &Places, progress: &dyn Fn(u64, Option<u64>)) -> Result<DataSet, TrainError> {
        let mut data = redsync_data::open_with_progress(&self.data, places, progress)?;
        if self.takes_bytes() {
            data = match data {
                DataSet::Text(text) => DataSet::Text(text.into_bytes()),
                images => images,
            };
        }
        match &mut data {
            DataSet::Images(images) => images.limit(self.train_limit, self.test_limit),
            DataSet::Text(text) => {
                text.train.truncate(self.train_limit.unwrap_or(usize::MAX));
                text.valid.truncate(self.test_limit.unwrap_or(usize::MAX));
                text.test.truncate(self.test_limit.unwrap_or(usize::MAX));
            }
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_a_worker_are_those_that_compress_and_apply() {
        for threads in [1, 3] {
            let settings = Settings { threads, ..Settings::for_model("digits-cnn") };
            assert_eq!(settings.config(10).threads, threads);
        }
    }
}

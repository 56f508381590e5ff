//! What the user chooses for a training: options of the command line, before those of a TOML file, before the model's own values.

use crate::usage;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory, Parser};
use redsync_burn::net::Architecture;
use redsync_burn::train::{Optimizer, Schedule, Settings, WarmUp};
use redsync_data::Places;
use redsync_engine::{Exchange, Method, Preset, Rest};
use redsync_names::nearest;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Every choice may also stand in the file of --config, under the same name without the dashes.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Options {
    /// Network: digits-cnn, vgg-small, vgg16-cifar, resnet20, resnet44, alexnet, vgg16, resnet50, lstm-small, lstm-ptb, lstm-wiki2,
    /// gpt-tiny, gpt-small (of bytes, with adamw) [default: digits-cnn]
    #[arg(long, help_heading = "What")]
    pub model: Option<String>,
    /// Data: digits (always there), fashion-mnist, mnist, cifar10, ptb, wikitext-2, synthetic-imagenet [default: what suits the model]
    #[arg(long, help_heading = "What")]
    pub data: Option<String>,
    /// Directory in which data are looked for first, directly or in a subdirectory of their name
    #[arg(long, help_heading = "What", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Fetch data that are not found from their official address, into the user's cache
    #[arg(long, help_heading = "What", num_args = 0..=1, default_missing_value = "true")]
    pub download: Option<bool>,
    /// Use only so many images, or words, of the training data
    #[arg(long, help_heading = "What", value_name = "N")]
    pub train_limit: Option<usize>,
    /// Use only so many of the test data
    #[arg(long, help_heading = "What", value_name = "N")]
    pub test_limit: Option<usize>,
    /// Seed of the weights, the order of the data, augmentation and dropout [default: 1]
    #[arg(long, help_heading = "What")]
    pub seed: Option<u64>,

    /// What workers are: local (threads of this process) or mpi (processes that mpirun started) [default: local]
    #[arg(long, help_heading = "Workers")]
    pub comm: Option<String>,
    /// Workers, with --comm local [default: 4]
    #[arg(long, help_heading = "Workers", value_name = "N")]
    pub workers: Option<usize>,
    /// Threads of each worker [default: the cores of this machine, divided among its workers]
    #[arg(long, help_heading = "Workers", value_name = "N")]
    pub threads: Option<usize>,
    /// Longest wait for another worker, in seconds [default: 60]
    #[arg(long, help_heading = "Workers", value_name = "SECONDS")]
    pub deadline: Option<f64>,

    /// sgd (dense), rgc (compressed), rgc+2bit (values in two bits each), rgc+asq (one value for all) or rgc-naive (compressed by a
    /// full sort) [default: rgc+asq; rgc+2bit with adamw and with --every]
    #[arg(long, help_heading = "Compression")]
    pub method: Option<String>,
    /// Fraction of a compressed layer that is sent at a step [default: 0.001; 0.01 with adamw, 1/64 with
    /// --every]
    #[arg(long, help_heading = "Compression")]
    pub density: Option<f64>,
    /// Elements that a small compressed layer sends at least; 16 times as many during a ramp, but at most 1/16 of the layer
    /// [default: 96]
    #[arg(long, help_heading = "Compression", value_name = "N")]
    pub at_least: Option<usize>,
    /// How compression begins: ramp (25, 6.25, 1.6 and 0.4%, for 1, 3, 9 and 27 fortieths of it; all of it sends what 1/240 of its
    /// steps would send if they were dense), dense (everything is sent as it is) or none [default: ramp; dense with --paper]
    #[arg(long, help_heading = "Compression")]
    pub warm_up: Option<String>,
    /// Epochs of the warm-up, or a part of one [default: for a ramp 5, but at most 5/6 of the training; 1 if it is dense]
    #[arg(long, help_heading = "Compression", value_name = "EPOCHS")]
    pub warm_up_epochs: Option<f64>,
    /// Weights of fewer bytes are not compressed, but sent whole [default: 4096; 131072 with --paper]
    #[arg(long, help_heading = "Compression", value_name = "BYTES")]
    pub dense_below: Option<usize>,
    /// How biases, norms and weights of less than 4096 bytes travel: 8bit, 2bit (so many bits per element, the error kept for
    /// later steps) or f32 [default: 8bit; 2bit with adamw below a density of 0.4%; always f32 with --paper]
    #[arg(long, help_heading = "Compression")]
    pub rest: Option<String>,
    /// Send the whole output layer at every step, in two bits per element, the error kept, instead of its largest elements [default: true
    /// with adamw, where the method quantizes and that takes at most three times the bytes of all other messages]
    #[arg(long, help_heading = "Compression", num_args = 0..=1, default_missing_value = "true")]
    pub whole_output: Option<bool>,
    /// How messages travel: gather (every worker receives every worker's), owners (every element has an owner, who adds what all sent
    /// and sends on the largest: what a worker receives does not grow with their number) or hosts (workers of one host sum their gradients
    /// densely, and a host sends what a single worker would) [default: gather; with --auto what is predicted to be faster]
    #[arg(long, help_heading = "Compression")]
    pub exchange: Option<String>,
    /// With --exchange hosts: workers on each host, one after the other [default with --comm mpi: those on the same machine]
    #[arg(long, help_heading = "Compression", value_name = "N")]
    pub ranks_per_host: Option<usize>,
    /// Local steps, for the slowest links: every worker trains by itself, with any optimizer, and after so many steps the workers
    /// exchange the largest differences of their weights. Costs some loss, the more the longer; with --method sgd weights are averaged
    #[arg(long, help_heading = "Compression", value_name = "STEPS")]
    pub every: Option<u64>,
    /// With --every: the rate at which what the workers found is applied [default: 1]
    #[arg(long, help_heading = "Compression", value_name = "RATE")]
    pub outer_rate: Option<f32>,
    /// With --every: how much of what was not sent is kept until the next exchange [default: 0.95]
    #[arg(long, help_heading = "Compression", value_name = "FRACTION")]
    pub keep: Option<f32>,
    /// With adamw: steps within which a worker tells the others all of its second moments, a part of them at each step, in four bits
    /// per element; 0: never, each keeps to its own [default: 0 if the output goes whole, or else 64, 256 below a density of 0.4%]
    #[arg(long, help_heading = "Compression", value_name = "STEPS")]
    pub share_moments: Option<u64>,
    /// Measure machine and network first, some seconds long, and compress the layers for which that is predicted to be faster
    #[arg(long, help_heading = "Compression", num_args = 0..=1, default_missing_value = "true")]
    pub auto: Option<bool>,
    /// Treat layers as in the paper: trimmed or threshold selection, 32-bit indices
    #[arg(long, help_heading = "Compression", num_args = 0..=1, default_missing_value = "true")]
    pub paper: Option<bool>,
    /// Clear the momentum of what was sent [default: true]
    #[arg(long, help_heading = "Compression", num_args = 0..=1, default_missing_value = "true")]
    pub masking: Option<bool>,
    /// While less than a sixteenth of a layer is sent: less momentum, of the same strength, since what waits in a residual acts like momentum
    /// too. 0.9 becomes 0.8 at 3.1%, 0.6 at 1.6%, and 0.2 below 0.8%; with adamw 0.6 as soon as not everything is sent [default: true]
    #[arg(long, help_heading = "Compression", num_args = 0..=1, default_missing_value = "true")]
    pub lower_momentum: Option<bool>,
    /// Send values that are not quantized as bf16, or in eight bits (the output layer with rgc+asq), the error kept for later
    /// steps [default: true; never with --paper]
    #[arg(long, help_heading = "Compression", num_args = 0..=1, default_missing_value = "true")]
    pub bf16: Option<bool>,

    /// Epochs [default: by model]
    #[arg(long, help_heading = "Training", value_name = "N")]
    pub epochs: Option<u32>,
    /// Images, or streams or windows of text, of each worker in a step [default: by model]
    #[arg(long, help_heading = "Training", value_name = "N")]
    pub batch_size: Option<usize>,
    /// Words, or bytes, through which gradients go back [default: 35]
    #[arg(long, help_heading = "Training", value_name = "N")]
    pub bptt: Option<usize>,
    /// sgd, momentum, nesterov or adamw [default: nesterov, sgd for LSTMs]
    #[arg(long, help_heading = "Training")]
    pub optimizer: Option<String>,
    /// Coefficient of the momentum [default: 0.9]
    #[arg(long, help_heading = "Training")]
    pub momentum: Option<f32>,
    /// Coefficient of adamw's second moment [default: 0.95]
    #[arg(long, help_heading = "Training")]
    pub beta2: Option<f32>,
    /// Learning rate [default: by model; 0.001 with adamw]
    #[arg(long, help_heading = "Training")]
    pub lr: Option<f64>,
    /// Course of the learning rate: constant, step (a tenth at 1/2, at 3/4), cosine or plateau (a quarter when validation gets no better)
    /// [default: cosine, plateau for LSTMs]
    #[arg(long, help_heading = "Training")]
    pub schedule: Option<String>,
    /// Epochs in which the learning rate grows to its value [default: 1, 0 for LSTMs]
    #[arg(long, help_heading = "Training", value_name = "EPOCHS")]
    pub lr_warm_up_epochs: Option<f64>,
    /// Weight decay, of all but biases and norms [default: 0.0005, 0 for LSTMs, 0.1 with adamw]
    #[arg(long, help_heading = "Training")]
    pub weight_decay: Option<f32>,
    /// Largest norm of all gradients together; 0 for none [default: 1 for transformers, 0.25 for LSTMs, none for others]
    #[arg(long, help_heading = "Training")]
    pub clip: Option<f32>,
    /// Each of N workers clips its own gradients to the limit times N to the power of minus this: 0.5, as the paper has it, for gradients
    /// that have nothing in common, 1 for equal ones; nothing if all is dense [default: 0.75]
    #[arg(long, help_heading = "Training", value_name = "POWER")]
    pub clip_power: Option<f32>,

    /// Directory for metrics.jsonl and TensorBoard's event file [default: a new one under runs/]
    #[arg(long, help_heading = "Results", value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Steps between two lines of metrics [default: 20]
    #[arg(long, help_heading = "Results", value_name = "STEPS")]
    pub log_every: Option<u64>,
    /// Exchanges between two comparisons of the weights of all workers [default: 100]
    #[arg(long, help_heading = "Results", value_name = "STEPS")]
    pub check_every: Option<u64>,
    /// Directory for checkpoints
    #[arg(long, help_heading = "Results", value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Epochs between two checkpoints [default: 1]
    #[arg(long, help_heading = "Results", value_name = "EPOCHS")]
    pub checkpoint_every: Option<u64>,
    /// For tests: end after this many steps as if interrupted
    #[arg(long, hide = true)]
    pub stop_after: Option<u64>,
}

/// Takes each field from the first that has it.
macro_rules! first {
    ($here:expr, $there:expr; $($field:ident)*) => {
        Options { $($field: $here.$field.or($there.$field)),* }
    };
}

impl Options {
    /// These options, completed by those of a file.
    pub fn with_file(self, file: Option<&Path>) -> Result<Self> {
        let Some(path) = file else { return Ok(self) };
        let file = read(path)?;
        Ok(
            first!(self, file; model data data_dir download train_limit test_limit seed comm workers threads deadline method
            density at_least warm_up warm_up_epochs dense_below rest whole_output exchange ranks_per_host every outer_rate keep share_moments auto paper masking lower_momentum bf16 epochs batch_size bptt optimizer momentum beta2 lr schedule
            lr_warm_up_epochs weight_decay clip clip_power out log_every check_every checkpoint_dir checkpoint_every stop_after),
        )
    }

    pub fn mpi(&self) -> Result<bool> {
        match self.comm.as_deref().unwrap_or("local") {
            "local" => Ok(false),
            "mpi" => Ok(true),
            other => Err(usage(format!(
                "unknown communicator {other} for --comm: {}",
                nearest(other, &["local", "mpi"])
            ))),
        }
    }

    pub fn places(&self) -> Places {
        Places { data_dir: self.data_dir.clone(), download: self.download.unwrap_or(false), cache_dir: None }
    }

    /// The settings of a training with these options.
    pub fn settings(&self) -> Result<Settings> {
        let mut s = Settings::for_model(self.model.as_deref().unwrap_or("digits-cnn"));
        let network = Architecture::named(&s.model).map_err(|error| usage(error.to_string()))?;
        choose(&mut s.optimizer, "optimizer", &self.optimizer, Optimizer::from_name, &Optimizer::NAMES)?;
        if s.optimizer == Optimizer::AdamW {
            s = s.for_adamw();
        }
        if let Some(every) = self.every {
            s = s.for_local_steps(every);
        }
        macro_rules! set {
            ($($field:ident)*) => { $(if let Some(value) = &self.$field { s.$field = value.clone(); })* };
        }
        set!(data density at_least outer_rate keep auto masking lower_momentum bf16 epochs batch_size bptt momentum beta2 lr
            lr_warm_up_epochs weight_decay seed log_every check_every checkpoint_every);
        (s.train_limit, s.test_limit, s.stop_after) = (self.train_limit, self.test_limit, self.stop_after);
        (s.share_moments, s.whole_output) = (self.share_moments, self.whole_output);
        (s.dense_below, s.checkpoint_dir) = (self.dense_below, self.checkpoint_dir.clone());
        s.ranks_per_host = self.ranks_per_host;
        s.clip_power = self.clip_power.unwrap_or(s.clip_power);
        if let Some(clip) = self.clip {
            s.clip = (clip != 0.0).then_some(clip);
        }
        if self.paper == Some(true) {
            s.preset = Preset::Paper { recurrent: matches!(network, Architecture::Lstm(_)) };
        }
        if let Some(seconds) = self.deadline {
            let valid = Duration::try_from_secs_f64(seconds).ok().filter(|_| seconds > 0.0);
            s.deadline = valid.ok_or_else(|| {
                usage(format!("deadline must be a positive number of seconds, got {seconds}"))
            })?;
        }
        let methods = Method::ALL.map(Method::name);
        choose(&mut s.method, "method", &self.method, Method::from_name, &methods)?;
        let exchanges = Exchange::ALL.map(Exchange::name);
        let named = |name: &str| Exchange::from_name(name).map(Some);
        choose(&mut s.exchange, "exchange", &self.exchange, named, &exchanges)?;
        if s.exchange == Some(Exchange::Hosts) && s.ranks_per_host.is_none() && !self.mpi()? {
            let how = "threads are all on one host: say how many are to be on each (--ranks-per-host)";
            return Err(usage(format!("--exchange hosts: {how}")));
        }
        s.rest = Rest::usual(s.optimizer == Optimizer::AdamW && s.every.is_none(), s.density);
        choose(&mut s.rest, "rest", &self.rest, Rest::from_name, &Rest::ALL.map(Rest::name))?;
        choose(&mut s.schedule, "schedule", &self.schedule, Schedule::from_name, &Schedule::NAMES)?;
        s.warm_up = WarmUp::usual(s.preset, s.epochs);
        let name = self.warm_up.as_deref().unwrap_or(s.warm_up.name());
        let usual = if name == "dense" { 1.0 } else { WarmUp::usual(Preset::Carried, s.epochs).epochs() };
        let epochs = self.warm_up_epochs.unwrap_or(usual);
        let named = |name: &str| WarmUp::from_name(name, epochs);
        choose(&mut s.warm_up, "warm-up", &Some(name.into()), named, &WarmUp::NAMES)?;
        let names: Vec<&str> = redsync_data::names().collect();
        if !names.contains(&&*s.data) {
            return Err(usage(format!("unknown data set {}: {}", s.data, nearest(&s.data, &names))));
        }
        s.check().map_err(|error| usage(error.to_string()))?;
        Ok(s)
    }
}

/// Sets a choice that has names.
fn choose<T>(
    place: &mut T,
    what: &str,
    name: &Option<String>,
    from_name: impl Fn(&str) -> Option<T>,
    names: &[&str],
) -> Result<()> {
    if let Some(name) = name {
        *place = from_name(name)
            .ok_or_else(|| usage(format!("unknown {what} {name}: {}", nearest(name, names))))?;
    }
    Ok(())
}

/// Only to learn the names of all options from clap.
#[derive(Parser)]
struct Names {
    #[command(flatten)]
    _options: Options,
}

fn read(path: &Path) -> Result<Options> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let one_line = |error: toml::de::Error| {
        let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let place = line.map_or(String::new(), |line| format!(" line {line}"));
        usage(format!("{}{place}: {}", path.display(), error.message().replace('\n', ", ")))
    };
    let table: toml::Table = text.parse().map_err(one_line)?;
    let command = Names::command();
    let names: Vec<&str> = command.get_arguments().filter_map(|arg| arg.get_long()).collect();
    if let Some(wrong) = table.keys().find(|key| !names.contains(&key.as_str())) {
        return Err(usage(format!("{}: unknown key {wrong}: {}", path.display(), nearest(wrong, &names))));
    }
    toml::from_str(&text).map_err(one_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(line: &str) -> Settings {
        let words = std::iter::once("train").chain(line.split_whitespace());
        let parsed = Names::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        parsed._options.settings().unwrap_or_else(|error| panic!("{line}: {error:#}"))
    }

    /// What every option is given, with what else it wants beside it. An option that is missing here fails the test, and one that
    /// nobody reads does too.
    const GIVEN: [(&str, &str, &str); 45] = [
        ("model", "vgg-small", ""),
        ("data", "cifar10", "--model vgg-small --data fashion-mnist"),
        ("train-limit", "640", ""),
        ("test-limit", "64", ""),
        ("seed", "7", ""),
        ("deadline", "7", ""),
        ("method", "rgc", ""),
        ("density", "0.01", ""),
        ("at-least", "7", ""),
        ("warm-up", "dense", ""),
        ("warm-up-epochs", "0.5", ""),
        ("dense-below", "7", ""),
        ("rest", "2bit", ""),
        ("whole-output", "true", ""),
        ("exchange", "owners", ""),
        ("ranks-per-host", "2", "--exchange hosts --ranks-per-host 4"),
        ("every", "8", ""),
        ("outer-rate", "0.5", "--every 8"),
        ("keep", "0.5", "--every 8"),
        ("share-moments", "8", "--optimizer adamw"),
        ("auto", "true", ""),
        ("paper", "true", ""),
        ("masking", "false", ""),
        ("lower-momentum", "false", ""),
        ("bf16", "false", ""),
        ("epochs", "2", ""),
        ("batch-size", "7", ""),
        ("bptt", "7", "--model lstm-small"),
        ("optimizer", "adamw", ""),
        ("momentum", "0.5", ""),
        ("beta2", "0.5", "--optimizer adamw"),
        ("lr", "0.7", ""),
        ("schedule", "step", ""),
        ("lr-warm-up-epochs", "2", ""),
        ("weight-decay", "0.7", ""),
        ("clip", "0.7", ""),
        ("clip-power", "0.5", "--clip 0.7"),
        ("log-every", "7", ""),
        ("check-every", "7", ""),
        ("checkpoint-dir", "here", ""),
        ("checkpoint-every", "7", "--checkpoint-dir here"),
        ("stop-after", "7", ""),
        ("comm", "mpi", "not a setting"),
        ("workers", "2", "not a setting"),
        ("threads", "2", "not a setting"),
    ];
    /// Of the places where data are, and where results go.
    const PLACES: [&str; 3] = ["data-dir", "download", "out"];

    #[test]
    fn every_option_is_heeded() {
        let command = Names::command();
        let names = command.get_arguments().filter_map(|arg| arg.get_long()).filter(|name| *name != "help");
        for name in names.filter(|name| !PLACES.contains(name)) {
            let given = GIVEN.iter().find(|(option, ..)| *option == name);
            let (_, value, beside) = given.unwrap_or_else(|| panic!("--{name} is not tried"));
            if *beside != "not a setting" {
                let repeated = format!("--{name} ");
                let usual = settings(beside);
                let other = match beside.find(&repeated) {
                    None => settings(&format!("{beside} --{name} {value}")),
                    Some(at) => settings(&format!("{} --{name} {value}", &beside[..at])),
                };
                assert_ne!(usual, other, "--{name} {value} changes nothing");
            }
        }
    }
}

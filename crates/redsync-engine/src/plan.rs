//! From layers and a configuration to what happens with each layer, and in which order the ranks exchange.
//! What must hold: the plan follows from its inputs alone, so it is the same on every rank.

use crate::config::{Choice, Config, Exchange, FEW, Figures, Method, Preset, Rest, SMALL, Stage};
use crate::cost;
use crate::cost::{expected_elements, message_bits, message_bytes};
use crate::error::SyncError;
use crate::exchange;
use crate::hello;
use crate::layer::{Kind, Layer};
use crate::second;
use redsync_comm::Communicator;
use redsync_core::wire::Shape;
use redsync_core::{Density, IndexCode, Momentum, Selector, Sending, Values};
use serde_json::json;
use std::collections::BTreeSet;

/// Small messages share a frame until it has about this many bytes: fewer exchanges, but early ones start early.
const FRAME_BYTES: usize = 8 << 10;
/// With owners, so many for each rank: every frame is dealt out among all, and each part has a header.
const FRAME_BYTES_OF_AN_OWNER: usize = 1 << 10;
/// Small dense layers share a bucket until it has this many bytes.
const BUCKET_BYTES: usize = 4 << 20;

/// Layers that are exchanged together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub sparse: bool,
    /// In the order in which the backward pass yields them.
    pub layers: Vec<usize>,
}

/// Turns figures into the size below which layers are dense, and the exchange if that was left open. Ranks may have measured differently, so rank 0 decides; it
/// decides nothing if it has no figures.
pub(crate) fn agree(layers: &[Layer], config: Config, comm: &dyn Communicator) -> Result<Config, SyncError> {
    let ours = match &config.figures {
        Some(figures) if config.preset == Preset::Carried && config.method != Method::Sgd => {
            figures.platform.check().map_err(|bad| SyncError::Layers(bad.to_string()))?;
            let Figures { platform, compute } = figures;
            Some(cost::decide(layers, &config, platform, comm.size(), *compute)?)
        }
        _ => None,
    };
    let ours = ours.map(|(exchange, limit)| (exchange.name(), limit));
    let said = json!({ "dense below": ours.map(|(_, limit)| limit), "exchange": ours.map(|(name, _)| name) });
    let all = hello::gather(comm, &said, &config)?;
    let first = all.first().cloned().unwrap_or_default();
    let limit = first["dense below"].as_u64().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let exchange = first["exchange"].as_str().and_then(Exchange::from_name);
    Ok(match limit {
        Some(limit) => Config { dense_below: Some(limit), exchange: exchange.or(config.exchange), ..config },
        None => config,
    })
}

/// The choice for every layer, if the configuration makes sense.
pub fn choices(layers: &[Layer], config: &Config) -> Result<Vec<Choice>, SyncError> {
    let names: BTreeSet<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
    if names.len() != layers.len() {
        return Err(SyncError::Layers("two layers have the same name".into()));
    }
    if let Some(name) = config.layers.keys().find(|name| !names.contains(name.as_str())) {
        return Err(SyncError::Layers(format!("the plan names layer {name}, which the model does not have")));
    }
    let quantized = |choice: &Choice| matches!(choice, Choice::Sparse { quantized: true, .. });
    let never =
        |layer: &&Layer| layer.kind == Kind::Output && config.layers.get(&layer.name).is_some_and(quantized);
    if let Some(layer) = layers.iter().find(never) {
        return Err(SyncError::Layers(format!(
            "layer {} is the output, which is never quantized",
            layer.name
        )));
    }
    config.check_clip().map_err(SyncError::Layers)?;
    let mut choices: Vec<Choice> = layers.iter().map(|layer| choice(layer, config)).collect();
    if let Some(output) = layers.iter().position(|layer| layer.kind == Kind::Output)
        && sends_whole(output, layers, &choices, config)
    {
        choices[output] = Choice::DenseTwoBit;
    }
    Ok(choices)
}

/// The output layer goes whole if that takes at most so many times the bits of all other messages.
const WHOLE_OUTPUT: f64 = 3.0;

/// Whether the output layer, which would be compressed, is sent whole.
fn sends_whole(output: usize, layers: &[Layer], choices: &[Choice], config: &Config) -> bool {
    let layer = &layers[output];
    if !choices[output].is_sparse() || config.layers.contains_key(&layer.name) || config.is_plain() {
        return false;
    }
    let bits = |i: usize, choice| {
        let sent = Sent::at(choice, layers[i].size, config, Stage::Sparse(config.density));
        sent.map_or(0.0, |sent| {
            let (elements, bits, _) = sent.size();
            elements * bits
        })
    };
    config.whole_output.unwrap_or_else(|| {
        let quantizes = matches!(config.method, Method::RgcTwoBit | Method::RgcAsq);
        let others = (0..layers.len()).filter(|i| *i != output && choices[*i].is_sparse());
        let others: f64 = others.map(|i| bits(i, choices[i])).sum();
        quantizes && second::has(layer, config) && bits(output, Choice::DenseTwoBit) <= WHOLE_OUTPUT * others
    })
}

fn choice(layer: &Layer, config: &Config) -> Choice {
    if config.method == Method::Sgd {
        return Choice::Dense;
    }
    if let Some(choice) = config.layers.get(&layer.name) {
        return *choice;
    }
    let bytes = 4 * layer.size;
    if layer.kind == Kind::BiasOrNorm || bytes < config.limit() {
        let small = layer.kind == Kind::BiasOrNorm || bytes < SMALL;
        let exact = config.is_plain() || config.limit() == usize::MAX;
        return match config.rest {
            Rest::EightBit if small && !exact => Choice::DenseEightBit,
            Rest::TwoBit if small && !exact => Choice::DenseTwoBit,
            _ => Choice::Dense,
        };
    }
    let quantized = config.method == Method::RgcAsq && layer.kind != Kind::Output;
    let selector = match (config.method, config.preset) {
        (Method::RgcNaive, _) => Selector::Exact,
        (_, Preset::Carried) => Selector::Carried,
        (_, Preset::Paper { recurrent: false }) => Selector::Trimmed,
        (_, Preset::Paper { recurrent: true }) if quantized => Selector::Threshold,
        (_, Preset::Paper { recurrent: true }) => Selector::Sampled,
    };
    Choice::Sparse { selector, quantized }
}

/// Within how many steps Adam's second moments are told; 0 for never.
pub(crate) fn moment_period(layers: &[Layer], choices: &[Choice], config: &Config) -> u64 {
    // Where nothing is compressed nothing is told either, and a checkpoint says what it always said.
    let compresses = config.method != Method::Sgd;
    let whole = layers.iter().zip(choices).any(|(layer, choice)| {
        compresses && layer.kind == Kind::Output && second::has(layer, config) && !choice.is_sparse()
    });
    let usual = match config.density < FEW {
        _ if whole => 0,
        true => 256,
        false => 64,
    };
    config.share_moments.unwrap_or(usual)
}

/// While more than this is sent, one mean is a poor stand-in for all values, and clearing the momentum of what was sent would throw
/// most of it away.
const ONE_MEAN_UP_TO: f64 = 0.01;

/// Owners send on so many times as many elements as one rank chose, but not more than all ranks together.
const SENT_ON: f64 = 3.0;

/// During a ramp a small layer sends this many times as many elements as it sends at least afterwards.
const MORE_IN_A_RAMP: usize = 16;
/// However small it is, a compressed layer sends at most this much of itself for the sake of a number of elements.
const LARGEST_SHARE: f64 = 1.0 / 16.0;

/// What a layer sends at a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sent {
    /// Elements of the layer.
    n: usize,
    pub selector: Selector,
    pub density: Density,
    pub indices: IndexCode,
    pub values: Values,
    pub masking: bool,
}

impl Sent {
    /// What a layer of `n` elements sends; None if it is dense.
    pub fn at(choice: Choice, n: usize, config: &Config, stage: Stage) -> Option<Self> {
        let Stage::Sparse(density) = stage else { return None };
        let plain = config.is_plain();
        let more = if density > config.density { MORE_IN_A_RAMP } else { 1 };
        let least = config.at_least.saturating_mul(more);
        let density = match plain {
            true => density,
            false => density.max((least as f64 / n.max(1) as f64).min(LARGEST_SHARE)),
        };
        let coarse = !plain && density > config.density && density > ONE_MEAN_UP_TO;
        // A density that is none is refused when a synchronizer is made.
        let density = Density::new(density).unwrap_or_default();
        match choice {
            Choice::Dense => None,
            Choice::DenseEightBit | Choice::DenseTwoBit => Some(Sent {
                n,
                selector: Selector::Exact,
                density: Density::new(1.0).unwrap_or_default(),
                indices: IndexCode::Every,
                values: if choice == Choice::DenseTwoBit { Values::TwoBit } else { Values::EightBit },
                masking: false,
            }),
            Choice::Sparse { selector, quantized } => Some(Sent {
                n,
                selector,
                density,
                indices: if plain { IndexCode::Plain } else { IndexCode::Rice },
                values: match (quantized, config.bf16) {
                    _ if coarse => Values::TwoBit,
                    (true, _) => Values::Asq,
                    _ if !plain && config.method == Method::RgcTwoBit => Values::TwoBit,
                    (false, true) if !plain && config.method == Method::RgcAsq => Values::EightBit,
                    (false, true) if !plain => Values::Bf16,
                    (false, _) => Values::F32,
                },
                masking: config.masking && !coarse,
            }),
        }
    }

    /// What owners send on of what each of so many ranks sends.
    pub fn sent_on(&self, ranks: usize) -> Sent {
        let fraction = self.density.fraction() * SENT_ON.min(ranks as f64);
        Sent { density: Density::new(fraction.min(1.0)).unwrap_or(self.density), masking: false, ..*self }
    }

    /// What of it may change from stage to stage.
    pub fn sending(&self) -> Sending {
        Sending { density: self.density, values: self.values, masking: self.masking }
    }

    /// What both sides know of the message of a step.
    pub fn shape(&self, step: u64) -> Shape {
        Shape { n: self.n as u32, phase: self.values.phase(step), indices: self.indices, values: self.values }
    }

    /// Elements on average, the bits of one, and how values travel.
    pub fn size(&self) -> (f64, f64, Values) {
        let elements = expected_elements(self.n, self.density, self.selector);
        (elements, message_bits(self.density, self.indices, self.values), self.values)
    }
}

/// Who owns which elements of the layers that are compressed, as long as what they send after the warm-up says.
pub(crate) fn cuts(
    layers: &[Layer],
    choices: &[Choice],
    config: &Config,
    ranks: usize,
) -> Vec<Option<exchange::cut::Cut>> {
    let sends = |(layer, choice): (&Layer, &Choice)| {
        let sent = Sent::at(*choice, layer.size, config, Stage::Sparse(config.density))?;
        let (elements, bits, _) = sent.size();
        Some((layer.size, elements, bits))
    };
    let sends: Vec<_> = layers.iter().zip(choices).map(sends).collect();
    exchange::cut::cuts(&sends, ranks)
}

/// What each layer sends at a stage; None for one that is dense then.
pub(crate) fn sendings(
    layers: &[Layer],
    choices: &[Choice],
    config: &Config,
    stage: Stage,
) -> impl Iterator<Item = Option<Sending>> {
    let sent = move |(layer, choice): (&Layer, &Choice)| Sent::at(*choice, layer.size, config, stage);
    layers.iter().zip(choices).map(move |each| sent(each).map(|sent| sent.sending()))
}

/// The momentum of a layer, and whether its residual has less of it while elements wait.
pub(crate) fn momentum(layer: &Layer, config: &Config) -> (Momentum, bool) {
    let momentum = layer.momentum.unwrap_or(config.momentum);
    (momentum, config.lower_momentum && !config.is_plain())
}

/// What the compressor of a layer is made with, if it is compressed.
pub(crate) fn compressor(
    layer: &Layer,
    choice: Choice,
    config: &Config,
    ranks: usize,
) -> Result<Option<redsync_core::Config>, SyncError> {
    let refuse = |why| SyncError::Config { layer: layer.name.clone(), why };
    Density::new(config.density).map_err(refuse)?;
    let Some(sent) = Sent::at(choice, layer.size, config, Stage::Sparse(config.density)) else {
        return Ok(None);
    };
    let Sent { selector, density, indices, values, masking, .. } = sent;
    Ok(Some(redsync_core::Config {
        density,
        selector,
        values,
        indices,
        momentum: momentum(layer, config).0,
        ranks,
        masking,
        keep: config.keep,
        undo: config.undo,
    }))
}

/// About how many bytes a layer sends at a stage, and whether it is compressed then.
fn bytes(layer: &Layer, choice: Choice, config: &Config, stage: Stage) -> (bool, usize) {
    match Sent::at(choice, layer.size, config, stage) {
        None => (false, 4 * layer.size),
        Some(sent) => {
            let (elements, bits, values) = sent.size();
            (true, message_bytes(elements, bits, values) as usize)
        }
    }
}

/// The groups of a stage, in the order in which every rank exchanges them.
pub(crate) fn groups(
    layers: &[Layer],
    choices: &[Choice],
    config: &Config,
    stage: Stage,
    ranks: usize,
) -> Vec<Group> {
    let frame = match config.exchange() {
        Exchange::Gather | Exchange::Hosts => FRAME_BYTES,
        Exchange::Owners => FRAME_BYTES.max(FRAME_BYTES_OF_AN_OWNER * ranks),
    };
    let mut groups = Vec::new();
    // The open group of each kind, dense and sparse, with its bytes.
    let mut open = [(Vec::new(), 0usize), (Vec::new(), 0usize)];
    // The backward pass yields the last layer first.
    for (i, layer) in layers.iter().enumerate().rev() {
        let (sparse, bytes) = bytes(layer, choices[i], config, stage);
        let (members, total) = &mut open[usize::from(sparse)];
        members.push(i);
        *total += bytes;
        if *total >= if sparse { frame } else { BUCKET_BYTES } {
            groups.push(Group { sparse, layers: std::mem::take(members) });
            *total = 0;
        }
    }
    for (sparse, (members, _)) in [false, true].into_iter().zip(open) {
        if !members.is_empty() {
            groups.push(Group { sparse, layers: members });
        }
    }
    // A group is complete when its last layer is there.
    groups.sort_by_key(|group| std::cmp::Reverse(group.layers.last().copied()));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{Model, NAMES};
    use redsync_core::{Adam, Momentum};

    #[test]
    fn every_layer_is_in_exactly_one_group_and_the_order_is_that_of_the_backward_pass() {
        for name in NAMES {
            let layers = Model::named(name).unwrap().layers;
            for method in Method::ALL {
                let config = Config { method, ..Config::default() };
                let choices = choices(&layers, &config).unwrap();
                for stage in [Stage::Dense, Stage::Sparse(0.001), Stage::Sparse(0.25)] {
                    let groups = groups(&layers, &choices, &config, stage, 4);
                    let mut seen: Vec<usize> = groups.iter().flat_map(|g| g.layers.clone()).collect();
                    seen.sort_unstable();
                    assert_eq!(seen, (0..layers.len()).collect::<Vec<_>>(), "{name} {method:?} {stage:?}");
                    let ends: Vec<_> = groups.iter().map(|g| *g.layers.last().unwrap()).collect();
                    assert!(ends.is_sorted_by(|a, b| a > b));
                    assert!(stage != Stage::Dense || groups.iter().all(|g| !g.sparse));
                }
            }
        }
    }

    #[test]
    fn small_layers_biases_and_the_output_are_treated_as_ruled() {
        let layers = [
            Layer::new("big", 40_000, Kind::Weight),
            Layer::new("middle", 30_000, Kind::Weight),
            Layer::new("small", 1_023, Kind::Weight),
            Layer::new("norm", 40_000, Kind::BiasOrNorm),
            Layer::new("out", 40_000, Kind::Output),
        ];
        let by = |selector, quantized| Choice::Sparse { selector, quantized };
        let sparse = |quantized| by(Selector::Carried, quantized);
        let (exact, coarse) = (Choice::Dense, Choice::DenseEightBit);
        let of = |config: &Config| choices(&layers, config).unwrap();
        assert_eq!(of(&Config::default()), [sparse(true), sparse(true), coarse, coarse, sparse(false)]);
        let limit = Config { dense_below: Some(128 << 10), ..Config::default() };
        assert_eq!(of(&limit), [sparse(true), exact, coarse, coarse, sparse(false)]);
        let plain = Config { rest: Rest::F32, ..Config::default() };
        assert_eq!(of(&plain), [sparse(true), sparse(true), exact, exact, sparse(false)]);
        let nothing = Config { dense_below: Some(usize::MAX), ..Config::default() };
        assert_eq!(of(&nothing), [exact; 5]);
        let paper = Config { preset: Preset::Paper { recurrent: false }, ..Config::default() };
        let trimmed = |quantized| by(Selector::Trimmed, quantized);
        assert_eq!(of(&paper), [trimmed(true), exact, exact, exact, trimmed(false)]);
        let mut config = Config { method: Method::Sgd, ..Config::default() };
        assert!(choices(&layers, &config).unwrap().iter().all(|choice| *choice == Choice::Dense));
        config.method = Method::Rgc;
        config.layers.insert("big".into(), Choice::Dense);
        assert_eq!(choices(&layers, &config).unwrap()[0], Choice::Dense);
        config.layers.insert("bug".into(), Choice::Dense);
        assert!(choices(&layers, &config).unwrap_err().to_string().contains("bug"));
    }

    #[test]
    fn the_output_goes_whole_with_adam_where_that_is_cheap() {
        let layers = Model::named("gpt-small").unwrap().layers;
        let output = layers.iter().position(|layer| layer.kind == Kind::Output).unwrap();
        let of = |config: &Config| choices(&layers, config).unwrap()[output];
        let adam = Config {
            method: Method::RgcTwoBit,
            momentum: Momentum::Adam(Adam::default()),
            density: 0.01,
            ..Config::default()
        };
        let compressed = Choice::Sparse { selector: Selector::Carried, quantized: false };
        assert_eq!(of(&adam), Choice::DenseTwoBit);
        let others_first = choices(&layers, &Config { whole_output: Some(false), ..adam.clone() }).unwrap();
        assert_eq!(others_first[output], compressed);
        for (i, choice) in choices(&layers, &adam).unwrap().into_iter().enumerate() {
            assert!(i == output || choice == others_first[i], "{}", layers[i].name);
        }
        let same = |config: Config| assert_eq!(of(&config), compressed, "{config:?}");
        assert_eq!(of(&Config { density: 0.001, ..adam.clone() }), Choice::DenseTwoBit);
        same(Config { density: 0.0002, at_least: 0, ..adam.clone() });
        same(Config { momentum: Momentum::Nesterov(0.9), ..adam.clone() });
        same(Config { method: Method::Rgc, ..adam.clone() });
        let by_name = [(layers[output].name.clone(), compressed)].into();
        same(Config { layers: by_name, whole_output: Some(true), ..adam.clone() });
        assert_eq!(of(&Config { whole_output: Some(true), ..Config::default() }), Choice::DenseTwoBit);
        let preset = Preset::Paper { recurrent: false };
        assert!(of(&Config { preset, whole_output: Some(true), ..adam.clone() }).is_sparse());
        let dense = Config { method: Method::Sgd, whole_output: Some(true), ..adam.clone() };
        assert_eq!(of(&dense), Choice::Dense);
        let period = |config: &Config| moment_period(&layers, &choices(&layers, config).unwrap(), config);
        assert_eq!([&adam, &dense, &Config::default()].map(period), [0, 64, 256]);
        assert_eq!(period(&Config { whole_output: Some(false), ..adam }), 64);
    }
}

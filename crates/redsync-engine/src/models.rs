//! Layer sizes of well-known networks: in comes a model's name, out go its parameter tensors.
//! Must hold: tensors stand in forward order under unique names (PyTorch's), exactly one is `Kind::Output`,
//! and the sizes add up to the architecture's parameter count.

use crate::layer::{Kind, Layer};

/// A model whose layer sizes are known.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Its name, one of [`NAMES`].
    pub name: &'static str,
    /// Whether it is a recurrent network.
    pub recurrent: bool,
    /// Its parameter tensors, in forward order.
    pub layers: Vec<Layer>,
}

impl Model {
    /// The model of a name.
    pub fn named(name: &str) -> Result<Model, UnknownModel> {
        let known = MODELS.into_iter().find(|(known, ..)| *known == name);
        let (name, recurrent, build) = known.ok_or_else(|| UnknownModel { name: name.to_owned() })?;
        Ok(Model { name, recurrent, layers: build() })
    }

    /// The number of elements of all layers together.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.size).sum()
    }
}

/// The name asked for is none of [`NAMES`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown model {name}: {}", redsync_names::nearest(.name, &NAMES))]
pub struct UnknownModel {
    /// The name asked for.
    pub name: String,
}

/// Lists a model's layers.
type Build = fn() -> Vec<Layer>;

/// Every known model: its name, whether it is recurrent, what builds its layers.
const MODELS: [(&str, bool, Build); 10] = [
    ("digits-cnn", false, digits_cnn),
    ("vgg16-cifar", false, vgg16_cifar),
    ("resnet44", false, resnet44),
    ("alexnet", false, alexnet),
    ("vgg16", false, vgg16),
    ("resnet50", false, resnet50),
    ("lstm-ptb", true, || tied_lstm(10_000)),
    ("lstm-wiki2", true, || tied_lstm(33_278)),
    ("gpt-tiny", false, || gpt(128, 5, 128)),
    ("gpt-small", false, || gpt(384, 6, 256)),
];

/// The names of all known models.
pub const NAMES: [&str; 10] = {
    let mut names = [""; 10];
    let mut i = 0;
    while i < names.len() {
        names[i] = MODELS[i].0;
        i += 1;
    }
    names
};

/// The one tensor called `weight` of a module.
fn weight(module: &str, size: usize, kind: Kind) -> Layer {
    Layer::new(format!("{module}.weight"), size, kind)
}

/// The one tensor called `bias` of a module.
fn bias(module: &str, size: usize) -> Layer {
    Layer::new(format!("{module}.bias"), size, Kind::BiasOrNorm)
}

/// A square convolution with a bias.
fn conv(module: &str, from: usize, to: usize, kernel: usize) -> [Layer; 2] {
    [weight(module, from * to * kernel * kernel, Kind::Weight), bias(module, to)]
}

/// A square convolution without a bias and the batch norm behind it.
fn conv_norm(module: &str, norm: &str, from: usize, to: usize, kernel: usize) -> [Layer; 3] {
    let [kernel, _] = conv(module, from, to, kernel);
    [kernel, weight(norm, to, Kind::BiasOrNorm), bias(norm, to)]
}

/// A fully connected layer with a bias.
fn linear(module: &str, from: usize, to: usize) -> [Layer; 2] {
    [weight(module, from * to, Kind::Weight), bias(module, to)]
}

/// The fully connected layer with a bias that ends a network.
fn output(module: &str, from: usize, to: usize) -> [Layer; 2] {
    [weight(module, from * to, Kind::Output), bias(module, to)]
}

/// Layer number `depth` of an LSTM whose input is as wide as its state; all four gates in each tensor.
fn lstm(depth: usize, units: usize) -> [Layer; 4] {
    let gates = 4 * units;
    let tensor = |part: &str, size, kind| Layer::new(format!("rnn.{part}_l{depth}"), size, kind);
    [
        tensor("weight_ih", gates * units, Kind::Weight),
        tensor("weight_hh", gates * units, Kind::Weight),
        tensor("bias_ih", gates, Kind::BiasOrNorm),
        tensor("bias_hh", gates, Kind::BiasOrNorm),
    ]
}

/// The thirteen convolutions of VGG16, with batch norm instead of biases if `norm`.
fn vgg16_features(norm: bool) -> Vec<Layer> {
    let mut layers = Vec::new();
    let (mut from, mut index) = (3, 0);
    for (to, convolutions) in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)] {
        for _ in 0..convolutions {
            let (here, next) = (format!("features.{index}"), format!("features.{}", index + 1));
            match norm {
                true => layers.extend(conv_norm(&here, &next, from, to, 3)),
                false => layers.extend(conv(&here, from, to, 3)),
            }
            from = to;
            index += if norm { 3 } else { 2 }; // the activation counts as a module
        }
        index += 1; // so does the pooling
    }
    layers
}

/// Two convolutions and two dense layers for digits of 8x8: what `redsync train` begins with.
fn digits_cnn() -> Vec<Layer> {
    let features = [conv("features.0", 1, 32, 3), conv("features.2", 32, 64, 3)];
    let classifier = [linear("classifier.0", 64 * 4 * 4, 1000), output("classifier.3", 1000, 10)];
    features.into_iter().chain(classifier).flatten().collect()
}

/// VGG16 with batch norm for 32x32 images of ten classes.
fn vgg16_cifar() -> Vec<Layer> {
    let mut layers = vgg16_features(true);
    layers.extend(output("classifier", 512, 10));
    layers
}

/// VGG16 for ImageNet.
fn vgg16() -> Vec<Layer> {
    let mut layers = vgg16_features(false);
    layers.extend(linear("classifier.0", 512 * 7 * 7, 4096));
    layers.extend(linear("classifier.3", 4096, 4096));
    layers.extend(output("classifier.6", 4096, 1000));
    layers
}

/// AlexNet for ImageNet, as in torchvision.
fn alexnet() -> Vec<Layer> {
    [
        conv("features.0", 3, 64, 11),
        conv("features.3", 64, 192, 5),
        conv("features.6", 192, 384, 3),
        conv("features.8", 384, 256, 3),
        conv("features.10", 256, 256, 3),
        linear("classifier.1", 256 * 6 * 6, 4096),
        linear("classifier.4", 4096, 4096),
        output("classifier.6", 4096, 1000),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// ResNet44 for CIFAR: seven blocks of two convolutions per stage, shortcuts without parameters.
fn resnet44() -> Vec<Layer> {
    let mut layers = conv_norm("conv1", "bn1", 3, 16, 3).to_vec();
    let mut from = 16;
    for (stage, to) in (1..).zip([16, 32, 64]) {
        for block in 0..7 {
            let at = |module: &str| format!("layer{stage}.{block}.{module}");
            layers.extend(conv_norm(&at("conv1"), &at("bn1"), from, to, 3));
            layers.extend(conv_norm(&at("conv2"), &at("bn2"), to, to, 3));
            from = to;
        }
    }
    layers.extend(output("linear", 64, 10));
    layers
}

/// ResNet50 for ImageNet, as in torchvision: bottleneck blocks, each stage's first with a projection.
fn resnet50() -> Vec<Layer> {
    let mut layers = conv_norm("conv1", "bn1", 3, 64, 7).to_vec();
    let mut from = 64;
    for (stage, (width, blocks)) in (1..).zip([(64, 3), (128, 4), (256, 6), (512, 3)]) {
        let to = 4 * width;
        for block in 0..blocks {
            let at = |module: &str| format!("layer{stage}.{block}.{module}");
            layers.extend(conv_norm(&at("conv1"), &at("bn1"), from, width, 1));
            layers.extend(conv_norm(&at("conv2"), &at("bn2"), width, width, 3));
            layers.extend(conv_norm(&at("conv3"), &at("bn3"), width, to, 1));
            if from != to {
                layers.extend(conv_norm(&at("downsample.0"), &at("downsample.1"), from, to, 1));
            }
            from = to;
        }
    }
    layers.extend(output("fc", 2048, 1000));
    layers
}

/// A word model of two LSTM layers whose embedding is also its softmax matrix. That matrix is the output
/// layer but stands first: its gradient is complete only when backpropagation reaches the embedding.
fn tied_lstm(vocabulary: usize) -> Vec<Layer> {
    let units = 1500;
    let mut layers = vec![weight("encoder", vocabulary * units, Kind::Output)];
    layers.extend((0..2).flat_map(|depth| lstm(depth, units)));
    layers.push(bias("decoder", vocabulary));
    layers
}

/// A transformer of bytes, as wide as `width`, whose embedding is also its softmax matrix.
fn gpt(width: usize, blocks: usize, context: usize) -> Vec<Layer> {
    let linear =
        |name: String, from: usize, to: usize| [weight(&name, from * to, Kind::Weight), bias(&name, to)];
    let mut layers =
        vec![weight("wte", 256 * width, Kind::Output), weight("wpe", context * width, Kind::Weight)];
    for depth in 0..blocks {
        let name = |part: &str| format!("h.{depth}.{part}");
        layers.extend(layer_norm(&name("ln_1"), width));
        layers.extend(linear(name("attn.qkv"), width, 3 * width));
        layers.extend(linear(name("attn.proj"), width, width));
        layers.extend(layer_norm(&name("ln_2"), width));
        layers.extend(linear(name("mlp.fc"), width, 4 * width));
        layers.extend(linear(name("mlp.proj"), 4 * width, width));
    }
    layers.extend(layer_norm("ln_f", width));
    layers
}

fn layer_norm(module: &str, width: usize) -> [Layer; 2] {
    [weight(module, width, Kind::BiasOrNorm), bias(module, width)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn all() -> impl Iterator<Item = Model> {
        NAMES.into_iter().map(|name| Model::named(name).expect("every listed name is known"))
    }

    #[test]
    fn parameter_totals_are_exact() {
        let totals: Vec<_> = all().map(|model| (model.name, model.parameters())).collect();
        let expected = [
            ("digits-cnn", 1_053_826),
            ("vgg16-cifar", 14_724_042),
            ("resnet44", 658_586),
            ("alexnet", 61_100_840),
            ("vgg16", 138_357_544),
            ("resnet50", 25_557_032),
            ("lstm-ptb", 51_034_000),
            ("lstm-wiki2", 85_974_278),
            ("gpt-tiny", 1_040_768),
            ("gpt-small", 10_844_160),
        ];
        assert_eq!(totals, expected);
    }

    #[test]
    fn tensor_counts_are_those_of_the_architectures() {
        let counts: Vec<_> = all().map(|model| model.layers.len()).collect();
        assert_eq!(
            counts,
            [4 * 2, 13 * 3 + 2, 43 * 3 + 2, 8 * 2, 16 * 2, 53 * 3 + 2, 10, 10, 5 * 12 + 4, 6 * 12 + 4]
        );
    }

    #[test]
    fn names_are_unique_within_a_model() {
        for model in all() {
            let unique: HashSet<_> = model.layers.iter().map(|layer| &layer.name).collect();
            assert_eq!(unique.len(), model.layers.len(), "{}", model.name);
        }
    }

    #[test]
    fn exactly_one_layer_is_the_output() {
        for model in all() {
            let outputs = model.layers.iter().filter(|layer| layer.kind == Kind::Output).count();
            assert_eq!(outputs, 1, "{}", model.name);
        }
    }

    #[test]
    fn output_is_the_last_weight_unless_tied_to_the_embedding() {
        for model in all() {
            let mut weights = model.layers.iter().filter(|layer| layer.kind != Kind::BiasOrNorm);
            let tied = model.recurrent || model.name.starts_with("gpt");
            let place = if tied { weights.next() } else { weights.next_back() };
            assert_eq!(place.map(|layer| layer.kind), Some(Kind::Output), "{}", model.name);
        }
    }

    #[test]
    fn kinds_follow_the_tensors() {
        for layer in all().flat_map(|model| model.layers) {
            let norm = layer.name.contains("bn")
                || layer.name.contains("downsample.1")
                || layer.name.contains("ln_");
            if layer.name.contains("bias") || norm {
                assert_eq!(layer.kind, Kind::BiasOrNorm, "{}", layer.name);
            }
        }
    }

    #[test]
    fn vgg_module_numbers_are_torchvisions() {
        let last = |norm| vgg16_features(norm).pop().map(|layer| layer.name);
        assert_eq!(last(false).as_deref(), Some("features.28.bias"));
        assert_eq!(last(true).as_deref(), Some("features.41.bias"));
    }

    #[test]
    fn an_unknown_name_is_refused_with_a_hint() {
        let message = |name| Model::named(name).expect_err("the name is wrong").to_string();
        assert_eq!(message("AlexNt"), "unknown model AlexNt: did you mean alexnet?");
        assert_eq!(message("resnet18"), "unknown model resnet18: did you mean resnet44 or resnet50?");
        assert_eq!(message("bert"), format!("unknown model bert: known are {}", NAMES.join(", ")));
    }
}

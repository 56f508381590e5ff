//! Networks by name: in comes a name and the shape of the data, out goes the network.

use super::Net;
use super::classifier::{Classifier, SmallResNet, Vgg, alexnet, resnet50};
use super::language::{Language, Lstm};
use super::transformer::Gpt;

/// What a network is to be fed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Images.
    Images {
        /// Channels, height, width.
        shape: [usize; 3],
        /// The number of classes.
        classes: usize,
    },
    /// Words.
    Words {
        /// The number of different ones.
        vocabulary: usize,
    },
}

/// A kind of network with its numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    /// See [`Vgg`].
    Vgg(Vgg),
    /// See [`SmallResNet`].
    SmallResNet(SmallResNet),
    /// ResNet50 as in torchvision.
    ResNet50,
    /// AlexNet as in torchvision.
    AlexNet,
    /// See [`Lstm`].
    Lstm(Lstm),
    /// See [`Gpt`].
    Gpt(Gpt),
}

/// The names of all networks.
pub const NAMES: [&str; 13] = [
    "digits-cnn",
    "vgg-small",
    "vgg16-cifar",
    "resnet20",
    "resnet44",
    "alexnet",
    "vgg16",
    "resnet50",
    "lstm-small",
    "lstm-ptb",
    "lstm-wiki2",
    "gpt-tiny",
    "gpt-small",
];

/// The name asked for is none of [`NAMES`], or the network cannot take the data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownModel {
    /// No such name.
    #[error("unknown model {name}: {}", redsync_names::nearest(.name, &NAMES))]
    Name {
        /// The name asked for.
        name: String,
    },
    /// Images for a language model, words for a classifier.
    #[error("the model {model} takes {takes}, but the data are {data}")]
    Data {
        /// The model.
        model: String,
        /// What it takes.
        takes: &'static str,
        /// What there is.
        data: &'static str,
    },
    /// The images are smaller than the network's poolings allow.
    #[error(
        "the model {model} needs images of at least {least} x {least}, but the data have {height} x {width}"
    )]
    Small {
        /// The model.
        model: String,
        /// The smallest side.
        least: usize,
        /// What there is.
        height: usize,
        /// What there is.
        width: usize,
    },
}

impl Architecture {
    /// The network of a name.
    pub fn named(name: &str) -> Result<Self, UnknownModel> {
        let vgg = |groups: &[&[usize]], norm, side, dense: &[usize], dropout| {
            let groups = groups.iter().map(|group| group.to_vec()).collect();
            Vgg { groups, norm, last_pooling: true, side, dense: dense.to_vec(), dropout }
        };
        let sixteen: [&[usize]; 5] = [&[64; 2], &[128; 2], &[256; 3], &[512; 3], &[512; 3]];
        Ok(match name {
            "digits-cnn" => Architecture::Vgg(vgg(&[&[32, 64]], false, None, &[1000], 0.0)),
            "vgg-small" => {
                let small = vgg(&[&[16], &[32], &[64, 64], &[128, 128]], true, Some(4), &[1280], 0.0);
                Architecture::Vgg(Vgg { last_pooling: false, ..small })
            }
            "vgg16-cifar" => Architecture::Vgg(vgg(&sixteen, true, None, &[], 0.0)),
            "vgg16" => Architecture::Vgg(vgg(&sixteen, false, Some(7), &[4096, 4096], 0.5)),
            "resnet20" => Architecture::SmallResNet(SmallResNet { blocks: 3 }),
            "resnet44" => Architecture::SmallResNet(SmallResNet { blocks: 7 }),
            "alexnet" => Architecture::AlexNet,
            "resnet50" => Architecture::ResNet50,
            "lstm-small" => Architecture::Lstm(Lstm { units: 200, layers: 2, dropout: 0.2, begin: 0.1 }),
            "lstm-ptb" | "lstm-wiki2" => {
                Architecture::Lstm(Lstm { units: 1500, layers: 2, dropout: 0.65, begin: 0.05 })
            }
            "gpt-tiny" => {
                Architecture::Gpt(Gpt { width: 128, layers: 5, heads: 4, context: 128, begin: 0.02 })
            }
            "gpt-small" => {
                Architecture::Gpt(Gpt { width: 384, layers: 6, heads: 6, context: 256, begin: 0.02 })
            }
            _ => return Err(UnknownModel::Name { name: name.into() }),
        })
    }

    /// The network for the data, as a seed begins it; errors call it by the name.
    pub fn build(&self, name: &str, input: Input, seed: u64) -> Result<Net, UnknownModel> {
        match input {
            Input::Words { vocabulary } => self.language(name, vocabulary, seed).map(Net::Words),
            Input::Images { shape, classes } => self.classifier(name, shape, classes, seed).map(Net::Images),
        }
    }

    /// Whether its words are the bytes of a text.
    pub fn takes_bytes(&self) -> bool {
        matches!(self, Architecture::Gpt(_))
    }

    /// The network for words, if it is one.
    pub fn language(&self, name: &str, vocabulary: usize, seed: u64) -> Result<Language, UnknownModel> {
        match self {
            Architecture::Lstm(lstm) => Ok(lstm.build(vocabulary, seed)),
            Architecture::Gpt(gpt) => Ok(gpt.build(vocabulary, seed)),
            _ => Err(UnknownModel::Data { model: name.into(), takes: "images", data: "words" }),
        }
    }

    /// The network for images of this shape, if it is one and they are large enough.
    pub fn classifier(
        &self,
        name: &str,
        shape: [usize; 3],
        classes: usize,
        seed: u64,
    ) -> Result<Classifier, UnknownModel> {
        let [_, height, width] = shape;
        let least = self.least_side();
        if height.min(width) < least {
            return Err(UnknownModel::Small { model: name.into(), least, height, width });
        }
        match self {
            Architecture::Vgg(vgg) => Ok(vgg.build(shape, classes, seed)),
            Architecture::SmallResNet(resnet) => Ok(resnet.build(shape, classes, seed)),
            Architecture::ResNet50 => Ok(resnet50(shape, classes, seed)),
            Architecture::AlexNet => Ok(alexnet(shape, classes, seed)),
            Architecture::Lstm(_) | Architecture::Gpt(_) => {
                Err(UnknownModel::Data { model: name.into(), takes: "words", data: "images" })
            }
        }
    }

    /// The smallest images it can take.
    fn least_side(&self) -> usize {
        match self {
            Architecture::Vgg(vgg) => 1 << (vgg.groups.len() - usize::from(!vgg.last_pooling)),
            Architecture::SmallResNet(_) => 8,
            Architecture::ResNet50 => 32,
            Architecture::AlexNet => 63,
            Architecture::Lstm(_) | Architecture::Gpt(_) => 0,
        }
    }
}

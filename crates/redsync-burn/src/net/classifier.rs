//! Networks for images: VGG, ResNet, AlexNet and a small one for digits, each from its configuration.
//! What must hold: names, order and sizes of the parameters are those of `redsync_engine::models` where that knows the network.

use super::blocks::{Builder, Feature, Head};
use super::weights::Spec;
use super::{Buffers, Pass};
use burn::tensor::Tensor;

/// A network for images.
#[derive(Clone, Debug)]
pub struct Classifier {
    /// Channels, height and width of an image.
    pub shape: [usize; 3],
    /// The number of classes.
    pub classes: usize,
    specs: Vec<Spec>,
    buffers: Buffers,
    features: Vec<Feature>,
    head: Vec<Head>,
}

impl Classifier {
    /// The parameters, in forward order.
    pub fn specs(&self) -> &[Spec] {
        &self.specs
    }

    /// The running statistics beside them, as they begin.
    pub fn buffers(&self) -> Buffers {
        self.buffers.clone()
    }

    /// The scores of each class for each image.
    pub fn run(&self, pass: &mut Pass, images: Tensor<4>) -> Tensor<2> {
        let x = self.features.iter().fold(images, |x, block| block.run(pass, x));
        let x = x.flatten(1, 3);
        self.head.iter().fold(x, |x, block| block.run(pass, x))
    }

    fn from_parts(
        shape: [usize; 3],
        classes: usize,
        build: Builder,
        features: Vec<Feature>,
        head: Vec<Head>,
    ) -> Self {
        Classifier { shape, classes, specs: build.specs, buffers: build.buffers, features, head }
    }
}

/// A VGG: groups of 3x3 convolutions, a pooling between them, fully connected layers behind all.
#[derive(Clone, Debug, PartialEq)]
pub struct Vgg {
    /// The channels of the convolutions, group by group.
    pub groups: Vec<Vec<usize>>,
    /// Whether batch norm takes the place of biases.
    pub norm: bool,
    /// Whether a pooling stands behind the last group, too.
    pub last_pooling: bool,
    /// Side of the image that goes to the fully connected layers, whatever the size of the input.
    pub side: Option<usize>,
    /// The lengths of the fully connected layers before the last.
    pub dense: Vec<usize>,
    /// Dropout behind them.
    pub dropout: f32,
}

impl Vgg {
    /// The network for images of this shape.
    pub fn build(&self, [channels, height, width]: [usize; 3], classes: usize) -> Classifier {
        let (mut build, mut features) = (Builder::default(), Vec::new());
        let (mut from, mut h, mut w) = (channels, height, width);
        for (number, group) in self.groups.iter().enumerate() {
            for to in group {
                let here = format!("features.{}", features.len());
                match self.norm {
                    true => {
                        features.push(build.bare_conv(&here, [from, *to, 3], 1, 1));
                        features.push(build.norm(&format!("features.{}", features.len()), *to));
                    }
                    false => features.push(build.conv(&here, [from, *to, 3], 1, 1)),
                }
                features.push(Feature::Relu);
                from = *to;
            }
            if number + 1 < self.groups.len() || self.last_pooling {
                features.push(Feature::MaxPool { window: 2, stride: 2, padding: 0 });
                (h, w) = (h / 2, w / 2);
            }
        }
        if let Some(side) = self.side {
            features.push(Feature::AveragePool(side));
            (h, w) = (side, side);
        }
        let (mut head, mut length) = (Vec::new(), from * h * w);
        for to in &self.dense {
            head.push(build.linear(&format!("classifier.{}", head.len()), length, *to));
            head.extend([Head::Relu, Head::Dropout(self.dropout)]);
            length = *to;
        }
        let last = if head.is_empty() { "classifier".into() } else { format!("classifier.{}", head.len()) };
        head.push(build.output(&last, length, classes));
        Classifier::from_parts([channels, height, width], classes, build, features, head)
    }
}

/// A ResNet for small images: three stages of blocks of two convolutions.
#[derive(Clone, Debug, PartialEq)]
pub struct SmallResNet {
    /// Blocks in each stage: 3 makes ResNet20, 7 makes ResNet44.
    pub blocks: usize,
}

impl SmallResNet {
    /// The network for images of this shape.
    pub fn build(&self, shape: [usize; 3], classes: usize) -> Classifier {
        let mut build = Builder::default();
        let mut features =
            vec![build.bare_conv("conv1", [shape[0], 16, 3], 1, 1), build.norm("bn1", 16), Feature::Relu];
        let mut from = 16;
        for (stage, to) in (1..).zip([16, 32, 64]) {
            for block in 0..self.blocks {
                let at = |module: &str| format!("layer{stage}.{block}.{module}");
                let stride = if from == to { 1 } else { 2 };
                let body = vec![
                    build.bare_conv(&at("conv1"), [from, to, 3], stride, 1),
                    build.norm(&at("bn1"), to),
                    Feature::Relu,
                    build.bare_conv(&at("conv2"), [to, to, 3], 1, 1),
                    build.norm(&at("bn2"), to),
                ];
                let shortcut = if from == to { vec![] } else { vec![Feature::Subsample { channels: to }] };
                features.push(Feature::Residual { body, shortcut });
                from = to;
            }
        }
        features.push(Feature::AveragePool(1));
        let head = vec![build.output("linear", 64, classes)];
        Classifier::from_parts(shape, classes, build, features, head)
    }
}

/// ResNet50 for images of about 224x224: four stages of bottleneck blocks.
pub(super) fn resnet50(shape: [usize; 3], classes: usize) -> Classifier {
    let mut build = Builder::default();
    let mut features =
        vec![build.bare_conv("conv1", [shape[0], 64, 7], 2, 3), build.norm("bn1", 64), Feature::Relu];
    features.push(Feature::MaxPool { window: 3, stride: 2, padding: 1 });
    let mut from = 64;
    for (stage, (width, blocks)) in (1..).zip([(64, 3), (128, 4), (256, 6), (512, 3)]) {
        let to = 4 * width;
        for block in 0..blocks {
            let at = |module: &str| format!("layer{stage}.{block}.{module}");
            let stride = if stage > 1 && block == 0 { 2 } else { 1 };
            let body = vec![
                build.bare_conv(&at("conv1"), [from, width, 1], 1, 0),
                build.norm(&at("bn1"), width),
                Feature::Relu,
                build.bare_conv(&at("conv2"), [width, width, 3], stride, 1),
                build.norm(&at("bn2"), width),
                Feature::Relu,
                build.bare_conv(&at("conv3"), [width, to, 1], 1, 0),
                build.norm(&at("bn3"), to),
            ];
            let shortcut = match from == to {
                true => vec![],
                false => {
                    let project = build.bare_conv(&at("downsample.0"), [from, to, 1], stride, 0);
                    vec![project, build.norm(&at("downsample.1"), to)]
                }
            };
            features.push(Feature::Residual { body, shortcut });
            from = to;
        }
    }
    features.push(Feature::AveragePool(1));
    let head = vec![build.output("fc", from, classes)];
    Classifier::from_parts(shape, classes, build, features, head)
}

/// AlexNet for images of about 224x224.
pub(super) fn alexnet(shape: [usize; 3], classes: usize) -> Classifier {
    let mut build = Builder::default();
    let pool = || Feature::MaxPool { window: 3, stride: 2, padding: 0 };
    let features = vec![
        build.conv("features.0", [shape[0], 64, 11], 4, 2),
        Feature::Relu,
        pool(),
        build.conv("features.3", [64, 192, 5], 1, 2),
        Feature::Relu,
        pool(),
        build.conv("features.6", [192, 384, 3], 1, 1),
        Feature::Relu,
        build.conv("features.8", [384, 256, 3], 1, 1),
        Feature::Relu,
        build.conv("features.10", [256, 256, 3], 1, 1),
        Feature::Relu,
        pool(),
        Feature::AveragePool(6),
    ];
    let head = vec![
        Head::Dropout(0.5),
        build.linear("classifier.1", 256 * 6 * 6, 4096),
        Head::Relu,
        Head::Dropout(0.5),
        build.linear("classifier.4", 4096, 4096),
        Head::Relu,
        build.output("classifier.6", 4096, classes),
    ];
    Classifier::from_parts(shape, classes, build, features, head)
}

//! Networks for images: VGG, ResNet, AlexNet and a small one for digits, each from its configuration.
//! What must hold: paths, order and sizes of the parameters are names, order and sizes in `redsync_engine::models` where that knows the
//! network.

use super::Pass;
use super::begin::Begin;
use super::blocks::{AveragePool, Conv, Linear, MaxPool, Norm, subsample};
use burn::module::Module;
use burn::nn::Relu;
use burn::tensor::Tensor;
use burn::tensor::activation::relu;

/// A network for images.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // There is one of it.
pub enum Classifier {
    /// A VGG or AlexNet.
    Sequence(Sequence),
    /// A ResNet for small images.
    ThreeStages(ThreeStages),
    /// A ResNet for large images.
    FourStages(FourStages),
}

impl Classifier {
    /// The scores of each class for each image.
    pub fn forward(&self, pass: &mut Pass, images: Tensor<4>) -> Tensor<2> {
        match self {
            Classifier::Sequence(net) => net.forward(pass, images),
            Classifier::ThreeStages(net) => net.forward(pass, images),
            Classifier::FourStages(net) => net.forward(pass, images),
        }
    }
}

/// Layers one behind the other: on images first, on vectors then.
#[derive(Module, Debug)]
pub struct Sequence {
    /// What works on images.
    pub features: Vec<Feature>,
    /// What works on vectors.
    pub classifier: Full,
}

impl Sequence {
    fn forward(&self, pass: &mut Pass, images: Tensor<4>) -> Tensor<2> {
        let x = self.features.iter().fold(images, |x, layer| layer.forward(pass, x)).flatten(1, 3);
        match &self.classifier {
            Full::One(last) => last.forward(pass, x),
            Full::Several(layers) => layers.iter().fold(x, |x, layer| layer.forward(pass, x)),
        }
    }
}

/// A layer that takes and gives images.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub enum Feature {
    Conv(Conv),
    Norm(Norm),
    Relu(Relu),
    MaxPool(MaxPool),
    AveragePool(AveragePool),
}

impl Feature {
    fn forward(&self, pass: &mut Pass, x: Tensor<4>) -> Tensor<4> {
        match self {
            Feature::Conv(conv) => conv.forward(pass, x),
            Feature::Norm(norm) => norm.forward(pass, x),
            Feature::Relu(_) => relu(x),
            Feature::MaxPool(pool) => pool.forward(x),
            Feature::AveragePool(pool) => pool.forward(x),
        }
    }
}

/// The fully connected layers behind all others.
#[derive(Module, Debug)]
pub enum Full {
    /// The last one alone.
    One(Linear),
    /// With what stands before it.
    Several(Vec<Head>),
}

/// A layer that takes and gives vectors.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub enum Head {
    Linear(Linear),
    Relu(Relu),
    Dropout(Dropout),
}

impl Head {
    fn forward(&self, pass: &mut Pass, x: Tensor<2>) -> Tensor<2> {
        match self {
            Head::Linear(linear) => linear.forward(pass, x),
            Head::Relu(_) => relu(x),
            Head::Dropout(dropout) => pass.dropout(x, dropout.rate),
        }
    }
}

/// Dropout.
#[derive(Module, Debug)]
pub struct Dropout {
    /// The share that is dropped.
    pub rate: f32,
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
    pub fn build(&self, [channels, height, width]: [usize; 3], classes: usize, seed: u64) -> Classifier {
        let (mut begin, mut features) = (Begin::new(seed), Vec::new());
        let (mut from, mut h, mut w) = (channels, height, width);
        for (number, group) in self.groups.iter().enumerate() {
            for to in group {
                match self.norm {
                    true => {
                        features.push(Feature::Conv(Conv::bare(&mut begin, [from, *to, 3], 1, 1)));
                        features.push(Feature::Norm(Norm::new(&mut begin, *to)));
                    }
                    false => features.push(Feature::Conv(Conv::new(&mut begin, [from, *to, 3], 1, 1))),
                }
                features.push(Feature::Relu(Relu::new()));
                from = *to;
            }
            if number + 1 < self.groups.len() || self.last_pooling {
                features.push(Feature::MaxPool(MaxPool { window: 2, stride: 2, padding: 0 }));
                (h, w) = (h / 2, w / 2);
            }
        }
        if let Some(side) = self.side {
            features.push(Feature::AveragePool(AveragePool { side }));
            (h, w) = (side, side);
        }
        let (mut head, mut length) = (Vec::new(), from * h * w);
        for to in &self.dense {
            head.push(Head::Linear(Linear::new(&mut begin, length, *to)));
            head.extend([Head::Relu(Relu::new()), Head::Dropout(Dropout { rate: self.dropout })]);
            length = *to;
        }
        let last = Linear::output(&mut begin, length, classes);
        let classifier = match head.is_empty() {
            true => Full::One(last),
            false => {
                head.push(Head::Linear(last));
                Full::Several(head)
            }
        };
        Classifier::Sequence(Sequence { features, classifier })
    }
}

/// What some convolutions make of the input, plus the input or what the shortcut makes of it, rectified.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct Block {
    pub conv1: Conv,
    pub bn1: Norm,
    pub conv2: Conv,
    pub bn2: Norm,
    /// Of a bottleneck.
    pub conv3: Option<Conv>,
    pub bn3: Option<Norm>,
    /// The shortcut, where the input is of another shape; without one, every second point is taken.
    pub downsample: Vec<Feature>,
}

impl Block {
    /// Two 3x3 convolutions.
    fn two(begin: &mut Begin, from: usize, to: usize) -> Self {
        let stride = if from == to { 1 } else { 2 };
        Block {
            conv1: Conv::bare(begin, [from, to, 3], stride, 1),
            bn1: Norm::new(begin, to),
            conv2: Conv::bare(begin, [to, to, 3], 1, 1),
            bn2: Norm::new(begin, to),
            conv3: None,
            bn3: None,
            downsample: Vec::new(),
        }
    }

    /// A 3x3 convolution between two 1x1 convolutions, from and to more channels.
    fn bottleneck(begin: &mut Begin, from: usize, width: usize, stride: usize) -> Self {
        let to = 4 * width;
        let block = Block {
            conv1: Conv::bare(begin, [from, width, 1], 1, 0),
            bn1: Norm::new(begin, width),
            conv2: Conv::bare(begin, [width, width, 3], stride, 1),
            bn2: Norm::new(begin, width),
            conv3: Some(Conv::bare(begin, [width, to, 1], 1, 0)),
            bn3: Some(Norm::new(begin, to)),
            downsample: Vec::new(),
        };
        if from == to {
            return block;
        }
        let project = Conv::bare(begin, [from, to, 1], stride, 0);
        let downsample = vec![Feature::Conv(project), Feature::Norm(Norm::new(begin, to))];
        Block { downsample, ..block }
    }

    fn forward(&self, pass: &mut Pass, x: Tensor<4>) -> Tensor<4> {
        let ([_, from, ..], [to, ..]) = (x.dims(), self.conv2.weight.dims());
        let short = match self.conv3.is_none() && from != to {
            true => subsample(x.clone(), to),
            false => self.downsample.iter().fold(x.clone(), |x, layer| layer.forward(pass, x)),
        };
        let x = self.conv1.forward(pass, x);
        let x = relu(self.bn1.forward(pass, x));
        let x = self.conv2.forward(pass, x);
        let x = self.bn2.forward(pass, x);
        let x = match (&self.conv3, &self.bn3) {
            (Some(conv3), Some(bn3)) => {
                let x = conv3.forward(pass, relu(x));
                bn3.forward(pass, x)
            }
            _ => x,
        };
        relu(x + short)
    }
}

/// Images through all blocks of some stages, and the mean of what comes out of each channel.
fn through(stages: &[&[Block]], pass: &mut Pass, x: Tensor<4>) -> Tensor<2> {
    let x = stages.iter().copied().flatten().fold(x, |x, block| block.forward(pass, x));
    AveragePool { side: 1 }.forward(x).flatten(1, 3)
}

/// A ResNet for small images: three stages of blocks of two convolutions.
#[derive(Clone, Debug, PartialEq)]
pub struct SmallResNet {
    /// Blocks in each stage: 3 makes ResNet20, 7 makes ResNet44.
    pub blocks: usize,
}

/// The network of a [`SmallResNet`].
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct ThreeStages {
    pub conv1: Conv,
    pub bn1: Norm,
    pub layer1: Vec<Block>,
    pub layer2: Vec<Block>,
    pub layer3: Vec<Block>,
    pub linear: Linear,
}

impl SmallResNet {
    /// The network for images of this shape.
    pub fn build(&self, shape: [usize; 3], classes: usize, seed: u64) -> Classifier {
        let mut begin = Begin::new(seed);
        let conv1 = Conv::bare(&mut begin, [shape[0], 16, 3], 1, 1);
        let bn1 = Norm::new(&mut begin, 16);
        let mut stage = |from: usize, to: usize| -> Vec<Block> {
            let block = |number| Block::two(&mut begin, if number == 0 { from } else { to }, to);
            (0..self.blocks).map(block).collect()
        };
        let [layer1, layer2, layer3] = [(16, 16), (16, 32), (32, 64)].map(|(from, to)| stage(from, to));
        let linear = Linear::output(&mut begin, 64, classes);
        Classifier::ThreeStages(ThreeStages { conv1, bn1, layer1, layer2, layer3, linear })
    }
}

impl ThreeStages {
    fn forward(&self, pass: &mut Pass, images: Tensor<4>) -> Tensor<2> {
        let x = self.conv1.forward(pass, images);
        let x = relu(self.bn1.forward(pass, x));
        let x = through(&[&self.layer1, &self.layer2, &self.layer3], pass, x);
        self.linear.forward(pass, x)
    }
}

/// ResNet50: four stages of bottleneck blocks behind a pooling.
#[derive(Module, Debug)]
#[allow(missing_docs)]
pub struct FourStages {
    pub conv1: Conv,
    pub bn1: Norm,
    pub pool: MaxPool,
    pub layer1: Vec<Block>,
    pub layer2: Vec<Block>,
    pub layer3: Vec<Block>,
    pub layer4: Vec<Block>,
    pub fc: Linear,
}

impl FourStages {
    fn forward(&self, pass: &mut Pass, images: Tensor<4>) -> Tensor<2> {
        let x = self.conv1.forward(pass, images);
        let x = self.pool.forward(relu(self.bn1.forward(pass, x)));
        let x = through(&[&self.layer1, &self.layer2, &self.layer3, &self.layer4], pass, x);
        self.fc.forward(pass, x)
    }
}

/// ResNet50 for images of about 224x224.
pub(super) fn resnet50(shape: [usize; 3], classes: usize, seed: u64) -> Classifier {
    let mut begin = Begin::new(seed);
    let conv1 = Conv::bare(&mut begin, [shape[0], 64, 7], 2, 3);
    let bn1 = Norm::new(&mut begin, 64);
    let mut stage = |from: usize, width: usize, blocks: usize, stride: usize| -> Vec<Block> {
        let block = |number| match number {
            0 => Block::bottleneck(&mut begin, from, width, stride),
            _ => Block::bottleneck(&mut begin, 4 * width, width, 1),
        };
        (0..blocks).map(block).collect()
    };
    let layer1 = stage(64, 64, 3, 1);
    let layer2 = stage(256, 128, 4, 2);
    let layer3 = stage(512, 256, 6, 2);
    let layer4 = stage(1024, 512, 3, 2);
    let fc = Linear::output(&mut begin, 2048, classes);
    let pool = MaxPool { window: 3, stride: 2, padding: 1 };
    Classifier::FourStages(FourStages { conv1, bn1, pool, layer1, layer2, layer3, layer4, fc })
}

/// AlexNet for images of about 224x224.
pub(super) fn alexnet(shape: [usize; 3], classes: usize, seed: u64) -> Classifier {
    let mut begin = Begin::new(seed);
    let mut conv = |shape, stride, padding| Feature::Conv(Conv::new(&mut begin, shape, stride, padding));
    let pool = || Feature::MaxPool(MaxPool { window: 3, stride: 2, padding: 0 });
    let rectify = || Feature::Relu(Relu::new());
    let features = vec![
        conv([shape[0], 64, 11], 4, 2),
        rectify(),
        pool(),
        conv([64, 192, 5], 1, 2),
        rectify(),
        pool(),
        conv([192, 384, 3], 1, 1),
        rectify(),
        conv([384, 256, 3], 1, 1),
        rectify(),
        conv([256, 256, 3], 1, 1),
        rectify(),
        pool(),
        Feature::AveragePool(AveragePool { side: 6 }),
    ];
    let drop = || Head::Dropout(Dropout { rate: 0.5 });
    let classifier = Full::Several(vec![
        drop(),
        Head::Linear(Linear::new(&mut begin, 256 * 6 * 6, 4096)),
        Head::Relu(Relu::new()),
        drop(),
        Head::Linear(Linear::new(&mut begin, 4096, 4096)),
        Head::Relu(Relu::new()),
        Head::Linear(Linear::output(&mut begin, 4096, classes)),
    ]);
    Classifier::Sequence(Sequence { features, classifier })
}

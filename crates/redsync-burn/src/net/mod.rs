//! Networks: Burn modules with our operations inside, by name and for the data, and the pass that carries an input through them.
//! What must hold: parameters are met in the order of the layers of `redsync_engine::models`; every parameter that a pass uses is watched
//! when the pass is.
//!
//! They are used as any module of Burn:
//!
//! ```
//! use burn::module::Module;
//! use burn::optim::{GradientsParams, SgdConfig};
//! use burn::tensor::{Device, Distribution, Tensor};
//! use redsync_burn::net::{Architecture, Pass};
//! use redsync_burn::ops::loss::cross_entropy;
//!
//! let mut net = Architecture::named("digits-cnn")?.classifier("digits-cnn", [1, 8, 8], 10, 1)?;
//! let mut optimizer = SgdConfig::new().init();
//! let images = Tensor::<4>::random([4, 1, 8, 8], Distribution::Default, &Device::flex().autodiff());
//! for step in 0..2 {
//!     let (loss, _) = cross_entropy(net.forward(&mut Pass::training(step), images.clone()), &[3, 1, 4, 1]);
//!     let gradients = GradientsParams::from_grads(loss.backward(), &net);
//!     net = optimizer.step(0.02, net, gradients);
//! }
//! let scores = net.valid().forward(&mut Pass::judging(), images.inner());
//! assert_eq!(scores.dims(), [4, 10]);
//! # Ok::<(), redsync_burn::net::UnknownModel>(())
//! ```
//!
//! They work on Burn's CPU backend, and a forward pass of tensors that are elsewhere panics. Several ranks train one with
//! [`Distributed`](crate::Distributed), which [`Net::layer`] tells what the layers are called.

mod begin;
mod blocks;
mod classifier;
mod config;
mod language;
mod pass;
mod transformer;

pub use blocks::{AveragePool, Conv, Linear, MaxPool, Norm};
pub use classifier::{
    Block, Classifier, Dropout, Feature, FourStages, Full, Head, Sequence, SmallResNet, ThreeStages, Vgg,
};
pub use config::{Architecture, Input, NAMES, UnknownModel};
pub use language::{Embedding, Language, Lstm, LstmLayer, LstmNet, Offset, State};
pub use pass::Pass;
pub use transformer::{Attention, Gpt, GptBlock, GptNet, LayerNorm, Projection, Wide};

use burn::module::Module;
use redsync_engine::{Kind, Layer};

/// A network: what goes in and how it gets through.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // There is one of it.
pub enum Net {
    /// Images in, classes out.
    Images(Classifier),
    /// Words in, next words out.
    Words(Language),
}

impl Net {
    /// A layer of a network of this module, or of a part of it such as [`Classifier`], by the name and kind that it has in
    /// `redsync_engine::models`: for [`Setup::layers`](crate::Setup::layers). The embedding of a language model is its output, since it is
    /// also the matrix of the scores.
    pub fn layer(layer: Layer) -> Layer {
        // Variants of enums stand in a path, too.
        let fields = layer.name.split('.').filter(|part| !part.starts_with(char::is_uppercase));
        let fields: Vec<&str> = fields.collect();
        let (name, kind) = match fields[..] {
            ["rnn", depth, part] => (format!("rnn.{part}_l{depth}"), layer.kind),
            ["encoder" | "wte", "weight"] => (fields.join("."), Kind::Output),
            _ => (fields.join("."), layer.kind),
        };
        Layer { name, kind, ..layer }
    }
}

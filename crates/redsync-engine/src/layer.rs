//! What the synchronizer has to know of a layer.

use redsync_core::Momentum;

/// What a layer's parameters are, which decides how they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A matrix or a convolution kernel: compressed if it is large enough.
    Weight,
    /// A bias or a normalization parameter: always dense.
    BiasOrNorm,
    /// The last weight of the network: compressed, never quantized to one mean.
    Output,
}

/// One parameter tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its name, the same on every rank.
    pub name: String,
    /// Its number of elements.
    pub size: usize,
    /// What it is.
    pub kind: Kind,
    /// Its momentum, if that is another than the configuration's.
    pub momentum: Option<Momentum>,
}

impl Layer {
    /// A layer of a name, size and kind.
    pub fn new(name: impl Into<String>, size: usize, kind: Kind) -> Self {
        Layer { name: name.into(), size, kind, momentum: None }
    }

    /// The same with a momentum of its own.
    pub fn with_momentum(self, momentum: Momentum) -> Self {
        Layer { momentum: Some(momentum), ..self }
    }
}

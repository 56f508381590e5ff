//! The optimizers that a training can choose by name; what they do to weights is the engine's.

use redsync_core::{Adam, Momentum};

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimizer {
    /// Plain gradient descent.
    Sgd,
    /// With momentum.
    Momentum,
    /// With Nesterov's momentum.
    Nesterov,
    /// Adam with decay of the weights apart from the gradients.
    AdamW,
}

impl Optimizer {
    /// The names of all optimizers.
    pub const NAMES: [&str; 4] = ["sgd", "momentum", "nesterov", "adamw"];

    /// The optimizer of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Optimizer::Sgd, Optimizer::Momentum, Optimizer::Nesterov, Optimizer::AdamW]
            .into_iter()
            .find(|known| known.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Optimizer::Sgd => "sgd",
            Optimizer::Momentum => "momentum",
            Optimizer::Nesterov => "nesterov",
            Optimizer::AdamW => "adamw",
        }
    }

    /// The same with its coefficients, as residuals take it; only AdamW has a second.
    pub fn momentum(self, coefficient: f32, beta2: f32) -> Momentum {
        match self {
            Optimizer::Sgd => Momentum::None,
            Optimizer::Momentum => Momentum::Plain(coefficient),
            Optimizer::Nesterov => Momentum::Nesterov(coefficient),
            Optimizer::AdamW => Momentum::Adam(Adam { beta1: coefficient, beta2, ..Adam::default() }),
        }
    }
}

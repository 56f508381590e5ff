//! How much known models compute: operations of a forward pass of one sample, and the batch the paper trained with.

/// What one rank computes.
#[derive(Clone, Copy)]
pub struct Work {
    /// Floating-point operations of the forward pass of one sample; the backward pass has twice as many.
    pub operations: f64,
    /// Of the sustained operations of a platform, what this kind of network reaches.
    pub efficiency: f64,
    /// Samples per rank and step.
    pub batch: u32,
}

/// Operations are multiplications plus additions; the paper's table counts some networks so and some in multiply-adds, see
/// docs/cost-model.md. Efficiencies are assumed: convolutions of VGG need fewer operations than counted (Winograd), large
/// fully connected layers and recurrent steps with small batches wait for memory.
const KNOWN: [(&str, Work); 9] = [
    ("vgg16-cifar", Work { operations: 0.63e9, efficiency: 1.0, batch: 64 }),
    ("resnet44", Work { operations: 0.20e9, efficiency: 0.5, batch: 64 }),
    ("alexnet", Work { operations: 1.43e9, efficiency: 0.6, batch: 32 }),
    ("vgg16", Work { operations: 31.0e9, efficiency: 2.0, batch: 32 }),
    ("resnet50", Work { operations: 8.22e9, efficiency: 1.0, batch: 32 }),
    ("lstm-ptb", Work { operations: 3.57e9, efficiency: 0.4, batch: 5 }),
    ("lstm-wiki2", Work { operations: 6.0e9, efficiency: 0.4, batch: 5 }),
    // A sample is a window of 64 bytes, and of 128.
    ("gpt-tiny", Work { operations: 0.13e9, efficiency: 0.5, batch: 4 }),
    ("gpt-small", Work { operations: 2.8e9, efficiency: 0.5, batch: 2 }),
];

/// The work of a model by name.
pub fn of(model: &str) -> Option<Work> {
    KNOWN.iter().find(|(name, _)| *name == model).map(|(_, work)| *work)
}

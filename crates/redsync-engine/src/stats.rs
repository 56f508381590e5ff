//! What one step cost, per layer and in all. Cheap enough to be always on: a few clock readings per layer.

use serde::Serialize;

/// One layer at one step. Times are in milliseconds; what a frame or bucket of several layers shares is divided by size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerStats {
    /// Bytes of this rank's message, or of the dense gradient.
    pub bytes_sent: u64,
    /// Bytes of the other ranks' messages, or of the dense sum.
    pub bytes_received: u64,
    /// Elements sent.
    pub elements: u64,
    /// Accumulating, selecting and quantizing; copying for a dense layer.
    pub select_ms: f64,
    /// Encoding.
    pub encode_ms: f64,
    /// From the start of the exchange to its end, hidden or not.
    pub exchange_ms: f64,
    /// Decoding the messages of all ranks.
    pub decode_ms: f64,
    /// Applying the update.
    pub apply_ms: f64,
}

impl LayerStats {
    /// Adds another layer's.
    pub fn add(&mut self, other: &LayerStats) {
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        self.elements += other.elements;
        self.select_ms += other.select_ms;
        self.encode_ms += other.encode_ms;
        self.exchange_ms += other.exchange_ms;
        self.decode_ms += other.decode_ms;
        self.apply_ms += other.apply_ms;
    }
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepStats {
    /// The step.
    pub step: u64,
    /// Its layers, in their order.
    pub layers: Vec<LayerStats>,
    /// From the start of the first exchange to the end of the last, hidden or not.
    pub exchange_ms: f64,
    /// How long `finish` had to wait: what was not hidden behind the backward pass.
    pub exposed_ms: f64,
}

impl StepStats {
    /// All layers together.
    pub fn total(&self) -> LayerStats {
        let mut total = LayerStats::default();
        self.layers.iter().for_each(|layer| total.add(layer));
        total
    }
}

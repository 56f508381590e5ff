//! What one step cost, per layer and in all. Cheap enough to be always on: a few clock readings per layer.

use serde::{Deserialize, Serialize};

/// Where the bytes of one rank went: its messages and dense gradients, each counted once, however many ranks they go to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// After the warm-up: chosen elements of compressed layers.
    pub messages: u64,
    /// After the warm-up: biases, normalization parameters, small and dense layers.
    pub rest: u64,
    /// After the warm-up: second moments of Adam.
    pub moments: u64,
    /// After the warm-up: headers of frames and messages.
    pub headers: u64,
    /// Everything that was sent during the warm-up.
    pub warm_up: u64,
    /// What dense training sends in the same steps, 32 bits per element.
    pub dense: u64,
}

impl Traffic {
    /// Everything that was sent.
    pub fn sent(&self) -> u64 {
        self.messages + self.rest + self.moments + self.headers + self.warm_up
    }

    /// What was sent, by its names, in the order in which people look for it; only Adam has the last.
    pub fn parts(&self) -> [(&'static str, u64); 5] {
        [
            ("warm-up", self.warm_up),
            ("messages", self.messages),
            ("rest", self.rest),
            ("headers", self.headers),
            ("second moments", self.moments),
        ]
    }

    /// How many times less than dense training was sent; 1 if there was nothing to send.
    ///
    /// ```
    /// use redsync_engine::Traffic;
    /// let traffic = Traffic { messages: 6, rest: 3, headers: 1, dense: 1000, ..Traffic::default() };
    /// assert_eq!((traffic.sent(), traffic.ratio()), (10, 100.0));
    /// ```
    pub fn ratio(&self) -> f64 {
        if self.sent() == 0 { 1.0 } else { self.dense as f64 / self.sent() as f64 }
    }

    /// Adds another step's, or another run's.
    pub fn add(&mut self, other: &Traffic) {
        self.messages += other.messages;
        self.rest += other.rest;
        self.moments += other.moments;
        self.headers += other.headers;
        self.warm_up += other.warm_up;
        self.dense += other.dense;
    }
}

/// One layer at one step. Times are in milliseconds; what a frame or bucket of several layers shares is divided by size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerStats {
    /// Bytes of this rank's message with its header, or of the dense gradient. The first layer of a frame carries the frame's header.
    pub bytes_sent: u64,
    /// How many of them are headers.
    pub header_bytes: u64,
    /// How many of them are second moments.
    pub moment_bytes: u64,
    /// Bytes of the other ranks' messages, or of the dense sum.
    pub bytes_received: u64,
    /// With hosts: bytes for the ranks of the same host, which are not among those above. The first layer of a frame has them.
    pub inside_bytes: u64,
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
        self.header_bytes += other.header_bytes;
        self.moment_bytes += other.moment_bytes;
        self.bytes_received += other.bytes_received;
        self.inside_bytes += other.inside_bytes;
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
    /// Where its bytes went.
    pub traffic: Traffic,
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

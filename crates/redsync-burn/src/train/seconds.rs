//! Time by phase: durations of steps go in, sums and means come out.
//! What must hold: a [`Seconds`] always holds seconds; records that tell milliseconds turn them on their way out and in.

use serde::{Deserialize, Serialize};

/// Seconds by phase. Selecting, encoding and decoding run beside the backward pass; exchange is the time in which there was nothing
/// left to do but to wait for other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Seconds {
    pub forward: f64,
    pub backward: f64,
    pub select: f64,
    pub encode: f64,
    pub exchange: f64,
    pub decode: f64,
    pub apply: f64,
    pub update: f64,
    pub total: f64,
}

impl Seconds {
    /// The names of the phases.
    pub const PHASES: [&str; 8] =
        ["forward", "backward", "select", "encode", "exchange", "decode", "apply", "update"];

    /// The phases, in the order of their names.
    pub fn phases(&self) -> [f64; 8] {
        let Seconds { forward, backward, select, encode, exchange, decode, apply, update, .. } = *self;
        [forward, backward, select, encode, exchange, decode, apply, update]
    }

    /// Adds another.
    pub fn add(&mut self, other: &Seconds) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.select += other.select;
        self.encode += other.encode;
        self.exchange += other.exchange;
        self.decode += other.decode;
        self.apply += other.apply;
        self.update += other.update;
        self.total += other.total;
    }

    /// All of them, times a factor.
    pub fn times(&self, factor: f64) -> Seconds {
        Seconds {
            forward: factor * self.forward,
            backward: factor * self.backward,
            select: factor * self.select,
            encode: factor * self.encode,
            exchange: factor * self.exchange,
            decode: factor * self.decode,
            apply: factor * self.apply,
            update: factor * self.update,
            total: factor * self.total,
        }
    }
}

/// For serde: [`Seconds`] that stand as milliseconds in a record.
pub mod milliseconds {
    use super::Seconds;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes milliseconds.
    pub fn serialize<S: Serializer>(seconds: &Seconds, to: S) -> Result<S::Ok, S::Error> {
        seconds.times(1e3).serialize(to)
    }

    /// Reads milliseconds.
    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Seconds, D::Error> {
        Seconds::deserialize(from).map(|ms| ms.times(1e-3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Record {
        #[serde(rename = "ms", with = "milliseconds")]
        seconds: Seconds,
    }

    #[test]
    fn a_record_in_milliseconds_comes_back_in_seconds() {
        let seconds = Seconds { forward: 0.25, total: 2.0, ..Seconds::default() };
        let text = serde_json::to_value(Record { seconds }).expect("JSON");
        assert_eq!((&text["ms"]["forward"], &text["ms"]["total"]), (&250.0.into(), &2000.0.into()));
        let back: Record = serde_json::from_value(text).expect("a record");
        assert_eq!(back.seconds, seconds);
    }
}

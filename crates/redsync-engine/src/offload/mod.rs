//! Layers whose u and v are in the memory of a device. A device brings a few kernels ([`Kernels`]); [`Offloaded`] makes a compressor of
//! them. The device accumulates and finds the elements above a floor in one pass; only those cross to the host, which chooses, rounds
//! and writes the message with the code that it has for its own layers, and says in return what was sent.
//! What must hold: messages, u and v have the bits of the host's; in the usual step at most 12 bytes per element that is sent cross.

mod layer;
mod resident;

pub use layer::Offloaded;

use crate::source::Source;
use redsync_core::{Config, IndexCode, Momentum, Phase, StatLanes};
use thiserror::Error;

/// A device could not do what it was asked for, in a sentence. What u and v are then is not known.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// Whether a layer of this configuration is for a device: what is sent whole is as well compressed on the host, and Adam is there only.
pub fn serves(config: &Config) -> bool {
    config.indices != IndexCode::Every && !matches!(config.momentum, Momentum::Adam(_))
}

/// What a pass does to u and v. Every operation below is one of f32, rounded to nearest: no fused multiply-add, no flushed subnormal.
///
/// ```text
/// g = scale * gradient; v = carry * v
/// no momentum:  v = v + g
/// plain:        u = m * u + g;    v = v + u
/// Nesterov:     u = m * (u + g);  v = v + (u + g)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// Which rule, and m; never Adam.
    pub momentum: Momentum,
    /// Multiplies the gradient as it enters.
    pub scale: f32,
    /// Multiplies what v held before; 1 in most steps.
    pub carry: f32,
    /// u and v as they are before the pass are wanted by [`Kernels::take_back`].
    pub save: bool,
}

/// What is looked for in v: elements that compete in a phase and are greater than a floor. An element's bits as
/// [`Phase::lens`] shows them, `(bits & keep) ^ flip`, are compared as i32 with those of the floor, which is not negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seek {
    /// The signs that compete.
    pub phase: Phase,
    /// Elements greater than this are found.
    pub floor: f32,
    /// As many can be handed out; not zero but for a layer without elements.
    pub capacity: usize,
    /// Fewer need not be handed out.
    pub enough: usize,
}

impl Seek {
    /// Whether so many elements can be handed out, and have to be.
    pub fn takes(&self, count: usize) -> bool {
        (self.enough..=self.capacity).contains(&count)
    }
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// How many elements there are, handed out or not.
    pub count: usize,
    /// Their indices and values, in any order; none if there are more than the capacity, and none are needed if there are not enough. The
    /// device keeps them, in this order, for [`Kernels::take_out`].
    pub elements: Vec<(u32, f32)>,
}

/// Some of the bits by which magnitudes are counted, from `shift` on: `bits` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digit {
    /// Bits below.
    pub shift: u32,
    /// Width.
    pub bits: u32,
}

impl Digit {
    /// A magnitude in three digits, the highest first. Its sign is not among the 31 bits.
    pub const ALL: [Digit; 3] =
        [Digit { shift: 20, bits: 11 }, Digit { shift: 9, bits: 11 }, Digit { shift: 0, bits: 9 }];
    /// No digit has more values.
    pub const BINS: usize = 1 << 11;
}

/// Where the largest elements end: at one value of a digit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edge {
    /// That value.
    pub bin: u32,
    /// Elements with a higher one.
    pub above: usize,
    /// Those, and the elements that have it.
    pub count: usize,
}

impl Edge {
    /// The edge in a histogram: from the highest bin down to the one with which there are `keep` elements, or to the last. `above` were
    /// counted before.
    pub fn find(bins: &[u32], above: usize, keep: usize) -> Edge {
        let mut edge = Edge { bin: bins.len() as u32, above, count: above };
        while edge.bin > 0 && edge.count < keep {
            edge.bin -= 1;
            edge.above = edge.count;
            edge.count += bins[edge.bin as usize] as usize;
        }
        edge
    }
}

/// What was sent of the elements that were taken out. Where it is not the whole element, v minus that stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sent<'a> {
    /// All: zero stays.
    Whole,
    /// One value for all.
    Same(f32),
    /// Each rounded to the nearest bf16, ties to even, but never to an infinity: the largest bf16 instead.
    Rounded,
    /// One of a few values for each.
    Listed {
        /// At most 256.
        values: &'a [f32],
        /// Which of them, for each element that was handed out, in that order; meaningless where it was not taken.
        which: &'a [u8],
    },
}

/// u and v of one layer on a device, zeros at first, and what can be done with them there. A layer may have no elements.
pub trait Kernels: Send {
    /// Makes a u of zeros; there is none before.
    fn make_u(&mut self) -> Result<(), DeviceError>;

    /// Whether what several layers found is waited for at once, so that to look once more costs a wait of its own.
    fn waits_for_many(&self) -> bool {
        false
    }

    /// The next call will be [`Kernels::accumulate`] with the same arguments: the pass may begin. Comes for several layers before the
    /// first of them is accumulated, so that what all of them found can be had at once.
    fn announce(&mut self, _: &dyn Source, _: &Pass, _: Option<Seek>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Accumulates a gradient, which is of the layer's length, by a rule, and finds what is sought in the new v, in the same pass. A
    /// source in the memory of the host is copied to the device. Returns whether every element of the new v is finite; what was
    /// found means nothing if not.
    fn accumulate(
        &mut self,
        source: &dyn Source,
        pass: &Pass,
        seek: Option<Seek>,
        found: &mut Found,
    ) -> Result<bool, DeviceError>;

    /// Finds what is sought in v as it is.
    fn collect(&mut self, seek: Seek, found: &mut Found) -> Result<(), DeviceError>;

    /// Where the largest `keep` elements that compete end. Elements that are not zero are counted by a digit of their bits as the phase
    /// shows them, among those whose higher bits are `prefix`; `above`, which is less than `keep`, are larger than all of these. What
    /// [`Edge::find`] says of the counts is all that crosses.
    fn edge(
        &mut self,
        phase: Phase,
        digit: Digit,
        prefix: u32,
        above: usize,
        keep: usize,
    ) -> Result<Edge, DeviceError>;

    /// How many elements that compete are greater than each of some thresholds, which are not negative.
    fn count_above(&mut self, phase: Phase, thresholds: &[f32]) -> Result<Vec<usize>, DeviceError>;

    /// Sum, maximum and number of the elements that compete, for every chunk of [`StatLanes::CHUNK`] elements of v.
    fn stats(&mut self, phase: Phase) -> Result<Vec<StatLanes>, DeviceError>;

    /// Takes out, of the elements handed out last, `least` (index and value) and all that are larger in magnitude or, at the same
    /// magnitude, have a smaller index. Leaves in v what was not sent, and clears u there if asked to.
    fn take_out(&mut self, least: (u32, f32), sent: Sent<'_>, clear_u: bool) -> Result<(), DeviceError>;

    /// Replaces elements of v, by rising indices, and clears u there if asked to.
    fn put(&mut self, indices: &[u32], values: &[f32], clear_u: bool) -> Result<(), DeviceError>;

    /// Adds to elements of v, by rising indices.
    fn add(&mut self, indices: &[u32], values: &[f32]) -> Result<(), DeviceError>;

    /// Multiplies u.
    fn scale_u(&mut self, factor: f32) -> Result<(), DeviceError>;

    /// Brings u and v back as they were before the last pass, which had to save them.
    fn take_back(&mut self) -> Result<(), DeviceError>;

    /// A gradient of the layer's length, as f32.
    fn gradient(&self, source: &dyn Source) -> Result<Vec<f32>, DeviceError>;

    /// All of u; nothing if there is none.
    fn read_u(&self) -> Result<Vec<f32>, DeviceError>;

    /// All of v.
    fn read_v(&self) -> Result<Vec<f32>, DeviceError>;

    /// Replaces all of u, if there is one, and of v; what is None stays.
    fn write(&mut self, u: Option<&[f32]>, v: Option<&[f32]>) -> Result<(), DeviceError>;
}

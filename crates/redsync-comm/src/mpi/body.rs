//! What follows the headers of a collective. Peers' headers and inline payloads come in, the caller's slot is filled when
//! everything has arrived. A body never blocks: it starts transfers and is asked to go on.

use super::header::INLINE;
use super::library::{Lent, Library, Memory, failed};
use super::reduce::Reduce;
use crate::{CommError, Gathered, Slot, sum};
use std::ffi::c_int;
use std::sync::Arc;

/// Bytes per MPI message, whose count is an `i32`.
const MESSAGE: usize = 16 << 20;

/// The MPI tags of one collective; each collective in flight has its own.
#[derive(Clone, Copy)]
pub(super) struct Tags {
    pub header: c_int,
    pub payload: c_int,
    pub result: c_int,
}

/// What a peer is told about this rank's part: how many bytes or values there are for it, and the payload itself when that is
/// short, else nothing.
pub(super) struct Letter<'a> {
    pub length: usize,
    pub inline: &'a [u8],
}

impl<'a> Letter<'a> {
    fn of(message: &'a [u8], short: usize) -> Letter<'a> {
        Letter { length: message.len(), inline: if message.len() <= short { message } else { &[] } }
    }
}

/// One collective after its header.
pub(super) trait Body {
    /// What goes to a peer along with the header. The same for all peers, but for an all-to-all.
    fn letter(&self, peer: usize) -> Letter<'_>;

    /// Starts what needs no answer from anybody.
    fn begin(&mut self, lib: &Library, tags: Tags) -> Result<(), CommError>;

    /// A peer takes part, with so many bytes or values, and this inline payload if it is short.
    fn heard(&mut self, lib: &Library, peer: usize, length: usize, inline: &[u8]) -> Result<(), CommError>;

    /// Moves on; true when something happened.
    fn progress(&mut self, lib: &Library) -> Result<bool, CommError>;

    /// The peers that have taken part but from which something is missing.
    fn missing(&self) -> Vec<usize>;

    /// Tells the caller which ranks are missing.
    fn report(&self, missing: Vec<usize>);

    /// Whether no transfer is open and the slot is filled.
    fn done(&self) -> bool;

    /// Whether the slot has a result or an error.
    fn filled(&self) -> bool;

    /// Fills the slot with an error, unless it has its result.
    fn fail(&self, cause: CommError);
}

/// A collective as the caller hands it over: what to send, and where to leave the result.
pub(super) enum Work {
    Gather(Vec<u8>, Arc<Slot<Gathered>>),
    Deal(Vec<Vec<u8>>, Arc<Slot<Gathered>>),
    ShortSum(Vec<f32>, Arc<Slot<Vec<f32>>>),
    Sum(Vec<f32>, Arc<Slot<Vec<f32>>>),
    Meet(Arc<Slot<()>>),
}

impl Work {
    /// Made on the communication thread, because what is lent to MPI stays there. Messages of an all-to-all that are not longer
    /// than `short` travel with what the ranks tell each other first.
    pub fn body(self, short: usize) -> Box<dyn Body> {
        match self {
            Work::Gather(message, slot) => Box::new(Gather::new(message, slot)),
            Work::Deal(messages, slot) => Box::new(Deal::new(messages, slot, short)),
            Work::ShortSum(values, slot) => Box::new(ShortSum::new(values, slot)),
            Work::Sum(values, slot) => Box::new(Reduce::new(values, slot)),
            Work::Meet(slot) => Box::new(Meet::new(slot)),
        }
    }
}

/// A barrier: the headers are all there is.
struct Meet {
    slot: Arc<Slot<()>>,
    awaited: usize,
}

impl Meet {
    fn new(slot: Arc<Slot<()>>) -> Meet {
        Meet { slot, awaited: usize::MAX }
    }
}

impl Body for Meet {
    fn letter(&self, _peer: usize) -> Letter<'_> {
        Letter::of(&[], 0)
    }

    fn begin(&mut self, lib: &Library, _tags: Tags) -> Result<(), CommError> {
        self.awaited = lib.size - 1;
        Ok(())
    }

    fn heard(&mut self, _: &Library, _: usize, _: usize, _: &[u8]) -> Result<(), CommError> {
        self.awaited -= 1;
        Ok(())
    }

    fn progress(&mut self, _lib: &Library) -> Result<bool, CommError> {
        if self.awaited == 0 {
            self.slot.fill(Ok(()));
        }
        Ok(false)
    }

    fn missing(&self) -> Vec<usize> {
        Vec::new()
    }

    fn report(&self, missing: Vec<usize>) {
        self.slot.set_missing(missing);
    }

    fn done(&self) -> bool {
        self.awaited == 0
    }

    fn filled(&self) -> bool {
        self.slot.is_filled()
    }

    fn fail(&self, cause: CommError) {
        self.slot.fill(Err(cause));
    }
}

/// The messages that this rank receives, one from every rank.
struct Incoming {
    /// Up to which length they come with what is heard first.
    short: usize,
    arriving: Vec<Option<Lent<Vec<u8>, ()>>>,
    arrived: Vec<Option<Arc<Vec<u8>>>>,
    tag: c_int,
    delivered: bool,
}

impl Incoming {
    fn new(short: usize) -> Incoming {
        Incoming { short, arriving: Vec::new(), arrived: Vec::new(), tag: 0, delivered: false }
    }

    fn begin(&mut self, lib: &Library, tag: c_int, own: Arc<Vec<u8>>) {
        self.tag = tag;
        self.arriving.resize_with(lib.size, || None);
        self.arrived.resize(lib.size, None);
        self.arrived[lib.rank] = Some(own);
    }

    fn heard(&mut self, lib: &Library, peer: usize, length: usize, inline: &[u8]) -> Result<(), CommError> {
        if length <= self.short {
            self.arrived[peer] = Some(Arc::new(inline.to_vec()));
            return Ok(());
        }
        let mut message = Vec::new();
        if message.try_reserve_exact(length).is_err() {
            return Err(failed(&format!("no memory for the {length} bytes of rank {peer}")));
        }
        message.resize(length, 0);
        let mut message = Lent::new(message);
        for start in (0..length).step_by(MESSAGE) {
            message.receive(lib, start..length.min(start + MESSAGE), peer, self.tag, ())?;
        }
        self.arriving[peer] = Some(message);
        Ok(())
    }

    fn progress(&mut self, slot: &Slot<Gathered>) -> Result<bool, CommError> {
        let mut moved = false;
        for (arriving, arrived) in self.arriving.iter_mut().zip(&mut self.arrived) {
            let Some(message) = arriving else { continue };
            moved |= message.progress(drop)?;
            if message.idle() {
                *arrived = arriving.take().map(|message| Arc::new(message.take()));
            }
        }
        // Delivered before the last send is done: a slow peer is no reason to wait.
        if !self.delivered && self.arrived.iter().all(Option::is_some) {
            let messages = std::mem::take(&mut self.arrived).into_iter().flatten().collect();
            slot.fill(Ok(Gathered::new(messages)));
            self.delivered = true;
        }
        Ok(moved)
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.arriving.len()).filter(|&peer| self.arriving[peer].is_some()).collect()
    }
}

/// Sends a message that is too long to travel with the header.
fn send_long<M: Memory>(
    message: &mut Lent<M, ()>,
    lib: &Library,
    length: usize,
    peer: usize,
    tag: c_int,
) -> Result<(), CommError> {
    (0..length)
        .step_by(MESSAGE)
        .try_for_each(|start| message.send(lib, start..length.min(start + MESSAGE), peer, tag, ()))
}

/// An allgather: every rank sends its message to every other.
struct Gather {
    slot: Arc<Slot<Gathered>>,
    own: Arc<Vec<u8>>,
    sending: Lent<Arc<Vec<u8>>, ()>,
    incoming: Incoming,
}

impl Gather {
    fn new(message: Vec<u8>, slot: Arc<Slot<Gathered>>) -> Gather {
        let own = Arc::new(message);
        let sending = Lent::new(Arc::clone(&own));
        Gather { slot, own, sending, incoming: Incoming::new(INLINE) }
    }
}

impl Body for Gather {
    fn letter(&self, _peer: usize) -> Letter<'_> {
        Letter::of(&self.own, INLINE)
    }

    fn begin(&mut self, lib: &Library, tags: Tags) -> Result<(), CommError> {
        self.incoming.begin(lib, tags.payload, Arc::clone(&self.own));
        let length = self.own.len();
        if length <= INLINE {
            return Ok(());
        }
        lib.peers().try_for_each(|peer| send_long(&mut self.sending, lib, length, peer, tags.payload))
    }

    fn heard(&mut self, lib: &Library, peer: usize, length: usize, inline: &[u8]) -> Result<(), CommError> {
        self.incoming.heard(lib, peer, length, inline)
    }

    fn progress(&mut self, _lib: &Library) -> Result<bool, CommError> {
        Ok(self.sending.progress(drop)? | self.incoming.progress(&self.slot)?)
    }

    fn missing(&self) -> Vec<usize> {
        self.incoming.missing()
    }

    fn report(&self, missing: Vec<usize>) {
        self.slot.set_missing(missing);
    }

    fn done(&self) -> bool {
        self.incoming.delivered && self.sending.idle()
    }

    fn filled(&self) -> bool {
        self.slot.is_filled()
    }

    fn fail(&self, cause: CommError) {
        self.slot.fill(Err(cause));
    }
}

/// An all-to-all: every rank has a message of its own for every other.
struct Deal {
    slot: Arc<Slot<Gathered>>,
    /// In rank order; this rank's own is taken out.
    sending: Vec<Lent<Vec<u8>, ()>>,
    lengths: Vec<usize>,
    incoming: Incoming,
}

impl Deal {
    fn new(messages: Vec<Vec<u8>>, slot: Arc<Slot<Gathered>>, short: usize) -> Deal {
        let lengths = messages.iter().map(Vec::len).collect();
        let sending = messages.into_iter().map(Lent::new).collect();
        Deal { slot, sending, lengths, incoming: Incoming::new(short) }
    }
}

impl Body for Deal {
    fn letter(&self, peer: usize) -> Letter<'_> {
        Letter::of(self.sending[peer].read(0..self.lengths[peer]), self.incoming.short)
    }

    fn begin(&mut self, lib: &Library, tags: Tags) -> Result<(), CommError> {
        let own = std::mem::replace(&mut self.sending[lib.rank], Lent::new(Vec::new()));
        self.incoming.begin(lib, tags.payload, Arc::new(own.take()));
        let long = |peer: &usize| self.lengths[*peer] > self.incoming.short;
        lib.peers().filter(long).try_for_each(|peer| {
            send_long(&mut self.sending[peer], lib, self.lengths[peer], peer, tags.payload)
        })
    }

    fn heard(&mut self, lib: &Library, peer: usize, length: usize, inline: &[u8]) -> Result<(), CommError> {
        self.incoming.heard(lib, peer, length, inline)
    }

    fn progress(&mut self, _lib: &Library) -> Result<bool, CommError> {
        let mut moved = self.incoming.progress(&self.slot)?;
        for message in &mut self.sending {
            moved |= message.progress(drop)?;
        }
        Ok(moved)
    }

    fn missing(&self) -> Vec<usize> {
        self.incoming.missing()
    }

    fn report(&self, missing: Vec<usize>) {
        self.slot.set_missing(missing);
    }

    fn done(&self) -> bool {
        self.incoming.delivered && self.sending.iter().all(Lent::idle)
    }

    fn filled(&self) -> bool {
        self.slot.is_filled()
    }

    fn fail(&self, cause: CommError) {
        self.slot.fill(Err(cause));
    }
}

/// A sum so short that every rank sends all of it with its header, and everybody adds.
struct ShortSum {
    slot: Arc<Slot<Vec<f32>>>,
    values: Vec<f32>,
    parts: Vec<Option<Vec<f32>>>,
    awaited: usize,
}

impl ShortSum {
    fn new(values: Vec<f32>, slot: Arc<Slot<Vec<f32>>>) -> ShortSum {
        ShortSum { slot, values, parts: Vec::new(), awaited: usize::MAX }
    }
}

impl Body for ShortSum {
    fn letter(&self, _peer: usize) -> Letter<'_> {
        Letter { length: self.values.len(), inline: bytemuck::cast_slice(&self.values) }
    }

    fn begin(&mut self, lib: &Library, _tags: Tags) -> Result<(), CommError> {
        self.parts.resize(lib.size, None);
        self.awaited = lib.size - 1;
        Ok(())
    }

    fn heard(&mut self, _: &Library, peer: usize, _: usize, inline: &[u8]) -> Result<(), CommError> {
        let value = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        self.parts[peer] = Some(inline.chunks_exact(4).map(value).collect());
        self.awaited -= 1;
        Ok(())
    }

    fn progress(&mut self, _lib: &Library) -> Result<bool, CommError> {
        if self.awaited == 0 && !self.parts.is_empty() {
            let parts = std::mem::take(&mut self.parts);
            let parts: Vec<Option<&[f32]>> = parts.iter().map(Option::as_deref).collect();
            let mut values = std::mem::take(&mut self.values);
            sum::in_order(&mut values, &parts);
            self.slot.fill(Ok(values));
        }
        Ok(false)
    }

    fn missing(&self) -> Vec<usize> {
        Vec::new()
    }

    fn report(&self, missing: Vec<usize>) {
        self.slot.set_missing(missing);
    }

    fn done(&self) -> bool {
        self.awaited == 0 && self.parts.is_empty()
    }

    fn filled(&self) -> bool {
        self.slot.is_filled()
    }

    fn fail(&self, cause: CommError) {
        self.slot.fill(Err(cause));
    }
}

//! The long sum. This rank's values come in; rank `r` receives everybody's `r`-th segment (the pieces), adds them in rank
//! order, and sends the result to all. It goes chunk by chunk, so that pieces and results flow at the same time.
//!
//! The values are summed in place: a chunk is received into where it was sent from, once that send is done.

use super::body::{Body, Letter, Tags};
use super::library::{Lent, Library};
use crate::{CommError, Slot, sum};
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

/// Values per chunk: longer than what MPI sends without asking, short enough that adding hides behind sending.
const CHUNK: Range<usize> = 64 << 10..128 << 10;

/// Chunks under way between two ranks, in each direction: one is sent while the one before is added.
const WINDOW: usize = 3;

const WIDTH: usize = size_of::<f32>();

/// An open transfer of the values.
#[derive(Clone, Copy)]
enum Transfer {
    /// A chunk of a peer's segment, on its way to be added there.
    Piece { peer: usize, chunk: usize },
    /// A chunk of this rank's segment, added, on its way to a peer.
    Sum { peer: usize },
    /// A chunk of a peer's segment, added, on its way to this rank.
    Result { peer: usize },
}

/// How far the exchange with one peer is, in chunks.
#[derive(Clone, Default)]
struct Peer {
    heard: bool,
    /// Pieces of its segment: handed to MPI, and which of them have left.
    pieces_started: usize,
    pieces_sent: Vec<bool>,
    /// Chunks of its result: expected, and here.
    results_started: usize,
    results_here: usize,
    /// Pieces of our segment: expected, and which of the next `WINDOW` are here.
    parts_started: usize,
    parts_here: [bool; WINDOW],
}

pub(super) struct Reduce {
    slot: Arc<Slot<Vec<f32>>>,
    values: Option<Lent<Vec<f32>, Transfer>>,
    length: usize,
    chunk: usize,
    /// Peers' pieces of our segment: places for `WINDOW` chunks, each with a place for every peer.
    pieces: Lent<Vec<f32>, (usize, usize)>,
    peers: Vec<Peer>,
    /// Chunks of our segment that are added.
    summed: usize,
    rank: usize,
    tags: (c_int, c_int),
}

impl Reduce {
    pub fn new(values: Vec<f32>, slot: Arc<Slot<Vec<f32>>>) -> Reduce {
        let (length, values, pieces) = (values.len(), Some(Lent::new(values)), Lent::new(Vec::new()));
        Reduce { slot, values, length, chunk: 0, pieces, peers: Vec::new(), summed: 0, rank: 0, tags: (0, 0) }
    }

    fn segment(&self, rank: usize) -> Range<usize> {
        // In two factors, because length * rank may not fit.
        let (share, rest) = (self.length / self.peers.len(), self.length % self.peers.len());
        let start = |rank: usize| rank * share + rank.min(rest);
        start(rank)..start(rank + 1)
    }

    fn chunks(&self, rank: usize) -> usize {
        self.segment(rank).len().div_ceil(self.chunk)
    }

    /// Where a chunk of a rank's segment lies in the values, in bytes.
    fn span(&self, rank: usize, chunk: usize) -> Range<usize> {
        let segment = self.segment(rank);
        let start = segment.start + chunk * self.chunk;
        start * WIDTH..segment.end.min(start + self.chunk) * WIDTH
    }

    /// A chunk, or our segment where that is shorter: with many ranks it is, by far.
    fn longest_piece(&self) -> usize {
        self.chunk.min(self.segment(self.rank).len())
    }

    /// Where a peer's piece of a chunk of our segment lies among the pieces, in bytes.
    fn place(&self, peer: usize, chunk: usize) -> Range<usize> {
        let start = (chunk % WINDOW * self.peers.len() + peer) * self.longest_piece() * WIDTH;
        start..start + self.span(self.rank, chunk).len()
    }

    /// Hands the next pieces of a peer's segment to MPI, and expects the results of those that have left.
    fn exchange(&mut self, lib: &Library, peer: usize) -> Result<(), CommError> {
        let Some(mut values) = self.values.take() else { return Ok(()) };
        let mut state = std::mem::take(&mut self.peers[peer]);
        let chunks = self.chunks(peer);
        while state.pieces_started < chunks && state.pieces_started < state.results_started + WINDOW {
            let chunk = state.pieces_started;
            let transfer = Transfer::Piece { peer, chunk };
            values.send(lib, self.span(peer, chunk), peer, self.tags.0, transfer)?;
            state.pieces_started += 1;
            state.pieces_sent.push(false);
        }
        while state.results_started < state.pieces_started && state.pieces_sent[state.results_started] {
            let span = self.span(peer, state.results_started);
            values.receive(lib, span, peer, self.tags.1, Transfer::Result { peer })?;
            state.results_started += 1;
        }
        (self.values, self.peers[peer]) = (Some(values), state);
        Ok(())
    }

    /// Expects the next pieces of our segment from a peer that has spoken.
    fn expect(&mut self, lib: &Library, peer: usize) -> Result<(), CommError> {
        let last = self.chunks(self.rank).min(self.summed + WINDOW);
        while self.peers[peer].heard && self.peers[peer].parts_started < last {
            let chunk = self.peers[peer].parts_started;
            self.pieces.receive(lib, self.place(peer, chunk), peer, self.tags.0, (peer, chunk))?;
            self.peers[peer].parts_started += 1;
        }
        Ok(())
    }

    /// Adds the next chunk if all its pieces are here, and sends it to everybody.
    fn add(&mut self, lib: &Library) -> Result<bool, CommError> {
        let chunk = self.summed;
        let here = |peer: usize| self.peers[peer].parts_here[chunk % WINDOW];
        if chunk == self.chunks(self.rank) || !lib.peers().all(here) {
            return Ok(false);
        }
        let span = self.span(self.rank, chunk);
        let Some(mut values) = self.values.take() else { return Ok(false) };
        let piece = |rank: usize| {
            (rank != self.rank).then(|| bytemuck::cast_slice(self.pieces.read(self.place(rank, chunk))))
        };
        let parts: Vec<Option<&[f32]>> = (0..lib.size).map(piece).collect();
        sum::in_order(bytemuck::cast_slice_mut(values.write(span.clone())), &parts);
        for peer in lib.peers() {
            values.send(lib, span.clone(), peer, self.tags.1, Transfer::Sum { peer })?;
        }
        self.values = Some(values);
        self.peers.iter_mut().for_each(|peer| peer.parts_here[chunk % WINDOW] = false);
        self.summed += 1;
        Ok(true)
    }

    /// Notes what MPI has finished.
    fn collect(&mut self) -> Result<bool, CommError> {
        let Some(values) = &mut self.values else { return Ok(false) };
        let peers = &mut self.peers;
        let mut moved =
            self.pieces.progress(|(peer, chunk)| peers[peer].parts_here[chunk % WINDOW] = true)?;
        moved |= values.progress(|transfer| match transfer {
            Transfer::Piece { peer, chunk } => peers[peer].pieces_sent[chunk] = true,
            Transfer::Result { peer } => peers[peer].results_here += 1,
            Transfer::Sum { .. } => {}
        })?;
        Ok(moved)
    }

    fn complete(&self) -> bool {
        let all_here = |peer: usize| peer == self.rank || self.peers[peer].results_here == self.chunks(peer);
        let idle = self.values.as_ref().is_some_and(Lent::idle);
        idle && self.summed == self.chunks(self.rank) && (0..self.peers.len()).all(all_here)
    }
}

impl Body for Reduce {
    fn letter(&self, _peer: usize) -> Letter<'_> {
        Letter { length: self.length, inline: &[] }
    }

    fn begin(&mut self, lib: &Library, tags: Tags) -> Result<(), CommError> {
        self.rank = lib.rank;
        self.tags = (tags.payload, tags.result);
        self.peers.resize(lib.size, Peer::default());
        self.chunk = (self.length.div_ceil(lib.size * 4)).clamp(CHUNK.start, CHUNK.end);
        let window = self.chunks(lib.rank).min(WINDOW);
        self.pieces = Lent::new(vec![0.0; window * lib.size * self.longest_piece()]);
        lib.peers().try_for_each(|peer| self.exchange(lib, peer))
    }

    fn heard(&mut self, lib: &Library, peer: usize, _length: usize, _inline: &[u8]) -> Result<(), CommError> {
        self.peers[peer].heard = true;
        self.expect(lib, peer)
    }

    fn progress(&mut self, lib: &Library) -> Result<bool, CommError> {
        let mut moved = self.collect()?;
        while self.add(lib)? {
            moved = true;
        }
        if moved {
            for peer in lib.peers() {
                self.expect(lib, peer)?;
                self.exchange(lib, peer)?;
            }
        }
        let complete = self.complete();
        if let Some(values) = self.values.take_if(|_| complete) {
            self.slot.fill(Ok(values.take()));
        }
        Ok(moved)
    }

    /// Those whose pieces are missing; a missing result may be the fault of another whose piece its rank misses.
    fn missing(&self) -> Vec<usize> {
        let others = || (0..self.peers.len()).filter(|&peer| peer != self.rank);
        let no_piece = |&peer: &usize| !self.peers[peer].parts_here[self.summed % WINDOW];
        let adding = self.summed < self.chunks(self.rank);
        let silent: Vec<usize> = others().filter(|peer| adding && no_piece(peer)).collect();
        if !silent.is_empty() {
            return silent;
        }
        let no_result = |&peer: &usize| self.peers[peer].results_here < self.chunks(peer);
        let waiting: Vec<usize> = others().filter(no_result).collect();
        if !waiting.is_empty() {
            return waiting;
        }
        let unsent = |&peer: &usize| {
            let to_peer = |transfer: &Transfer| matches!(transfer, Transfer::Sum { peer: to } if *to == peer);
            self.values.as_ref().is_some_and(|values| values.open().any(to_peer))
        };
        others().filter(unsent).collect()
    }

    fn report(&self, missing: Vec<usize>) {
        self.slot.set_missing(missing);
    }

    fn done(&self) -> bool {
        self.values.is_none()
    }

    fn filled(&self) -> bool {
        self.slot.is_filled()
    }

    fn fail(&self, cause: CommError) {
        self.slot.fill(Err(cause));
    }
}

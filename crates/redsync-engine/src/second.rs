//! Adam's second moments are shared: at every step the ranks tell each other a part of theirs, in four bits each, so that no step is
//! long and after some steps all of it was told.
//! Comes in: a step. Goes out: which parts of which layers are told, the frame, and what the others told. What must hold: it follows
//! from step and plan alone, so it is the same on every rank; what is told changes what ranks send later, never what they received.
//!
//! A rank divides its momentum by the root of the mean over all ranks, of which its own part is always of today and that of the others
//! as old as it is since they told it. A mean that is old in all its parts would be a danger: where gradients come rarely, as in an
//! embedding, it is next to nothing when they come, and the step is huge. With its own part a rank cannot step further than the square
//! root of the number of ranks times what Adam alone would.

use crate::config::{Config, Stage};
use crate::error::SyncError;
use crate::layer::Layer;
use crate::pipeline::{Shared, lock};
use redsync_comm::{Gathered, Pending, Tag};
use redsync_core::Momentum;
use redsync_core::wire::{FRAME_HEADER, Frame, FrameWriter};
use std::ops::Range;
use std::time::Instant;

/// The number of this collective at a step; groups count from 0.
const OP: u32 = u32::MAX - 2;

/// Whether a layer that is compressed tells a second moment.
pub(crate) fn has(layer: &Layer, config: &Config) -> bool {
    matches!(layer.momentum.unwrap_or(config.momentum), Momentum::Adam(_))
}

/// A part of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    pub layer: usize,
    pub range: Range<usize>,
}

/// What is told at a step: of all layers with a second moment, one behind the other, a part of the period. At first the period is as
/// long as there were steps, because second moments are young and change quickly.
pub(crate) fn parts(
    sizes: impl Iterator<Item = (usize, usize)> + Clone,
    since: u64,
    period: u64,
) -> Vec<Part> {
    let t = since + 1;
    let young = 1u64 << (63 - t.leading_zeros());
    let period = u128::from(period.min(young).max(1));
    let at = u128::from(t) % period;
    let total: usize = sizes.clone().map(|(_, size)| size).sum();
    let cut = |part: u128| (total as u128 * part / period) as usize;
    let (begin, end) = (cut(at), cut(at + 1));
    let (mut parts, mut before) = (Vec::new(), 0);
    for (layer, size) in sizes {
        let range = begin.clamp(before, before + size) - before..end.clamp(before, before + size) - before;
        if !range.is_empty() {
            parts.push(Part { layer, range });
        }
        before += size;
    }
    parts
}

impl Shared {
    /// What is told at a step; None by a single rank, without Adam, and while everything is dense.
    pub(crate) fn told_at(&self, step: u64) -> Option<Vec<Part>> {
        let Shared { layers, parts: own, choices, config, among, hosts, .. } = self;
        let sparse = config.warm_up.stage(step, config.density) != Stage::Dense;
        let period = crate::plan::moment_period(layers, choices, config);
        if among.size() == 1 || !sparse || period == 0 {
            return None;
        }
        let with = |i: &usize| choices[*i] != crate::config::Choice::Dense && has(&layers[*i], config);
        let sizes = (0..layers.len()).filter(with).map(|i| (i, own[i].size));
        let told = parts(sizes.clone(), step - config.warm_up.first_sparse_step(), period);
        // With hosts, ranks have other parts but the same collectives.
        let is_told = !told.is_empty() || (hosts.is_some() && sizes.count() > 0);
        is_told.then_some(told)
    }
}

/// What the ranks tell, under way.
pub(crate) struct Telling {
    step: u64,
    parts: Vec<Part>,
    /// Bytes of this rank's message for each part, and those of them that are headers.
    sent: Vec<(u64, u64)>,
    pending: Start,
    started: Instant,
}

/// A collective, or what it will be started with by the thread that waits for it.
enum Start {
    Now(Pending<Gathered>),
    Later(Vec<u8>),
}

/// What the others told, for each part, and what it cost.
#[derive(Default)]
pub(crate) struct Told {
    /// The others' sum over the number of ranks; None at a step that does not count.
    pub parts: Option<Vec<(Part, Vec<f32>)>>,
    /// Of each layer: bytes sent, headers among them, bytes received.
    pub cost: Vec<(usize, u64, u64, u64)>,
    pub ms: f64,
}

/// Starts to tell; an empty frame at a step that will not count.
pub(crate) fn tell(
    shared: &Shared,
    step: u64,
    parts: Vec<Part>,
    void: bool,
    writer: &mut FrameWriter,
) -> Telling {
    let (started, rank) = (Instant::now(), shared.among.rank());
    let mut sent = Vec::new();
    let frame = match void {
        true => Vec::new(),
        false => {
            writer.begin(step, rank as u32, shared.plan);
            let compressed = lock(&shared.compressed);
            // The first part answers for the header of the frame.
            let (mut before, mut header) = (0, FRAME_HEADER);
            for Part { layer, range } in &parts {
                header += writer.push_squares(compressed.second(*layer, range.clone()).into_iter());
                let bytes = writer.len() - std::mem::replace(&mut before, writer.len());
                sent.push((bytes as u64, std::mem::take(&mut header) as u64));
            }
            writer.take()
        }
    };
    let pending = match shared.exchange.in_order() {
        true => Start::Later(frame),
        false => Start::Now(shared.among.allgather(Tag { step, op: OP }, frame)),
    };
    Telling { step, parts, sent, pending, started }
}

/// Waits for what the others tell, and reads it.
pub(crate) fn hear(shared: &Shared, telling: Telling) -> Result<Told, SyncError> {
    let Telling { step, parts, sent, pending, started } = telling;
    let failed = |source| SyncError::exchange("second moments".into(), source);
    let (pending, started) = match pending {
        Start::Now(pending) => (pending, started),
        Start::Later(frame) => (shared.among.allgather(Tag { step, op: OP }, frame), Instant::now()),
    };
    let gathered = pending.wait(shared.config.deadline).map_err(failed)?;
    let ms = crate::pipeline::ms(started);
    if gathered.iter().any(<[u8]>::is_empty) {
        return Ok(Told { ms, ..Told::default() });
    }
    let (own, share) = (shared.among.rank(), 1.0 / gathered.ranks() as f32);
    // Of what a rank has itself, the others have something near.
    let compressed = lock(&shared.compressed);
    let guesses = parts.iter().map(|Part { layer, range }| compressed.second(*layer, range.clone()));
    let guesses: Vec<Vec<f32>> = guesses.collect();
    drop(compressed);
    let mut sums: Vec<Vec<f32>> = parts.iter().map(|part| vec![0.0; part.range.len()]).collect();
    let (mut received, mut squares) = (vec![0; parts.len()], Vec::new());
    for (rank, bytes) in gathered.iter().enumerate().filter(|(rank, _)| *rank != own) {
        let bad_frame = |why| SyncError::Frame { rank, layers: "second moments".into(), why };
        let frame = Frame::parse(bytes).map_err(bad_frame)?;
        frame.expect(step, rank as u32, parts.len() as u16, shared.plan).map_err(bad_frame)?;
        // As where it is sent, the first part answers for the header.
        if let Some(first) = received.first_mut() {
            *first += FRAME_HEADER as u64;
        }
        for (at, message) in frame.messages().enumerate() {
            let message = message.map_err(bad_frame)?;
            let name = || shared.layers[parts[at].layer].name.clone();
            squares.clone_from(&guesses[at]);
            message.squares(&mut squares).map_err(|why| SyncError::Message { rank, layer: name(), why })?;
            sums[at].iter_mut().zip(&squares).for_each(|(sum, square)| *sum += square * share);
            received[at] += message.byte_len() as u64;
        }
    }
    let costs = parts.iter().zip(sent).zip(received);
    let cost =
        costs.map(|((part, (sent, headers)), received)| (part.layer, sent, headers, received)).collect();
    Ok(Told { parts: Some(parts.into_iter().zip(sums).collect()), cost, ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_told_once_in_a_period_and_often_at_first() {
        let sizes = [(0, 10), (2, 0), (3, 7), (5, 1000)];
        let told = |since, period| parts(sizes.iter().copied(), since, period);
        let whole: Vec<Part> = vec![
            Part { layer: 0, range: 0..10 },
            Part { layer: 3, range: 0..7 },
            Part { layer: 5, range: 0..1000 },
        ];
        assert_eq!(told(0, 64), whole);
        assert_eq!(told(9, 1), whole);
        for (since, period) in [(1, 2), (3, 4), (63, 64), (200, 64), (1_000, 7), (1 << 40, 64)] {
            let mut count = vec![0; 1017];
            for step in since..since + period {
                for Part { layer, range } in told(step, period) {
                    let begin = match layer {
                        0 => 0,
                        3 => 10,
                        _ => 17,
                    };
                    range.for_each(|i| count[begin + i] += 1);
                }
            }
            assert!(count.iter().all(|count| *count == 1), "{since} {period} {count:?}");
        }
    }
}

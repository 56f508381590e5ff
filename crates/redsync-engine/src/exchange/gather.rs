//! The allgather: every rank receives every rank's frame. (N - 1) messages come in for each one that goes out.

use super::{About, Exchange, Flight, Landed, Packed, Packing, names, share_time};
use crate::error::SyncError;
use crate::pipeline::ms;
use crate::plan::Sent;
use redsync_comm::{Communicator, Gathered, Pending, Tag};
use redsync_core::Sparse;
use redsync_core::wire::{FRAME_HEADER, Frame, FrameWriter};
use std::time::Instant;

/// The exchange by allgather.
pub(crate) struct Gather {
    pub rank: usize,
}

impl Exchange for Gather {
    fn pack(&self, packing: Packing<'_>, writer: &mut FrameWriter) -> Packed {
        let Packing { group, messages, sent, step, plan, bytes } = packing;
        writer.begin(step, self.rank as u32, plan);
        // The first layer answers for the header of the frame.
        let (mut before, mut header) = (0, writer.len());
        for (at, layer) in group.layers.iter().enumerate() {
            if let Some(sent) = &sent[at] {
                header += writer.push(&messages[*layer], sent.indices, sent.values);
            }
            let length = writer.len() - std::mem::replace(&mut before, writer.len());
            bytes[at] = (length as u64, std::mem::take(&mut header) as u64);
        }
        Packed(vec![writer.take()])
    }

    fn void(&self) -> Packed {
        Packed(vec![Vec::new()])
    }

    fn start(&self, comm: &dyn Communicator, tag: Tag, frames: Packed) -> Box<dyn Flight> {
        let frame = frames.0.into_iter().next().unwrap_or_default();
        Box::new(Flying { pending: comm.allgather(tag, frame), started: Instant::now() })
    }
}

struct Flying {
    pending: Pending<Gathered>,
    started: Instant,
}

impl Flight for Flying {
    fn land(self: Box<Self>, about: About<'_>, updates: Vec<Vec<Sparse>>) -> Result<Landed, SyncError> {
        let Flying { pending, started } = *self;
        let gathered = pending
            .wait(about.config.deadline)
            .map_err(|source| SyncError::exchange(names(about.layers, about.group), source))?;
        share_time(&mut about.stats.borrow_mut(), ms(started));
        let void = gathered.iter().any(<[u8]>::is_empty);
        let updates = if void { None } else { Some(decode(about, &gathered, updates)?) };
        Ok(Landed { updates, returned: Vec::new(), frames: gathered.reclaim() })
    }
}

/// The messages of all ranks, for each layer of the group.
fn decode(
    about: About<'_>,
    gathered: &Gathered,
    mut updates: Vec<Vec<Sparse>>,
) -> Result<Vec<Vec<Sparse>>, SyncError> {
    let About { layers, choices, config, plan, group, step, rank: own, stats, .. } = about;
    let mut stats = stats.borrow_mut();
    let stage = config.warm_up.stage(step, config.density);
    updates.iter_mut().for_each(|ranks| ranks.resize_with(gathered.ranks(), Sparse::new));
    for (rank, bytes) in gathered.iter().enumerate() {
        let bad_frame = |why| SyncError::Frame { rank, layers: names(layers, group), why };
        let frame = Frame::parse(bytes).map_err(bad_frame)?;
        frame.expect(step, rank as u32, group.layers.len() as u16, plan).map_err(bad_frame)?;
        // The first layer answers for the header of the frame, as it does where it is sent.
        let mut header = FRAME_HEADER;
        for (at, message) in frame.messages().enumerate() {
            let (begin, message) = (Instant::now(), message.map_err(bad_frame)?);
            let (number, layer) = (group.layers[at], &layers[group.layers[at]]);
            let shape = Sent::at(choices[number], layer.size, config, stage).map(|sent| sent.shape(step));
            let shape = shape.ok_or_else(|| SyncError::Order(format!("layer {} is dense", layer.name)))?;
            message.decode(&shape, &mut updates[at][rank]).map_err(|why| SyncError::Message {
                rank,
                layer: layer.name.clone(),
                why,
            })?;
            stats[at].decode_ms += ms(begin);
            if rank != own {
                stats[at].bytes_received += (message.byte_len() + std::mem::take(&mut header)) as u64;
            }
        }
    }
    Ok(updates)
}

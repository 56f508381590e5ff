//! What exchanges cost: each length by itself, and many after each other.

use super::{Meter, median, no_network};
use crate::cost::{Allgather, Allreduce, Link, Network, dense_bytes, sparse_bytes};
use crate::error::SyncError;
use std::time::Instant;

/// Bytes of the messages that are gathered.
const MESSAGES: [usize; 6] = [64, 2 << 10, 12 << 10, 48 << 10, 192 << 10, 768 << 10];
/// Bytes of the gradients that are summed.
const GRADIENTS: [usize; 8] = [256, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 6 << 20, 24 << 20];
/// A length that takes longer, in seconds, is the last: the next ones follow its slope.
const ENOUGH: f64 = 0.8;
/// Exchanges under way at once, and the bytes of each, about as in a step.
const ROW: usize = 4;
const FRAME: usize = 32 << 10;
const BUCKET: usize = 4 << 20;
/// Seconds per byte of a network on which nothing can be seen: not infinitely fast.
const FASTEST: f64 = 1e-12;

pub(super) fn measure(meter: &mut Meter<'_>, progress: &mut dyn FnMut(f64)) -> Result<Network, SyncError> {
    if meter.comm.size() < 2 {
        return Ok(no_network());
    }
    let stages = (MESSAGES.len() + GRADIENTS.len()) as f64;
    let mut sparse = Link::new(0.0, 0.0);
    for (stage, bytes) in MESSAGES.into_iter().enumerate() {
        progress(stage as f64 / stages);
        let on_link = sparse_bytes(meter.comm.size(), bytes as f64);
        let (time, work) = alone(meter, |meter| gather(meter, bytes))?;
        sparse.alone.push((on_link, time));
        sparse.work = work / on_link;
        if time > ENOUGH {
            break;
        }
    }
    let mut dense = Link::new(0.0, 0.0);
    let mut values = Vec::new();
    for (stage, bytes) in GRADIENTS.into_iter().enumerate() {
        progress((MESSAGES.len() + stage) as f64 / stages);
        let on_link = dense_bytes(meter.comm.size(), bytes as f64);
        values.resize(bytes / 4, 0.0f32);
        let (time, work) = alone(meter, |meter| sum(meter, &mut values))?;
        dense.alone.push((on_link, time));
        dense.work = work / on_link;
        if time > ENOUGH {
            break;
        }
    }
    draw(&mut sparse);
    draw(&mut dense);
    let p = meter.comm.size();
    let many_messages = following(meter, |meter, count| gathers(meter, count, FRAME))?;
    sparse.beta = (many_messages / sparse_bytes(p, FRAME as f64)).max(FASTEST);
    let mut buffers = vec![vec![0.0f32; BUCKET / 4]; ROW];
    let many_sums = following(meter, |meter, count| sums(meter, count, &mut buffers))?;
    dense.beta = (many_sums / dense_bytes(p, BUCKET as f64)).max(FASTEST);
    let others = meter.comm.size() as f64 - 1.0;
    sparse.gap = following(meter, |meter, count| gathers(meter, count, MESSAGES[0]))? / others;
    Ok(Network { allgather: Allgather::Direct, allreduce: Allreduce::Direct, sparse, dense })
}

/// Alpha of the measured points, which rise: noise may make a longer exchange the shorter one, the model wants none of that.
fn draw(link: &mut Link) {
    for i in 1..link.alone.len() {
        link.alone[i].1 = link.alone[i].1.max(link.alone[i - 1].1);
    }
    link.alpha = link.alone.first().map_or(0.0, |point| point.1);
}

/// Time and core time of an exchange by itself, agreed on: the median of some, fewer where they take long.
fn alone(
    meter: &mut Meter<'_>,
    mut exchange: impl FnMut(&mut Meter<'_>) -> Result<(), SyncError>,
) -> Result<(f64, f64), SyncError> {
    let mut times = Vec::new();
    let mut spent = Vec::new();
    loop {
        meter.together()?;
        let (begin, busy) = (Instant::now(), core_time(meter));
        exchange(meter)?;
        let ours = begin.elapsed().as_secs_f64();
        spent.push(core_time(meter) - busy);
        times.push(meter.agree(ours)?);
        let so_far: f64 = times.iter().sum();
        if times.len() >= 15 || times.len() >= 3 && so_far > 0.5 || so_far > 1.5 {
            break;
        }
    }
    // The first one finds cold buffers.
    if times.len() > 2 {
        times.remove(0);
        spent.remove(0);
    }
    let spent = meter.agree(median(&mut spent))?;
    Ok((median(&mut times), spent))
}

fn gather(meter: &mut Meter<'_>, bytes: usize) -> Result<(), SyncError> {
    gathers(meter, 1, bytes)
}

/// Some allgathers, all under way at once.
fn gathers(meter: &mut Meter<'_>, count: usize, bytes: usize) -> Result<(), SyncError> {
    let start = |_| {
        let tag = meter.tag();
        meter.comm.allgather(tag, vec![1; bytes])
    };
    let pending: Vec<_> = (0..count).map(start).collect();
    pending.into_iter().try_for_each(|p| p.wait(meter.config.deadline).map(drop)).map_err(Meter::failed)
}

fn sum(meter: &mut Meter<'_>, values: &mut Vec<f32>) -> Result<(), SyncError> {
    let tag = meter.tag();
    let pending = meter.comm.allreduce(tag, std::mem::take(values));
    *values = pending.wait(meter.config.deadline).map_err(Meter::failed)?;
    Ok(())
}

/// Some sums, all under way at once, of buffers that are used again, as in training: new ones would cost their pages.
fn sums(meter: &mut Meter<'_>, count: usize, buffers: &mut Vec<Vec<f32>>) -> Result<(), SyncError> {
    let start = |values: Vec<f32>| {
        let tag = meter.tag();
        meter.comm.allreduce(tag, values)
    };
    let pending: Vec<_> = buffers.drain(..count.min(buffers.len())).map(start).collect();
    for pending in pending {
        buffers.push(pending.wait(meter.config.deadline).map_err(Meter::failed)?);
    }
    Ok(())
}

/// By how much one more exchange makes a row of them longer.
fn following(
    meter: &mut Meter<'_>,
    mut exchange: impl FnMut(&mut Meter<'_>, usize) -> Result<(), SyncError>,
) -> Result<f64, SyncError> {
    let (one, _) = alone(meter, |meter| exchange(meter, 1))?;
    let (row, _) = alone(meter, |meter| exchange(meter, ROW))?;
    Ok((row - one).max(0.0) / (ROW - 1) as f64)
}

/// Seconds for which cores have worked for this rank. Where the system does not tell: none.
fn core_time(meter: &Meter<'_>) -> f64 {
    let of_thread = |entry: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(entry.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    let nanoseconds: f64 = match std::fs::read_dir("/proc/self/task") {
        Ok(threads) => threads.filter_map(of_thread).sum(),
        Err(_) => 0.0,
    };
    // Ranks that are threads of one process share its time.
    let ranks = if meter.comm.name() == "local" { meter.comm.size() } else { 1 };
    nanoseconds / 1e9 / ranks as f64
}

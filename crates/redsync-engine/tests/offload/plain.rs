//! The kernels of a device in plain Rust, with every copy between host and device counted: what a real device is held to.

use crate::pair::Far;
use redsync_core::{Gradient, Momentum, Phase, StatLanes, bf16};
use redsync_engine::Source;
use redsync_engine::offload::{DeviceError, Digit, Edge, Found, Kernels, Pass, Seek, Sent};
use std::any::Any;
use std::cell::Cell;

/// u and v "on a device", and what crossed.
#[derive(Debug, Default)]
pub struct Plain {
    u: Option<Vec<f32>>,
    v: Vec<f32>,
    saved: Option<(Option<Vec<f32>>, Vec<f32>)>,
    listed: Vec<u32>,
    /// What a pass that was announced has found, and whether v is finite.
    begun: Option<(Pass, Option<Seek>, Found, bool)>,
    /// Bytes that were copied, either way.
    pub copied: Cell<usize>,
    /// Passes over v that were not the accumulating one.
    pub passes: Cell<usize>,
}

impl Plain {
    pub fn new(n: usize) -> Self {
        Plain { v: vec![0.0; n], ..Plain::default() }
    }

    fn copy(&self, bytes: usize) {
        self.copied.set(self.copied.get() + bytes);
    }

    fn seen(&self, phase: Phase) -> impl Iterator<Item = i32> + '_ {
        self.passes.set(self.passes.get() + 1);
        let lens = phase.lens();
        self.v.iter().map(move |x| ((x.to_bits() & lens.keep) ^ lens.flip) as i32)
    }

    fn find(&mut self, seek: Seek, found: &mut Found) {
        assert!(seek.floor >= 0.0 && seek.capacity <= self.v.len(), "{seek:?} of {} elements", self.v.len());
        let floor = seek.floor.to_bits() as i32;
        let hits: Vec<u32> =
            (0u32..).zip(self.seen(seek.phase)).filter(|(_, x)| *x > floor).map(|(i, _)| i).collect();
        found.count = hits.len();
        found.elements.clear();
        self.listed.clear();
        self.copy(8);
        if seek.takes(found.count) {
            // A device finds them in no order.
            self.listed.extend(hits.iter().skip(1).step_by(2).rev().chain(hits.iter().step_by(2)));
            found.elements.extend(self.listed.iter().map(|i| (*i, self.v[*i as usize])));
            self.copy(8 * found.count);
        }
    }

    fn leave(&mut self, index: u32, rest: f32, clear_u: bool) {
        self.v[index as usize] = rest;
        if clear_u {
            self.u.as_mut().unwrap()[index as usize] = 0.0;
        }
    }
}

fn round(value: f32) -> f32 {
    let rounded = bf16::from_f32(value).to_f32();
    rounded.clamp(bf16::MIN.to_f32(), bf16::MAX.to_f32())
}

fn values_of(source: &dyn Source) -> Gradient<'_> {
    let any: &dyn Any = source;
    any.downcast_ref::<Far>().map(Far::values).or(source.host()).unwrap()
}

impl Kernels for Plain {
    fn make_u(&mut self) -> Result<(), DeviceError> {
        assert!(self.u.is_none());
        self.u = Some(vec![0.0; self.v.len()]);
        Ok(())
    }

    fn announce(&mut self, source: &dyn Source, pass: &Pass, seek: Option<Seek>) -> Result<(), DeviceError> {
        let mut found = Found::default();
        let finite = self.accumulate(source, pass, seek, &mut found)?;
        self.begun = Some((*pass, seek, found, finite));
        Ok(())
    }

    fn accumulate(
        &mut self,
        source: &dyn Source,
        pass: &Pass,
        seek: Option<Seek>,
        found: &mut Found,
    ) -> Result<bool, DeviceError> {
        if let Some((announced, sought, begun, finite)) = self.begun.take() {
            assert_eq!((announced, sought), (*pass, seek));
            *found = begun;
            return Ok(finite);
        }
        let gradient = values_of(source);
        self.saved = pass.save.then(|| (self.u.clone(), self.v.clone()));
        for (i, v) in self.v.iter_mut().enumerate() {
            let (g, old) = (gradient.get(i).unwrap() * pass.scale, *v * pass.carry);
            *v = match (pass.momentum, &mut self.u) {
                (Momentum::None, _) => old + g,
                (Momentum::Plain(m), Some(u)) => {
                    u[i] = m * u[i] + g;
                    old + u[i]
                }
                (Momentum::Nesterov(m), Some(u)) => {
                    u[i] = m * (u[i] + g);
                    old + (u[i] + g)
                }
                other => unreachable!("{other:?}"),
            };
        }
        self.listed.clear();
        if let Some(seek) = seek {
            self.find(seek, found);
            self.passes.set(self.passes.get() - 1);
        }
        Ok(self.v.iter().all(|x| x.is_finite()))
    }

    fn collect(&mut self, seek: Seek, found: &mut Found) -> Result<(), DeviceError> {
        self.find(seek, found);
        Ok(())
    }

    fn edge(
        &mut self,
        phase: Phase,
        digit: Digit,
        prefix: u32,
        above: usize,
        keep: usize,
    ) -> Result<Edge, DeviceError> {
        assert!(above < keep);
        let mut bins = vec![0; 1 << digit.bits];
        let mask = (1 << digit.bits) - 1;
        for x in self.seen(phase).filter(|x| *x > 0) {
            if (x as u32) >> (digit.shift + digit.bits) == prefix {
                bins[(x as u32 >> digit.shift & mask) as usize] += 1;
            }
        }
        self.copy(12);
        Ok(Edge::find(&bins, above, keep))
    }

    fn count_above(&mut self, phase: Phase, thresholds: &[f32]) -> Result<Vec<usize>, DeviceError> {
        let seen: Vec<i32> = self.seen(phase).collect();
        self.copy(8 * thresholds.len());
        let above = |t: &f32| seen.iter().filter(|x| **x > t.to_bits() as i32).count();
        Ok(thresholds.iter().map(above).collect())
    }

    fn stats(&mut self, phase: Phase) -> Result<Vec<StatLanes>, DeviceError> {
        let seen: Vec<i32> = self.seen(phase).collect();
        let lanes = |chunk: &[i32]| {
            let mut lanes = StatLanes::default();
            for (i, x) in chunk.iter().enumerate().filter(|(_, x)| **x > 0) {
                let (lane, x) = (i % StatLanes::LANES, f32::from_bits(*x as u32));
                lanes.sum[lane] += x;
                lanes.max[lane] = lanes.max[lane].max(x);
                lanes.count[lane] += 1;
            }
            lanes
        };
        let all: Vec<StatLanes> = seen.chunks(StatLanes::CHUNK).map(lanes).collect();
        self.copy(size_of::<StatLanes>() * all.len());
        Ok(all)
    }

    fn take_out(&mut self, least: (u32, f32), sent: Sent<'_>, clear_u: bool) -> Result<(), DeviceError> {
        self.copy(16);
        if let Sent::Listed { values, which } = sent {
            assert_eq!(which.len(), self.listed.len());
            self.copy(4 * values.len() + which.len());
        }
        for (place, index) in self.listed.clone().into_iter().enumerate() {
            let value = self.v[index as usize];
            let (size, bound) = (value.abs().to_bits(), least.1.abs().to_bits());
            if size > bound || (size == bound && index <= least.0) {
                let rest = match sent {
                    Sent::Whole => 0.0,
                    Sent::Same(mean) => value - mean,
                    Sent::Rounded => value - round(value),
                    Sent::Listed { values, which } => value - values[usize::from(which[place])],
                };
                self.leave(index, rest, clear_u);
            }
        }
        self.listed.clear();
        Ok(())
    }

    fn put(&mut self, indices: &[u32], values: &[f32], clear_u: bool) -> Result<(), DeviceError> {
        self.copy(8 * indices.len());
        indices.iter().zip(values).for_each(|(index, value)| self.leave(*index, *value, clear_u));
        Ok(())
    }

    fn add(&mut self, indices: &[u32], values: &[f32]) -> Result<(), DeviceError> {
        self.copy(8 * indices.len());
        indices.iter().zip(values).for_each(|(index, value)| self.v[*index as usize] += value);
        Ok(())
    }

    fn scale_u(&mut self, factor: f32) -> Result<(), DeviceError> {
        self.u.as_mut().unwrap().iter_mut().for_each(|u| *u *= factor);
        Ok(())
    }

    fn take_back(&mut self) -> Result<(), DeviceError> {
        (self.u, self.v) = self.saved.take().unwrap();
        Ok(())
    }

    fn gradient(&self, source: &dyn Source) -> Result<Vec<f32>, DeviceError> {
        let gradient = values_of(source);
        self.copy(4 * gradient.len());
        Ok((0..gradient.len()).map(|i| gradient.get(i).unwrap()).collect())
    }

    fn read_u(&self) -> Result<Vec<f32>, DeviceError> {
        self.copy(4 * self.u.as_ref().map_or(0, Vec::len));
        Ok(self.u.clone().unwrap_or_default())
    }

    fn read_v(&self) -> Result<Vec<f32>, DeviceError> {
        self.copy(4 * self.v.len());
        Ok(self.v.clone())
    }

    fn write(&mut self, u: Option<&[f32]>, v: Option<&[f32]>) -> Result<(), DeviceError> {
        if let Some(u) = u {
            self.u.as_mut().unwrap().copy_from_slice(u);
        }
        if let Some(v) = v {
            self.v.copy_from_slice(v);
        }
        Ok(())
    }
}

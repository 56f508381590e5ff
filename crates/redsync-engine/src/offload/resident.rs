//! A residual on a device, as a selection sees it: looked through by its kernels, with a bounded number of elements at a time.
//! What must hold: the elements a selection asks for are all there. If they do not fit, a histogram of ever lower bits finds a higher
//! floor; if no floor divides them, as with many of one magnitude, v is copied to the host.

use super::{DeviceError, Digit, Found, Kernels, Pass, Seek, Sent};
use crate::source::Source;
use redsync_core::residual::{COPIED, subtract};
use redsync_core::{Bad, Config, Elements, Gradient, Look, Momentum, Phase, Values, Wanted, Workspace};
use std::borrow::Cow;

/// Elements that fit beyond twice those that must not be lost.
const SPARE: usize = 4096;
/// The same of a small layer, beyond an eighth more, whose device is waited for layer by layer: it passes over it once more in no time, so
/// that of many the largest are found there, and few cross.
const SPARE_OF_SMALL: usize = 32;

/// u and v on a device.
pub(super) struct Resident<K> {
    pub kernels: K,
    pub n: usize,
    /// That of the rule; none where none leaves a trace.
    pub momentum: Momentum,
    pub has_u: bool,
    /// Elements that fit beyond those that must not be lost, if it is not the usual number.
    pub room: Option<usize>,
    /// Whether the step before the last pass is there to be taken back.
    pub undoable: bool,
    found: Found,
    /// The places of the found elements, by index.
    order: Vec<u32>,
    listed: Listed,
    /// Whether the candidates in the workspace are those that the device handed out last.
    handed_out: bool,
}

/// The values of [`Sent::Listed`].
#[derive(Default)]
struct Listed {
    values: Vec<f32>,
    which: Vec<u8>,
}

impl<K: Kernels> Resident<K> {
    pub fn new(mut kernels: K, n: usize, momentum: Momentum) -> Result<Self, DeviceError> {
        let momentum = momentum.traced();
        let has_u = momentum != Momentum::None && n > 0;
        if has_u {
            kernels.make_u()?;
        }
        Ok(Resident {
            kernels,
            n,
            momentum,
            has_u,
            room: None,
            undoable: false,
            found: Found::default(),
            order: Vec::new(),
            listed: Listed::default(),
            handed_out: false,
        })
    }

    /// Accumulates a gradient, and leaves in the workspace what the look wanted to know. Err if it was refused.
    pub fn accumulate(
        &mut self,
        source: &dyn Source,
        scale: f32,
        look: &Look,
        undo: bool,
        workspace: &mut Workspace,
    ) -> Result<Result<(), Bad>, DeviceError> {
        let Look { phase, wanted, .. } = *look;
        let (pass, seek) = self.pass(scale, look, undo);
        (self.undoable, self.handed_out) = (false, false);
        let finite = self.kernels.accumulate(source, &pass, seek, &mut self.found)?;
        if !finite {
            return self.refuse(source, &pass).map(Err);
        }
        self.undoable = undo;
        match seek {
            Some(seek) => self.hand_over(seek, wanted.keep, workspace)?,
            None => workspace.put_candidates(f32::INFINITY, std::iter::empty()),
        }
        if wanted.stats {
            workspace.put_stats(self.kernels.stats(phase)?.into_iter());
        }
        Ok(Ok(()))
    }

    /// What the device does to accumulate, and looks for meanwhile.
    pub fn pass(&self, scale: f32, look: &Look, undo: bool) -> (Pass, Option<Seek>) {
        let Look { carry, phase, wanted, .. } = *look;
        let pass = Pass { momentum: self.momentum, scale, carry, save: undo || self.n <= COPIED };
        let Wanted { floor, keep, enough, .. } = wanted;
        (pass, wanted.collects().then(|| Seek { enough, ..self.seek(phase, floor, keep) }))
    }

    fn seek(&self, phase: Phase, floor: f32, keep: usize) -> Seek {
        let small = self.n <= COPIED && !self.kernels.waits_for_many();
        let usual = if small { keep / 8 + SPARE_OF_SMALL } else { keep + SPARE };
        let capacity = keep + self.room.unwrap_or(usual);
        Seek { phase, floor, capacity: capacity.min(self.n), enough: 0 }
    }

    /// Undoes a pass that turned out not to be finite, and says why it was not.
    fn refuse(&mut self, source: &dyn Source, pass: &Pass) -> Result<Bad, DeviceError> {
        let values = self.kernels.gradient(source)?;
        let gradient = Gradient::F32(&values);
        let why = match gradient.first_not_finite() {
            Some((index, value)) => Bad::NotFinite { index, value },
            None => {
                let first = self.kernels.read_v()?.iter().position(|x| !x.is_finite());
                Bad::Overflow { index: first.unwrap_or(0) }
            }
        };
        if pass.save {
            self.kernels.take_back()?;
        } else {
            let (mut u, mut v) = (self.kernels.read_u()?, self.kernels.read_v()?);
            subtract(self.momentum, &mut u, &mut v, gradient, pass.scale, pass.carry);
            self.kernels.write(self.has_u.then_some(&u), Some(&v))?;
        }
        Ok(why)
    }

    /// What was found goes to the workspace, in index order, if it was handed out; otherwise the largest are searched for.
    fn hand_over(&mut self, seek: Seek, keep: usize, workspace: &mut Workspace) -> Result<(), DeviceError> {
        if self.found.count > seek.capacity {
            return self.narrow(seek, keep, workspace);
        }
        if self.found.count < seek.enough {
            workspace.put_candidates(seek.floor, std::iter::empty());
            return Ok(());
        }
        let elements = &self.found.elements;
        self.order.clear();
        self.order.extend(0..elements.len() as u32);
        self.order.sort_unstable_by_key(|place| elements[*place as usize].0);
        workspace.put_candidates(seek.floor, self.order.iter().map(|place| elements[*place as usize]));
        self.handed_out = true;
        Ok(())
    }

    /// Raises the floor until no more elements are above it than fit, but still the largest `keep`.
    fn narrow(&mut self, seek: Seek, keep: usize, workspace: &mut Workspace) -> Result<(), DeviceError> {
        let (mut prefix, mut above) = (0u32, 0usize);
        for (at, digit) in Digit::ALL.into_iter().enumerate() {
            debug_assert!(above < keep);
            // The value of the digit that the last of those has that must not be lost.
            let edge = self.kernels.edge(seek.phase, digit, prefix, above, keep)?;
            (prefix, above) = (prefix << digit.bits | edge.bin, edge.above);
            let below = (prefix << digit.shift).saturating_sub(1);
            let floor = f32::from_bits(below).max(seek.floor);
            // All that have the same first digit, which is an eighth of their magnitude wide, may be as many again as are wanted: the second
            // tells them apart in one more pass on the device.
            let close = at > 0 || edge.count <= keep + keep / 8;
            if close && edge.count <= seek.capacity {
                let seek = Seek { floor, enough: 0, ..seek };
                self.kernels.collect(seek, &mut self.found)?;
                return self.hand_over_counted(seek, workspace);
            }
        }
        let v = self.kernels.read_v()?;
        self.handed_out = false;
        let Ok(()) = (&v[..]).scan(seek.phase, seek.floor, keep, workspace);
        Ok(())
    }

    /// The same for elements whose number is known to fit.
    fn hand_over_counted(&mut self, seek: Seek, workspace: &mut Workspace) -> Result<(), DeviceError> {
        if self.found.count > seek.capacity {
            let (count, capacity) = (self.found.count, seek.capacity);
            let told = format!("it found {count} elements where it had counted at most {capacity}");
            return Err(DeviceError(told));
        }
        self.hand_over(seek, 0, workspace)
    }

    /// Takes out of the residual what was chosen, and leaves there what `rests` says.
    pub fn take_out(
        &mut self,
        config: &Config,
        rests: impl Iterator<Item = (u32, f32)>,
        workspace: &Workspace,
    ) -> Result<(), DeviceError> {
        let Some(least) = workspace.least_chosen() else { return Ok(()) };
        let clear_u = config.masking && self.has_u;
        if self.handed_out {
            self.handed_out = false;
            let sent = tell(config.values, &self.found, &self.order, &mut self.listed, workspace);
            return self.kernels.take_out(least, sent, clear_u);
        }
        let (indices, values): (Vec<u32>, Vec<f32>) = rests.unzip();
        if indices.len() < self.n {
            return self.kernels.put(&indices, &values, clear_u);
        }
        let zeros = clear_u.then(|| vec![0.0; self.n]);
        self.kernels.write(zeros.as_deref(), Some(&values))
    }
}

/// What was sent, as the device needs it: which of a few values, for every element it handed out, where one does not say it all.
fn tell<'a>(
    values: Values,
    found: &Found,
    order: &[u32],
    listed: &'a mut Listed,
    workspace: &Workspace,
) -> Sent<'a> {
    let message = workspace.message();
    let Listed { values: list, which } = listed;
    let scale = message.scale().unwrap_or(0.0);
    list.clear();
    match values {
        Values::F32 | Values::AsqDropError => return Sent::Whole,
        Values::Asq => return Sent::Same(message.mean().unwrap_or(0.0)),
        Values::Bf16 => return Sent::Rounded,
        Values::TwoBit => list.extend(message.levels().unwrap_or_default()),
        Values::EightBit => list.extend((-127..=127i8).map(|multiple| scale * f32::from(multiple))),
    }
    let one_of = |value: f32| match values {
        // Nothing is a multiple of zero but zero.
        Values::EightBit if scale == 0.0 => 127,
        Values::EightBit => ((value / scale).round() as i8 as i16 + 127) as u8,
        _ => list.iter().position(|level| level.to_bits() == value.to_bits()).unwrap_or(0) as u8,
    };
    which.clear();
    which.resize(found.elements.len(), 0);
    let mut places = order.iter();
    for (index, value) in message.iter() {
        let is_it = |place: &&u32| found.elements[**place as usize].0 == index;
        if let Some(place) = places.find(is_it) {
            which[*place as usize] = one_of(value);
        }
    }
    Sent::Listed { values: list, which }
}

impl<K: Kernels> Elements for Resident<K> {
    type Error = DeviceError;

    fn len(&self) -> usize {
        self.n
    }

    fn scan(
        &mut self,
        phase: Phase,
        floor: f32,
        keep: usize,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let seek = self.seek(phase, floor, keep);
        // Nearly everything is greater than zero.
        if floor == 0.0 && seek.capacity < self.n {
            return self.narrow(seek, keep, workspace);
        }
        self.kernels.collect(seek, &mut self.found)?;
        self.hand_over(seek, keep, workspace)
    }

    fn count_above(&mut self, phase: Phase, thresholds: &[f32]) -> Result<Option<Vec<usize>>, DeviceError> {
        self.kernels.count_above(phase, thresholds).map(Some)
    }

    fn whole(&mut self) -> Result<Cow<'_, [f32]>, DeviceError> {
        self.handed_out = false;
        self.kernels.read_v().map(Cow::Owned)
    }
}

//! The compressor of a layer on a device: what the host's does, with u and v elsewhere.

use super::resident::Resident;
use super::{DeviceError, Kernels};
use crate::compressor::{LayerCompressor, fits, norm};
use crate::source::Source;
use crate::state::LayerState;
use redsync_core::residual::Change;
use redsync_core::{
    Bad, Config, ConfigError, LayerError, Momentum, Sender, Sending, Sparse, Unfit, Workspace,
};
use std::ops::Range;

/// The compressor of a layer whose u and v are kept by [`Kernels`].
pub struct Offloaded<K> {
    sender: Sender,
    residual: Resident<K>,
}

impl From<DeviceError> for Unfit {
    fn from(DeviceError(why): DeviceError) -> Self {
        Unfit::Device(why)
    }
}

impl From<DeviceError> for ConfigError {
    fn from(DeviceError(why): DeviceError) -> Self {
        ConfigError::Device(why)
    }
}

impl<K: Kernels> Offloaded<K> {
    /// A layer of zeros. `layer` is its number, `name` appears in errors; `kernels` are of `n` elements, and have no u yet.
    pub fn new(
        layer: u32,
        name: impl Into<String>,
        n: usize,
        config: Config,
        kernels: K,
    ) -> Result<Self, ConfigError> {
        if matches!(config.momentum, Momentum::Adam(_)) {
            return Err(ConfigError::AdamElsewhere);
        }
        let sender = Sender::new(layer, name, n, config)?;
        Ok(Offloaded { sender, residual: Resident::new(kernels, n, config.momentum)? })
    }

    /// Lets the device hand out no more than so many elements beyond those that a selection cannot do without: less memory, more passes.
    pub fn with_room(mut self, elements: usize) -> Self {
        self.residual.room = Some(elements);
        self
    }

    /// What keeps u and v.
    pub fn kernels(&self) -> &K {
        &self.residual.kernels
    }

    /// What keeps u and v. To change them behind the layer's back is no good idea.
    pub fn kernels_mut(&mut self) -> &mut K {
        &mut self.residual.kernels
    }

    /// The sending side of the layer.
    pub fn sender(&self) -> &Sender {
        &self.sender
    }

    fn failed(&self, step: u64, DeviceError(why): DeviceError) -> LayerError {
        self.sender.error(step, Bad::Device(why))
    }

    /// v or u was replaced or changed otherwise than by a pass.
    fn changed(&mut self) {
        self.residual.undoable = false;
        self.sender.changed();
    }
}

impl<K: Kernels> LayerCompressor for Offloaded<K> {
    fn accumulate(
        &mut self,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let look = self.sender.look(step, scale, workspace)?;
        let (expected, got) = (self.sender.len(), source.len());
        if got != expected {
            return Err(self.sender.error(step, Bad::Length { expected, got }));
        }
        let undo = self.sender.config().undo;
        let outcome = self.residual.accumulate(source, scale, &look, undo, workspace);
        outcome.map_err(|e| self.failed(step, e))?.map_err(|why| self.sender.error(step, why))?;
        self.sender.accumulated(look, workspace);
        Ok(())
    }

    fn announce(
        &mut self,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let look = self.sender.look(step, scale, workspace)?;
        if source.len() != self.sender.len() {
            return Ok(()); // it will be refused
        }
        let (pass, seek) = self.residual.pass(scale, &look, self.sender.config().undo);
        self.residual.kernels.announce(source, &pass, seek).map_err(|e| self.failed(step, e))
    }

    fn select(
        &mut self,
        step: u64,
        message: &mut Sparse,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let Offloaded { sender, residual } = self;
        let chosen = sender.choose(step, residual, workspace);
        let taken =
            chosen.and_then(|()| residual.take_out(sender.config(), sender.rests(workspace), workspace));
        taken.map_err(|e| self.failed(step, e))?;
        workspace.swap_message(message);
        Ok(())
    }

    fn give_back(&mut self, elements: &Sparse) -> Result<(), Unfit> {
        let (expected, got) = (self.sender.len(), elements.dense_len());
        if got != expected {
            return Err(Unfit::Length { what: "what is given back", expected, got });
        }
        let values: Vec<f32> = elements.iter().map(|(_, value)| value).collect();
        self.residual.kernels.add(elements.indices(), &values)?;
        self.changed();
        Ok(())
    }

    fn take_back(&mut self) -> Result<(), Unfit> {
        if !std::mem::take(&mut self.residual.undoable) {
            return Err(Unfit::NoStep);
        }
        self.residual.kernels.take_back()?;
        self.sender.roll_back();
        Ok(())
    }

    fn set_sending(&mut self, sending: Sending) {
        self.sender.set_sending(sending);
    }

    fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit> {
        momentum.check()?;
        let residual = &mut self.residual;
        let change = residual.momentum.change(momentum, residual.has_u)?;
        match change {
            Change::Nothing | Change::Coefficient => {}
            Change::Begins if self.sender.is_empty() => {}
            Change::Begins => residual.kernels.make_u()?,
            Change::Rescaled(factor) => residual.kernels.scale_u(factor)?,
        }
        if change != Change::Nothing {
            (residual.momentum, residual.undoable) = (momentum, false);
            residual.has_u = !self.sender.is_empty();
        }
        self.sender.set_momentum(momentum);
        Ok(())
    }

    fn set_rate(&mut self, rate: f32) -> Result<(), Unfit> {
        self.sender.set_rate(rate)
    }

    fn adopt_momentum(&mut self, buffer: &[f32], ranks: usize) -> Result<(), Unfit> {
        let (what, expected, got) = ("the momentum buffer", self.sender.len(), buffer.len());
        if got != expected {
            return Err(Unfit::Length { what, expected, got });
        }
        if let Some(index) = buffer.iter().position(|x| !x.is_finite()) {
            return Err(Unfit::NotFinite { what, index, value: buffer[index] });
        }
        let share = self.residual.momentum.share(ranks);
        let u: Vec<f32> = buffer.iter().map(|b| b * share).collect();
        self.residual.kernels.write(self.residual.has_u.then_some(&u), Some(&vec![0.0; expected]))?;
        self.changed();
        Ok(())
    }

    fn adopt_adam(&mut self, _: &[f32], q: &[f32], _: u64) -> Result<(), Unfit> {
        Err(Unfit::Length { what: "the second moment", expected: 0, got: q.len() })
    }

    fn second(&self, _: Range<usize>) -> Vec<f32> {
        Vec::new()
    }

    fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<Option<Vec<f32>>, Unfit> {
        let got = begin.saturating_add(values.len());
        Err(Unfit::Length { what: "the given second moment", expected: 0, got })
    }

    fn withdraw_second(&mut self, _: usize, _: Option<&[f32]>) -> Result<(), Unfit> {
        Ok(())
    }

    fn save(&self) -> Result<LayerState, Unfit> {
        Ok(LayerState {
            name: self.sender.name().into(),
            size: self.sender.len(),
            momentum: self.sender.config().momentum,
            u: self.residual.kernels.read_u()?,
            v: self.residual.kernels.read_v()?,
            memory: self.sender.memory(),
            rate: self.sender.rate(),
            second: None,
            kept: None,
        })
    }

    fn check(&self, state: &LayerState) -> Result<(), Unfit> {
        fits(state, self.sender.len(), self.sender.config().momentum, self.residual.has_u)
    }

    fn restore(&mut self, state: &LayerState) -> Result<(), Unfit> {
        self.check(state)?;
        Sender::check_rate(state.rate)?;
        if !state.u.is_empty() {
            // u is of the momentum of its step; a schedule goes on from there.
            self.set_momentum(state.momentum)?;
        }
        let expected = if self.residual.has_u { self.sender.len() } else { 0 };
        if state.u.len() != expected {
            return Err(Unfit::Length { what: "u", expected, got: state.u.len() });
        }
        self.residual.kernels.write(self.residual.has_u.then_some(&state.u), Some(&state.v))?;
        self.residual.undoable = false;
        self.sender.restore(state.memory, state.rate);
        Ok(())
    }

    fn norm(&self) -> Result<f64, Unfit> {
        Ok(norm(&self.residual.kernels.read_v()?))
    }
}

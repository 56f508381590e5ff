//! One compressed layer of a rank, wherever its u and v live: a gradient goes in, a sparse message comes out.
//! What must hold: a gradient that is refused is not accumulated; what comes out is the same on every device, bit by bit.

use crate::layer::Layer;
use crate::source::Source;
use crate::state::{LayerState, SecondMoment};
use redsync_core::{
    Bad, Compressor, Config, ConfigError, LayerError, Momentum, Sending, Sparse, Unfit, Workspace,
};
use std::ops::Range;

/// The compressor of one layer.
pub trait LayerCompressor: Send {
    /// Adds `scale` times a gradient to the residual; may come several times before a selection.
    fn accumulate(
        &mut self,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError>;

    /// The next call will accumulate this gradient, which was not fetched yet, in the same way: a device may begin with it. Comes for
    /// several layers before the first of them is accumulated, so that all have begun before one is waited for.
    fn announce(
        &mut self,
        _step: u64,
        _source: &dyn Source,
        _scale: f32,
        _workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        Ok(())
    }

    /// Chooses what to send at a step, and takes it out of the residual.
    fn select(
        &mut self,
        step: u64,
        message: &mut Sparse,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError>;

    /// Elements that were chosen come back: the exchange did not use them.
    fn give_back(&mut self, elements: &Sparse) -> Result<(), Unfit>;

    /// Takes the last step back; there is one only with `undo`, and only once.
    fn take_back(&mut self) -> Result<(), Unfit>;

    /// Changes what is sent from the next step on.
    fn set_sending(&mut self, sending: Sending);

    /// Changes the coefficient of the momentum; its form stays.
    fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit>;

    /// The learning rate at which what is sent from the next step on is applied; what waits is rescaled to it.
    fn set_rate(&mut self, rate: f32) -> Result<(), Unfit>;

    /// Starts from this rank's share of an optimizer's momentum buffer.
    fn adopt_momentum(&mut self, buffer: &[f32], ranks: usize) -> Result<(), Unfit>;

    /// Starts from what an optimizer has gathered as Adam, after so many steps.
    fn adopt_adam(&mut self, m: &[f32], q: &[f32], steps: u64) -> Result<(), Unfit>;

    /// A part of this rank's second moment, free of bias, for others to be told; zeros where there is none.
    fn second(&self, range: Range<usize>) -> Vec<f32>;

    /// What the other ranks told of theirs, from an element on: their sum over the number of ranks. It counts from the next step on.
    /// Returns what stood there before; None if nothing was given yet.
    fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<Option<Vec<f32>>, Unfit>;

    /// Takes that back.
    fn withdraw_second(&mut self, begin: usize, old: Option<&[f32]>) -> Result<(), Unfit>;

    /// Everything that the next step depends on.
    fn save(&self) -> Result<LayerState, Unfit>;

    /// Whether a state is one of this layer.
    fn check(&self, state: &LayerState) -> Result<(), Unfit>;

    /// Continues from a state; after an error nothing has changed.
    fn restore(&mut self, state: &LayerState) -> Result<(), Unfit>;

    /// The norm of what was accumulated and not sent.
    fn norm(&self) -> Result<f64, Unfit>;
}

/// Where the layers of a model are compressed.
pub trait Device {
    /// The compressor of a layer, whose number travels in its messages.
    fn compressor(
        &self,
        number: u32,
        layer: &Layer,
        config: Config,
    ) -> Result<Box<dyn LayerCompressor>, ConfigError>;
}

/// The memory of the host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Device for Host {
    fn compressor(
        &self,
        number: u32,
        layer: &Layer,
        config: Config,
    ) -> Result<Box<dyn LayerCompressor>, ConfigError> {
        Ok(Box::new(Compressor::new(number, &layer.name, layer.size, config)?))
    }
}

impl LayerCompressor for Compressor {
    fn accumulate(
        &mut self,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let elsewhere = || LayerError { layer: self.name().into(), step, why: Bad::Elsewhere };
        let gradient = source.host().ok_or_else(elsewhere)?;
        Compressor::accumulate(self, step, gradient, scale, workspace)
    }

    fn select(
        &mut self,
        step: u64,
        message: &mut Sparse,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        Compressor::select(self, step, workspace);
        workspace.swap_message(message);
        Ok(())
    }

    fn give_back(&mut self, elements: &Sparse) -> Result<(), Unfit> {
        Compressor::give_back(self, elements)
    }

    fn take_back(&mut self) -> Result<(), Unfit> {
        self.roll_back()
    }

    fn set_sending(&mut self, sending: Sending) {
        Compressor::set_sending(self, sending);
    }

    fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit> {
        Compressor::set_momentum(self, momentum)
    }

    fn set_rate(&mut self, rate: f32) -> Result<(), Unfit> {
        Compressor::set_rate(self, rate)
    }

    fn adopt_momentum(&mut self, buffer: &[f32], ranks: usize) -> Result<(), Unfit> {
        Compressor::adopt_momentum(self, buffer, ranks)
    }

    fn adopt_adam(&mut self, m: &[f32], q: &[f32], steps: u64) -> Result<(), Unfit> {
        Compressor::adopt_adam(self, m, q, steps)
    }

    fn second(&self, range: Range<usize>) -> Vec<f32> {
        self.residual().unbiased_second(range).collect()
    }

    fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<Option<Vec<f32>>, Unfit> {
        Compressor::give_second(self, begin, values)
    }

    fn withdraw_second(&mut self, begin: usize, old: Option<&[f32]>) -> Result<(), Unfit> {
        Compressor::withdraw_second(self, begin, old)
    }

    fn save(&self) -> Result<LayerState, Unfit> {
        Ok(LayerState {
            name: self.name().into(),
            size: self.residual().len(),
            momentum: self.config().momentum,
            u: self.residual().u().to_vec(),
            v: self.residual().v().to_vec(),
            memory: self.memory(),
            rate: self.rate(),
            second: self.residual().second().map(SecondMoment::from),
            kept: None,
        })
    }

    fn check(&self, state: &LayerState) -> Result<(), Unfit> {
        let residual = self.residual();
        fits(state, residual.len(), self.config().momentum, !residual.u().is_empty())
    }

    fn restore(&mut self, state: &LayerState) -> Result<(), Unfit> {
        LayerCompressor::check(self, state)?;
        if !state.u.is_empty() {
            // u is of the momentum of its step; a schedule goes on from there.
            Compressor::set_momentum(self, state.momentum)?;
        }
        let second = state.second.as_ref().map(SecondMoment::as_second);
        Compressor::restore(self, &state.u, &state.v, second, state.memory, state.rate)
    }

    fn norm(&self) -> Result<f64, Unfit> {
        Ok(norm(self.residual().v()))
    }
}

/// Whether a state is one of a layer of so many elements, which has this momentum, and u or not.
pub(crate) fn fits(state: &LayerState, expected: usize, to: Momentum, has_u: bool) -> Result<(), Unfit> {
    let from = state.momentum;
    // Momentum may begin later than the layer: then u is made on the way.
    if has_u && (state.u.is_empty() || from.form() != to.form()) {
        return Err(Unfit::Form { from, to });
    }
    let wrong = |got: usize| got != expected;
    if wrong(state.v.len()) {
        return Err(Unfit::Length { what: "v", expected, got: state.v.len() });
    }
    if !state.u.is_empty() && wrong(state.u.len()) {
        return Err(Unfit::Length { what: "u", expected, got: state.u.len() });
    }
    let squares = |state: &LayerState| state.second.as_ref().map(|second| second.own.len());
    if let Some(got) = squares(state).filter(|got| wrong(*got)) {
        return Err(Unfit::Length { what: "the second moment", expected, got });
    }
    state.check_finite()
}

pub(crate) fn norm(v: &[f32]) -> f64 {
    v.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

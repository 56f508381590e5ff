//! One layer on the sending side: gradient in, message out, state saved and loaded.
//! What must hold: an input that is refused is not accumulated and nothing of it is sent.

use crate::density::Density;
use crate::error::{ConfigError, LayerError, Unfit};
use crate::gradient::Gradient;
use crate::phase::Phase;
use crate::quantize::Values;
use crate::residual::{Momentum, Residual, Second};
use crate::select::{Memory, Selector};
use crate::sender::Sender;
use crate::sparse::Sparse;
use crate::wire::{FrameWriter, IndexCode, Shape};
use crate::workspace::Workspace;

/// What can be chosen for a layer.
///
/// ```
/// use redsync_core::{Config, Momentum, Values};
/// let config = Config { values: Values::Asq, momentum: Momentum::Nesterov(0.9), ..Config::default() };
/// assert_eq!(config.density.fraction(), 0.001);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// The fraction that is sent.
    pub density: Density,
    /// How it is chosen.
    pub selector: Selector,
    /// How its values travel.
    pub values: Values,
    /// How its indices travel. With [`IndexCode::Every`] the whole layer is sent, whatever the density and the selector.
    pub indices: IndexCode,
    /// Momentum correction. The optimizer behind must then not apply momentum again.
    pub momentum: Momentum,
    /// Ranks that share the work: the second moment of Adam is that of gradients which do not carry 1/N.
    pub ranks: usize,
    /// Clear the momentum of what was sent.
    pub masking: bool,
    /// How much of what waits is still there at the next step: 1 if nothing is forgotten. Above 0, at most 1.
    pub keep: f32,
    /// Keep u and v of the step before, which costs a second u and v and about half a pass over memory: the last step can
    /// be taken back, and a refused gradient leaves exactly the old state in a layer of any size. Without it that holds up
    /// to 65,536 elements; from a larger layer the refused gradient is subtracted again, with the rounding of f32, and zero
    /// stays where it was not finite.
    pub undo: bool,
}

/// What may change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sending {
    /// The fraction that is sent.
    pub density: Density,
    /// How its values travel.
    pub values: Values,
    /// Clear the momentum of what was sent.
    pub masking: bool,
}

impl Default for Config {
    /// 0.1%, carried threshold, f32 values, Rice-coded indices, no momentum, masking, nothing forgotten, no undo.
    fn default() -> Self {
        Config {
            density: Density::default(),
            selector: Selector::default(),
            values: Values::default(),
            indices: IndexCode::default(),
            momentum: Momentum::default(),
            ranks: 1,
            masking: true,
            keep: 1.0,
            undo: false,
        }
    }
}

impl Config {
    pub(crate) fn check(&self, n: usize) -> Result<u32, ConfigError> {
        self.momentum.check().map_err(|why| match why {
            Unfit::Eps(eps) => ConfigError::Eps(eps),
            Unfit::Coefficient(coefficient) => ConfigError::Momentum(coefficient),
            _ => ConfigError::Momentum(self.momentum.coefficient()),
        })?;
        if self.selector == Selector::Sampled && self.values.is_quantized() {
            return Err(ConfigError::SampledQuantized);
        }
        if self.indices == IndexCode::Every && self.values.is_quantized() {
            return Err(ConfigError::EveryQuantized);
        }
        if !(self.keep > 0.0 && self.keep <= 1.0) {
            return Err(ConfigError::Keep(self.keep));
        }
        u32::try_from(n).map_err(|_| ConfigError::TooLong(n))
    }
}

/// The compressor of one layer.
///
/// ```
/// use redsync_core::{Compressor, Config, FrameWriter, Gradient, Sparse, Workspace, wire::Frame};
/// let mut layer = Compressor::new(3, "conv1.weight", 4, Config::default())?;
/// let (mut workspace, mut frame) = (Workspace::new(1), FrameWriter::new());
/// frame.begin(0, 0, 0);
/// layer.compress(0, Gradient::F32(&[0.5, -2.0, 0.0, 1.0]), 1.0, &mut workspace, &mut frame)?;
///
/// let mut received = Sparse::new();
/// for message in Frame::parse(frame.finish())?.messages() {
///     message?.decode(&layer.shape(0), &mut received)?;
/// }
/// assert_eq!(received.iter().collect::<Vec<_>>(), [(1, -2.0)]); // 0.1% of four is one
/// assert_eq!(layer.residual().v(), [0.5, 0.0, 0.0, 1.0]); // the rest is kept
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Compressor {
    sender: Sender,
    residual: Residual,
}

impl Compressor {
    /// A compressor with an empty residual. `layer` is its number, `name` appears in errors.
    pub fn new(layer: u32, name: impl Into<String>, n: usize, config: Config) -> Result<Self, ConfigError> {
        let sender = Sender::new(layer, name, n, config)?;
        Ok(Compressor { sender, residual: Residual::new(n, config.momentum, config.ranks, config.undo) })
    }

    /// The layer's number.
    pub fn layer(&self) -> u32 {
        self.sender.layer()
    }

    /// The layer's name.
    pub fn name(&self) -> &str {
        self.sender.name()
    }

    /// What was chosen.
    pub fn config(&self) -> &Config {
        self.sender.config()
    }

    /// u and v.
    pub fn residual(&self) -> &Residual {
        &self.residual
    }

    /// What the selector remembers; with u and v it is the whole state of the layer.
    pub fn memory(&self) -> Memory {
        self.sender.memory()
    }

    /// The learning rate in whose units v is, if it was told: state like u and v.
    pub fn rate(&self) -> Option<f32> {
        self.sender.rate()
    }

    /// The learning rate at which what is sent from the next step on will be applied. What waits in v was accumulated at earlier
    /// rates; it is rescaled, so that it moves the weights as far as it would have moved them then. A rate of zero moves
    /// nothing, and changes nothing here.
    ///
    /// ```
    /// use redsync_core::{Compressor, Config, Gradient, Workspace};
    /// let (mut layer, mut workspace) = (Compressor::new(0, "weight", 2, Config::default())?, Workspace::new(1));
    /// layer.set_rate(0.5)?;
    /// layer.accumulate(0, Gradient::F32(&[3.0, 2.0]), 1.0, &mut workspace)?;
    /// layer.select(0, &mut workspace); // sends the 3
    /// layer.set_rate(0.25)?;
    /// layer.accumulate(1, Gradient::F32(&[0.0, 0.0]), 1.0, &mut workspace)?;
    /// assert_eq!(layer.residual().v(), [0.0, 4.0]); // 4 * 0.25 is 2 * 0.5
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_rate(&mut self, rate: f32) -> Result<(), Unfit> {
        self.sender.set_rate(rate)
    }

    /// Replaces the whole state of the layer, as read from a checkpoint; after an error nothing has changed.
    pub fn restore(
        &mut self,
        u: &[f32],
        v: &[f32],
        second: Option<Second<'_>>,
        memory: Memory,
        rate: Option<f32>,
    ) -> Result<(), Unfit> {
        Sender::check_rate(rate)?;
        self.residual.restore(u, v, second)?;
        self.sender.restore(memory, rate);
        Ok(())
    }

    /// Takes over from dense training; see [`Residual::adopt_momentum`].
    pub fn adopt_momentum(&mut self, buffer: &[f32], ranks: usize) -> Result<(), Unfit> {
        self.residual.adopt_momentum(buffer, ranks)?;
        self.sender.changed();
        Ok(())
    }

    /// Takes over from Adam; see [`Residual::adopt_adam`].
    pub fn adopt_adam(&mut self, m: &[f32], q: &[f32], steps: u64) -> Result<(), Unfit> {
        self.residual.adopt_adam(m, q, steps)?;
        self.sender.changed();
        Ok(())
    }

    /// What the other ranks tell of their second moments; see [`Residual::give_second`].
    pub fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<Option<Vec<f32>>, Unfit> {
        self.residual.give_second(begin, values)
    }

    /// Takes that back; see [`Residual::withdraw_second`].
    pub fn withdraw_second(&mut self, begin: usize, old: Option<&[f32]>) -> Result<(), Unfit> {
        self.residual.withdraw_second(begin, old)
    }

    /// Changes what is sent from the next step on, for a warm-up; u and v stay.
    pub fn set_sending(&mut self, sending: Sending) {
        self.sender.set_sending(sending);
    }

    /// Changes the coefficient of the momentum between steps; its form, plain or Nesterov, stays. After an error nothing has
    /// changed.
    pub fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit> {
        momentum.check()?;
        self.residual.set_momentum(momentum)?;
        self.sender.set_momentum(momentum);
        Ok(())
    }

    /// The signs that compete at a step.
    pub fn phase(&self, step: u64) -> Phase {
        self.sender.phase(step)
    }

    /// What a reader has to know of the layer's message of a step.
    pub fn shape(&self, step: u64) -> Shape {
        self.sender.shape(step)
    }

    /// Accumulates `scale` times the gradient (`scale` is 1/N), chooses what to send, adds it to the frame as a message
    /// and takes it out of the residual. Returns how many elements were sent.
    pub fn compress(
        &mut self,
        step: u64,
        gradient: Gradient<'_>,
        scale: f32,
        workspace: &mut Workspace,
        frame: &mut FrameWriter,
    ) -> Result<usize, LayerError> {
        self.accumulate(step, gradient, scale, workspace)?;
        self.select(step, workspace);
        let message = std::mem::take(&mut workspace.message);
        self.encode(&message, frame);
        workspace.message = message;
        Ok(workspace.message.len())
    }

    /// Accumulates `scale` times the gradient, once or several times before a selection, and finds in the same pass what the
    /// selection of this step will want to know; that stays in the workspace. What is forgotten ([`Config::keep`]) is forgotten each time.
    ///
    /// ```
    /// use redsync_core::{Compressor, Config, Gradient, Workspace};
    /// let mut layer = Compressor::new(0, "weight", 3, Config::default())?;
    /// let mut workspace = Workspace::new(1);
    /// layer.accumulate(0, Gradient::F32(&[1.0, 0.0, 2.0]), 1.0, &mut workspace)?;
    /// layer.accumulate(0, Gradient::F32(&[3.0, 0.0, 1.0]), 1.0, &mut workspace)?;
    /// layer.select(0, &mut workspace);
    /// assert_eq!(workspace.message().iter().collect::<Vec<_>>(), [(0, 4.0)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn accumulate(
        &mut self,
        step: u64,
        gradient: Gradient<'_>,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let look = self.sender.look(step, scale, workspace)?;
        let outcome =
            self.residual.accumulate(gradient, scale, look.carry, look.phase, look.wanted, workspace);
        outcome.map_err(|why| self.sender.error(step, why))?;
        self.sender.accumulated(look, workspace);
        Ok(())
    }

    /// Chooses what to send of what was accumulated, and takes it out of the residual: a sparse vector, which stays in the
    /// workspace as [`Workspace::message`]. If the workspace served another layer since, or v changed, all of v is looked
    /// through.
    pub fn select(&mut self, step: u64, workspace: &mut Workspace) {
        let mut v = self.residual.v();
        let Ok(()) = self.sender.choose(step, &mut v, workspace);
        self.residual.remove(self.sender.rests(workspace), self.sender.config().masking);
    }

    /// Gives elements that were taken out but not used back to the residual.
    pub fn give_back(&mut self, elements: &Sparse) -> Result<(), Unfit> {
        let (expected, got) = (self.sender.len(), elements.dense_len());
        if got != expected {
            return Err(Unfit::Length { what: "what is given back", expected, got });
        }
        self.residual.give_back(elements.iter());
        self.sender.changed();
        Ok(())
    }

    /// The last part of [`Compressor::compress`]: adds a sparse vector of this layer to a frame.
    pub fn encode(&self, message: &Sparse, frame: &mut FrameWriter) {
        self.sender.encode(message, frame);
    }

    /// Takes the last step back, as if its gradient had never come: for a step that failed elsewhere or is to be
    /// skipped. There is one to take back only with [`Config::undo`], and only once.
    pub fn roll_back(&mut self) -> Result<(), Unfit> {
        self.residual.roll_back()?;
        self.sender.roll_back();
        Ok(())
    }
}

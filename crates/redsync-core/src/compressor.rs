//! One layer on the sending side: gradient in, message out, state saved and loaded.
//! What must hold: an input that is refused is not accumulated and nothing of it is sent.

use crate::density::Density;
use crate::error::{Bad, ConfigError, LayerError, Unfit};
use crate::gradient::Gradient;
use crate::kernel::Key;
use crate::phase::Phase;
use crate::quantize::{Values, asq, eight_bit, multiple, round, two_bit};
use crate::residual::{Momentum, Residual, Second};
use crate::select::{Memory, Selector};
use crate::sparse::Sparse;
use crate::wire::{FrameWriter, IndexCode, Shape};
use crate::workspace::{View, Workspace};

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
    /// 0.1%, carried threshold, f32 values, Rice-coded indices, no momentum, masking, no undo.
    fn default() -> Self {
        Config {
            density: Density::default(),
            selector: Selector::default(),
            values: Values::default(),
            indices: IndexCode::default(),
            momentum: Momentum::default(),
            ranks: 1,
            masking: true,
            undo: false,
        }
    }
}

impl Config {
    fn check(&self, n: usize) -> Result<u32, ConfigError> {
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
    layer: u32,
    name: String,
    n: u32,
    config: Config,
    residual: Residual,
    memory: Memory,
    /// The learning rate of the step at which v was last accumulated, in whose units it is; None if nobody told it.
    rate: Option<f32>,
    /// The rate of the steps to come.
    next_rate: Option<f32>,
    /// Memory and rate before the last step.
    before: (Memory, Option<f32>),
    /// Counts what changed v: candidates that were found in an earlier one are void.
    changes: u64,
}

impl Compressor {
    /// A compressor with an empty residual. `layer` is its number, `name` appears in errors.
    pub fn new(layer: u32, name: impl Into<String>, n: usize, config: Config) -> Result<Self, ConfigError> {
        let memory = Memory::default();
        let residual = |n: u32| Residual::new(n as usize, config.momentum, config.ranks, config.undo);
        config.check(n).map(|n| Compressor {
            layer,
            name: name.into(),
            n,
            config,
            residual: residual(n),
            memory,
            rate: None,
            next_rate: None,
            before: (memory, None),
            changes: 0,
        })
    }

    /// The layer's number.
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// The layer's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What was chosen.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// u and v.
    pub fn residual(&self) -> &Residual {
        &self.residual
    }

    /// What the selector remembers; with u and v it is the whole state of the layer.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The learning rate in whose units v is, if it was told: state like u and v.
    pub fn rate(&self) -> Option<f32> {
        self.rate
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
        if !(rate >= 0.0 && rate.is_finite()) {
            return Err(Unfit::Rate(rate));
        }
        if rate > 0.0 {
            self.next_rate = Some(rate);
        }
        Ok(())
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
        if let Some(rate) = rate.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
            return Err(Unfit::Rate(rate));
        }
        self.residual.restore(u, v, second)?;
        (self.memory, self.rate, self.changes) = (memory, rate, self.changes + 1);
        Ok(())
    }

    /// Takes over from dense training; see [`Residual::adopt_momentum`].
    pub fn adopt_momentum(&mut self, buffer: &[f32], ranks: usize) -> Result<(), Unfit> {
        self.residual.adopt_momentum(buffer, ranks)?;
        self.changes += 1;
        Ok(())
    }

    /// Takes over from Adam; see [`Residual::adopt_adam`].
    pub fn adopt_adam(&mut self, m: &[f32], q: &[f32], steps: u64) -> Result<(), Unfit> {
        self.residual.adopt_adam(m, q, steps)?;
        self.changes += 1;
        Ok(())
    }

    /// A part of the second moment by which momentum is divided from the next step on; see [`Residual::give_second`].
    pub fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<(), Unfit> {
        self.residual.give_second(begin, values)
    }

    /// Changes what is sent from the next step on, for a warm-up; u and v stay.
    pub fn set_sending(&mut self, sending: Sending) {
        let Sending { density, values, masking } = sending;
        (self.config.density, self.config.values, self.config.masking) = (density, values, masking);
    }

    /// Changes the coefficient of the momentum between steps; its form, plain or Nesterov, stays. After an error nothing has
    /// changed.
    pub fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit> {
        momentum.check()?;
        self.residual.set_momentum(momentum)?;
        self.config.momentum = momentum;
        Ok(())
    }

    /// The signs that compete at a step.
    pub fn phase(&self, step: u64) -> Phase {
        self.config.values.phase(step)
    }

    /// What a reader has to know of the layer's message of a step.
    pub fn shape(&self, step: u64) -> Shape {
        let Config { indices, values, .. } = self.config;
        Shape { n: self.n, phase: self.phase(step), indices, values }
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
    /// selection of this step will want to know; that stays in the workspace.
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
        let refuse = |why| LayerError { layer: self.name.clone(), step, why };
        if !scale.is_finite() {
            return Err(refuse(Bad::Scale(scale)));
        }
        let (phase, k) = (self.phase(step), self.config.density.k(self.n as usize));
        // Where everything is sent, nothing need be found.
        let everything = self.config.indices == IndexCode::Every;
        let selector = if everything { Selector::Exact } else { self.config.selector };
        let carry = match (self.rate, self.next_rate) {
            (Some(was), Some(is)) => was / is,
            _ => 1.0,
        };
        let memory = self.memory.scaled(carry);
        let wanted = selector.wants(&memory, phase, k);
        workspace.found_in = None;
        self.residual.accumulate(gradient, scale, carry, phase, wanted, workspace).map_err(refuse)?;
        (self.before, self.changes) = ((self.memory, self.rate), self.changes + 1);
        (self.memory, self.rate) = (memory, self.next_rate.or(self.rate));
        workspace.found_in = Some(self.view(phase));
        Ok(())
    }

    /// Chooses what to send of what was accumulated, and takes it out of the residual: a sparse vector, which stays in the
    /// workspace as [`Workspace::message`]. If the workspace served another layer since, or v changed, all of v is looked
    /// through.
    pub fn select(&mut self, step: u64, workspace: &mut Workspace) {
        let Config { selector, values, masking, density, .. } = self.config;
        let (phase, k) = (self.phase(step), density.k(self.n as usize));
        if self.config.indices == IndexCode::Every {
            workspace.found_in = None;
            workspace.keys.clear();
            workspace.keys.extend((0..self.n).zip(self.residual.v()).map(|(i, x)| Key::new(*x, i)));
        } else if workspace.found_in.take() == Some(self.view(phase)) {
            selector.finish(&mut self.memory, self.residual.v(), phase, k, workspace);
        } else {
            Selector::Exact.finish(&mut self.memory, self.residual.v(), phase, k, workspace);
        }
        self.take_out(values, masking, phase, workspace);
    }

    /// What candidates are candidates of: this v, as it is, seen in a phase.
    fn view(&self, phase: Phase) -> View {
        View { v: self.residual.v().as_ptr().addr(), changes: self.changes, phase }
    }

    /// Gives elements that were taken out but not used back to the residual.
    pub fn give_back(&mut self, elements: &Sparse) -> Result<(), Unfit> {
        let (expected, got) = (self.n as usize, elements.dense_len());
        if got != expected {
            return Err(Unfit::Length { what: "what is given back", expected, got });
        }
        self.residual.give_back(elements.iter());
        self.changes += 1;
        Ok(())
    }

    /// The last part of [`Compressor::compress`]: adds a sparse vector of this layer to a frame.
    pub fn encode(&self, message: &Sparse, frame: &mut FrameWriter) {
        frame.push(message, self.config.indices, self.config.values);
    }

    /// Turns the chosen keys into the message and leaves in the residual what is not sent.
    fn take_out(&mut self, values: Values, masking: bool, phase: Phase, workspace: &mut Workspace) {
        let Workspace { keys, message, .. } = workspace;
        message.reset(self.n, phase);
        message.indices.extend(keys.iter().map(|key| key.index()));
        let each = keys.iter().map(|key| (key.index(), key.value()));
        match values {
            Values::F32 => {
                message.values.extend(keys.iter().map(|key| key.value()));
                self.residual.remove(each.map(|(index, _)| (index, 0.0)), masking);
            }
            Values::Bf16 => {
                message.values.extend(keys.iter().map(|key| round(key.value()).to_f32()));
                let rest = |value: f32| value - round(value).to_f32();
                self.residual.remove(each.map(|(index, value)| (index, rest(value))), masking);
            }
            Values::EightBit => {
                let scale = eight_bit(keys.iter().map(|key| key.value()));
                let near = |value: f32| scale * f32::from(multiple(value, scale));
                message.values.extend(keys.iter().map(|key| near(key.value())));
                message.scale = Some(scale);
                self.residual.remove(each.map(|(index, value)| (index, value - near(value))), masking);
            }
            Values::TwoBit => {
                let levels = two_bit(keys.iter().map(|key| key.value()));
                message.values.extend(keys.iter().map(|key| levels.of(key.value())));
                message.levels = Some(levels.levels);
                let rest = |value: f32| value - levels.of(value);
                self.residual.remove(each.map(|(index, value)| (index, rest(value))), masking);
            }
            Values::Asq | Values::AsqDropError => {
                let mean = asq(keys);
                message.mean = (!keys.is_empty()).then_some(mean);
                let keep = values == Values::Asq;
                let rest = |value: f32| if keep { value - mean } else { 0.0 };
                self.residual.remove(each.map(|(index, value)| (index, rest(value))), masking);
            }
        }
    }

    /// Takes the last step back, as if its gradient had never come: for a step that failed elsewhere or is to be
    /// skipped. There is one to take back only with [`Config::undo`], and only once.
    pub fn roll_back(&mut self) -> Result<(), Unfit> {
        self.residual.roll_back()?;
        ((self.memory, self.rate), self.changes) = (self.before, self.changes + 1);
        Ok(())
    }
}

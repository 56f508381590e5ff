//! One layer on the sending side: gradient in, message out, state saved and loaded.
//! What must hold: an input that is refused is not accumulated and nothing of it is sent.

use crate::density::Density;
use crate::error::{Bad, ConfigError, LayerError};
use crate::gradient::Gradient;
use crate::phase::Phase;
use crate::quantize::{Values, asq, round};
use crate::residual::{Momentum, Residual};
use crate::select::{Memory, Selector};
use crate::sparse::Sparse;
use crate::wire::{FrameWriter, IndexCode};
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
    /// How its indices travel.
    pub indices: IndexCode,
    /// Momentum correction. The optimizer behind must then not apply momentum again.
    pub momentum: Momentum,
    /// Clear the momentum of what was sent.
    pub masking: bool,
    /// Keep u and v of the step before, which costs a second u and v and about half a pass over memory: the last step can
    /// be taken back, and a refused gradient leaves exactly the old state in a layer of any size. Without it that holds up
    /// to 65,536 elements; from a larger layer the refused gradient is subtracted again, with the rounding of f32, and zero
    /// stays where it was not finite.
    pub undo: bool,
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
            masking: true,
            undo: false,
        }
    }
}

impl Config {
    fn check(&self, n: usize) -> Result<u32, ConfigError> {
        let m = self.momentum.coefficient();
        if !(0.0..1.0).contains(&m) {
            return Err(ConfigError::Momentum(m));
        }
        if self.selector == Selector::Sampled && self.values.is_quantized() {
            return Err(ConfigError::SampledQuantized);
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
/// frame.begin(0, 0);
/// layer.compress(0, Gradient::F32(&[0.5, -2.0, 0.0, 1.0]), 1.0, &mut workspace, &mut frame)?;
///
/// let mut received = Sparse::new();
/// for message in Frame::parse(frame.finish())?.messages() {
///     message?.decode(3, 4, layer.phase(0), &mut received)?;
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
    memory_before: Memory,
}

impl Compressor {
    /// A compressor with an empty residual. `layer` travels in the messages, `name` appears in errors.
    pub fn new(layer: u32, name: impl Into<String>, n: usize, config: Config) -> Result<Self, ConfigError> {
        let memory = Memory::default();
        let residual = |n: u32| Residual::new(n as usize, config.momentum, config.undo);
        config.check(n).map(|n| Compressor {
            layer,
            name: name.into(),
            n,
            config,
            residual: residual(n),
            memory,
            memory_before: memory,
        })
    }

    /// The layer's number in messages.
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

    /// u and v, to be restored.
    pub fn residual_mut(&mut self) -> &mut Residual {
        &mut self.residual
    }

    /// What the selector remembers; with u and v it is the whole state of the layer.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Replaces what the selector remembers, as read from a checkpoint.
    pub fn set_memory(&mut self, memory: Memory) {
        self.memory = memory;
    }

    /// Changes the density, for a warm-up; u and v stay.
    pub fn set_density(&mut self, density: Density) {
        self.config.density = density;
    }

    /// Changes the coefficient of the momentum between steps; its form, plain or Nesterov, stays. Returns false, and changes
    /// nothing, if the form is another or the coefficient is not at least 0 and below 1.
    pub fn set_momentum(&mut self, momentum: Momentum) -> bool {
        let done = (0.0..1.0).contains(&momentum.coefficient()) && self.residual.set_momentum(momentum);
        if done {
            self.config.momentum = momentum;
        }
        done
    }

    /// The signs that compete at a step.
    pub fn phase(&self, step: u64) -> Phase {
        self.config.values.phase(step)
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
        self.select(step, gradient, scale, workspace)?;
        let message = std::mem::take(&mut workspace.message);
        self.encode(&message, frame);
        workspace.message = message;
        Ok(workspace.message.len())
    }

    /// The first half of [`Compressor::compress`]: everything up to the sparse vector, which stays in the workspace as
    /// [`Workspace::message`].
    pub fn select(
        &mut self,
        step: u64,
        gradient: Gradient<'_>,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let Config { selector, values, masking, density, .. } = self.config;
        let refuse = |why| LayerError { layer: self.name.clone(), step, why };
        if !scale.is_finite() {
            return Err(refuse(Bad::Scale(scale)));
        }
        let (phase, k) = (self.phase(step), density.k(self.n as usize));
        let wanted = selector.wants(&self.memory, phase, k);
        self.residual.accumulate(gradient, scale, phase, wanted, workspace).map_err(refuse)?;
        self.memory_before = self.memory;
        selector.finish(&mut self.memory, self.residual.v(), phase, k, workspace);
        self.take_out(values, masking, phase, workspace);
        Ok(())
    }

    /// Adds an empty message in the place of a gradient that does not exist at this step; u and v stay as they are.
    ///
    /// ```
    /// use redsync_core::{Compressor, Config, FrameWriter, Sparse, Values, Workspace, wire::Frame};
    /// let config = Config { values: Values::Asq, ..Config::default() };
    /// let layer = Compressor::new(0, "unused", 4, config)?;
    /// let (mut workspace, mut frame, mut received) = (Workspace::new(1), FrameWriter::new(), Sparse::new());
    /// frame.begin(0, 0);
    /// layer.skip(0, &mut workspace, &mut frame);
    /// for message in Frame::parse(frame.finish())?.messages() {
    ///     message?.decode(0, 4, layer.phase(0), &mut received)?;
    /// }
    /// assert!(received.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn skip(&self, step: u64, workspace: &mut Workspace, frame: &mut FrameWriter) {
        workspace.message.clear(self.n, self.phase(step));
        self.encode(&workspace.message, frame);
    }

    /// The second half of [`Compressor::compress`]: adds a sparse vector of this layer to a frame.
    pub fn encode(&self, message: &Sparse, frame: &mut FrameWriter) {
        frame.push(self.layer, message, self.config.indices, self.config.values);
    }

    /// Turns the chosen keys into the message and leaves in the residual what is not sent.
    fn take_out(&mut self, values: Values, masking: bool, phase: Phase, workspace: &mut Workspace) {
        let Workspace { keys, message, .. } = workspace;
        message.clear(self.n, phase);
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
    /// skipped. Returns false if there is none to take back, or without [`Config::undo`].
    pub fn roll_back(&mut self) -> bool {
        let done = self.residual.roll_back();
        if done {
            self.memory = self.memory_before;
        }
        done
    }
}

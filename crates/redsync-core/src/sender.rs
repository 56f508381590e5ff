//! The sending side of one layer without its u and v: what was chosen, what the selector remembers, the rate in whose units v is. It
//! serves a residual anywhere: on the host as part of [`Compressor`](crate::Compressor), on a device as part of what keeps it there.
//! What must hold: what is chosen and what it is sent as do not depend on where the residual is, to the last bit.

use crate::elements::Elements;
use crate::error::{Bad, ConfigError, LayerError, Unfit};
use crate::kernel::Key;
use crate::phase::Phase;
use crate::quantize::{Values, asq, eight_bit, multiple, round, two_bit};
use crate::select::{Memory, Selector, Wanted};
use crate::sparse::Sparse;
use crate::wire::{FrameWriter, IndexCode, Shape};
use crate::workspace::{View, Workspace};
use crate::{Config, Sending};
use std::sync::atomic::{AtomicU64, Ordering};

/// Tells senders apart: candidates of one are not taken for those of another.
static SENDERS: AtomicU64 = AtomicU64::new(0);

/// Everything of a layer's sending side but u and v.
#[derive(Debug)]
pub struct Sender {
    id: u64,
    layer: u32,
    name: String,
    n: u32,
    config: Config,
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

/// What an accumulating pass has to do and to find out.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Multiplies what v held before.
    pub carry: f32,
    /// The signs that compete.
    pub phase: Phase,
    /// What the selection wants to know of the new v.
    pub wanted: Wanted,
    /// What is remembered if the gradient is not refused.
    memory: Memory,
}

impl Sender {
    /// The sending side of a layer whose u and v are zeros. `layer` is its number, `name` appears in errors.
    pub fn new(layer: u32, name: impl Into<String>, n: usize, config: Config) -> Result<Self, ConfigError> {
        let n = config.check(n)?;
        Ok(Sender {
            id: SENDERS.fetch_add(1, Ordering::Relaxed),
            layer,
            name: name.into(),
            n,
            config,
            memory: Memory::default(),
            rate: None,
            next_rate: None,
            before: (Memory::default(), None),
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

    /// Elements of the layer.
    pub fn len(&self) -> usize {
        self.n as usize
    }

    /// Whether the layer has no elements.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// What was chosen.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the selector remembers; with u and v it is the whole state of the layer.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The learning rate in whose units v is, if it was told: state like u and v.
    pub fn rate(&self) -> Option<f32> {
        self.rate
    }

    /// See [`Compressor::set_rate`](crate::Compressor::set_rate).
    pub fn set_rate(&mut self, rate: f32) -> Result<(), Unfit> {
        if !(rate >= 0.0 && rate.is_finite()) {
            return Err(Unfit::Rate(rate));
        }
        if rate > 0.0 {
            self.next_rate = Some(rate);
        }
        Ok(())
    }

    /// Changes what is sent from the next step on, for a warm-up.
    pub fn set_sending(&mut self, sending: Sending) {
        let Sending { density, values, masking } = sending;
        (self.config.density, self.config.values, self.config.masking) = (density, values, masking);
    }

    /// Notes the momentum that the residual has taken over.
    pub fn set_momentum(&mut self, momentum: crate::Momentum) {
        self.config.momentum = momentum;
    }

    /// Whether a saved rate makes sense; to be asked before u and v are replaced.
    pub fn check_rate(rate: Option<f32>) -> Result<(), Unfit> {
        match rate.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
            Some(rate) => Err(Unfit::Rate(rate)),
            None => Ok(()),
        }
    }

    /// Continues from what a checkpoint says besides u and v, which were replaced.
    pub fn restore(&mut self, memory: Memory, rate: Option<f32>) {
        (self.memory, self.rate) = (memory, rate);
        self.changed();
    }

    /// v has changed in another way than by a pass: what was found in it before is void.
    pub fn changed(&mut self) {
        self.changes += 1;
    }

    /// The last step was taken back.
    pub fn roll_back(&mut self) {
        (self.memory, self.rate) = self.before;
        self.changed();
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

    /// An error of this layer.
    pub fn error(&self, step: u64, why: Bad) -> LayerError {
        LayerError { layer: self.name.clone(), step, why }
    }

    /// Before a gradient is accumulated: what the pass has to do and to find out. The workspace forgets what it had found.
    pub fn look(&self, step: u64, scale: f32, workspace: &mut Workspace) -> Result<Look, LayerError> {
        if !scale.is_finite() {
            return Err(self.error(step, Bad::Scale(scale)));
        }
        workspace.found_in = None;
        let (phase, k) = (self.phase(step), self.config.density.k(self.len()));
        // Where everything is sent, nothing need be found.
        let everything = self.config.indices == IndexCode::Every;
        let selector = if everything { Selector::Exact } else { self.config.selector };
        let rescaled = match (self.rate, self.next_rate) {
            (Some(was), Some(is)) => was / is,
            _ => 1.0,
        };
        let carry = rescaled * self.config.keep;
        let memory = self.memory.scaled(carry);
        Ok(Look { carry, phase, wanted: selector.wants(&memory, phase, k), memory })
    }

    /// After the pass, if the gradient was not refused: what it found is in the workspace.
    pub fn accumulated(&mut self, look: Look, workspace: &mut Workspace) {
        self.before = (self.memory, self.rate);
        self.changed();
        (self.memory, self.rate) = (look.memory, self.next_rate.or(self.rate));
        workspace.found_in = Some(self.view(look.phase));
    }

    /// What candidates are candidates of: this v, as it is, seen in a phase.
    fn view(&self, phase: Phase) -> View {
        View { sender: self.id, changes: self.changes, phase }
    }

    /// Chooses what to send of v and makes the message of it; both stay in the workspace. If the workspace served another layer since
    /// the pass, or v changed, all of v is looked through.
    pub fn choose<E: Elements>(
        &mut self,
        step: u64,
        v: &mut E,
        workspace: &mut Workspace,
    ) -> Result<(), E::Error> {
        let (phase, k) = (self.phase(step), self.config.density.k(self.len()));
        let is_ours = workspace.found_in.take() == Some(self.view(phase));
        if self.config.indices == IndexCode::Every {
            let v = v.whole()?;
            workspace.keys.clear();
            workspace.keys.extend((0..self.n).zip(&*v).map(|(i, x)| Key::new(*x, i)));
        } else {
            let selector = if is_ours { self.config.selector } else { Selector::Exact };
            selector.finish(&mut self.memory, v, phase, k, workspace)?;
        }
        let Workspace { keys, message, .. } = workspace;
        message.reset(self.n, phase);
        make(message, self.config.values, keys);
        Ok(())
    }

    /// Whether nothing of a chosen element stays in v. If not, what stays is the element minus what was sent of it.
    pub fn sends_whole(&self) -> bool {
        matches!(self.config.values, Values::F32 | Values::AsqDropError)
    }

    /// What stays in v of each chosen element, with its index, in index order.
    pub fn rests<'a>(&self, workspace: &'a Workspace) -> impl Iterator<Item = (u32, f32)> + 'a {
        let whole = self.sends_whole();
        let sent = workspace.message.iter().map(|(_, value)| value);
        let rest = move |value: f32, sent: f32| if whole { 0.0 } else { value - sent };
        workspace.chosen().zip(sent).map(move |((index, value), sent)| (index, rest(value, sent)))
    }

    /// Adds a sparse vector of this layer to a frame.
    pub fn encode(&self, message: &Sparse, frame: &mut FrameWriter) {
        frame.push(message, self.config.indices, self.config.values);
    }
}

/// Fills an empty message with the chosen keys, as their values travel.
fn make(message: &mut Sparse, values: Values, keys: &[Key]) {
    let each = keys.iter().map(|key| key.value());
    message.indices.extend(keys.iter().map(|key| key.index()));
    match values {
        Values::F32 => message.values.extend(each),
        Values::Bf16 => message.values.extend(each.map(|value| round(value).to_f32())),
        Values::EightBit => {
            let scale = eight_bit(each.clone());
            message.values.extend(each.map(|value| scale * f32::from(multiple(value, scale))));
            message.scale = Some(scale);
        }
        Values::TwoBit => {
            let levels = two_bit(each.clone());
            message.values.extend(each.map(|value| levels.of(value)));
            message.levels = Some(levels.levels);
        }
        Values::Asq | Values::AsqDropError => {
            message.mean = (!keys.is_empty()).then(|| asq(keys));
        }
    }
}

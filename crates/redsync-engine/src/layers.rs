//! The compressed layers of one rank: all that lasts from step to step, in one place.
//! Comes in: gradients, one layer at a time. Goes out: messages, and the state of every layer. What must hold: a step that is
//! taken back leaves every layer as it was before, used at that step or not.

use crate::compressor::LayerCompressor;
use crate::error::SyncError;
use crate::layer::Layer;
use crate::source::Source;
use crate::state::LayerState;
use crate::waiting;
use redsync_core::{LayerError, Momentum, Sending, Sparse, Unfit, Workspace};
use std::ops::Range;

/// The compressors of a rank; None for a layer that is always dense.
pub(crate) struct Layers {
    compressors: Vec<Option<Box<dyn LayerCompressor>>>,
    names: Vec<String>,
    strengths: Vec<Strength>,
    /// The layers that were accumulated at the step that is under way, or at the last one.
    touched: Vec<usize>,
    /// Where second moments were given at that step, and what stood there before.
    told: Vec<(usize, usize, Option<Vec<f32>>)>,
}

/// With which momentum gradients enter a layer's residual.
struct Strength {
    /// The optimizer's.
    usual: Momentum,
    /// It is less while elements wait.
    lowers: bool,
    /// The compressor may have another than the usual one.
    other: bool,
    /// What gradients are multiplied with.
    factor: f32,
}

impl Layers {
    /// `compressors` of `layers`, with the momentum of each, and whether it is less while elements wait.
    pub fn new(
        layers: &[Layer],
        compressors: Vec<Option<Box<dyn LayerCompressor>>>,
        momenta: impl Iterator<Item = (Momentum, bool)>,
    ) -> Self {
        let names = layers.iter().map(|layer| layer.name.clone()).collect();
        let strength = |(usual, lowers)| Strength { usual, lowers, other: false, factor: 1.0 };
        let strengths = momenta.map(strength).collect();
        Layers { compressors, names, strengths, touched: Vec::new(), told: Vec::new() }
    }

    /// A step begins at which each layer sends what is given, if anything.
    pub fn begin(&mut self, sendings: impl IntoIterator<Item = Option<Sending>>) -> Result<(), SyncError> {
        self.touched.clear();
        self.told.clear();
        for (layer, sending) in sendings.into_iter().enumerate() {
            let (Some(compressor), Some(sending)) = (&mut self.compressors[layer], sending) else { continue };
            compressor.set_sending(sending);
            let strength = &mut self.strengths[layer];
            let (momentum, factor) = match strength.lowers {
                true => waiting::lowered(strength.usual, sending.density),
                false => (strength.usual, 1.0),
            };
            strength.factor = factor;
            if strength.other || momentum != strength.usual {
                let unfit = |why| SyncError::Unfit { layer: self.names[layer].clone(), why };
                compressor.set_momentum(momentum).map_err(unfit)?;
                strength.other = momentum != strength.usual;
            }
        }
        Ok(())
    }

    /// A gradient that is compressed next; see [`LayerCompressor::announce`].
    pub fn announce(
        &mut self,
        layer: usize,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let (compressor, scale) = (self.compressors[layer].as_mut(), scale * self.strengths[layer].factor);
        compressor.map_or(Ok(()), |compressor| compressor.announce(step, source, scale, workspace))
    }

    /// Accumulates a gradient and chooses what to send of the sum.
    pub fn compress(
        &mut self,
        layer: usize,
        step: u64,
        source: &dyn Source,
        scale: f32,
        message: &mut Sparse,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let Some(compressor) = &mut self.compressors[layer] else { return Ok(()) };
        compressor.accumulate(step, source, scale * self.strengths[layer].factor, workspace)?;
        self.touched.push(layer);
        compressor.select(step, message, workspace)
    }

    /// What the exchange did not use comes back.
    pub fn give_back(&mut self, layer: usize, elements: &Sparse) -> Result<(), SyncError> {
        self.change(layer, |compressor| compressor.give_back(elements))
    }

    /// Takes the step that was begun last back.
    pub fn take_back(&mut self) -> Result<(), SyncError> {
        for (layer, begin, old) in std::mem::take(&mut self.told).into_iter().rev() {
            self.change(layer, |compressor| compressor.withdraw_second(begin, old.as_deref()))?;
        }
        for layer in std::mem::take(&mut self.touched) {
            self.change(layer, |compressor| compressor.take_back())?;
        }
        Ok(())
    }

    /// The usual momentum of a layer is another from now on. What u is of is changed at the next step where it is lowered, or of a
    /// checkpoint: changed twice it would be rounded twice.
    pub fn set_momentum(&mut self, layer: usize, momentum: Momentum) -> Result<(), SyncError> {
        let strength = self.strengths.get(layer).map(|strength| (strength.usual, strength.other));
        self.change(layer, |compressor| match strength {
            Some((usual, true)) => {
                momentum.check()?;
                usual.change(momentum, usual.traced() != Momentum::None).map(drop)
            }
            _ => compressor.set_momentum(momentum),
        })?;
        self.strengths[layer].usual = momentum;
        Ok(())
    }

    /// The momentum of a layer's optimizer.
    pub fn usual_momentum(&self, layer: usize) -> Momentum {
        self.strengths[layer].usual
    }

    /// A dense layer has nothing that waits.
    pub fn set_rate(&mut self, layer: usize, rate: f32) -> Result<(), SyncError> {
        match self.compressors.get(layer) {
            Some(None) => Ok(()),
            _ => self.change(layer, |compressor| compressor.set_rate(rate)),
        }
    }

    /// The buffer is of the usual momentum.
    pub fn adopt_momentum(&mut self, layer: usize, buffer: &[f32], ranks: usize) -> Result<(), SyncError> {
        let usual = self.strengths.get(layer).map(|strength| strength.usual);
        self.change(layer, |compressor| {
            usual.map_or(Ok(()), |usual| compressor.set_momentum(usual))?;
            compressor.adopt_momentum(buffer, ranks)
        })
    }

    pub fn adopt_adam(&mut self, layer: usize, m: &[f32], q: &[f32], steps: u64) -> Result<(), SyncError> {
        self.change(layer, |compressor| compressor.adopt_adam(m, q, steps))
    }

    /// A part of a layer's second moment, free of bias.
    pub fn second(&self, layer: usize, range: Range<usize>) -> Vec<f32> {
        let compressor = self.compressors.get(layer).and_then(Option::as_ref);
        compressor.map_or_else(|| vec![0.0; range.len()], |compressor| compressor.second(range.clone()))
    }

    /// What the other ranks told of theirs.
    pub fn give_second(&mut self, layer: usize, begin: usize, values: &[f32]) -> Result<(), SyncError> {
        let mut old = None;
        self.change(layer, |compressor| {
            old = compressor.give_second(begin, values)?;
            Ok(())
        })?;
        self.told.push((layer, begin, old));
        Ok(())
    }

    /// The norm of what a layer has accumulated and not sent; None for a dense layer, or one whose device failed.
    pub fn norm(&self, layer: usize) -> Option<f64> {
        self.compressors.get(layer)?.as_ref()?.norm().ok()
    }

    /// The state of a layer; None for a dense one.
    pub fn state_of(&self, layer: usize) -> Result<Option<LayerState>, SyncError> {
        let compressor = self.compressors.get(layer).and_then(Option::as_ref);
        let unfit = |why| SyncError::Unfit { layer: self.names[layer].clone(), why };
        compressor.map(|compressor| compressor.save().map_err(unfit)).transpose()
    }

    /// The state of every compressed layer, in order.
    pub fn save(&self) -> Result<Vec<LayerState>, SyncError> {
        (0..self.names.len()).filter_map(|layer| self.state_of(layer).transpose()).collect()
    }

    /// Whether states are those of the compressed layers; a sentence if not.
    pub fn check(&self, states: &[LayerState]) -> Result<(), String> {
        let ours: Vec<usize> = (0..self.names.len()).filter(|i| self.compressors[*i].is_some()).collect();
        let theirs: Vec<&str> = states.iter().map(|state| &state.name[..]).collect();
        let names: Vec<&str> = ours.iter().map(|layer| &self.names[*layer][..]).collect();
        if names != theirs {
            let once = |a: &[&str], b: &[&str]| -> Vec<String> {
                a.iter().filter(|name| !b.contains(name)).map(|name| name.to_string()).collect()
            };
            let apart = [once(&names, &theirs), once(&theirs, &names)].concat();
            return Err(match apart.is_empty() {
                true => "it compresses the layers in another order".into(),
                false => format!("it compresses other layers; not in both: {}", apart.join(", ")),
            });
        }
        for (compressor, state) in self.compressors.iter().flatten().zip(states) {
            compressor.check(state).map_err(|why| format!("layer {}: {why}", state.name))?;
        }
        Ok(())
    }

    /// Continues from states that [`Layers::check`] has approved.
    pub fn restore(&mut self, states: &[LayerState]) -> Result<(), SyncError> {
        self.touched.clear();
        self.told.clear();
        let strengths = self.strengths.iter_mut().zip(&mut self.compressors);
        let compressed =
            strengths.filter_map(|(strength, compressor)| Some((strength, compressor.as_mut()?)));
        for ((strength, compressor), state) in compressed.zip(states) {
            let unfit = |why| SyncError::Unfit { layer: state.name.clone(), why };
            compressor.restore(state).map_err(unfit)?;
            strength.other = true;
        }
        Ok(())
    }

    fn change(
        &mut self,
        layer: usize,
        change: impl FnOnce(&mut dyn LayerCompressor) -> Result<(), Unfit>,
    ) -> Result<(), SyncError> {
        let found = self.compressors.get_mut(layer).and_then(Option::as_mut);
        let compressor =
            found.ok_or_else(|| SyncError::Order(format!("there is no compressed layer {layer}")))?;
        change(&mut **compressor).map_err(|why| SyncError::Unfit { layer: self.names[layer].clone(), why })
    }
}

//! Where gradients of a step come in, from any thread: each layer once, of the right length, in any order.

use crate::error::SyncError;
use crate::layer::Layer;
use crate::pipeline::{Submitted, lock};
use crate::source::Source;
use crate::target::Target;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};

/// Hands the gradients of a step to the sending thread; may be cloned into other threads.
#[derive(Clone)]
pub struct Submitter {
    inbox: Arc<Mutex<Inbox>>,
    sizes: Arc<Vec<(String, usize)>>,
}

/// A layer of several that are handed over together; see [`Submitter::submit_together`].
pub struct Handed {
    /// Its number.
    pub layer: usize,
    /// Its gradient, if it has one at this step on this rank.
    pub source: Option<Box<dyn Source>>,
    /// What its update replaces, if anything.
    pub target: Option<Box<dyn Target>>,
}

pub(crate) struct Inbox {
    pub step: u64,
    round: u64,
    pub arrived: Vec<bool>,
    pub loss_scale: Option<f32>,
    pub gradients: Sender<Vec<Submitted>>,
    /// The first failure; nothing works after it.
    pub failure: Option<String>,
}

impl Inbox {
    pub fn check(&self) -> Result<(), SyncError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(SyncError::Failed(failure.clone())))
    }

    /// Whether no gradient of a step is under way.
    pub fn check_between(&self) -> Result<(), SyncError> {
        self.check()?;
        match self.arrived.contains(&true) {
            true => Err(SyncError::Order(format!("step {} is under way: finish comes first", self.step))),
            false => Ok(()),
        }
    }

    /// The next round begins, at a step.
    pub fn turn_to(&mut self, step: u64) {
        (self.step, self.round) = (step, self.round + 1);
        self.arrived.fill(false);
    }
}

impl Submitter {
    pub(crate) fn new(layers: &[Layer], gradients: Sender<Vec<Submitted>>) -> Self {
        let sizes = layers.iter().map(|layer| (layer.name.clone(), layer.size)).collect();
        let arrived = vec![false; layers.len()];
        let inbox = Inbox { step: 0, round: 0, arrived, loss_scale: None, gradients, failure: None };
        Submitter { inbox: Arc::new(Mutex::new(inbox)), sizes: Arc::new(sizes) }
    }

    pub(crate) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        lock(&self.inbox)
    }

    /// Hands over the gradient of a layer. Returns at once.
    pub fn submit(&self, layer: usize, source: impl Source) -> Result<(), SyncError> {
        self.hand_over(layer, Some(Box::new(source)), None)
    }

    /// Hands over the gradient of a layer, and what its update is to replace as soon as it is there, in the units of the gradient:
    /// often the same memory. Nothing is written at a step that fails or overflows.
    pub fn submit_into(
        &self,
        layer: usize,
        source: impl Source,
        target: impl Target + 'static,
    ) -> Result<(), SyncError> {
        self.hand_over(layer, Some(Box::new(source)), Some(Box::new(target)))
    }

    /// Says that a layer has no gradient at this step on this rank.
    pub fn skip(&self, layer: usize) -> Result<(), SyncError> {
        self.hand_over(layer, None, None)
    }

    /// The same, for a layer whose update replaces something all the same: other ranks may have a gradient.
    pub fn skip_into(&self, layer: usize, target: impl Target + 'static) -> Result<(), SyncError> {
        self.hand_over(layer, None, Some(Box::new(target)))
    }

    fn hand_over(
        &self,
        layer: usize,
        source: Option<Box<dyn Source>>,
        target: Option<Box<dyn Target>>,
    ) -> Result<(), SyncError> {
        self.submit_together(vec![Handed { layer, source, target }])
    }

    /// Hands over several layers at once, as a framework has them in a bucket. Layers on a device begin with all of them before
    /// anything is waited for. After an error none was handed over.
    pub fn submit_together(&self, handed: Vec<Handed>) -> Result<(), SyncError> {
        let mut inbox = self.inbox();
        inbox.check()?;
        let (step, round, loss_scale) = (inbox.step, inbox.round, inbox.loss_scale);
        let mut arrived = inbox.arrived.clone();
        for Handed { layer, source, .. } in &handed {
            let Some((name, size)) = self.sizes.get(*layer) else {
                return Err(SyncError::Order(format!(
                    "there is no layer {layer}, only {}",
                    self.sizes.len()
                )));
            };
            if std::mem::replace(&mut arrived[*layer], true) {
                return Err(SyncError::Order(format!("layer {name} was submitted twice at step {step}")));
            }
            let got = source.as_ref().map_or(*size, |source| source.len());
            if got != *size {
                let why = redsync_core::Bad::Length { expected: *size, got };
                return Err(redsync_core::LayerError { layer: name.clone(), step, why }.into());
            }
        }
        inbox.arrived = arrived;
        let submitted =
            |Handed { layer, source, target }| Submitted { round, step, loss_scale, layer, source, target };
        // If the thread is gone it has reported why, and `finish` will say it.
        let _ = inbox.gradients.send(handed.into_iter().map(submitted).collect());
        Ok(())
    }
}

//! Layers that hand their gradients over during the backward pass, so that compression and exchange proceed beside it.
//! Comes in: a layer of the user's module with its input. Goes out: the same layer, watched. What must hold: a gradient that came this way
//! is taken once; a layer that cannot be watched is given back as it is, and its gradients are taken at the end.

use super::DistributedError;
use super::place::{Place, Values};
use crate::hook::{OnGradient, watch};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;
use redsync_engine::Submitter;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Watches layers of a model: see [`Distributed::watch`](crate::Distributed::watch).
#[derive(Clone)]
pub struct Watch {
    layers: Arc<HashMap<ParamId, usize>>,
    submitter: Submitter,
    place: Arc<Place>,
    come: Arc<Mutex<Come>>,
    /// Whether gradients are kept, not handed over.
    keeps: bool,
}

/// What came during the backward pass.
pub(super) struct Come {
    pub layers: Vec<bool>,
    /// The layers whose gradients are wanted in the memory of the host at this step.
    pub wanted: Vec<bool>,
    pub failure: Option<DistributedError>,
    /// Gradients that are kept.
    kept: Vec<Option<Values>>,
}

impl Watch {
    pub(super) fn new(
        layers: HashMap<ParamId, usize>,
        submitter: Submitter,
        place: Arc<Place>,
        wanted: Vec<bool>,
        keeps: bool,
    ) -> Self {
        let count = layers.len();
        let come = Come { layers: vec![false; count], wanted, failure: None, kept: vec![None; count] };
        Watch { layers: Arc::new(layers), submitter, place, come: Arc::new(Mutex::new(come)), keeps }
    }

    /// The number of a parameter's layer.
    pub(super) fn number(&self, id: ParamId) -> Option<usize> {
        self.layers.get(&id).copied()
    }

    pub(super) fn come(&self) -> MutexGuard<'_, Come> {
        self.come.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of all layers.
    pub(super) fn count(&self) -> usize {
        self.layers.len()
    }

    /// The gradients of a step that were kept, by layer.
    pub(super) fn take_kept(&self) -> Vec<Option<Values>> {
        std::mem::replace(&mut self.come().kept, vec![None; self.count()])
    }

    /// The same layer, whose gradients are handed over as soon as the backward pass has them. `input` is what the layer gets; every use
    /// of its parameters in this forward pass must be behind it.
    ///
    /// ```
    /// # use burn::nn::Linear;
    /// # use burn::tensor::Tensor;
    /// # use redsync_burn::Watch;
    /// fn forward(hidden: &Linear, x: Tensor<2>, watch: &Watch) -> Tensor<2> {
    ///     watch.layer(hidden, &x).forward(x) // instead of hidden.forward(x)
    /// }
    /// ```
    pub fn layer<L: Module, const D: usize>(&self, layer: &L, input: &Tensor<D>) -> L {
        layer.clone().map(&mut Watching { watch: self, input })
    }

    fn on_gradient<T: 'static>(&self, values: fn(T) -> Values) -> OnGradient<T> {
        let watch = self.clone();
        Arc::new(move |layer, gradient| {
            if watch.keeps {
                let mut come = watch.come();
                if std::mem::replace(&mut come.layers[layer], true) {
                    come.failure.get_or_insert(DistributedError::Model(AGAIN.into()));
                }
                come.kept[layer] = Some(values(gradient));
                return;
            }
            let wanted = watch.come().wanted[layer];
            let submitted = watch.place.submit(&watch.submitter, layer, values(gradient), wanted);
            let mut come = watch.come();
            come.layers[layer] = true;
            if let Err(error) = submitted {
                come.failure.get_or_insert(error);
            }
        })
    }
}

const AGAIN: &str = "a watched parameter got a second gradient before a step: gradients of several passes are added up unwatched";

struct Watching<'a, const E: usize> {
    watch: &'a Watch,
    input: &'a Tensor<E>,
}

impl<const E: usize> ModuleMapper for Watching<'_, E> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.watch.number(param.id).filter(|_| param.is_require_grad()) {
            None => param,
            Some(layer) => param.map(|weight| {
                #[cfg(feature = "wgpu")]
                if crate::cube::is_here(&weight) {
                    let on_gradient = self.watch.on_gradient(Values::There);
                    let watched = crate::hook::watch_there(weight.clone(), self.input, layer, on_gradient);
                    return watched.unwrap_or(weight);
                }
                let on_gradient = self.watch.on_gradient(Values::Host);
                watch(weight.clone(), self.input, layer, on_gradient).unwrap_or(weight)
            }),
        }
    }
}

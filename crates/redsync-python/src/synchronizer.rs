//! The engine's synchronizer for Python: gradients of a bucket go in from DDP's hook, averaged ones come out in the same place.
//! What must hold: the GIL is never held while something is waited for.

use crate::communicator::Group;
use crate::device::Devices;
use crate::failure::{raise, refuse};
use crate::memory::Tensor;
use crate::settings::{self, Parameter, Rule, Settings};
use crate::state::{Dict, State};
use crate::tensor::{Given, Piece, Wanted};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use redsync_comm::Communicator;
use redsync_engine::cost::Compute;
use redsync_engine::state::Saved;
use redsync_engine::{
    self as engine, Figures, Finished, Handed, Method, Source, Stage, SyncError, Traffic, measure,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Of one layer at the last step: elements and bytes that were sent, milliseconds of compressing.
type Cost = (u64, u64, f64);

/// One rank's synchronizer for the parameters of a model.
#[pyclass(module = "redsync._redsync", frozen)]
pub struct Synchronizer {
    /// None once it is closed.
    sync: Mutex<Option<engine::Synchronizer>>,
    submitter: engine::Submitter,
}

impl Synchronizer {
    fn lock(&self) -> MutexGuard<'_, Option<engine::Synchronizer>> {
        // What a panic left is only ever dropped.
        self.sync.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs something without the GIL.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&mut engine::Synchronizer) -> Result<T, SyncError> + Send,
    ) -> PyResult<T> {
        let closed = || SyncError::Failed("redsync was closed for this model".into());
        let done = py.detach(|| self.lock().as_mut().ok_or_else(closed).and_then(run));
        done.map_err(|error| raise(py, error))
    }
}

#[pymethods]
impl Synchronizer {
    /// A synchronizer for the parameters of a model: name, number of elements, kind (`weight`, `bias-or-norm` or `output`), and
    /// the rule by which gradients enter. `devices` is asked for each layer that can be compressed where the model is, by its number.
    /// All ranks of the group make one.
    #[new]
    #[pyo3(signature = (group, parameters, settings, devices=None))]
    fn new(
        py: Python<'_>,
        group: &Group,
        parameters: Vec<Parameter>,
        settings: Settings,
        devices: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let comm: Arc<dyn Communicator> = group.communicator()?;
        let layers: Vec<engine::Layer> = parameters.iter().map(settings::layer).collect();
        let told = settings.config(&layers);
        let config = told.inspect_err(|error| comm.give_up(&error.value(py).to_string()))?;
        let made = py.detach(|| {
            let mut config = config;
            if settings.is_measured() && config.method != Method::Sgd {
                let platform = measure::platform(comm.clone(), &config, &mut |_| ())?;
                config.figures = Some(Figures { platform, compute: Compute::default() });
            }
            engine::Synchronizer::on(&Devices(devices), layers, config, comm)
        });
        let sync = made.map_err(|error| refuse(py, error))?;
        Ok(Synchronizer { submitter: sync.submitter(), sync: Mutex::new(Some(sync)) })
    }

    /// What happens with each parameter, in words that a plan can say.
    fn choices(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |sync| Ok(sync.choices().iter().map(ToString::to_string).collect()))
    }

    /// The number of steps that were finished.
    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |sync| Ok(sync.step()))
    }

    /// What compressed parameters send at the step that is under way; None while everything is dense.
    #[getter]
    fn density(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        self.with(py, |sync| match sync.stage() {
            Stage::Dense => Ok(None),
            Stage::Sparse(density) => Ok(Some(density)),
        })
    }

    /// Whether compressed parameters take over the optimizer's momentum before the step that is under way.
    #[getter]
    fn turns_sparse(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |sync| Ok(sync.turns_sparse()))
    }

    /// By what the loss of the next step is multiplied.
    fn set_loss_scale(&self, py: Python<'_>, scale: Option<f32>) -> PyResult<()> {
        self.with(py, |sync| sync.set_loss_scale(scale))
    }

    /// Changes the momentum of a compressed parameter.
    fn set_momentum(&self, py: Python<'_>, layer: usize, rule: Rule) -> PyResult<()> {
        self.with(py, |sync| sync.set_momentum(layer, settings::momentum(&rule)))
    }

    /// The learning rate at which what is sent of a parameter from the next step on is applied.
    fn set_rate(&self, py: Python<'_>, layer: usize, rate: f32) -> PyResult<()> {
        self.with(py, |sync| sync.set_rate(layer, rate))
    }

    /// Starts the momentum of a compressed parameter from this rank's share of an optimizer's buffer.
    fn adopt_momentum(&self, py: Python<'_>, layer: usize, buffer: Tensor) -> PyResult<()> {
        let Some(floats) = buffer.floats() else {
            return Err(PyValueError::new_err("a momentum buffer has to be of single precision"));
        };
        self.with(py, |sync| sync.adopt_momentum(layer, floats))
    }

    /// Starts both moments of a compressed parameter from those of an optimizer's Adam, after so many steps.
    fn adopt_adam(
        &self,
        py: Python<'_>,
        layer: usize,
        first: Tensor,
        second: Tensor,
        steps: u64,
    ) -> PyResult<()> {
        let (Some(first), Some(second)) = (first.floats(), second.floats()) else {
            return Err(PyValueError::new_err("the moments of Adam have to be of single precision"));
        };
        self.with(py, |sync| sync.adopt_adam(layer, first, second, steps))
    }

    /// Writes what a compressed parameter has gathered on all ranks into tensors of single precision, as an optimizer keeps it: momentum
    /// and Adam's second moment, where there are such, and what waits. All ranks call it. Returns the steps of Adam, and the rate at which what
    /// waits is to be applied, if one is known.
    fn hand_back(
        &self,
        py: Python<'_>,
        layer: usize,
        first: Option<Tensor>,
        second: Option<Tensor>,
        waiting: Tensor,
    ) -> PyResult<(u64, Option<f32>)> {
        let gathered = self.with(py, |sync| sync.gathered(layer))?;
        let wrong = || PyValueError::new_err("there is nothing of that form to be handed back");
        let gathered = gathered.ok_or_else(wrong)?;
        let wanted =
            [(first, &gathered.first), (second, &gathered.second), (Some(waiting), &gathered.waiting)];
        for (tensor, values) in wanted {
            if let Some(mut tensor) = tensor
                && !tensor.write_rounded(values)
            {
                return Err(wrong());
            }
        }
        Ok((gathered.steps, gathered.rate))
    }

    /// Hands over gradients that were computed together, whose places the averaged ones take: the parameter, its gradient, and whether
    /// this rank has one. What is on a device comes with its `bucket`, which knows what of it the host needs.
    #[pyo3(signature = (parts, bucket=None))]
    fn submit(
        &self,
        py: Python<'_>,
        parts: Vec<(usize, Bound<'_, PyAny>, bool)>,
        bucket: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let mut handed = Vec::with_capacity(parts.len());
        for (layer, flat, used) in parts {
            let (given, wanted) = match &bucket {
                None => (Given::Here(flat.extract()?), Wanted::Here(flat.extract()?)),
                Some(bucket) => {
                    let piece = || Piece::new(layer, &flat, bucket);
                    (Given::There(piece()?, None), Wanted::There(piece()?))
                }
            };
            let source = used.then(|| -> Box<dyn Source> { Box::new(given) });
            handed.push(Handed { layer, source, target: Some(Box::new(wanted)) });
        }
        self.submitter.submit_together(handed).map_err(|error| raise(py, error))
    }

    /// Waits until all gradients are averaged. False if one was not finite, and the loss was scaled: the step was taken back then.
    fn finish(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |sync| Ok(sync.finish()? == Finished::Done))
    }

    /// What the last step cost: the step, milliseconds of exchanging, hidden or not, and of waiting, and each parameter's part.
    fn stats(&self, py: Python<'_>) -> PyResult<(u64, f64, f64, Vec<Cost>)> {
        self.with(py, |sync| {
            let stats = sync.stats();
            let cost = |layer: &engine::LayerStats| {
                (layer.elements, layer.bytes_sent, layer.select_ms + layer.encode_ms)
            };
            Ok((stats.step, stats.exchange_ms, stats.exposed_ms, stats.layers.iter().map(cost).collect()))
        })
    }

    /// Where the bytes of all steps went: messages, rest, headers, warm-up and second moments.
    fn traffic(&self, py: Python<'_>) -> PyResult<(u64, u64, u64, u64, u64)> {
        self.with(py, |sync| {
            let Traffic { messages, rest, headers, warm_up, moments, dense: _ } = sync.traffic();
            Ok((messages, rest, headers, warm_up, moments))
        })
    }

    /// The norm of what a parameter has accumulated and not sent.
    fn residual_norm(&self, py: Python<'_>, layer: usize) -> PyResult<Option<f64>> {
        self.with(py, |sync| Ok(sync.residual_norm(layer)))
    }

    /// Compares tensors of single precision among all ranks, and returns their hash.
    fn check_replicas(&self, py: Python<'_>, tensors: Vec<Tensor>) -> PyResult<u64> {
        let floats: Option<Vec<&[f32]>> = tensors.iter().map(Tensor::floats).collect();
        let single = || PyValueError::new_err("only tensors of single precision are compared");
        let floats = floats.ok_or_else(single)?;
        self.with(py, |sync| sync.check_replicas(&floats))
    }

    /// What this rank carries from step to step.
    fn capture(&self, py: Python<'_>) -> PyResult<State> {
        self.with(py, |sync| sync.capture(0, Vec::new())).map(State)
    }

    /// Continues from a state of this rank, or from those of all ranks of another number. All ranks call it; one that has none says
    /// what its problem is.
    fn restore(&self, py: Python<'_>, states: Vec<Dict>, problem: Option<String>) -> PyResult<()> {
        self.with(py, |sync| {
            let state = match problem {
                Some(problem) => Err(problem),
                None => join(sync, &states),
            };
            sync.restore(state).map(drop)
        })
    }

    /// Ends the threads, after what is under way.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().take()));
    }
}

/// This rank's own state, or its share of all old ranks' states.
fn join(sync: &engine::Synchronizer, states: &[Dict]) -> Result<Saved, String> {
    let ranks = sync.rank().1;
    let mut saved = states.iter().map(Dict::saved).collect::<Result<Vec<_>, _>>()?;
    match &saved[..] {
        [one] if one.ranks == ranks => Ok(saved.remove(0)),
        [one] if one.ranks > 1 => Err(format!(
            "it is of {old} ranks, this job has {ranks}: pass the states of all {old} old ranks as a list",
            old = one.ranks
        )),
        _ => sync.share_of(saved).map_err(|error| error.to_string()),
    }
}

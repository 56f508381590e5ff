//! The layers of one model on one rank. Comes in: gradients of a bucket. Goes out: one frame of bytes per bucket; and
//! from the frames of all ranks the averaged gradient, in rank order, so that all replicas get the same bits.
//! What must hold: a gradient or a frame that is refused changes no target, and the error names layer, rank and cause.

use crate::memory::Tensor;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use redsync_core::wire::{Frame, Messages};
use redsync_core::{
    Compressor, Density, FrameWriter, Memory, Momentum, Remembered, Sparse, Values, Workspace,
};
use redsync_engine::{Choice, Config, Kind, Layer, Method, Preset, Stage, SyncError, WarmUp, plan};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pyo3::create_exception!(redsync, RefusedGradient, PyRuntimeError, "A gradient that cannot be accumulated.");
pyo3::create_exception!(
    redsync,
    RefusedMessage,
    PyRuntimeError,
    "A peer's message that is not what it should be: a text and, if it is known, the rank."
);

/// What a layer remembers, as plain numbers: for each phase the bits of two thresholds, and a count.
type Remembering = [[u32; 3]; 3];

/// What compressing a layer brought: its number, elements and bytes of its message, milliseconds.
type Cost = (usize, usize, usize, f64);

/// The compressors of one model.
#[pyclass(frozen)]
pub struct Layers {
    names: Vec<String>,
    sizes: Vec<usize>,
    choices: Vec<Choice>,
    density: f64,
    warm_up: WarmUp,
    /// How the values of each compressed layer travel.
    values: Vec<Option<Values>>,
    rank: u32,
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
}

struct Sending {
    compressors: Vec<Option<Compressor>>,
    workspace: Workspace,
    frame: FrameWriter,
    /// The layers that were accumulated at a step.
    touched: (u64, Vec<usize>),
}

struct Receiving {
    workspace: Workspace,
    /// One per rank.
    messages: Vec<Sparse>,
    /// For gradients of half precision.
    dense: Vec<f32>,
}

/// A panic in another thread was reported there; what it left is whole, because no call returns in the middle of a layer.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wrong(what: impl Into<String>) -> PyErr {
    PyValueError::new_err(what.into())
}

fn refused(error: SyncError) -> PyErr {
    match error {
        SyncError::Layer(_) => RefusedGradient::new_err(error.to_string()),
        SyncError::Frame { rank, .. } | SyncError::Message { rank, .. } => {
            RefusedMessage::new_err((error.to_string(), rank))
        }
        SyncError::Apply { .. } => RefusedMessage::new_err(error.to_string()),
        _ => wrong(error.to_string()),
    }
}

fn momentum((coefficient, nesterov): (f32, bool)) -> Momentum {
    match nesterov {
        _ if coefficient == 0.0 => Momentum::None,
        true => Momentum::Nesterov(coefficient),
        false => Momentum::Plain(coefficient),
    }
}

/// What a user says of one layer: `dense`, or a selector, with `+asq` for quantization.
fn choice(text: &str) -> Option<Choice> {
    if text == "dense" {
        return Some(Choice::Dense);
    }
    let (name, quantized) = text.strip_suffix("+asq").map_or((text, false), |name| (name, true));
    redsync_core::Selector::from_name(name).map(|selector| Choice::Sparse { selector, quantized })
}

fn describe(choice: Choice) -> String {
    match choice {
        Choice::Dense => "dense".into(),
        Choice::Sparse { selector, quantized } => {
            format!("{}{}", selector.name(), if quantized { "+asq" } else { "" })
        }
    }
}

/// The choices of a whole run, from their names.
#[allow(clippy::too_many_arguments)] // as many as there are choices
fn config(
    method: &str,
    preset: &str,
    plan: &HashMap<String, String>,
    density: f64,
    dense_below: usize,
    masking: bool,
    bf16: bool,
    (warm_up, steps): (&str, u64),
) -> PyResult<Config> {
    let methods = Method::ALL.map(Method::name).join(", ");
    let method = Method::from_name(method)
        .ok_or_else(|| wrong(format!("no method {method:?}: choose one of {methods}")))?;
    let preset = match preset {
        "auto" => Preset::Auto,
        "paper" => Preset::Paper,
        other => {
            return Err(wrong(format!("no plan {other:?}: choose auto, paper, or a choice per parameter")));
        }
    };
    let layers = plan.iter().map(|(name, text)| {
        let selectors = redsync_core::Selector::ALL.map(redsync_core::Selector::name).join(", ");
        let unknown = || {
            wrong(format!(
                "the plan says {text:?} of {name}: choose dense, or one of {selectors}, with or without +asq"
            ))
        };
        Ok((name.clone(), choice(text).ok_or_else(unknown)?))
    });
    let layers = layers.collect::<PyResult<_>>()?;
    let warm_up = match warm_up {
        "dense" => WarmUp::Dense(steps),
        "ramp" => WarmUp::Ramp(steps),
        other => return Err(wrong(format!("no warm-up {other:?}: choose dense or ramp"))),
    };
    Ok(Config { method, preset, layers, dense_below, density, warm_up, masking, bf16, ..Config::default() })
}

#[pymethods]
impl Layers {
    /// The layers of a model: name, number of elements and kind (`weight`, `bias-or-norm` or `output`) of each, and its
    /// momentum with whether it is Nesterov's.
    #[new]
    #[pyo3(signature = (layers, momenta, *, rank, ranks, method, preset, plan, density, dense_below, masking, bf16, warm_up, undo, threads))]
    #[allow(clippy::too_many_arguments)] // named ones, for Python
    fn new(
        layers: Vec<(String, usize, String)>,
        momenta: Vec<(f32, bool)>,
        rank: u32,
        ranks: usize,
        method: &str,
        preset: &str,
        plan: HashMap<String, String>,
        density: f64,
        dense_below: usize,
        masking: bool,
        bf16: bool,
        warm_up: (String, u64),
        undo: bool,
        threads: usize,
    ) -> PyResult<Self> {
        let warm_up = (&warm_up.0[..], warm_up.1);
        let config = config(method, preset, &plan, density, dense_below, masking, bf16, warm_up)?;
        let kind = |kind: &str| match kind {
            "output" => Kind::Output,
            "bias-or-norm" => Kind::BiasOrNorm,
            _ => Kind::Weight,
        };
        let layers: Vec<Layer> =
            layers.iter().map(|(name, size, what)| Layer::new(name, *size, kind(what))).collect();
        if momenta.len() != layers.len() {
            return Err(wrong(format!("{} layers, but {} momenta", layers.len(), momenta.len())));
        }
        let choices = plan::choices(&layers, &config).map_err(refused)?;
        let compressors = (0..layers.len())
            .map(|i| {
                compressor(i, &layers[i], choices[i], &config, momentum(momenta[i]), undo).map_err(refused)
            })
            .collect::<PyResult<Vec<_>>>()?;
        Ok(Layers {
            names: layers.iter().map(|layer| layer.name.clone()).collect(),
            sizes: layers.iter().map(|layer| layer.size).collect(),
            values: compressors.iter().map(|c| c.as_ref().map(|c| c.config().values)).collect(),
            choices,
            density: config.density,
            warm_up: config.warm_up,
            rank,
            sending: Mutex::new(Sending {
                compressors,
                workspace: Workspace::new(threads),
                frame: FrameWriter::new(),
                touched: (0, Vec::new()),
            }),
            receiving: Mutex::new(Receiving {
                workspace: Workspace::new(threads),
                messages: vec![Sparse::new(); ranks],
                dense: Vec::new(),
            }),
        })
    }

    /// What happens with each layer, in words that a plan can say.
    fn choices(&self) -> Vec<String> {
        self.choices.iter().map(|choice| describe(*choice)).collect()
    }

    /// Turns to a step of the warm-up or after it: sets the density of all compressed layers and returns it, or None while
    /// everything is dense.
    fn begin(&self, step: u64) -> PyResult<Option<f64>> {
        let Stage::Sparse(fraction) = self.warm_up.stage(step, self.density) else { return Ok(None) };
        let density = Density::new(fraction).map_err(|why| wrong(why.to_string()))?;
        lock(&self.sending).compressors.iter_mut().flatten().for_each(|c| c.set_density(density));
        Ok(Some(fraction))
    }

    /// Changes a layer's momentum.
    fn set_momentum(&self, layer: usize, coefficient: f32, nesterov: bool) -> PyResult<()> {
        let new = match nesterov {
            true => Momentum::Nesterov(coefficient),
            false => Momentum::Plain(coefficient),
        };
        let mut sending = lock(&self.sending);
        let compressor = self.compressor(&mut sending, layer)?;
        match compressor.set_momentum(new) {
            true => Ok(()),
            false => {
                let old = compressor.config().momentum;
                Err(wrong(format!("{}: momentum cannot change from {old:?} to {new:?}", self.names[layer])))
            }
        }
    }

    /// Starts a layer's momentum from this rank's share of an optimizer's buffer.
    fn adopt_momentum(&self, py: Python<'_>, layer: usize, buffer: Tensor, ranks: usize) -> PyResult<()> {
        py.detach(|| {
            let mut sending = lock(&self.sending);
            let compressor = self.compressor(&mut sending, layer)?;
            match buffer.floats().is_some_and(|b| compressor.residual_mut().adopt_momentum(b, ranks)) {
                true => Ok(()),
                false => Err(wrong(format!(
                    "{}: the optimizer's momentum buffer does not fit or is not finite",
                    self.names[layer]
                ))),
            }
        })
    }

    /// Accumulates `scale` times each gradient and writes the frame of a bucket. Where there is no gradient, the layer
    /// sends nothing and stays as it is. Returns the frame and what each layer cost.
    fn compress<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        scale: f32,
        gradients: Vec<(usize, Option<Tensor>)>,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<Cost>)> {
        let (frame, costs) = py.detach(|| {
            let mut sending = lock(&self.sending);
            let costs = self.write_frame(&mut sending, step, scale, &gradients)?;
            Ok::<_, PyErr>((sending.frame.take(), costs))
        })?;
        let bytes = PyBytes::new(py, &frame);
        lock(&self.sending).frame.reuse(frame);
        Ok((bytes, costs))
    }

    /// Makes each target `scale` times the sum of what all ranks sent for it: one frame per rank, in rank order. Nothing is
    /// written before all frames were read whole.
    fn fill(
        &self,
        py: Python<'_>,
        step: u64,
        scale: f32,
        frames: Vec<Tensor>,
        targets: Vec<(usize, Tensor)>,
    ) -> PyResult<()> {
        py.detach(|| self.read_frames(&mut lock(&self.receiving), step, scale, &frames, targets))
    }

    /// Takes a step back, if it is the last, in all layers that were accumulated at it.
    fn roll_back(&self, step: u64) -> PyResult<()> {
        let mut sending = lock(&self.sending);
        if sending.touched.0 != step {
            return Ok(());
        }
        for layer in std::mem::take(&mut sending.touched.1) {
            if !self.compressor(&mut sending, layer)?.roll_back() {
                return Err(wrong(format!("{}: step {step} cannot be taken back", self.names[layer])));
            }
        }
        Ok(())
    }

    /// Copies u, if there is one, and v of a layer, and tells what its selector remembers.
    fn save(&self, layer: usize, u: Option<Tensor>, v: Tensor) -> PyResult<Remembering> {
        let mut sending = lock(&self.sending);
        let compressor = self.compressor(&mut sending, layer)?;
        let residual = compressor.residual();
        for (tensor, values) in [(u, residual.u()), (Some(v), residual.v())] {
            if let Some(mut tensor) = tensor
                && !tensor.write_rounded(values)
            {
                return Err(wrong(format!("{}: {} elements", self.names[layer], values.len())));
            }
        }
        Ok(compressor.memory().phases().map(|r| [r.threshold.to_bits(), r.least.to_bits(), r.searched]))
    }

    /// Whether a layer has momentum, and so a u.
    fn has_momentum(&self, layer: usize) -> PyResult<bool> {
        let mut sending = lock(&self.sending);
        Ok(!self.compressor(&mut sending, layer)?.residual().u().is_empty())
    }

    /// Replaces u, v and what the selector remembers; after an error nothing has changed.
    fn restore(&self, layer: usize, u: Option<Tensor>, v: Tensor, remembering: Remembering) -> PyResult<()> {
        let mut sending = lock(&self.sending);
        let compressor = self.compressor(&mut sending, layer)?;
        let phases = remembering.map(|[threshold, least, searched]| Remembered {
            threshold: f32::from_bits(threshold),
            least: f32::from_bits(least),
            searched,
        });
        let refuse = |what: &str| wrong(format!("{}: {what}", self.names[layer]));
        let memory = Memory::from_phases(phases).ok_or_else(|| refuse("the remembered threshold is none"))?;
        let (u, v) = (u.as_ref().map_or(Some(&[][..]), Tensor::floats), v.floats());
        let done = u.zip(v).is_some_and(|(u, v)| compressor.residual_mut().restore(u, v));
        if !done {
            return Err(refuse("u or v has another number of elements, or is not finite"));
        }
        compressor.set_memory(memory);
        // Its last step cannot be taken back any more.
        sending.touched.1.retain(|touched| *touched != layer);
        Ok(())
    }

    /// The norm of what a layer has accumulated and not sent.
    fn residual_norm(&self, py: Python<'_>, layer: usize) -> PyResult<f64> {
        py.detach(|| {
            let mut sending = lock(&self.sending);
            let v = self.compressor(&mut sending, layer)?.residual().v();
            Ok(v.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt())
        })
    }
}

/// The hash of tensors of single precision, to compare replicas by.
#[pyfunction]
pub fn replica_hash(py: Python<'_>, tensors: Vec<Tensor>) -> PyResult<u64> {
    py.detach(|| {
        let floats: Option<Vec<&[f32]>> = tensors.iter().map(Tensor::floats).collect();
        let floats = floats.ok_or_else(|| wrong("only tensors of single precision are hashed"))?;
        Ok(redsync_engine::replica_hash(&floats))
    })
}

/// The compressor that the engine's plan would make, with the momentum of the layer's own parameter group.
fn compressor(
    number: usize,
    layer: &Layer,
    choice: Choice,
    config: &Config,
    momentum: Momentum,
    undo: bool,
) -> Result<Option<Compressor>, SyncError> {
    let config = Config { momentum, ..config.clone() };
    let Some(planned) = plan::compressor(number, layer, choice, &config)? else { return Ok(None) };
    if !undo {
        return Ok(Some(planned));
    }
    let core = redsync_core::Config { undo, ..*planned.config() };
    let refuse = |why| SyncError::Config { layer: layer.name.clone(), why };
    Compressor::new(number as u32, &layer.name, layer.size, core).map(Some).map_err(refuse)
}

impl Layers {
    fn compressor<'a>(&self, sending: &'a mut Sending, layer: usize) -> PyResult<&'a mut Compressor> {
        let found = sending.compressors.get_mut(layer).and_then(Option::as_mut);
        found.ok_or_else(|| wrong(format!("there is no compressed layer {layer}")))
    }

    fn write_frame(
        &self,
        sending: &mut Sending,
        step: u64,
        scale: f32,
        gradients: &[(usize, Option<Tensor>)],
    ) -> PyResult<Vec<Cost>> {
        let Sending { compressors, workspace, frame, touched } = sending;
        if touched.0 != step {
            touched.0 = step;
            touched.1.clear();
        }
        frame.begin(step, self.rank);
        let mut costs = Vec::with_capacity(gradients.len());
        for (layer, gradient) in gradients {
            let compressor = (compressors.get_mut(*layer).and_then(Option::as_mut))
                .ok_or_else(|| wrong(format!("there is no compressed layer {layer}")))?;
            let (begin, before) = (Instant::now(), frame.len());
            let elements = match gradient {
                None => {
                    compressor.skip(step, workspace, frame);
                    0
                }
                Some(tensor) => {
                    let gradient = tensor.gradient().ok_or_else(|| wrong("a gradient of bytes"))?;
                    let sent = compressor.compress(step, gradient, scale, workspace, frame);
                    touched.1.extend(sent.is_ok().then_some(*layer));
                    sent.map_err(|error| refused(error.into()))?
                }
            };
            costs.push((*layer, elements, frame.len() - before, begin.elapsed().as_secs_f64() * 1e3));
        }
        Ok(costs)
    }

    fn read_frames(
        &self,
        receiving: &mut Receiving,
        step: u64,
        scale: f32,
        frames: &[Tensor],
        mut targets: Vec<(usize, Tensor)>,
    ) -> PyResult<()> {
        if frames.len() != receiving.messages.len() {
            return Err(wrong(format!("{} frames of {} ranks", frames.len(), receiving.messages.len())));
        }
        let layers: Vec<usize> = targets.iter().map(|(layer, _)| *layer).collect();
        let mut readers = self.parse(step, frames, &layers)?;
        // A frame that turns out to be wrong in the middle must not leave half a gradient: one look without writing.
        for layer in &layers {
            self.decode(receiving, step, *layer, &mut readers)?;
        }
        for (rank, reader) in readers.iter_mut().enumerate() {
            if let Some(Err(why)) = reader.next() {
                return Err(self.bad_frame(rank, &layers, why));
            }
        }
        let mut readers = self.parse(step, frames, &layers)?;
        for (layer, target) in &mut targets {
            self.decode(receiving, step, *layer, &mut readers)?;
            self.write(receiving, *layer, target, scale)?;
        }
        Ok(())
    }

    fn bad_frame(&self, rank: usize, layers: &[usize], why: redsync_core::wire::FrameError) -> PyErr {
        let names: Vec<&str> = layers.iter().map(|layer| &self.names[*layer][..]).collect();
        refused(SyncError::Frame { rank, layers: names.join(", "), why })
    }

    /// Checks the frames, one per rank, and gives their messages.
    fn parse<'a>(&self, step: u64, frames: &'a [Tensor], layers: &[usize]) -> PyResult<Vec<Messages<'a>>> {
        let parse = |(rank, bytes): (usize, &'a Tensor)| {
            let bytes = bytes.bytes().ok_or_else(|| wrong("a frame has to be of bytes"))?;
            let frame = Frame::parse(bytes).and_then(|frame| {
                frame.expect(step, rank as u32, layers.len() as u16)?;
                Ok(frame)
            });
            frame.map(|frame| frame.messages()).map_err(|why| self.bad_frame(rank, layers, why))
        };
        frames.iter().enumerate().map(parse).collect()
    }

    /// The next message of every rank, which has to be of this layer.
    fn decode(
        &self,
        receiving: &mut Receiving,
        step: u64,
        layer: usize,
        readers: &mut [Messages<'_>],
    ) -> PyResult<()> {
        let values = (self.values.get(layer).copied().flatten())
            .ok_or_else(|| wrong(format!("there is no compressed layer {layer}")))?;
        let (n, phase) = (self.sizes[layer] as u32, values.phase(step));
        for (rank, (reader, sparse)) in readers.iter_mut().zip(&mut receiving.messages).enumerate() {
            let frame = |why| self.bad_frame(rank, &[layer], why);
            let early = || frame(redsync_core::wire::FrameError::Ends { position: 0 });
            let message = reader.next().ok_or_else(early)?.map_err(frame)?;
            let name = || self.names[layer].clone();
            (message.decode(layer as u32, n, phase, sparse))
                .map_err(|why| refused(SyncError::Message { rank, layer: name(), why }))?;
        }
        Ok(())
    }

    /// The sum of the decoded messages, into a target of any precision.
    fn write(
        &self,
        receiving: &mut Receiving,
        layer: usize,
        target: &mut Tensor,
        scale: f32,
    ) -> PyResult<()> {
        let Receiving { workspace, messages, dense } = receiving;
        let refuse = |why| refused(SyncError::Apply { layer: self.names[layer].clone(), why });
        if let Some(target) = target.floats_mut() {
            return redsync_core::apply::fill(target, messages, scale, workspace).map_err(refuse);
        }
        dense.resize(target.len(), 0.0);
        redsync_core::apply::fill(dense, messages, scale, workspace).map_err(refuse)?;
        match target.write_rounded(dense) {
            true => Ok(()),
            false => Err(wrong(format!("{}: a gradient of bytes", self.names[layer]))),
        }
    }
}

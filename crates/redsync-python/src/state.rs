//! The state of a rank as Python keeps it: numbers, texts and tensors of a dictionary, and the engine's [`Saved`].

use crate::memory::Tensor;
use crate::settings::{Rule, momentum, rule};
use pyo3::prelude::*;
use redsync_core::{Memory, Momentum};
use redsync_engine::Seat;
use redsync_engine::state::{Cut, Kept, LayerState, Saved, SecondMoment};

/// What a selector remembers: for each phase the bits of two thresholds, and a count.
pub type Remembering = [[u32; 3]; 3];

/// A state as Python hands it over; all tensors are of single precision and on the host.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Dict {
    step: u64,
    rank: usize,
    ranks: usize,
    identity: Vec<(String, String)>,
    seat: Option<Place>,
    layers: Vec<Layer>,
    /// What the Python half keeps besides, by name.
    extra: Vec<(String, Tensor)>,
}

/// Host, hosts, number on the host, ranks on each.
type Place = (usize, usize, usize, usize);

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Layer {
    name: String,
    /// The rule that u is of.
    momentum: Rule,
    remembering: Remembering,
    /// The learning rate in whose units v is, if it is known.
    rate: Option<f32>,
    u: Option<Tensor>,
    v: Tensor,
    /// The second moment of Adam, the one that was given, and steps.
    second: Option<Tensor>,
    given: Option<Tensor>,
    steps: u64,
    /// What this rank keeps as an owner of a part of the layer, if it is one.
    kept: Option<Owned>,
}

/// What an owner keeps: sums, which elements they are (see [`Cut`]), what the selector remembers, and the rate in whose units they are.
type Owned = (Tensor, [usize; 5], Remembering, Option<f32>);

impl Dict {
    /// The engine's form; a sentence if it is none.
    pub fn saved(&self) -> Result<Saved, String> {
        let layers = self.layers.iter().map(Layer::state).collect::<Result<_, _>>()?;
        let extra = self.extra.iter().map(|(name, tensor)| Ok((name.clone(), floats(name, tensor)?)));
        Ok(Saved {
            step: self.step,
            rank: self.rank,
            ranks: self.ranks,
            identity: self.identity.clone(),
            replica_hash: 0,
            seat: self.seat.map(|(host, hosts, number, on_each)| Seat { host, hosts, number, on_each }),
            layers,
            extra: extra.collect::<Result<_, String>>()?,
        })
    }
}

fn floats(name: &str, tensor: &Tensor) -> Result<Vec<f32>, String> {
    let values = tensor.floats().map(<[f32]>::to_vec);
    values.ok_or_else(|| format!("{name}: what is kept has to be of single precision"))
}

impl Layer {
    fn state(&self) -> Result<LayerState, String> {
        let none = || format!("{}: the remembered thresholds in the state are damaged", self.name);
        let floats = |tensor: &Tensor| floats(&self.name, tensor);
        let some = |tensor: &Option<Tensor>| tensor.as_ref().map_or(Ok(Vec::new()), floats);
        let u = some(&self.u)?;
        let second = match &self.second {
            None => None,
            Some(own) => {
                Some(SecondMoment { own: floats(own)?, given: some(&self.given)?, steps: self.steps })
            }
        };
        Ok(LayerState {
            name: self.name.clone(),
            size: self.v.len(),
            momentum: match u.is_empty() && second.is_none() {
                true => Momentum::None,
                false => momentum(&self.momentum),
            },
            v: floats(&self.v)?,
            u,
            memory: Memory::from_bits(self.remembering).ok_or_else(none)?,
            rate: self.rate,
            second,
            kept: match &self.kept {
                None => None,
                Some((v, [n, block, ranks, owners, first], remembering, rate)) => Some(Kept {
                    v: floats(v)?,
                    cut: Cut { n: *n, block: *block, ranks: *ranks, owners: *owners, first: *first },
                    memory: Memory::from_bits(*remembering).ok_or_else(none)?,
                    rate: *rate,
                }),
            },
        })
    }
}

/// The checksum of a state, which covers every number of it.
#[pyfunction]
pub fn checksum(py: Python<'_>, state: Dict) -> PyResult<String> {
    let sum = py.detach(|| state.saved().and_then(|saved| saved.checksum()));
    sum.map_err(pyo3::exceptions::PyValueError::new_err)
}

/// A state of a rank, to be copied into tensors.
#[pyclass(module = "redsync._redsync", frozen)]
pub struct State(pub Saved);

/// What is known of a layer besides its vectors: whether there is a u and its rule, what the selector remembers, the learning rate in
/// whose units v is, and for Adam whether a second moment was given, and steps.
type About = (bool, Rule, Remembering, Option<f32>, Option<(bool, u64)>);

#[pymethods]
impl State {
    /// The step, the rank and the number of ranks.
    #[getter]
    fn place(&self) -> (u64, usize, usize) {
        (self.0.step, self.0.rank, self.0.ranks)
    }

    /// Where the rank sits, if the ranks of a host sum among themselves: host, hosts, number on the host, ranks on each.
    #[getter]
    fn seat(&self) -> Option<Place> {
        self.0.seat.map(|Seat { host, hosts, number, on_each }| (host, hosts, number, on_each))
    }

    /// Elements of the layer at a place of the list, or of this rank's part of it.
    fn size(&self, at: usize) -> usize {
        self.0.layers.get(at).map_or(0, |layer| layer.size)
    }

    /// What the run is, by name.
    #[getter]
    fn identity(&self) -> Vec<(String, String)> {
        self.0.identity.clone()
    }

    /// The compressed layers, in order.
    fn layers(&self) -> Vec<(String, About)> {
        let about = |layer: &LayerState| {
            let second = layer.second.as_ref().map(|second| (!second.given.is_empty(), second.steps));
            (!layer.u.is_empty(), rule(layer.momentum), layer.memory.bits(), layer.rate, second)
        };
        self.0.layers.iter().map(|layer| (layer.name.clone(), about(layer))).collect()
    }

    /// What an owner keeps of the layer at a place of the list, besides its sums: how many there are, which elements they are, what the
    /// selector remembers, and the learning rate in whose units they are.
    fn kept(&self, at: usize) -> Option<(usize, [usize; 5], Remembering, Option<f32>)> {
        let Kept { v, cut: Cut { n, block, ranks, owners, first }, memory, rate } =
            self.0.layers.get(at)?.kept.as_ref()?;
        Some((v.len(), [*n, *block, *ranks, *owners, *first], memory.bits(), *rate))
    }

    /// Copies the sums that an owner keeps of the layer at a place of the list.
    fn copy_kept(&self, at: usize, mut v: Tensor) -> PyResult<()> {
        let kept = self.0.layers.get(at).and_then(|layer| layer.kept.as_ref());
        match kept.is_some_and(|kept| v.write_rounded(&kept.v)) {
            true => Ok(()),
            false => Err(pyo3::exceptions::PyValueError::new_err("an owner keeps nothing of that length")),
        }
    }

    /// Copies vectors of the layer at a place of the list, those that are wanted: u, v, the second moment and the given one.
    #[pyo3(signature = (at, u, v, second=None, given=None))]
    fn copy(
        &self,
        at: usize,
        u: Option<Tensor>,
        v: Tensor,
        second: Option<Tensor>,
        given: Option<Tensor>,
    ) -> PyResult<()> {
        let wrong = |what: &str| pyo3::exceptions::PyValueError::new_err(what.to_string());
        let layer = self.0.layers.get(at).ok_or_else(|| wrong("there is no such layer"))?;
        let none = SecondMoment { own: Vec::new(), given: Vec::new(), steps: 0 };
        let moments = layer.second.as_ref().unwrap_or(&none);
        let wanted = [(u, &layer.u), (Some(v), &layer.v), (second, &moments.own), (given, &moments.given)];
        for (tensor, values) in wanted {
            if let Some(mut tensor) = tensor
                && !tensor.write_rounded(values)
            {
                return Err(wrong("a tensor of another length"));
            }
        }
        Ok(())
    }
}

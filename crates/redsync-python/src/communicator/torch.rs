//! Every call to PyTorch: a process group that exchanges bytes, memory for them, and the store of the board. What must hold: the
//! interpreter is held for the call only, never while a peer is waited for; an exception becomes one line.

use crate::memory::{Tensor, lend, lend_mut};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDelta, PyDict};
use pyo3::{PyErr, intern};
use redsync_comm::CommError;
use std::time::Duration;

/// Lanes of more bytes are not kept.
const KEEP: usize = 64 << 20;

/// Why an exchange did not happen.
#[derive(Debug)]
pub enum Fault {
    /// The ranks disagree, or this rank cannot go on.
    Cause(CommError),
    /// The process group failed, and said this.
    Failed(String),
    /// Nobody wants the result any more. The process group may still be at it.
    Abandoned,
}

impl From<PyErr> for Fault {
    fn from(error: PyErr) -> Fault {
        Fault::Failed(line(&error))
    }
}

/// An exception as one line: the first sentence, without the place in PyTorch's sources and without its advice.
pub fn line(error: &PyErr) -> String {
    attached(|py| {
        let text = error.value(py).to_string();
        let first = text.lines().next().unwrap_or_default().trim();
        let first =
            first.strip_prefix('[').and_then(|rest| rest.split_once("] ")).map_or(first, |(_, rest)| rest);
        let first = first.split_once(". ").map_or(first, |(sentence, _)| sentence);
        let name =
            || error.get_type(py).name().map_or_else(|_| "an exception".to_string(), |name| name.to_string());
        if first.is_empty() { name() } else { first.to_string() }
    })
    .unwrap_or_else(|_| "the interpreter has ended".to_string())
}

/// Runs with the interpreter, unless that has ended.
fn attached<T>(run: impl FnOnce(Python<'_>) -> T) -> Result<T, Fault> {
    Python::try_attach(run).ok_or(Fault::Abandoned)
}

fn seconds(py: Python<'_>, time: Duration) -> PyResult<Bound<'_, PyDelta>> {
    let (whole, micros) = (time.as_secs(), time.subsec_micros());
    PyDelta::new(py, (whole / 86_400) as i32, (whole % 86_400) as i32, micros as i32, false)
}

/// A process group of its own, of the ranks of another.
pub struct Wire {
    pub rank: usize,
    pub size: usize,
    /// Which rank of this group is the first of the world, if it is here.
    first: Option<usize>,
    group: Py<PyAny>,
    empty: Py<PyAny>,
    bytes: Py<PyAny>,
    /// How long one wait for PyTorch takes at most.
    slice: Py<PyDelta>,
}

impl Wire {
    /// Makes the group; all ranks of `other` do. Over gloo, which carries what lies in the memory of the host, also beside a group
    /// for GPUs; an MPI group stays MPI.
    pub fn open(
        py: Python<'_>,
        other: &Bound<'_, PyAny>,
        patience: Duration,
        slice: Duration,
    ) -> PyResult<Wire> {
        let (torch, dist) = (py.import("torch")?, py.import("torch.distributed")?);
        let ranks: Vec<usize> = dist.call_method1("get_process_group_ranks", (other,))?.extract()?;
        let first = ranks.iter().position(|&rank| rank == 0);
        let backend: String = dist.call_method1("get_backend", (other,))?.extract()?;
        let is_mpi = backend.contains("mpi");
        let settings = PyDict::new(py);
        settings.set_item("timeout", seconds(py, patience)?)?;
        settings.set_item("backend", if is_mpi { "mpi" } else { "gloo" })?;
        // With MPI all ranks of the world have to make every group together.
        settings.set_item("use_local_synchronization", !is_mpi)?;
        let group = dist.call_method("new_group", (ranks,), Some(&settings))?;
        Ok(Wire {
            rank: group.call_method0("rank")?.extract()?,
            size: group.call_method0("size")?.extract()?,
            first,
            group: group.unbind(),
            empty: torch.getattr("empty")?.unbind(),
            bytes: torch.getattr("uint8")?.unbind(),
            slice: seconds(py, slice)?.unbind(),
        })
    }

    /// The name of the group, the same on all ranks.
    pub fn name(&self, py: Python<'_>) -> PyResult<String> {
        self.group.bind(py).getattr("group_name")?.extract()
    }

    /// Makes room for so many bytes in a lane; what it held is lost where it has to grow.
    pub fn room(&self, lane: &mut Lane, bytes: usize) -> Result<(), Fault> {
        if lane.memory.as_ref().is_some_and(|memory| memory.len() >= bytes && memory.len() <= KEEP.max(bytes))
        {
            return Ok(());
        }
        *lane = Lane::default();
        attached(|py| {
            let settings = PyDict::new(py);
            settings.set_item("dtype", &self.bytes)?;
            // Somewhat more, because the next message is seldom as long.
            let slack = if bytes < KEEP / 2 { bytes / 4 } else { 0 };
            let object = self.empty.bind(py).call(((bytes + slack).max(4096),), Some(&settings))?;
            lane.memory = Some(object.extract()?);
            lane.object = Some(object.unbind());
            Ok(())
        })?
    }

    /// Sends `splits_out[r]` bytes of `out` to each rank r and receives `splits_in[r]` bytes from it, packed in rank order.
    /// `goes_on` is asked now and then whether to wait any longer.
    pub fn exchange(
        &self,
        (out, splits_out): (Out<'_>, &[usize]),
        (into, splits_in): (&mut Lane, &[usize]),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Fault> {
        attached(|py| {
            let out = match out {
                Out::Lane(lane) => lane.view(py, splits_out)?,
                Out::Lent(bytes) => lend(py, bytes)?,
            };
            let into = into.view(py, splits_in)?;
            let name = intern!(py, "alltoall_base");
            let work = self.group.bind(py).call_method1(name, (into, out, splits_in, splits_out))?;
            self.wait(&work, goes_on)
        })?
    }

    /// Sums values over the ranks with PyTorch's own sum, in their place. The order of additions is PyTorch's, so among more
    /// than two ranks the bits are too.
    pub fn sum(&self, values: &mut [f32], goes_on: &dyn Fn() -> bool) -> Result<(), Fault> {
        attached(|py| {
            let values = lend_mut(py, values)?;
            let work = self.group.bind(py).call_method1(intern!(py, "allreduce"), ([values],))?;
            self.wait(&work, goes_on)
        })?
    }

    fn wait(&self, work: &Bound<'_, PyAny>, goes_on: &dyn Fn() -> bool) -> Result<(), Fault> {
        let py = work.py();
        loop {
            let Err(error) = work.call_method1(intern!(py, "wait"), (&self.slice,)) else { return Ok(()) };
            if work.call_method0(intern!(py, "is_completed"))?.extract()? {
                return Err(error.into());
            }
            if !goes_on() {
                return Err(Fault::Abandoned);
            }
        }
    }

    /// Leaves the group. With something under way the group stays in memory: PyTorch would wait for it.
    pub fn close(self, under_way: bool) {
        let _ = Python::try_attach(|py| {
            let destroyed = py
                .import("torch.distributed")
                .and_then(|dist| dist.call_method1("destroy_process_group", (&self.group,)));
            // The program may have destroyed all its groups already, this one too.
            drop(destroyed);
            if under_way {
                std::mem::forget(self.group);
            }
        });
    }
}

/// What is sent.
pub enum Out<'a> {
    /// The beginning of a lane.
    Lane(&'a mut Lane),
    /// These bytes, in their place; see [`lend`].
    Lent(&'a [u8]),
}

/// Memory that PyTorch and this program share.
#[derive(Default)]
pub struct Lane {
    memory: Option<Tensor>,
    object: Option<Py<PyAny>>,
    /// The first bytes as a tensor of their own, and how many.
    view: Option<(usize, Py<PyAny>)>,
}

impl Lane {
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().and_then(Tensor::bytes).unwrap_or_default()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().and_then(Tensor::bytes_mut).unwrap_or_default()
    }

    fn view<'py>(&mut self, py: Python<'py>, splits: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let length = splits.iter().sum();
        if let Some((known, view)) = &self.view
            && *known == length
        {
            return Ok(view.bind(py).clone());
        }
        let Some(object) = &self.object else { return Ok(py.None().into_bound(py)) };
        let view = object.bind(py).call_method1(intern!(py, "narrow"), (0, 0, length))?;
        self.view = Some((length, view.clone().unbind()));
        Ok(view)
    }
}

/// The store of the process group, where ranks leave notes for each other.
pub struct Store {
    store: Py<PyAny>,
    keys: Vec<String>,
    /// Whether every rank has left a note; reading one that is not there would wait for it.
    complete: bool,
    /// The rank whose process holds the store, if one of the group does.
    pub holder: Option<usize>,
}

const VERDICT: &str = "verdict";

impl Store {
    /// Opens the store for a group. The default store is shared with whoever waits in it, for minutes perhaps; a clone has a
    /// connection of its own.
    pub fn open(py: Python<'_>, wire: &Wire, timeout: Duration) -> PyResult<Store> {
        let dist = py.import("torch.distributed")?;
        let c10d = dist.getattr("distributed_c10d")?;
        let store = c10d.call_method0("_get_default_store")?.call_method0("clone")?;
        store.call_method1("set_timeout", (seconds(py, timeout)?,))?;
        let agent = std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
        let mut root = store.clone();
        while let Ok(under) = root.getattr("underlying_store") {
            root = under;
        }
        let of_rank_0 = !agent && root.is_instance(&dist.getattr("TCPStore")?)?;
        let prefix = format!("redsync/{}", wire.name(py)?);
        let store = dist.getattr("PrefixStore")?.call1((prefix, store))?.unbind();
        let keys = (0..wire.size).map(|rank| format!("rank/{rank}")).collect();
        Ok(Store { store, keys, complete: false, holder: wire.first.filter(|_| of_rank_0) })
    }

    /// Leaves the note of a rank.
    pub fn set(&self, rank: usize, note: &[u8]) -> Result<(), Fault> {
        attached(|py| {
            let note = PyBytes::new(py, note);
            self.store.bind(py).call_method1(intern!(py, "set"), (&self.keys[rank], note))?;
            Ok(())
        })?
    }

    /// The notes of all ranks.
    pub fn notes(&mut self) -> Result<Vec<Option<Vec<u8>>>, Fault> {
        attached(|py| {
            let store = self.store.bind(py);
            if !self.complete {
                self.complete = store.call_method1("check", (&self.keys,))?.extract()?;
            }
            if self.complete {
                return Ok(store.call_method1(intern!(py, "multi_get"), (&self.keys,))?.extract()?);
            }
            let note = |key: &String| match store.call_method1("check", ((key,),))?.extract()? {
                true => store.call_method1("get", (key,))?.extract().map(Some),
                false => Ok(None),
            };
            Ok(self.keys.iter().map(note).collect::<PyResult<_>>()?)
        })?
    }

    /// What the survivors have agreed on, if they have.
    pub fn verdict(&self) -> Result<Option<Vec<u8>>, Fault> {
        attached(|py| {
            let store = self.store.bind(py);
            Ok(match store.call_method1("check", ((VERDICT,),))?.extract()? {
                true => Some(store.call_method1("get", (VERDICT,))?.extract()?),
                false => None,
            })
        })?
    }

    /// Proposes a verdict; the first one counts, and comes back.
    pub fn agree(&self, verdict: &[u8]) -> Result<Vec<u8>, Fault> {
        attached(|py| {
            let ours = PyBytes::new(py, verdict);
            Ok(self.store.bind(py).call_method1("compare_set", (VERDICT, "", ours))?.extract()?)
        })?
    }
}

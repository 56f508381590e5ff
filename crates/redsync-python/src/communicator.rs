//! PyTorch's process group as an engine of `redsync_comm`: a [`Group`] comes in from Python, a [`Communicator`] goes out to Rust.
//!
//! ```text
//! callers --> desk --> thread of the wire (rounds, torch) --> process group of our own, over gloo
//!              |
//!              +-----> thread of the board (notes, verdicts) --> store of the process group
//! ```
//!
//! What must hold: all collectives run on one thread in the order in which they were started; a call into PyTorch that blocks
//! never blocks a caller beyond its deadline; both threads have ended before the interpreter does.

mod block;
mod board;
#[cfg(feature = "conformance")]
pub mod conformance;
mod desk;
mod forecast;
mod note;
mod rounds;
mod ticket;
mod torch;

use board::Board;
use desk::{Desk, Done, Inquest, Next, Work};
use note::Why;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use redsync_comm::{Call, CommError, Communicator, Gathered, Kind, Pending, Tag};
use rounds::Rounds;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use ticket::Ticket;
use torch::{Fault, Store, Wire};

/// The name of this engine.
pub(crate) const ENGINE: &str = "torch";

/// The ranks of a process group, as the engine sees them. Made by all of them.
///
/// `patience` is how many seconds a rank that does not answer is waited for.
#[pyclass(module = "redsync._redsync", frozen)]
pub struct Group(Mutex<Option<Arc<Torch>>>);

#[pymethods]
impl Group {
    #[new]
    fn new(py: Python<'_>, process_group: &Bound<'_, PyAny>, patience: f64) -> PyResult<Group> {
        let patience = Duration::try_from_secs_f64(patience)
            .ok()
            .filter(|patience| !patience.is_zero())
            .ok_or_else(|| {
                PyValueError::new_err(format!(
                    "patience must be a positive number of seconds, got {patience}"
                ))
            })?;
        Ok(Group(Mutex::new(Some(Arc::new(Torch::open(py, process_group, patience)?)))))
    }

    /// This rank, from 0.
    #[getter]
    fn rank(&self) -> PyResult<usize> {
        self.communicator().map(|torch| torch.rank())
    }

    /// How many ranks there are.
    #[getter]
    fn size(&self) -> PyResult<usize> {
        self.communicator().map(|torch| torch.size())
    }

    /// This rank cannot go on: every rank that waits for it learns why.
    fn give_up(&self, reason: &str) -> PyResult<()> {
        self.communicator().map(|torch| torch.give_up(reason))
    }

    /// Leaves, after what was started. Happens by itself when nobody uses the group any more, and when the program ends.
    fn close(&self) {
        if let Some(torch) = self.take() {
            torch.shared.close();
        }
    }
}

impl Group {
    /// What Rust uses. The group stays open as long as somebody has it.
    ///
    /// # Errors
    /// When the group was closed.
    pub fn communicator(&self) -> PyResult<Arc<Torch>> {
        let torch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        torch.clone().ok_or_else(|| PyValueError::new_err("this group was closed"))
    }

    fn take(&self) -> Option<Arc<Torch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// One rank of a process group. Dropping it tells the others that this rank leaves.
pub struct Torch {
    shared: Arc<Shared>,
    /// What the interpreter calls when it ends.
    at_exit: Py<AtExit>,
}

struct Shared {
    rank: usize,
    size: usize,
    desk: Arc<Desk>,
    /// The rank whose process holds the store, if that is another one.
    holder: Option<usize>,
    /// The process whose threads these are; a fork has none of them.
    process: u32,
    /// What the thread of the wire leaves behind: the group, and whether something is under way in it.
    remains: Arc<Mutex<Option<(Rounds, bool)>>>,
}

impl Torch {
    fn open(py: Python<'_>, process_group: &Bound<'_, PyAny>, patience: Duration) -> PyResult<Torch> {
        let grace = Duration::from_secs(5).min(patience / 4);
        let wire = Wire::open(py, process_group, patience, grace / 10)?;
        let (rank, size) = (wire.rank, wire.size);
        let store = Store::open(py, &wire, grace)?;
        let holder = store.holder.filter(|&holder| holder != rank);
        let desk = Arc::new(Desk::new(rank, grace));
        let mut board = Board::new(Arc::clone(&desk), store, size, patience);
        board.say(false);
        let remains = Arc::new(Mutex::new(None));
        let shared =
            Shared { rank, size, desk, holder, process: std::process::id(), remains: Arc::clone(&remains) };
        let shared = Arc::new(shared);
        let at_exit = Py::new(py, AtExit(Arc::downgrade(&shared)))?;
        py.import("atexit")?.call_method1("register", (&at_exit,))?;
        let desk = Arc::clone(&shared.desk);
        spawn("redsync-torch", move || serve(&desk, Rounds::new(wire), &remains))?;
        spawn("redsync-board", move || board.run())?;
        Ok(Torch { shared, at_exit })
    }

    fn start<T: Send + 'static>(&self, call: Call, work: Work, finish: fn(Done) -> T) -> Pending<T> {
        let desk = &self.shared.desk;
        match desk.start(call, work) {
            Err(cause) => Pending::ready(Err(cause)),
            Ok((number, slot)) => {
                let (desk, holder) = (Arc::clone(desk), self.shared.holder.into_iter().collect());
                Pending::new(Ticket { slot, desk, number, tag: call.tag, holder, finish })
            }
        }
    }
}

impl Torch {
    fn deal(&self, tag: Tag, messages: Vec<Vec<u8>>, work: fn(Vec<Vec<u8>>) -> Work) -> Pending<Gathered> {
        if messages.len() != self.shared.size {
            return Pending::ready(Err(CommError::miscounted(ENGINE, messages.len(), self.shared.size)));
        }
        let length = messages.iter().map(|message| message.len() as u64).sum();
        self.start(Call { kind: Kind::Alltoall, tag, length }, work(messages), |done| done.messages)
    }
}

impl Communicator for Torch {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn name(&self) -> &'static str {
        ENGINE
    }

    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered> {
        let call = Call { kind: Kind::Allgather, tag, length: message.len() as u64 };
        self.start(call, Work::Gather(message), |done| done.messages)
    }

    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>> {
        let call = Call { kind: Kind::Allreduce, tag, length: values.len() as u64 };
        self.start(call, Work::Sum(values), |done| done.values)
    }

    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        self.deal(tag, messages, Work::Scatter)
    }

    fn alltoall_few(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        self.deal(tag, messages, Work::ScatterFew)
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.start(Call { kind: Kind::Barrier, tag, length: 0 }, Work::Meet, |_| ())
    }

    fn give_up(&self, reason: &str) {
        self.shared.desk.give_up(reason);
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        self.shared.close();
        let _ = Python::try_attach(|py| {
            // Without an interpreter there is nothing to be taken back.
            let _ =
                py.import("atexit").and_then(|atexit| atexit.call_method1("unregister", (&self.at_exit,)));
        });
    }
}

impl Shared {
    /// Finishes what was started, says goodbye and ends the threads. Does nothing the second time.
    fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.desk.close();
        // The threads need the interpreter, which the caller may hold.
        let ended = Python::try_attach(|py| py.detach(|| self.desk.wait_for_end()));
        let remains = self.remains.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((rounds, under_way)) = remains.filter(|_| ended.is_some()) {
            rounds.close(under_way);
        }
    }
}

/// Closes a communicator when the interpreter ends, if it is still there: no thread may meet an interpreter that is ending.
#[pyclass(frozen)]
struct AtExit(Weak<Shared>);

#[pymethods]
impl AtExit {
    fn __call__(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.close();
        }
    }
}

/// The thread of the wire: does what is on the desk, in order, until the group fails or the communicator is closed.
fn serve(desk: &Desk, mut rounds: Rounds, remains: &Mutex<Option<(Rounds, bool)>>) {
    let under_way = loop {
        let (outcome, number, tag) = match desk.next() {
            Next::End => break false,
            Next::Farewell(reason) => {
                let told = rounds.say_farewell(&reason, &|| desk.goes_on(None));
                break matches!(told, Err(Fault::Abandoned));
            }
            Next::Job(job) => {
                let number = job.number;
                let outcome = rounds.perform(job.call, job.work, &|| desk.goes_on(Some(number)));
                (outcome, number, job.call.tag)
            }
        };
        match outcome {
            Ok(done) => desk.finish(number, done),
            Err(Fault::Cause(cause)) => desk.fail(number, cause),
            Err(Fault::Failed(reason)) => {
                desk.inquire(Inquest { number, tag, why: Why::Failed(reason) });
                break false;
            }
            Err(Fault::Abandoned) => break true,
        }
    };
    *remains.lock().unwrap_or_else(PoisonError::into_inner) = Some((rounds, under_way));
    desk.wire_ended();
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> PyResult<()> {
    std::thread::Builder::new().name(name.to_string()).spawn(run)?;
    Ok(())
}

fn failed(reason: &str) -> CommError {
    CommError::Engine { engine: ENGINE, reason: reason.to_string() }
}

//! The caller's side of the engine: starts the communication thread, turns calls into commands, ends the thread.

use super::body::Work;
use super::header::inline_bytes;
use super::library::{Library, failed};
use super::options::Options;
use super::thread::{Command, Thread};
use super::ticket::{Broken, Ticket};
use crate::{Call, CommError, Communicator, Gathered, Kind, Pending, Slot, Tag};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The way to the communication thread of this process, for [`abort`]; there is at most one.
static THREAD: Mutex<Option<Sender<Command>>> = Mutex::new(None);

/// How long [`abort`] lets MPI end the job before it ends this process alone.
const ABORT: Duration = Duration::from_secs(5);

/// This process among all processes of the MPI job.
///
/// Dropping it waits for the other ranks to leave too, unless it is broken; see the [module](crate::mpi).
pub struct Mpi {
    rank: usize,
    size: usize,
    /// The lowest of the ranks that share memory with this one.
    first_of_host: usize,
    sent: Arc<AtomicU64>,
    broken: Broken,
    /// Where commands go, and the number of the next collective: one lock, so that both have the same order.
    commands: Mutex<(u64, Sender<Command>)>,
    thread: Option<JoinHandle<()>>,
}

/// Starts MPI and joins its world: all processes that one `mpirun` started. Once per process.
///
/// # Errors
/// [`CommError::Engine`] when MPI does not start, was finalized already, or is in use by another [`Mpi`] of this process.
pub fn world() -> Result<Mpi, CommError> {
    world_with(Options::default())
}

/// The same with other options, which all ranks must have in common.
///
/// # Errors
/// As [`world`].
pub fn world_with(options: Options) -> Result<Mpi, CommError> {
    let (commands, inbox) = mpsc::channel();
    let broken = Broken::default();
    {
        let mut thread = lock(&THREAD);
        if thread.is_some() {
            return Err(failed("there is already a communicator in this process"));
        }
        *thread = Some(commands.clone());
    }
    start(inbox, options, broken.clone())
        .map(|(Place { rank, size, first_of_host, sent }, thread)| Mpi {
            rank,
            size,
            first_of_host,
            sent,
            broken,
            commands: Mutex::new((0, commands)),
            thread: Some(thread),
        })
        .inspect_err(|_| *lock(&THREAD) = None)
}

/// What the thread tells when MPI is up.
struct Place {
    rank: usize,
    size: usize,
    first_of_host: usize,
    sent: Arc<AtomicU64>,
}

/// Starts the thread and waits until MPI is up in it.
fn start(
    inbox: Receiver<Command>,
    options: Options,
    broken: Broken,
) -> Result<(Place, JoinHandle<()>), CommError> {
    let (tell, told) = mpsc::channel();
    let run = move || {
        let made = Library::start().and_then(|lib| {
            let Library { rank, size, first_of_host, .. } = lib;
            let place = Place { rank, size, first_of_host, sent: Arc::clone(&lib.sent) };
            Ok((place, Thread::new(lib, options, broken)?))
        });
        match made {
            Ok((place, thread)) => {
                // The receiver waits below.
                let _ = tell.send(Ok(place));
                thread.run(&inbox);
            }
            Err(cause) => drop(tell.send(Err(cause))),
        }
    };
    let thread = std::thread::Builder::new()
        .name("redsync-mpi".to_string())
        .spawn(run)
        .map_err(|cause| failed(&format!("cannot start the communication thread: {cause}")))?;
    let place = told.recv().unwrap_or_else(|_| Err(failed("the communication thread ended")))?;
    Ok((place, thread))
}

/// Ends all processes of the MPI job with this status. For after an error, when an orderly end could wait for ever.
///
/// Ends this process in any case, also when MPI was never started or cannot reach the others.
pub fn abort(status: i32) -> ! {
    let thread = lock(&THREAD).clone();
    if thread.is_some_and(|thread| thread.send(Command::Abort(status)).is_ok()) {
        // MPI_Abort ends the process from the other thread, normally long before this is over.
        std::thread::sleep(ABORT);
    }
    std::process::exit(status)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mpi {
    /// How many messages this rank has handed to MPI so far, headers and notes included.
    pub fn messages_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    fn start<T: Send + 'static>(&self, call: Call, work: impl FnOnce(Arc<Slot<T>>) -> Work) -> Pending<T> {
        let slot = Slot::new();
        let work = work(Arc::clone(&slot));
        let mut commands = lock(&self.commands);
        if let Some(cause) = self.broken.cause() {
            return Pending::ready(Err(cause.at(call.tag)));
        }
        let number = commands.0;
        if commands.1.send(Command::Start(call, work)).is_err() {
            return Pending::ready(Err(failed("the communication thread ended")));
        }
        commands.0 += 1;
        let (broken, thread) = (self.broken.clone(), commands.1.clone());
        Pending::new(Ticket { slot, tag: call.tag, number, broken, thread })
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn name(&self) -> &'static str {
        "mpi"
    }

    fn host(&self) -> Option<String> {
        Some(format!("that of rank {}", self.first_of_host))
    }

    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered> {
        let call = Call { kind: Kind::Allgather, tag, length: message.len() as u64 };
        self.start(call, |slot| Work::Gather(message, slot))
    }

    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>> {
        let call = Call { kind: Kind::Allreduce, tag, length: values.len() as u64 };
        if values.is_empty() || inline_bytes(call.kind, values.len()) > 0 {
            self.start(call, |slot| Work::ShortSum(values, slot))
        } else {
            self.start(call, |slot| Work::Sum(values, slot))
        }
    }

    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        if messages.len() != self.size {
            return Pending::ready(Err(CommError::miscounted("mpi", messages.len(), self.size)));
        }
        let length = messages.iter().map(|message| message.len() as u64).sum();
        self.start(Call { kind: Kind::Alltoall, tag, length }, |slot| Work::Deal(messages, slot))
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.start(Call { kind: Kind::Barrier, tag, length: 0 }, Work::Meet)
    }

    fn give_up(&self, reason: &str) {
        // Who asks gets the tag of what it asks for.
        let (rank, tag) = (self.rank, Tag { step: 0, op: 0 });
        let cause = CommError::GaveUp { rank, tag, reason: reason.to_string(), blames: Vec::new() };
        // Under the lock, so that what was started before is before it in the channel too.
        let commands = lock(&self.commands);
        let cause = self.broken.set(cause);
        let _ = commands.1.send(Command::GiveUp(cause));
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // If the thread is gone there is nobody to tell.
        let _ = lock(&self.commands).1.send(Command::Leave);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        *lock(&THREAD) = None;
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

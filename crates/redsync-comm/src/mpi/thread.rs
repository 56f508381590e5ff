//! The communication thread. Commands come in over a channel, slots are filled. It alone talks to MPI; it sleeps on the
//! channel when nothing is in flight, and between tests with growing pauses when something is.

use super::body::Work;
use super::exchange::{Exchange, FAREWELL};
use super::library::{Lent, Library};
use super::slot::Broken;
use crate::{Call, CommError, Tag};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

/// Collectives that exchange at the same time; the rest queues.
const IN_FLIGHT: usize = 16;

/// How long the thread looks without a pause after something has happened.
const EAGER: Duration = Duration::from_micros(50);

/// The shortest and the longest pause.
const PAUSE: Range<Duration> = Duration::from_micros(20)..Duration::from_micros(200);

/// The pause without work in flight. MPI may have taken a small message and not yet passed it on: it does so only when it is
/// called.
const IDLE: Duration = Duration::from_millis(10);

/// How long a broken rank stays for the sake of the others: they may need what it started before the error, and should
/// learn of it before the first process ends, because then `mpirun` ends all.
const LINGER: Duration = Duration::from_secs(2);

/// What the thread is asked to do.
pub(super) enum Command {
    /// Start a collective. They come in the order of their numbers.
    Start(Call, Work),
    /// Somebody gave up waiting for the collective with this number.
    Expire(u64, CommError),
    /// The communicator was dropped.
    Leave,
    /// End the whole job with this status.
    Abort(i32),
}

pub(super) struct Thread {
    lib: Library,
    broken: Broken,
    queue: VecDeque<(Call, Work)>,
    active: VecDeque<Exchange>,
    /// The number of the next collective.
    next: u64,
    farewells: Farewells,
    /// Since when the communicator is gone.
    leaving: Option<Instant>,
}

impl Thread {
    pub fn new(lib: Library, broken: Broken) -> Result<Thread, CommError> {
        let farewells = Farewells::expect(&lib)?;
        let (queue, active) = (VecDeque::new(), VecDeque::new());
        Ok(Thread { lib, broken, queue, active, next: 0, farewells, leaving: None })
    }

    pub fn run(mut self, commands: &Receiver<Command>) {
        let mut pace = Pace { moved: Instant::now() };
        while !self.finished() {
            match pace.next(commands, self.busy()) {
                Next::Command(command) => {
                    self.obey(command);
                    pace.moved();
                }
                Next::Nothing => {}
                Next::Closed => self.obey(Command::Leave),
            }
            match self.progress() {
                Ok(true) => pace.moved(),
                Ok(false) => {}
                Err(cause) => self.fail_from(0, cause),
            }
        }
        if !self.in_trouble() {
            self.lib.finalize();
        }
    }

    /// Whether there is something to do without another command. What queues counts: all that was in flight may have
    /// finished at once, and then nothing but the next look starts it.
    fn busy(&self) -> bool {
        !self.active.is_empty() || !self.queue.is_empty() || self.leaving.is_some()
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Start(call, work) => self.queue.push_back((call, work)),
            Command::Expire(number, cause) => self.fail_from(number, cause),
            Command::Leave if self.leaving.is_none() => self.leave(),
            Command::Leave => {}
            Command::Abort(status) => self.lib.abort(status),
        }
    }

    /// Everything in flight moves on; true when something happened.
    fn progress(&mut self) -> Result<bool, CommError> {
        let mut moved = self.farewells.progress()?;
        while self.active.len() < IN_FLIGHT {
            let Some((call, work)) = self.queue.pop_front() else { break };
            self.start(call, work);
            moved = true;
        }
        let mut failure = None;
        for exchange in &mut self.active {
            let outcome = match self.farewells.before(exchange.number, exchange.call.tag) {
                Some(cause) => Err(cause),
                None => exchange.progress(&self.lib),
            };
            match outcome {
                Ok(happened) => moved |= happened,
                Err(cause) => {
                    failure = Some((exchange.number, cause));
                    break;
                }
            }
        }
        if let Some((number, cause)) = failure {
            let (number, cause) = self.earlier_failure(number).unwrap_or((number, cause));
            self.fail_from(number, cause);
        }
        self.active.retain(|exchange| !exchange.done());
        Ok(moved)
    }

    /// What went wrong before the collective that was found to fail: what a peer sent for an earlier one came first, but perhaps
    /// just after this rank had looked for it.
    fn earlier_failure(&mut self, number: u64) -> Option<(u64, CommError)> {
        let mut earlier = self.active.iter_mut().take_while(|exchange| exchange.number < number);
        earlier.find_map(|exchange| Some((exchange.number, exchange.progress(&self.lib).err()?)))
    }

    fn start(&mut self, call: Call, work: Work) {
        let number = self.next;
        self.next += 1;
        if let Some(cause) = self.broken.cause() {
            return work.body().fail(cause);
        }
        let mut exchange = Exchange::new(&self.lib, number, call, work.body());
        let begun = exchange.begin(&self.lib);
        self.active.push_back(exchange);
        if let Err(cause) = begun {
            self.fail_from(number, cause);
        }
    }

    /// Breaks the communicator: this collective and all later ones fail.
    fn fail_from(&mut self, number: u64, cause: CommError) {
        let cause = self.broken.set(cause);
        self.active.iter().filter(|exchange| exchange.number >= number).for_each(|exchange| {
            exchange.fail(cause.clone());
        });
        self.active.retain(|exchange| exchange.number < number);
        self.queue.drain(..).for_each(|(_, work)| work.body().fail(cause.clone()));
    }

    fn leave(&mut self) {
        self.leaving = Some(Instant::now());
        let started = self.next + self.queue.len() as u64;
        if let Err(cause) = self.farewells.say(&self.lib, started, self.broken.cause()) {
            self.fail_from(0, cause);
        }
    }

    /// Whether the thread can end. A healthy rank among healthy ones waits for all, as finalizing would; in trouble nobody
    /// can be relied on, not even to take our note.
    fn finished(&self) -> bool {
        let Some(since) = self.leaving else { return false };
        let missing = match self.broken.cause() {
            Some(CommError::Deadline { missing, .. }) => missing,
            _ => Vec::new(),
        };
        let complete = self.active.is_empty() && self.queue.is_empty() && self.farewells.complete(&missing);
        complete || self.in_trouble() && since.elapsed() > LINGER
    }

    fn in_trouble(&self) -> bool {
        self.broken.cause().is_some() || self.farewells.any_trouble()
    }
}

/// The notes by which ranks tell each other that they leave.
struct Farewells {
    ours: Lent<Vec<u8>, ()>,
    theirs: Lent<Vec<u8>, usize>,
    /// What each rank that has left said.
    heard: Vec<Option<Note>>,
}

struct Note {
    /// How many collectives the rank has started in all.
    started: u64,
    /// Which rank met an error, and which, if that is why.
    trouble: Option<(usize, String)>,
}

/// Started, the rank in trouble or `HEALTHY`, the length of the reason, the reason.
const NOTE: usize = 512;
const REASON: usize = 16;
const HEALTHY: u32 = u32::MAX;

impl Note {
    fn write(&self, place: &mut [u8]) {
        let healthy = (HEALTHY, "");
        let (rank, reason) = self.trouble.as_ref().map_or(healthy, |(rank, reason)| (*rank as u32, reason));
        let reason = &reason.as_bytes()[..reason.len().min(NOTE - REASON)];
        place[..8].copy_from_slice(&self.started.to_le_bytes());
        place[8..12].copy_from_slice(&rank.to_le_bytes());
        place[12..REASON].copy_from_slice(&(reason.len() as u32).to_le_bytes());
        place[REASON..][..reason.len()].copy_from_slice(reason);
    }

    fn read(place: &[u8]) -> Note {
        let number = |range: Range<usize>| {
            place[range].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        let (rank, length) = (number(8..12) as u32, number(12..REASON) as usize);
        let reason = String::from_utf8_lossy(&place[REASON..][..length.min(NOTE - REASON)]).into_owned();
        Note { started: number(0..8), trouble: (rank != HEALTHY).then_some((rank as usize, reason)) }
    }
}

impl Farewells {
    fn expect(lib: &Library) -> Result<Farewells, CommError> {
        let mut theirs = Lent::new(vec![0; lib.size * NOTE]);
        for peer in lib.peers() {
            theirs.receive(lib, peer * NOTE..(peer + 1) * NOTE, peer, FAREWELL, peer)?;
        }
        let heard = (0..lib.size).map(|_| None).collect();
        Ok(Farewells { ours: Lent::new(vec![0; NOTE]), theirs, heard })
    }

    fn say(&mut self, lib: &Library, started: u64, cause: Option<CommError>) -> Result<(), CommError> {
        let trouble = cause.map(|cause| cause.origin(lib.rank));
        Note { started, trouble }.write(self.ours.write(0..NOTE));
        lib.peers().try_for_each(|peer| self.ours.send(lib, 0..NOTE, peer, FAREWELL, ()))
    }

    fn progress(&mut self) -> Result<bool, CommError> {
        let mut heard = Vec::new();
        self.ours.progress(drop)?;
        self.theirs.progress(|peer| heard.push(peer))?;
        for &peer in &heard {
            self.heard[peer] = Some(Note::read(self.theirs.read(peer * NOTE..(peer + 1) * NOTE)));
        }
        Ok(!heard.is_empty())
    }

    /// Why this collective cannot be complete, if a rank left without starting it.
    fn before(&self, number: u64, tag: Tag) -> Option<CommError> {
        let note = |note: &Option<Note>| note.as_ref().is_some_and(|note| note.started <= number);
        let rank = self.heard.iter().position(note)?;
        let trouble = self.heard[rank].as_ref()?.trouble.clone();
        Some(match trouble {
            None => CommError::Left { rank, tag },
            Some((rank, reason)) => CommError::GaveUp { rank, tag, reason },
        })
    }

    /// Whether our notes are on their way and all have left, but for those that are known not to answer.
    fn complete(&self, missing: &[usize]) -> bool {
        self.ours.idle() && self.theirs.open().all(|peer| missing.contains(peer))
    }

    fn any_trouble(&self) -> bool {
        self.heard.iter().flatten().any(|note| note.trouble.is_some())
    }
}

/// How long to wait between two looks at MPI: not at all at first, for latency, then longer, to leave the core to others.
struct Pace {
    moved: Instant,
}

enum Next {
    Command(Command),
    Nothing,
    Closed,
}

impl Pace {
    fn moved(&mut self) {
        self.moved = Instant::now();
    }

    /// A tenth of how long nothing has happened, within bounds: what comes late is noticed hardly later.
    fn pause(&self) -> Option<Duration> {
        let still = self.moved.elapsed();
        (still > EAGER).then(|| (still / 10).clamp(PAUSE.start, PAUSE.end))
    }

    /// The next command, after a pause at most.
    fn next(&self, commands: &Receiver<Command>, busy: bool) -> Next {
        match if busy { self.pause() } else { Some(IDLE) } {
            Some(pause) => match commands.recv_timeout(pause) {
                Ok(command) => Next::Command(command),
                Err(RecvTimeoutError::Timeout) => Next::Nothing,
                Err(RecvTimeoutError::Disconnected) => Next::Closed,
            },
            None => match commands.try_recv() {
                Ok(command) => Next::Command(command),
                Err(TryRecvError::Empty) => {
                    std::thread::yield_now();
                    Next::Nothing
                }
                Err(TryRecvError::Disconnected) => Next::Closed,
            },
        }
    }
}

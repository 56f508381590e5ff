//! Where callers and the two threads of a communicator meet. Callers leave work, one thread takes it in order, the other watches
//! over it; results and errors go to the slots of the callers. What must hold: nobody talks to Python under this lock, and every
//! slot is filled in the end.

use super::block::cut;
use super::note::{Gone, Note, Why};
use redsync_comm::{Call, CommError, Gathered, Slot, Tag};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long before its own deadline, at most, a rank does not follow another's.
const NEAR: Duration = Duration::from_secs(1);

/// What one rank brings to a collective.
#[derive(Debug)]
pub enum Work {
    /// A message for all.
    Gather(Vec<u8>),
    /// A message for each.
    Scatter(Vec<Vec<u8>>),
    /// The same, most of them empty.
    ScatterFew(Vec<Vec<u8>>),
    /// Values to be summed.
    Sum(Vec<f32>),
    /// Nothing.
    Meet,
}

/// What a collective brings; what its kind has not is empty.
#[derive(Debug)]
pub struct Done {
    /// One message of each rank.
    pub messages: Gathered,
    /// The sum.
    pub values: Vec<f32>,
}

/// A collective for the wire.
#[derive(Debug)]
pub struct Job {
    /// Its place in the sequence.
    pub number: u64,
    /// What the other ranks are told.
    pub call: Call,
    /// What this rank brings.
    pub work: Work,
}

/// What the thread of the wire does next.
#[derive(Debug)]
pub enum Next {
    /// This collective.
    Job(Job),
    /// Tell the others why this rank gives up.
    Farewell(String),
    /// Nothing more.
    End,
}

/// What the thread of the board does next.
#[derive(Debug)]
pub enum Order {
    /// Give a sign of life.
    Beat,
    /// Say at once that this rank cannot go on.
    Trouble,
    /// Find out why a collective does not end.
    Inquest(Inquest),
    /// Say goodbye.
    Leave,
}

/// The question why a collective does not end.
#[derive(Debug, Clone)]
pub struct Inquest {
    /// Its place in the sequence.
    pub number: u64,
    /// Its name.
    pub tag: Tag,
    /// Why somebody asks.
    pub why: Why,
}

/// See the module.
#[derive(Debug)]
pub struct Desk {
    /// This rank.
    pub rank: usize,
    /// Five beats of the board: how long what takes part in the end of a communicator may take.
    pub grace: Duration,
    state: Mutex<State>,
    /// Rings for the thread of the wire.
    work: Condvar,
    /// Rings for the thread of the board, and for who waits for the end of both.
    bell: Condvar,
}

#[derive(Debug, Default)]
struct State {
    started: u64,
    queue: VecDeque<Job>,
    open: VecDeque<Open>,
    broken: Option<Broken>,
    farewell: Option<String>,
    inquest: Option<Inquest>,
    /// Until when what was started may go on, once the communicator is closed.
    closing: Option<Instant>,
    /// The board did not answer a question.
    deaf: bool,
    wire_ended: bool,
    board_ended: bool,
}

/// A collective that was started here and is not done.
#[derive(Debug)]
struct Open {
    number: u64,
    tag: Tag,
    slot: Arc<Slot<Done>>,
    /// When somebody stops waiting for it.
    until: Option<Instant>,
}

#[derive(Debug)]
struct Broken {
    /// The first collective that fails.
    from: u64,
    cause: CommError,
}

impl Desk {
    pub fn new(rank: usize, grace: Duration) -> Desk {
        let (work, bell) = (Condvar::new(), Condvar::new());
        Desk { rank, grace, state: Mutex::default(), work, bell }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock with the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // For callers.

    /// Takes a collective in; its number and its slot.
    pub fn start(&self, call: Call, work: Work) -> Result<(u64, Arc<Slot<Done>>), CommError> {
        let mut state = self.lock();
        if let Some(broken) = &state.broken {
            return Err(broken.cause.clone().at(call.tag));
        }
        if state.closing.is_some() {
            return Err(closed());
        }
        let (number, slot) = (state.started, Slot::new());
        state.started += 1;
        state.open.push_back(Open { number, tag: call.tag, slot: Arc::clone(&slot), until: None });
        state.queue.push_back(Job { number, call, work });
        self.work.notify_one();
        Ok((number, slot))
    }

    /// Somebody waits for a collective, until then.
    pub fn waits(&self, number: u64, until: Option<Instant>) {
        let mut state = self.lock();
        if let Some(open) = state.open.iter_mut().find(|open| open.number == number) {
            open.until = until;
        }
    }

    /// See [`redsync_comm::Communicator::give_up`].
    pub fn give_up(&self, reason: &str) {
        let mut state = self.lock();
        if state.broken.is_some() || state.closing.is_some() {
            return;
        }
        let reason = cut(reason).to_string();
        // Who asks gets the tag of what it asks for.
        let tag = Tag { step: 0, op: 0 };
        let cause = CommError::GaveUp { rank: self.rank, tag, reason: reason.clone(), blames: Vec::new() };
        state.broken = Some(Broken { from: state.started, cause });
        state.farewell = Some(reason);
        self.work.notify_one();
        self.bell.notify_all();
    }

    /// Asks the board why a collective does not end; the answer goes to its slot.
    pub fn inquire(&self, inquest: Inquest) {
        let mut state = self.lock();
        // What is found out about a collective counts for all later ones too.
        if state.inquest.as_ref().is_none_or(|other| inquest.number < other.number) {
            state.inquest = Some(inquest);
        }
        self.bell.notify_all();
    }

    /// Breaks the communicator: this collective and all later ones fail. The first cause counts, also for what is started later;
    /// what fails though it came before that keeps its own.
    pub fn fail(&self, number: u64, cause: CommError) {
        let mut state = self.lock();
        let broken = state.broken.get_or_insert_with(|| Broken { from: number, cause: cause.clone() });
        let cause = if broken.from <= number { broken.cause.clone() } else { cause };
        broken.from = broken.from.min(number);
        state.queue.retain(|job| job.number < number);
        let later = state.open.iter().position(|open| open.number >= number).unwrap_or(state.open.len());
        for open in state.open.drain(later..) {
            open.slot.fill(Err(cause.clone().at(open.tag)));
        }
        self.bell.notify_all();
    }

    /// The same, when not even the board answers.
    pub fn fail_without_board(&self, number: u64, cause: CommError) {
        self.lock().deaf = true;
        self.fail(number, cause);
    }

    /// No more work is taken; what was started may go on for a while.
    pub fn close(&self) {
        let mut state = self.lock();
        let while_broken = self.grace * 2 / 5;
        let rest = if state.broken.is_some() { while_broken } else { self.grace };
        state.closing.get_or_insert(Instant::now() + rest);
        self.work.notify_one();
        self.bell.notify_all();
    }

    /// Waits until both threads have ended, not for ever. Then nothing is open any more.
    pub fn wait_for_end(&self) {
        let state = self.wait_while(self.grace * 6 / 5, |state| !state.wire_ended);
        drop(state);
        // One that hangs in the store is not waited for.
        let state = self.wait_while(self.grace, |state| !state.board_ended && !state.deaf);
        drop(state);
        self.fail(0, closed());
    }

    fn wait_while(&self, limit: Duration, unfinished: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        while unfinished(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = wait(&self.bell, state, left);
        }
        state
    }

    // For the thread of the wire.

    /// Waits for something to do.
    pub fn next(&self) -> Next {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                return Next::Job(job);
            }
            if let Some(reason) = state.farewell.take() {
                return Next::Farewell(reason);
            }
            if state.closing.is_some() {
                return Next::End;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the collective `number` is still worth waiting for; None is the farewell.
    pub fn goes_on(&self, number: Option<u64>) -> bool {
        let state = self.lock();
        let failed = |broken: &Broken| number.is_some_and(|number| broken.from <= number);
        let expired = state.closing.is_some_and(|until| until <= Instant::now());
        !expired && !state.broken.as_ref().is_some_and(failed)
    }

    /// The collective `number` is done.
    pub fn finish(&self, number: u64, done: Done) {
        let mut state = self.lock();
        let Some(at) = state.open.iter().position(|open| open.number == number) else { return };
        let open = state.open.remove(at);
        drop(state);
        if let Some(open) = open {
            open.slot.fill(Ok(done));
        }
    }

    /// The thread of the wire has ended.
    pub fn wire_ended(&self) {
        self.lock().wire_ended = true;
        self.bell.notify_all();
    }

    // For the thread of the board.

    /// Waits for something to do, at most until the next beat is due. `told` says that the others know of the trouble.
    pub fn order(&self, due: Instant, told: bool) -> Order {
        let mut state = self.lock();
        loop {
            if let Some(inquest) = state.inquest.take() {
                return Order::Inquest(inquest);
            }
            if state.broken.is_some() && !told {
                return Order::Trouble;
            }
            if state.closing.is_some() && state.wire_ended {
                return Order::Leave;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Order::Beat;
            }
            state = wait(&self.bell, state, left);
        }
    }

    /// What this rank says about itself.
    pub fn note(&self, beats: u64, leaves: bool) -> Note {
        let state = self.lock();
        let (started, finished) = (state.started, state.started - state.open.len() as u64);
        let gone = state.broken.as_ref().map(|broken| {
            // Who started the same collective sees a mismatch there, and names the right side.
            let seen_by_all = matches!(broken.cause, CommError::Mismatch { .. });
            Gone::because(&broken.cause, self.rank, broken.from + u64::from(seen_by_all))
        });
        Note { beats, started, finished, gone: gone.or(leaves.then_some(Gone::Left)) }
    }

    /// The first collective from `number` on that is not done.
    pub fn first_open(&self, number: u64) -> Option<(u64, Tag)> {
        let state = self.lock();
        state.open.iter().find(|open| open.number >= number).map(|open| (open.number, open.tag))
    }

    /// Whether the collective `number` is not done, and the communicator is not closed.
    pub fn is_open(&self, number: u64) -> bool {
        let state = self.lock();
        state.closing.is_none() && state.open.iter().any(|open| open.number == number)
    }

    /// Whether somebody who waits for a collective from `number` on will soon meet a deadline of its own.
    pub fn is_near_deadline(&self, number: u64) -> bool {
        let soon = Instant::now() + NEAR;
        let near = |open: &Open| open.number >= number && open.until.is_some_and(|until| until <= soon);
        self.lock().open.iter().any(near)
    }

    /// Whether the communicator is broken.
    pub fn is_broken(&self) -> bool {
        self.lock().broken.is_some()
    }

    /// The thread of the board has ended.
    pub fn board_ended(&self) {
        self.lock().board_ended = true;
        self.bell.notify_all();
    }
}

fn closed() -> CommError {
    CommError::Engine { engine: super::ENGINE, reason: "the communicator was closed".to_string() }
}

fn wait<'a>(bell: &Condvar, state: MutexGuard<'a, State>, left: Duration) -> MutexGuard<'a, State> {
    bell.wait_timeout(state, left).map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state)
}

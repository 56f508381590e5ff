//! The engine whose ranks are threads of one process. Each collective is a round in which the ranks meet under one lock;
//! messages are shared, not copied, and sums are taken by the ranks that wait, a segment each, always in rank order.
//!
//! Nobody spins and there is no thread besides those of the caller: who waits sleeps until the round changes.

use crate::{Call, CommError, Communicator, Gathered, Kind, Operation, Pending, Tag, sum};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Values summed under one claim: long enough to be worth a lock, short enough to share a layer among ranks.
const SEGMENT: usize = 1 << 16;

/// How long before its own deadline, at most, a rank does not follow another's.
const PATIENCE: Duration = Duration::from_secs(1);

/// Makes a group of `size` ranks, in rank order. Give each to a thread of its own.
pub fn group(size: usize) -> Vec<Local> {
    let state = State {
        rounds: VecDeque::new(),
        first: 0,
        started: vec![0; size],
        gone: vec![None; size],
        broken: vec![None; size],
    };
    let group = Arc::new(Group { size, state: Mutex::new(state), changed: Condvar::new() });
    (0..size).map(|rank| Local { rank, group: Arc::clone(&group) }).collect()
}

/// One rank of a group of threads. Dropping it tells the others that this rank leaves.
#[derive(Debug)]
pub struct Local {
    rank: usize,
    group: Arc<Group>,
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn name(&self) -> &'static str {
        "local"
    }

    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered> {
        let call = Call { kind: Kind::Allgather, tag, length: message.len() as u64 };
        self.start(call, Part { messages: vec![Arc::new(message)], ..Part::default() }, Outcome::gathered)
    }

    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>> {
        let call = Call { kind: Kind::Allreduce, tag, length: values.len() as u64 };
        self.start(call, Part { values: Arc::new(values), ..Part::default() }, Outcome::summed)
    }

    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        if messages.len() != self.size() {
            return Pending::ready(Err(CommError::miscounted("local", messages.len(), self.size())));
        }
        let length = messages.iter().map(|message| message.len() as u64).sum();
        let messages = messages.into_iter().map(Arc::new).collect();
        let call = Call { kind: Kind::Alltoall, tag, length };
        self.start(call, Part { messages, ..Part::default() }, Outcome::gathered)
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.start(Call { kind: Kind::Barrier, tag, length: 0 }, Part::default(), |_| ())
    }

    fn give_up(&self, reason: &str) {
        self.group.lock().give_up(self.rank, reason);
        self.group.changed.notify_all();
    }
}

impl Local {
    fn start<T: Send + 'static>(&self, call: Call, part: Part, finish: fn(Outcome) -> T) -> Pending<T> {
        match self.group.lock().enter(self.rank, call, part) {
            Err(cause) => {
                self.group.changed.notify_all();
                Pending::ready(Err(cause))
            }
            Ok(number) => {
                self.group.changed.notify_all();
                let group = Arc::clone(&self.group);
                Pending::new(Meeting { group, rank: self.rank, number, call, finish })
            }
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.group.lock().leave(self.rank);
        self.group.changed.notify_all();
    }
}

#[derive(Debug)]
struct Group {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this lock with the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct State {
    /// The rounds that some rank has not finished with; the first has number `first`.
    rounds: VecDeque<Round>,
    first: u64,
    /// Per rank: how many rounds it has started.
    started: Vec<u64>,
    /// Per rank: the round from which on it takes no part, if it has left, given up or reached a deadline.
    gone: Vec<Option<u64>>,
    /// Per rank: the round from which on everything fails, and why.
    broken: Vec<Option<(u64, CommError)>>,
}

impl State {
    /// Puts a rank's part into its next round and gives the number of that round.
    fn enter(&mut self, rank: usize, call: Call, part: Part) -> Result<u64, CommError> {
        if let Some((_, cause)) = &self.broken[rank] {
            return Err(cause.clone().at(call.tag));
        }
        let number = self.started[rank];
        let index = (number - self.first) as usize;
        if index == self.rounds.len() {
            self.rounds.push_back(Round::new(self.started.len()));
        }
        self.started[rank] += 1;
        self.compare(number, rank, call);
        let round = &mut self.rounds[index];
        round.calls[rank] = Some(call);
        round.parts[rank] = Some(part);
        round.present += 1;
        Ok(number)
    }

    /// Breaks this rank and every rank present whose call differs; each learns of the other side.
    fn compare(&mut self, number: u64, rank: usize, call: Call) {
        let round = &self.rounds[(number - self.first) as usize];
        for (other, theirs) in round.calls.iter().enumerate() {
            let Some(theirs) = *theirs else { continue };
            if !theirs.matches(&call) {
                let here = CommError::Mismatch { rank: other, theirs, ours: call };
                let there = CommError::Mismatch { rank, theirs: call, ours: theirs };
                self.broken[rank].get_or_insert((number, here));
                self.broken[other].get_or_insert((number, there));
            }
        }
    }

    /// This rank takes no part from its next round on.
    fn leave(&mut self, rank: usize) {
        let started = self.started[rank];
        self.gone[rank].get_or_insert(started);
    }

    fn give_up(&mut self, rank: usize, reason: &str) {
        // Who asks gets the tag of what it asks for.
        let tag = Tag { step: 0, op: 0 };
        let cause = CommError::GaveUp { rank, tag, reason: reason.to_string(), blames: Vec::new() };
        self.breaks(rank, self.started[rank], cause);
        self.leave(rank);
    }

    /// Everything of this rank fails from this round on. Only the first cause counts.
    fn breaks(&mut self, rank: usize, number: u64, cause: CommError) {
        let (since, _) = self.broken[rank].get_or_insert((number, cause));
        *since = number.min(*since);
    }

    /// Why a rank's part in a round cannot succeed any more, if so. Who is patient does not follow ranks that have reached a
    /// deadline.
    fn failure(&mut self, number: u64, rank: usize, tag: Tag, patient: bool) -> Option<CommError> {
        if !self.round(number).complete() {
            let expired = |other: usize| matches!(self.broken[other], Some((_, CommError::Deadline { .. })));
            let absent = |&other: &usize| {
                self.gone[other].is_some_and(|since| since <= number) && !(patient && expired(other))
            };
            if let Some(other) = (0..self.gone.len()).find(absent) {
                let cause = match &self.broken[other] {
                    None => CommError::Left { rank: other, tag },
                    Some((_, cause)) => cause.followed(other, tag),
                };
                self.breaks(rank, number, cause);
            }
        }
        match &self.broken[rank] {
            Some((since, cause)) if *since <= number => Some(cause.clone().at(tag)),
            _ => None,
        }
    }

    /// The time is up: all who wait for this round should know.
    fn expire(&mut self, number: u64, rank: usize, tag: Tag, waited: Duration) -> CommError {
        let missing = self.round(number).missing();
        let cause = CommError::Deadline { tag, waited, missing };
        self.breaks(rank, number, cause.clone());
        let since = self.gone[rank].get_or_insert(number);
        *since = number.min(*since);
        cause
    }

    fn round(&mut self, number: u64) -> &mut Round {
        &mut self.rounds[(number - self.first) as usize]
    }

    /// A rank needs nothing more of this round; rounds that nobody needs go away, in order.
    fn release(&mut self, number: u64) {
        self.round(number).finished += 1;
        while self.rounds.front().is_some_and(|round| round.finished == round.calls.len()) {
            self.rounds.pop_front();
            self.first += 1;
        }
    }
}

/// What one rank brings: one message for all, one for each rank, or values.
#[derive(Debug, Default, Clone)]
struct Part {
    messages: Vec<Arc<Vec<u8>>>,
    values: Arc<Vec<f32>>,
}

#[derive(Debug)]
struct Round {
    calls: Vec<Option<Call>>,
    parts: Vec<Option<Part>>,
    present: usize,
    finished: usize,
    /// The next segment that nobody sums yet, and the sums that are there.
    claimed: usize,
    sums: Vec<Arc<(usize, Vec<f32>)>>,
}

impl Round {
    fn new(size: usize) -> Round {
        let (calls, parts) = (vec![None; size], vec![None; size]);
        Round { calls, parts, present: 0, finished: 0, claimed: 0, sums: Vec::new() }
    }

    fn complete(&self) -> bool {
        self.present == self.calls.len()
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.calls.len()).filter(|&rank| self.calls[rank].is_none()).collect()
    }

    fn segments(&self) -> usize {
        match self.calls.iter().flatten().next() {
            Some(Call { kind: Kind::Allreduce, length, .. }) => (*length as usize).div_ceil(SEGMENT),
            _ => 0,
        }
    }

    fn done(&self) -> bool {
        self.complete() && self.sums.len() == self.segments()
    }

    /// Claims the next segment to sum: its number and the values of all ranks.
    fn claim(&mut self) -> Option<(usize, Vec<Arc<Vec<f32>>>)> {
        if !self.complete() || self.claimed == self.segments() {
            return None;
        }
        self.claimed += 1;
        let inputs = self.parts.iter().flatten().map(|part| Arc::clone(&part.values)).collect();
        Some((self.claimed - 1, inputs))
    }

    /// Takes what one rank needs to make its result outside the lock.
    fn outcome(&mut self, rank: usize) -> Outcome {
        let own_message = |part: &mut Part| match part.messages.as_mut_slice() {
            [] => Arc::default(),
            [shared] => Arc::clone(shared),
            // Nobody else wants it, and its buffer is free once this rank is done with it.
            each => std::mem::take(&mut each[rank]),
        };
        let messages = self.parts.iter_mut().flatten().map(own_message).collect();
        let own = self.parts[rank].as_mut().map(|part| std::mem::take(&mut part.values)).unwrap_or_default();
        Outcome { messages, own, sums: self.sums.clone() }
    }
}

/// A finished round, seen by one rank.
struct Outcome {
    messages: Vec<Arc<Vec<u8>>>,
    own: Arc<Vec<f32>>,
    sums: Vec<Arc<(usize, Vec<f32>)>>,
}

impl Outcome {
    fn gathered(self) -> Gathered {
        Gathered::new(self.messages)
    }

    /// Copies the sums over this rank's own values: nobody reads those any more, and their pages are there already.
    fn summed(self) -> Vec<f32> {
        let mut values = Arc::unwrap_or_clone(self.own);
        for sum in &self.sums {
            let (segment, sum) = &**sum;
            values[segment * SEGMENT..][..sum.len()].copy_from_slice(sum);
        }
        values
    }
}

/// One rank's part in a round under way.
struct Meeting<T> {
    group: Arc<Group>,
    rank: usize,
    number: u64,
    call: Call,
    finish: fn(Outcome) -> T,
}

impl<T> Meeting<T> {
    /// Sums one segment if there is one to claim. Only for a round that has not failed: there all inputs are equally long.
    fn help(&self) {
        let Some((segment, inputs)) = self.group.lock().round(self.number).claim() else { return };
        let start = segment * SEGMENT;
        let end = inputs[0].len().min(start + SEGMENT);
        let mut sum = vec![0.0; end - start];
        let parts: Vec<Option<&[f32]>> = inputs.iter().map(|input| Some(&input[start..end])).collect();
        sum::in_order(&mut sum, &parts);
        // Before the last sum is entered nobody may share the inputs: each rank then takes its own back.
        drop(inputs);
        let mut state = self.group.lock();
        let round = state.round(self.number);
        round.sums.push(Arc::new((segment, sum)));
        if round.done() {
            self.group.changed.notify_all();
        }
    }

    /// Sleeps until the round is done, has failed, has a segment to sum, or the time is up.
    fn step(&self, until: Option<Instant>, deadline: Duration) -> Option<Result<Outcome, CommError>> {
        let mut state = self.group.lock();
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // Just before its own deadline a rank comes to its own verdict: equal deadlines never end at once.
            let patient = left.is_some_and(|left| left < PATIENCE.min(deadline / 4));
            if let Some(cause) = state.failure(self.number, self.rank, self.call.tag, patient) {
                return Some(Err(cause));
            }
            let round = state.round(self.number);
            if round.done() {
                return Some(Ok(round.outcome(self.rank)));
            }
            if round.complete() && round.claimed < round.segments() {
                return None;
            }
            // Once all ranks are here only adding is left, by threads that are at it: no deadline for that.
            state = match left {
                Some(Duration::ZERO) if !round.complete() => {
                    let cause = state.expire(self.number, self.rank, self.call.tag, deadline);
                    self.group.changed.notify_all();
                    return Some(Err(cause));
                }
                Some(left) if !round.complete() => {
                    let woken = self.group.changed.wait_timeout(state, left);
                    woken.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state)
                }
                _ => self.group.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl<T: Send> Operation<T> for Meeting<T> {
    fn poll(&mut self) -> bool {
        // Ranks that only ever poll must get their sum too, so polling does a share of it.
        let failed = self.group.lock().failure(self.number, self.rank, self.call.tag, false).is_some();
        if !failed {
            self.help();
        }
        failed || self.group.lock().round(self.number).done()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<T, CommError> {
        // A deadline too far away to be a date is none.
        let until = Instant::now().checked_add(deadline);
        loop {
            if let Some(outcome) = self.step(until, deadline) {
                return outcome.map(self.finish);
            }
            self.help();
        }
    }
}

impl<T> Drop for Meeting<T> {
    fn drop(&mut self) {
        self.group.lock().release(self.number);
    }
}

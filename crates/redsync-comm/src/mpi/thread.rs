//! The communication thread. Commands come in over a channel, slots are filled. It alone talks to MPI; it sleeps on the
//! channel when nothing is in flight, and between tests with growing pauses when something is.

use super::body::Work;
use super::exchange::Exchange;
use super::header::INLINE;
use super::library::Library;
use super::notes::{Note, Notes};
use super::options::Options;
use super::pace::{Next, Pace};
use super::rounds::PARCEL_INLINE;
use super::ticket::Broken;
use super::verdict::{Complaint, Word, missed_by_all, verdict};
use crate::{Call, CommError, Tag};
use std::collections::VecDeque;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Collectives that exchange at the same time; the rest queues.
const IN_FLIGHT: usize = 16;

/// How long a broken rank stays for the sake of the others: they may need what it started before the error, and should
/// learn of it before the first process ends, because then `mpirun` ends all.
const LINGER: Duration = Duration::from_secs(2);

/// How long to wait for what the others say, at most, once a deadline has passed.
const GRACE: Duration = Duration::from_secs(1);

/// The same for a given deadline: short deadlines have a short grace.
pub(super) fn grace(deadline: Duration) -> Duration {
    GRACE.min(deadline / 4)
}

/// What the thread is asked to do.
pub(super) enum Command {
    /// Start a collective. They come in the order of their numbers.
    Start(Call, Work),
    /// Somebody has waited so long for the collective with this number and tag.
    Expire(u64, Tag, Duration),
    /// Tell the others that this rank gives up, for this reason or an earlier one.
    GiveUp(CommError),
    /// The communicator was dropped.
    Leave,
    /// End the whole job with this status.
    Abort(i32),
}

pub(super) struct Thread {
    lib: Library,
    /// Whether the ranks meet in rounds.
    in_rounds: bool,
    broken: Broken,
    queue: VecDeque<(Call, Work)>,
    active: VecDeque<Exchange>,
    /// The number of the next collective to leave the queue.
    next: u64,
    /// The collective from which on everything fails, and why.
    failed: Option<(u64, CommError)>,
    trouble: Option<Trouble>,
    notes: Notes,
    /// Whether the others know how far this rank is and what it misses.
    spoken: bool,
    /// Since when the communicator is gone.
    leaving: Option<Instant>,
}

/// The time between a deadline, here or elsewhere, and the verdict. What is in trouble stands still meanwhile, so that what a
/// rank has said stays true.
struct Trouble {
    /// The first collective that will fail.
    from: u64,
    since: Instant,
    grace: Duration,
    /// The wait of this rank whose time is up: number, tag, how long.
    expired: Option<(u64, Tag, Duration)>,
}

impl Thread {
    pub fn new(lib: Library, options: Options, broken: Broken) -> Result<Thread, CommError> {
        let notes = Notes::expect(&lib)?;
        let in_rounds = lib.size >= options.rounds_from.max(2);
        Ok(Thread {
            lib,
            in_rounds,
            broken,
            queue: VecDeque::new(),
            active: VecDeque::new(),
            next: 0,
            failed: None,
            trouble: None,
            notes,
            spoken: false,
            leaving: None,
        })
    }

    pub fn run(mut self, commands: &Receiver<Command>) {
        let mut pace = Pace::new();
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
            self.settle();
        }
        if !self.in_trouble() {
            self.lib.finalize();
        }
    }

    /// Whether there is something to do without another command. What queues counts: all that was in flight may have
    /// finished at once, and then nothing but the next look starts it.
    fn busy(&self) -> bool {
        !self.active.is_empty() || !self.queue.is_empty() || self.leaving.is_some() || self.trouble.is_some()
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Start(call, work) => self.queue.push_back((call, work)),
            Command::Expire(number, tag, waited) => self.expire(number, tag, waited),
            Command::GiveUp(cause) => self.give_up(cause),
            Command::Leave if self.leaving.is_none() => self.leave(),
            Command::Leave => {}
            Command::Abort(status) => self.lib.abort(status),
        }
    }

    /// Everything in flight moves on; true when something happened.
    fn progress(&mut self) -> Result<bool, CommError> {
        let mut moved = self.notes.progress(&self.lib)?;
        if let Some((number, waited)) = self.notes.earliest().filter(|_| moved) {
            self.alarm(number, waited);
            if !self.spoken {
                self.speak();
            }
        }
        let still = self.trouble.as_ref().map_or(u64::MAX, |trouble| trouble.from);
        while self.active.len() < IN_FLIGHT && self.next < still {
            let Some((call, work)) = self.queue.pop_front() else { break };
            self.start(call, work);
            moved = true;
        }
        let mut failure = None;
        for exchange in self.active.iter_mut().take_while(|exchange| exchange.number < still) {
            let outcome = match self.notes.before(exchange.number, exchange.call.tag) {
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
        if let Some((_, cause)) = self.failed.as_ref().filter(|(from, _)| *from <= number) {
            return work.body(0).fail(cause.clone().at(call.tag));
        }
        let body = work.body(if self.in_rounds { PARCEL_INLINE } else { INLINE });
        let mut exchange = Exchange::new(&self.lib, number, call, self.in_rounds, body);
        let begun = exchange.begin(&self.lib);
        self.active.push_back(exchange);
        if let Err(cause) = begun {
            self.fail_from(number, cause);
        }
    }

    /// Breaks the communicator: this collective and all later ones fail. Whatever is started after that fails with the first
    /// cause.
    fn fail_from(&mut self, number: u64, cause: CommError) {
        let first = self.broken.set(cause.clone());
        let from = self.failed.as_ref().map_or(number, |(from, _)| number.min(*from));
        self.trouble = self.trouble.take().filter(|trouble| trouble.from < from);
        self.active
            .iter()
            .filter(|exchange| exchange.number >= from)
            .for_each(|exchange| exchange.fail(&cause));
        self.active.retain(|exchange| exchange.number < from);
        let queued = (from.saturating_sub(self.next) as usize).min(self.queue.len());
        self.queue.drain(queued..).for_each(|(call, work)| work.body(0).fail(cause.clone().at(call.tag)));
        self.failed = Some((from, first));
    }

    /// How many collectives this rank has started.
    fn started(&self) -> u64 {
        self.next + self.queue.len() as u64
    }

    /// A wait of this rank is over. Its collective may have finished since; then the caller has its result.
    fn expire(&mut self, number: u64, tag: Tag, waited: Duration) {
        let in_flight = |exchange: &Exchange| exchange.number == number && !exchange.filled();
        if number < self.next && !self.active.iter().any(in_flight) {
            return;
        }
        let held_up =
            self.complaint(Some((number, tag, waited))).map_or(number, |complaint| complaint.number);
        self.alarm(held_up.min(number), waited);
        if let Some(trouble) = &mut self.trouble {
            trouble.expired.get_or_insert((number, tag, waited));
            self.speak();
        }
    }

    /// A deadline has passed in this collective, here or elsewhere.
    fn alarm(&mut self, number: u64, waited: Duration) {
        if self.failed.as_ref().is_none_or(|(from, _)| *from > number) {
            let (since, grace) = (Instant::now(), grace(waited));
            let trouble = self.trouble.get_or_insert(Trouble { from: number, since, grace, expired: None });
            trouble.from = number.min(trouble.from);
        }
    }

    /// What this rank misses: in the collective that it waits for, else in the first that does not go on.
    fn complaint(&self, expired: Option<(u64, Tag, Duration)>) -> Option<Complaint> {
        let waited = expired.map(|(_, _, waited)| waited);
        let awaited = |exchange: &Exchange| expired.is_some_and(|(number, ..)| number == exchange.number);
        let held_up = self.active.iter().filter(|exchange| !exchange.missing().is_empty());
        held_up
            .min_by_key(|exchange| (!awaited(exchange), exchange.number))
            .map(|exchange| Complaint {
                number: exchange.number,
                tag: exchange.call.tag,
                waited,
                missing: exchange.missing(),
            })
            .or(expired.map(|(number, tag, _)| Complaint { number, tag, waited, missing: Vec::new() }))
    }

    /// Tells the others how far this rank is and what it misses: as an answer, and whenever a deadline of its own has passed.
    fn speak(&mut self) {
        self.spoken = true;
        let word = self.word();
        self.notes.say(&self.lib, &Note::Word(word));
    }

    fn word(&self) -> Word {
        let expired = self.trouble.as_ref().and_then(|trouble| trouble.expired);
        Word { started: self.started(), complaint: self.complaint(expired) }
    }

    /// Ends the trouble when its time has come. Whose own deadline has passed needs no more than everybody's word; the others
    /// give theirs the whole time to pass.
    fn settle(&mut self) {
        let Some(trouble) = &self.trouble else { return };
        let informed = trouble.expired.is_some() && self.notes.all_spoken(&self.lib);
        if informed || trouble.since.elapsed() >= trouble.grace {
            self.decide();
        }
    }

    /// Names who is missing, from what all have said.
    fn decide(&mut self) {
        let Some(Trouble { from, expired, .. }) = self.trouble else { return };
        let own = self.word();
        let mut words = self.notes.words();
        words[self.lib.rank] = Some(own.clone());
        let or_else = |names: Vec<usize>, complaint: Option<&Complaint>| match complaint {
            Some(complaint) if names.is_empty() => complaint.missing.clone(),
            _ => names,
        };
        let mut names = verdict(&words);
        if names.is_empty() {
            names = missed_by_all(&words);
        }
        let cause = match (expired, self.notes.first()) {
            (Some((_, tag, waited)), _) => {
                let missing = or_else(names, own.complaint.as_ref());
                CommError::Deadline { tag, waited, missing }
            }
            (None, Some((rank, complaint))) => {
                let (tag, waited) = (complaint.tag, complaint.waited.unwrap_or_default());
                let missing = or_else(names, Some(complaint));
                CommError::Deadline { tag, waited, missing }.followed(*rank, tag)
            }
            // Trouble begins with a wait that is over, here or elsewhere.
            (None, None) => return,
        };
        let cause = self.notes.explanation(from).unwrap_or(cause);
        self.fail_from(from, cause);
    }

    fn give_up(&mut self, cause: CommError) {
        let started = self.started();
        self.failed.get_or_insert((started, cause));
        let note = self.gone(false);
        self.notes.say(&self.lib, &note);
    }

    fn leave(&mut self) {
        self.decide();
        self.leaving = Some(Instant::now());
        let note = self.gone(true);
        self.notes.say(&self.lib, &note);
    }

    /// What the others are told when this rank goes. Who goes at a deadline or because MPI failed takes the collective with it,
    /// since others may wait for what it would have passed on; of what fails otherwise they have this rank's part.
    fn gone(&self, leaving: bool) -> Note {
        let (started, nowhere) = (self.started(), Tag { step: 0, op: 0 });
        let cause = self.failed.as_ref().map(|(_, cause)| cause.followed(self.lib.rank, nowhere));
        let from = match &self.failed {
            Some((from, CommError::Deadline { .. } | CommError::Engine { .. })) => *from,
            _ => started,
        };
        Note::Gone { from, leaving, cause }
    }

    /// Whether the thread can end. A healthy rank among healthy ones waits for all, as finalizing would; in trouble nobody
    /// can be relied on, not even to take our note.
    fn finished(&self) -> bool {
        let Some(since) = self.leaving else { return false };
        let silent = match &self.failed {
            Some((
                _,
                CommError::Deadline { missing: silent, .. } | CommError::GaveUp { blames: silent, .. },
            )) => silent.as_slice(),
            _ => &[],
        };
        let complete =
            self.active.is_empty() && self.queue.is_empty() && self.notes.complete(&self.lib, silent);
        complete || self.in_trouble() && since.elapsed() > LINGER
    }

    fn in_trouble(&self) -> bool {
        self.broken.cause().is_some() || self.notes.any_trouble()
    }
}

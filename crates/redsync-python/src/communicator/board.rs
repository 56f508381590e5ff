//! The thread of the board. Every rank leaves a note there at every beat and reads those of the others when something takes long.
//! Comes in: notes, and the question why a collective does not end. Goes out: errors that name ranks. What must hold: all survivors
//! name the same, whoever notices first; only this thread can be held up by a store that does not answer.

use super::desk::{Desk, Inquest, Order};
use super::note::{Gone, Note, Pulse, Verdict, Why, judge};
use super::torch::{Fault, Store};
use redsync_comm::CommError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many beats without a note of a rank are silence.
const SILENCE: u32 = 3;

/// One rank's view on the board.
pub struct Board {
    desk: Arc<Desk>,
    store: Store,
    size: usize,
    /// How long the process group itself waits.
    patience: Duration,
    beat: Duration,
    beats: u64,
    /// When the next note is due.
    due: Instant,
    /// The others know that this rank cannot go on.
    told: bool,
    /// What was pending at the last beat.
    pending: Option<u64>,
    seen: Vec<Seen>,
    /// When the first of these looks was. Nothing was seen to change at it.
    since: Instant,
}

/// What was seen of a rank's notes.
struct Seen {
    note: Option<Note>,
    /// When it was seen to change, or when watching began.
    changed: Instant,
}

impl Board {
    pub fn new(desk: Arc<Desk>, store: Store, size: usize, patience: Duration) -> Board {
        let (beat, due) = (desk.grace / 5, Instant::now());
        let (pending, seen) = (None, Vec::new());
        Board { desk, store, size, patience, beat, beats: 0, due, told: false, pending, seen, since: due }
    }

    pub fn run(mut self) {
        loop {
            match self.desk.order(self.due, self.told) {
                Order::Beat => self.beat(),
                Order::Trouble => self.say(false),
                Order::Inquest(inquest) => self.investigate(&inquest),
                Order::Leave => break,
            }
        }
        // A store that has gone first has no readers either.
        let _ = self.leave();
        self.desk.board_ended();
    }

    /// Leaves the note of this rank. A failure is noticed where it matters, in an inquest.
    pub fn say(&mut self, leaves: bool) {
        self.beats += 1;
        self.due = Instant::now() + self.beat;
        let note = self.desk.note(self.beats, leaves);
        self.told = note.gone.is_some();
        let _ = serde_json::to_vec(&note).map(|note| self.store.set(self.desk.rank, &note));
    }

    /// A sign of life, and a look at the others if what was pending at the last beat still is.
    fn beat(&mut self) {
        self.say(false);
        let pending = self.desk.first_open(0).map(|(number, _)| number);
        if pending.is_some() && pending == self.pending {
            if self.look().is_ok() {
                self.follow();
            }
        } else {
            self.seen.clear();
        }
        self.pending = pending;
    }

    /// Reads the notes of all ranks.
    fn look(&mut self) -> Result<(), Fault> {
        let notes = self.store.notes()?;
        let now = Instant::now();
        let watching = !self.seen.is_empty();
        if !watching {
            self.since = now;
            self.seen.resize_with(self.size, || Seen { note: None, changed: now });
        }
        for (seen, note) in self.seen.iter_mut().zip(notes) {
            // What cannot be read is of another version, and as good as no sign of life.
            let note: Option<Note> = note.and_then(|note| serde_json::from_slice(&note).ok());
            if watching && seen.note != note {
                seen.changed = now;
            }
            seen.note = note;
        }
        Ok(())
    }

    /// Fails what cannot be complete because another rank is gone.
    fn follow(&mut self) {
        let gone = |seen: &Seen| seen.note.as_ref().and_then(Note::fails_from);
        let others = (0..self.size).filter(|&rank| rank != self.desk.rank);
        let Some((from, rank)) = others.filter_map(|rank| Some((gone(&self.seen[rank])?, rank))).min() else {
            return;
        };
        let Some((number, tag)) = self.desk.first_open(from) else { return };
        match self.seen[rank].note.as_ref().and_then(|note| note.gone.clone()) {
            // Ranks whose deadlines end together all say so, instead of following the first.
            Some(Gone::GaveUp { blames, .. }) if !blames.is_empty() && self.desk.is_near_deadline(number) => {
            }
            Some(Gone::GaveUp { rank, reason, blames, .. }) => {
                self.desk.fail(number, CommError::GaveUp { rank, tag, reason, blames });
            }
            // It may have left because of a rank that is silent.
            Some(Gone::Left) => self.investigate(&Inquest { number, tag, why: Why::Left }),
            None => {}
        }
    }

    /// Finds out why a collective does not end, and fails it; unless it does end, or nobody waits for it any more.
    fn investigate(&mut self, inquest: &Inquest) {
        let begin = Instant::now();
        while self.desk.is_open(inquest.number) {
            if self.due <= Instant::now() {
                self.say(false);
            }
            match self.find_out(inquest, begin) {
                Ok(Some(cause)) => self.desk.fail(inquest.number, cause),
                Ok(None) => std::thread::sleep(self.beat / 8),
                Err(fault) => self.desk.fail(inquest.number, self.without_store(inquest, &fault)),
            }
        }
    }

    /// What can be said now about a collective that does not end.
    fn find_out(&mut self, inquest: &Inquest, begin: Instant) -> Result<Option<CommError>, Fault> {
        self.look()?;
        if let Some(verdict) = self.store.verdict()? {
            return Ok(Some(self.sentence(&verdict, inquest)));
        }
        if let Some(cause) = self.given_up(inquest) {
            return Ok(Some(cause));
        }
        let others = (0..self.size).filter(|&rank| rank != self.desk.rank);
        let pulse = |rank: usize| self.pulse(&self.seen[rank], &inquest.why, begin);
        let others = others.map(|rank| (rank, self.seen[rank].note.as_ref(), pulse(rank)));
        let Some(verdict) = judge(inquest.number, others) else { return Ok(None) };
        let ours = serde_json::to_vec(&verdict).unwrap_or_default();
        let agreed = self.store.agree(&ours)?;
        Ok(Some(self.sentence(&agreed, inquest)))
    }

    fn sentence(&self, verdict: &[u8], inquest: &Inquest) -> CommError {
        match serde_json::from_slice::<Verdict>(verdict) {
            Ok(verdict) => verdict.error(inquest.tag, &inquest.why, self.patience),
            Err(_) => super::failed("the ranks run different versions of this program"),
        }
    }

    /// What a rank says that cannot go on.
    fn given_up(&self, inquest: &Inquest) -> Option<CommError> {
        let tag = inquest.tag;
        self.seen.iter().find_map(|seen| match (seen.note.as_ref()?.gone.clone()?, &inquest.why) {
            (Gone::GaveUp { from, .. }, _) if from > inquest.number => None,
            (Gone::GaveUp { blames, .. }, Why::Expired(waited)) if !blames.is_empty() => {
                Some(CommError::Deadline { tag, waited: *waited, missing: blames })
            }
            (Gone::GaveUp { rank, reason, blames, .. }, _) => {
                Some(CommError::GaveUp { rank, tag, reason, blames })
            }
            (Gone::Left, _) => None,
        })
    }

    fn pulse(&self, seen: &Seen, why: &Why, begin: Instant) -> Pulse {
        // What died, died before the process group failed; what was on its way to the store then does not count.
        let recent = match why {
            Why::Failed(_) => seen.changed > begin + self.beat / 4,
            Why::Expired(_) | Why::Left => seen.changed + 2 * self.beat > begin && seen.changed > self.since,
        };
        match seen.changed.elapsed() > SILENCE * self.beat {
            _ if recent => Pulse::Beating,
            true => Pulse::Silent,
            false => Pulse::Unknown,
        }
    }

    /// The store does not answer either. Who holds it is likely gone; if that is nobody, or this rank, nobody can be named.
    fn without_store(&self, inquest: &Inquest, fault: &Fault) -> CommError {
        let Inquest { tag, why, .. } = inquest;
        let said = match fault {
            Fault::Failed(said) => said.as_str(),
            _ => "closed",
        };
        let ranks: Vec<usize> =
            self.store.holder.into_iter().filter(|&rank| rank != self.desk.rank).collect();
        match why {
            Why::Expired(waited) => CommError::Deadline { tag: *tag, waited: *waited, missing: ranks },
            Why::Failed(cause) if ranks.is_empty() => {
                super::failed(&format!("{tag} failed ({cause}), and the store does not answer ({said})"))
            }
            Why::Failed(cause) => {
                let reason = format!("neither the exchange ({cause}) nor the store, which it holds ({said})");
                CommError::Lost { ranks, tag: *tag, reason }
            }
            Why::Left => super::failed(&format!("the store does not answer ({said}) in {tag}")),
        }
    }

    /// Stays for the sake of the others, a few beats at most, and says goodbye. They may need what this rank still has in its
    /// sockets; and if this process holds the store, what is written there, until they have said goodbye themselves.
    fn leave(&mut self) -> Result<(), Fault> {
        self.say(false);
        let broken = self.desk.is_broken();
        let holds = self.store.holder == Some(self.desk.rank);
        let until = Instant::now() + if broken { 4 } else { 2 } * self.beat;
        let started = self.desk.note(0, false).started;
        while (holds || !broken) && Instant::now() < until {
            self.look()?;
            let waits = |seen: &Seen| match &seen.note {
                Some(note) => note.gone.is_none() && (holds || note.finished < started),
                None => false,
            };
            if !self.seen.iter().enumerate().any(|(rank, seen)| rank != self.desk.rank && waits(seen)) {
                break;
            }
            std::thread::sleep(self.beat / 32);
        }
        self.say(true);
        Ok(())
    }
}

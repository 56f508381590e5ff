//! What ranks tell each other outside of collectives: that they leave, that they give up, what they miss. A note goes to every
//! peer; notes of all peers come in at any time and are kept by rank. A peer's last note is the one that says it leaves.

use super::exchange::NOTES;
use super::library::{Lent, Library, failed};
use super::verdict::{Complaint, Word};
use crate::{CommError, Tag};
use std::ops::Range;
use std::time::Duration;

/// What a note says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// How far the rank is and what it misses.
    Word(Word),
    /// The rank takes no part from this collective on: it leaves, or gives up, or both.
    Gone { from: u64, leaving: bool, cause: Option<CommError> },
}

/// The fixed part: kind, a rank, two numbers, step, op, length of the reason, nanoseconds, who says it. A bit per rank and
/// the reason follow.
const FIXED: usize = 52;
const REASON: usize = 448;

const WORD: u32 = 0;
const COMPLAINT: u32 = 1;
const EXPIRED: u32 = 2;
const LEAVES: u32 = 3;
const GIVES_UP: u32 = 4;
const GIVES_UP_AND_LEAVES: u32 = 5;

fn length(ranks: usize) -> usize {
    FIXED + ranks.div_ceil(8) + REASON
}

/// The fields of a note as they travel.
#[derive(Default)]
struct Fields<'a> {
    kind: u32,
    rank: usize,
    first: u64,
    second: u64,
    tag: Option<Tag>,
    waited: Duration,
    ranks: &'a [usize],
    reason: &'a str,
}

impl Fields<'_> {
    fn write(&self, ranks: usize, sender: usize) -> Vec<u8> {
        let tag = self.tag.unwrap_or(Tag { step: 0, op: 0 });
        let cut = self.reason.char_indices().map(|(start, letter)| start + letter.len_utf8());
        let reason = &self.reason.as_bytes()[..cut.take_while(|&end| end <= REASON).last().unwrap_or(0)];
        let waited = u64::try_from(self.waited.as_nanos()).unwrap_or(u64::MAX);
        let mut place = Vec::with_capacity(length(ranks));
        place.extend(self.kind.to_le_bytes());
        place.extend((self.rank as u32).to_le_bytes());
        place.extend(self.first.to_le_bytes());
        place.extend(self.second.to_le_bytes());
        place.extend(tag.step.to_le_bytes());
        place.extend(tag.op.to_le_bytes());
        place.extend((reason.len() as u32).to_le_bytes());
        place.extend(waited.to_le_bytes());
        place.extend((sender as u32).to_le_bytes());
        place.resize(FIXED + ranks.div_ceil(8), 0);
        for &rank in self.ranks.iter().filter(|&&rank| rank < ranks) {
            place[FIXED + rank / 8] |= 1 << (rank % 8);
        }
        place.extend(reason);
        place.resize(length(ranks), 0);
        place
    }
}

impl Note {
    fn write(&self, ranks: usize, sender: usize) -> Vec<u8> {
        match self {
            Note::Word(Word { started, complaint: None }) => {
                Fields { kind: WORD, second: *started, ..Fields::default() }.write(ranks, sender)
            }
            Note::Word(Word { started, complaint: Some(Complaint { number, tag, waited, missing }) }) => {
                Fields {
                    kind: if waited.is_some() { EXPIRED } else { COMPLAINT },
                    first: *number,
                    second: *started,
                    tag: Some(*tag),
                    waited: waited.unwrap_or_default(),
                    ranks: missing,
                    ..Fields::default()
                }
                .write(ranks, sender)
            }
            Note::Gone { from, leaving, cause: Some(CommError::GaveUp { rank, tag, reason, blames }) } => {
                Fields {
                    kind: if *leaving { GIVES_UP_AND_LEAVES } else { GIVES_UP },
                    rank: *rank,
                    first: *from,
                    tag: Some(*tag),
                    ranks: blames,
                    reason,
                    ..Fields::default()
                }
                .write(ranks, sender)
            }
            Note::Gone { from, .. } => {
                Fields { kind: LEAVES, first: *from, ..Fields::default() }.write(ranks, sender)
            }
        }
    }

    /// Who says it, and what.
    fn read(place: &[u8], size: usize) -> (usize, Note) {
        let number = |range: Range<usize>| {
            place[range].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        let (kind, rank) = (number(0..4) as u32, number(4..8) as usize);
        let (first, second) = (number(8..16), number(16..24));
        let tag = Tag { step: number(24..32), op: number(32..36) as u32 };
        let (reason, waited) = (number(36..40) as usize, Duration::from_nanos(number(40..48)));
        let ranks = (0..size).filter(|rank| place[FIXED + rank / 8] & 1 << (rank % 8) != 0).collect();
        let reason = &place[FIXED + size.div_ceil(8)..][..reason.min(REASON)];
        let reason = String::from_utf8_lossy(reason).into_owned();
        let note = match kind {
            WORD => Note::Word(Word { started: second, complaint: None }),
            COMPLAINT | EXPIRED => {
                let waited = (kind == EXPIRED).then_some(waited);
                let complaint = Some(Complaint { number: first, tag, waited, missing: ranks });
                Note::Word(Word { started: second, complaint })
            }
            GIVES_UP | GIVES_UP_AND_LEAVES => {
                let cause = Some(CommError::GaveUp { rank, tag, reason, blames: ranks });
                Note::Gone { from: first, leaving: kind == GIVES_UP_AND_LEAVES, cause }
            }
            _ => Note::Gone { from: first, leaving: true, cause: None },
        };
        (number(48..52) as usize, note)
    }
}

/// What a rank is known to have said.
#[derive(Default)]
struct Said {
    word: Option<Word>,
    /// From which collective on it takes no part, and why.
    gone: Option<(u64, Option<CommError>)>,
    left: bool,
}

pub(super) struct Notes {
    ours: Vec<Lent<Vec<u8>, ()>>,
    /// The next note, from whomever: one for each peer would cost more at every look the more ranks there are.
    theirs: Lent<Vec<u8>, ()>,
    said: Vec<Said>,
    /// The first rank from which it was heard that a deadline has passed.
    first: Option<(usize, Complaint)>,
}

impl Notes {
    /// Is ready for notes of all peers.
    pub fn expect(lib: &Library) -> Result<Notes, CommError> {
        let theirs = Lent::new(vec![0; length(lib.size)]);
        let said = (0..lib.size).map(|_| Said::default()).collect();
        let mut notes = Notes { ours: Vec::new(), theirs, said, first: None };
        notes.listen(lib)?;
        Ok(notes)
    }

    /// Is ready for the next note, if there is somebody left from whom it could come.
    fn listen(&mut self, lib: &Library) -> Result<(), CommError> {
        if lib.peers().all(|peer| self.said[peer].left) {
            return Ok(());
        }
        self.theirs.receive_any(lib, 0..length(lib.size), NOTES, ())
    }

    /// Sends a note to every peer. One that cannot be told is no reason not to tell the others.
    pub fn say(&mut self, lib: &Library, note: &Note) {
        let mut out = Lent::new(note.write(lib.size, lib.rank));
        for peer in lib.peers() {
            let _ = out.send(lib, 0..length(lib.size), peer, NOTES, ());
        }
        self.ours.push(out);
    }

    /// Takes in what has come; true when something has.
    pub fn progress(&mut self, lib: &Library) -> Result<bool, CommError> {
        let mut heard = false;
        for note in &mut self.ours {
            note.progress(drop)?;
        }
        while self.theirs.progress(drop)? {
            let (peer, note) = Note::read(self.theirs.read(0..length(lib.size)), lib.size);
            if peer >= lib.size || peer == lib.rank {
                return Err(failed(&format!("a note from rank {peer}, which is no peer")));
            }
            self.hear(peer, note);
            self.listen(lib)?;
            heard = true;
        }
        Ok(heard)
    }

    fn hear(&mut self, peer: usize, note: Note) {
        let said = &mut self.said[peer];
        match note {
            Note::Word(word) => {
                let expired = word.complaint.clone().filter(|complaint| complaint.waited.is_some());
                if let (None, Some(complaint)) = (&self.first, expired) {
                    self.first = Some((peer, complaint));
                }
                said.word = Some(word);
            }
            Note::Gone { from, leaving, cause } => {
                said.left |= leaving;
                let (earlier, _) = said.gone.get_or_insert((from, cause));
                *earlier = from.min(*earlier);
            }
        }
    }

    /// Why this collective cannot be complete, if a rank will not take part in it.
    pub fn before(&self, number: u64, tag: Tag) -> Option<CommError> {
        self.said.iter().enumerate().find_map(|(rank, said)| match said.gone.as_ref()? {
            (from, _) if *from > number => None,
            (_, None) => Some(CommError::Left { rank, tag }),
            (_, Some(cause)) => Some(cause.clone().at(tag)),
        })
    }

    /// What a peer said that will not take part in this collective for a reason of its own, not because it misses somebody.
    pub fn explanation(&self, number: u64) -> Option<CommError> {
        let nowhere = Tag { step: 0, op: 0 };
        self.said.iter().find_map(|said| match said.gone.as_ref()? {
            (from, Some(cause @ CommError::GaveUp { blames, .. }))
                if *from <= number && blames.is_empty() =>
            {
                Some(cause.clone().at(nowhere))
            }
            _ => None,
        })
    }

    /// The earliest collective in which a peer's deadline has passed, and how long that was.
    pub fn earliest(&self) -> Option<(u64, Duration)> {
        let complaints = self.said.iter().filter_map(|said| said.word.as_ref()?.complaint.as_ref());
        complaints.filter_map(|complaint| Some((complaint.number, complaint.waited?))).min()
    }

    pub fn first(&self) -> Option<&(usize, Complaint)> {
        self.first.as_ref()
    }

    /// What each peer has said how far it is, in rank order.
    pub fn words(&self) -> Vec<Option<Word>> {
        self.said.iter().map(|said| said.word.clone()).collect()
    }

    /// Whether no peer is left from which a word could come.
    pub fn all_spoken(&self, lib: &Library) -> bool {
        lib.peers().all(|peer| self.said[peer].word.is_some() || self.said[peer].gone.is_some())
    }

    /// Whether our notes are on their way and all have left, but for those that are known not to answer.
    pub fn complete(&self, lib: &Library, missing: &[usize]) -> bool {
        let gone = |peer: usize| self.said[peer].left || missing.contains(&peer);
        self.ours.iter().all(Lent::idle) && lib.peers().all(gone)
    }

    pub fn any_trouble(&self) -> bool {
        self.said.iter().any(|said| said.word.is_some() || matches!(said.gone, Some((_, Some(_)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_note_survives_the_way() {
        let tag = Tag { step: u64::MAX - 1, op: 7 };
        let complaint = |waited, missing| Some(Complaint { number: 1 << 40, tag, waited, missing });
        let gave_up = |reason: &str, blames| {
            Some(CommError::GaveUp { rank: 9, tag, reason: reason.to_string(), blames })
        };
        let notes = [
            Note::Word(Word { started: 12, complaint: None }),
            Note::Word(Word { started: 12, complaint: complaint(None, vec![]) }),
            Note::Word(Word {
                started: 12,
                complaint: complaint(Some(Duration::from_millis(1500)), vec![0, 8, 9]),
            }),
            Note::Gone { from: 5, leaving: true, cause: None },
            Note::Gone { from: 5, leaving: true, cause: gave_up("disk füll", vec![]) },
            Note::Gone { from: 5, leaving: false, cause: gave_up("no answer", vec![1, 2]) },
        ];
        for note in notes {
            let bytes = note.write(10, 3);
            assert_eq!((bytes.len(), Note::read(&bytes, 10)), (length(10), (3, note)));
        }
    }

    #[test]
    fn a_reason_that_is_too_long_is_cut_between_letters() {
        let tag = Tag { step: 0, op: 0 };
        let cause =
            CommError::GaveUp { rank: 1, tag, reason: format!("a{}", "ü".repeat(400)), blames: vec![] };
        let bytes = Note::Gone { from: 0, leaving: true, cause: Some(cause) }.write(4, 1);
        let (1, Note::Gone { cause: Some(CommError::GaveUp { reason, .. }), .. }) = Note::read(&bytes, 4)
        else {
            panic!("another note");
        };
        assert_eq!(reason, format!("a{}", "ü".repeat(REASON / 2 - 1)));
    }
}

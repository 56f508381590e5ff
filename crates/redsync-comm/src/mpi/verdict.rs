//! Who is to blame when a collective does not finish. What every rank has said comes in, the ranks that are really missing go
//! out: a rank that waits itself is excused, and whom it waits for is blamed instead.

use crate::Tag;
use std::time::Duration;

/// What a rank misses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Complaint {
    /// The collective, by its number in the sequence.
    pub number: u64,
    pub tag: Tag,
    /// How long the rank has waited, if its deadline has passed.
    pub waited: Option<Duration>,
    /// From whom it directly misses something.
    pub missing: Vec<usize>,
}

/// What a rank said when somebody's deadline had passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word {
    /// How many collectives it had started.
    pub started: u64,
    pub complaint: Option<Complaint>,
}

impl Word {
    /// Whether this rank is no reason to wait in this collective: it was there, or it is held up in an earlier one itself.
    fn excuses(&self, number: u64) -> bool {
        self.started > number || self.complaint.as_ref().is_some_and(|complaint| complaint.number < number)
    }
}

/// The ranks that somebody misses and that have no excuse, in order. `words` are in rank order.
pub(super) fn verdict(words: &[Option<Word>]) -> Vec<usize> {
    let complaints = || words.iter().flatten().filter_map(|word| word.complaint.as_ref());
    let excused = |rank: usize, number| words[rank].as_ref().is_some_and(|word: &Word| word.excuses(number));
    let blames = |complaint: &Complaint, rank: usize| {
        complaint.missing.contains(&rank) && !excused(rank, complaint.number)
    };
    (0..words.len()).filter(|&rank| complaints().any(|complaint| blames(complaint, rank))).collect()
}

/// Whom everybody else misses who is held up first, in order: for when nobody is to blame, because who was late has come meanwhile.
pub(super) fn missed_by_all(words: &[Option<Word>]) -> Vec<usize> {
    let complaints: Vec<(usize, &Complaint)> = (0..)
        .zip(words)
        .filter_map(|(rank, word)| Some((rank, word.as_ref()?.complaint.as_ref()?)))
        .filter(|(_, complaint)| !complaint.missing.is_empty())
        .collect();
    let first = complaints.iter().map(|(_, complaint)| complaint.number).min();
    let missed = |rank: usize| {
        let mut others = complaints
            .iter()
            .filter(|(by, complaint)| *by != rank && Some(complaint.number) == first)
            .peekable();
        others.peek().is_some() && others.all(|(_, complaint)| complaint.missing.contains(&rank))
    };
    (0..words.len()).filter(|&rank| missed(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(started: u64, number: u64, missing: &[usize]) -> Option<Word> {
        let tag = Tag { step: 0, op: number as u32 };
        let complaint = Complaint { number, tag, waited: None, missing: missing.to_vec() };
        Some(Word { started, complaint: Some(complaint) })
    }

    #[test]
    fn who_waits_itself_is_excused_and_whom_it_waits_for_is_named() {
        assert_eq!(verdict(&[word(6, 5, &[2]), word(6, 5, &[0]), None, word(6, 5, &[0])]), [2]);
        assert_eq!(verdict(&[word(6, 5, &[2]), word(6, 5, &[0, 2]), None, word(7, 5, &[0])]), [2]);
    }

    #[test]
    fn who_is_ahead_blames_nobody_who_is_held_up() {
        // Rank 1 has all of the sum and waits in the next collective for those who are still in it.
        assert_eq!(verdict(&[word(7, 5, &[2]), word(7, 6, &[0, 2]), None, word(6, 5, &[0, 2])]), [2]);
        // Rank 1 has not come to what rank 0 waits for, because it waits for rank 2 in an earlier one.
        assert_eq!(verdict(&[word(6, 5, &[1, 2]), word(4, 3, &[2]), None]), [2]);
    }

    #[test]
    fn who_is_alive_but_never_came_is_named() {
        let idle = Some(Word { started: 5, complaint: None });
        assert_eq!(verdict(&[word(6, 5, &[2]), word(6, 5, &[2]), idle]), [2]);
    }

    #[test]
    fn who_is_silent_is_named_by_the_only_one_who_speaks() {
        assert_eq!(verdict(&[None, None, word(6, 5, &[0, 1, 3]), None]), [0, 1, 3]);
    }

    #[test]
    fn several_missing_ranks_are_all_named() {
        let words = [word(6, 5, &[1, 4]), None, word(6, 5, &[0]), word(6, 5, &[4]), None];
        assert_eq!(verdict(&words), [1, 4]);
    }

    #[test]
    fn a_circle_of_waiting_ranks_blames_nobody() {
        assert_eq!(verdict(&[word(6, 5, &[1]), word(6, 5, &[0])]), [0_usize; 0]);
    }

    #[test]
    fn who_came_too_late_is_named_for_want_of_anybody_else() {
        // Rank 2 has come since; ranks 0 and 1 had not heard of rank 3 only because of it, and rank 3 is ahead.
        let words = [word(6, 5, &[2, 3]), word(6, 5, &[2]), word(6, 5, &[0, 1, 3]), word(7, 6, &[0, 1, 2])];
        assert_eq!((verdict(&words), missed_by_all(&words)), (vec![], vec![2]));
        let circle = [word(6, 5, &[1]), word(6, 5, &[2]), word(6, 5, &[0])];
        assert_eq!(missed_by_all(&circle), [0_usize; 0]);
    }
}

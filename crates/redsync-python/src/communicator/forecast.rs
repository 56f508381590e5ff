//! How large the next block should be, so that a message goes whole with its header. What went over the wire comes in, the size of
//! the next block goes out. What must hold: only what all ranks have seen alike counts, so that all come to the same size,
//! whatever each is about to start.
//!
//! A training step repeats its collectives in the same order. So what followed a collective the last time tells what follows it
//! now.

use super::block::{HEADER, LEAST};
use redsync_comm::{Call, Kind};
use std::collections::HashMap;

/// Longer messages gain nothing by saving a round.
const MOST: usize = 64 << 10;

/// Kinds and operations that are told apart; a program with more begins anew.
const KNOWN: usize = 4096;

/// The sizes of blocks to come.
#[derive(Debug, Default)]
pub struct Forecast {
    /// The bytes that were needed after each collective.
    after: HashMap<(Kind, u32), usize>,
    last: Option<(Kind, u32)>,
}

impl Forecast {
    /// Bytes of the next block.
    pub fn block(&self) -> usize {
        let need = self.last.and_then(|last| self.after.get(&last)).copied().unwrap_or_default();
        // Whole words, so that values in a block are aligned.
        (HEADER + need).next_multiple_of(8).max(LEAST)
    }

    /// All ranks started `call`, and the longest message of all had so many bytes.
    pub fn learn(&mut self, call: Call, longest: u64) {
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        // A little more than this time; a message beyond the limit goes in a round of its own.
        let need = longest.saturating_add(longest / 64 + 32);
        let need = if need > MOST { 0 } else { need };
        if self.after.len() >= KNOWN {
            self.after.clear();
        }
        if let Some(last) = self.last {
            let old = self.after.entry(last).or_default();
            // Up at once, down slowly.
            *old = need.max(if need == 0 { 0 } else { *old - old.saturating_sub(need).div_ceil(8) });
        }
        self.last = Some((call.kind, call.tag.op));
    }
}

//! The result of an allgather or an all-to-all: one message per rank, in rank order, shared or owned, never copied.

use std::sync::Arc;

/// The messages of all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    messages: Vec<Arc<Vec<u8>>>,
}

impl Gathered {
    /// Made by an engine from the messages in rank order.
    pub fn new(messages: Vec<Arc<Vec<u8>>>) -> Gathered {
        Gathered { messages }
    }

    /// The message of one rank, empty where that rank sent nothing.
    ///
    /// # Panics
    /// When the group has no such rank.
    pub fn from_rank(&self, rank: usize) -> &[u8] {
        &self.messages[rank]
    }

    /// The messages in rank order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.messages.iter().map(|message| message.as_slice())
    }

    /// How many ranks the group has.
    pub fn ranks(&self) -> usize {
        self.messages.len()
    }

    /// The messages of some ranks, in the order of these.
    ///
    /// # Panics
    /// When the group has no such rank.
    pub fn of(self, ranks: &[usize]) -> Gathered {
        Gathered { messages: ranks.iter().map(|rank| Arc::clone(&self.messages[*rank])).collect() }
    }

    /// Gives back the buffers that nobody else holds, for reuse. Their contents and number mean nothing.
    pub fn reclaim(self) -> Vec<Vec<u8>> {
        self.messages.into_iter().filter_map(Arc::into_inner).collect()
    }
}

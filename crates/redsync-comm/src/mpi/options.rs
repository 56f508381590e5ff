//! What can be chosen about the engine.

/// How the ranks exchange. All ranks of a job must have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// From how many ranks on they meet in rounds; fewer tell each other directly. Results have the same bits.
    pub rounds_from: usize,
}

impl Default for Options {
    /// Rounds from 192 ranks on: with 128 both ways take as long on the machine of the figures, with 256 rounds take half.
    fn default() -> Options {
        Options { rounds_from: 192 }
    }
}

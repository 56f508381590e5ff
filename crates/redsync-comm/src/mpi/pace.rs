//! When to look at MPI again. Commands come in over the channel and are handed on at once; without one the thread pauses, the
//! longer the longer nothing has happened.

use super::thread::Command;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

/// How long the thread looks without a pause after something has happened.
const EAGER: Duration = Duration::from_micros(50);

/// The shortest and the longest pause.
const PAUSE: Range<Duration> = Duration::from_micros(20)..Duration::from_micros(200);

/// The pause without work in flight. MPI may have taken a small message and not yet passed it on: it does so only when it is
/// called.
const IDLE: Duration = Duration::from_millis(10);

/// How long to wait between two looks at MPI: not at all at first, for latency, then longer, to leave the core to others.
pub(super) struct Pace {
    moved: Instant,
}

pub(super) enum Next {
    Command(Command),
    Nothing,
    Closed,
}

impl Pace {
    pub fn new() -> Pace {
        Pace { moved: Instant::now() }
    }

    pub fn moved(&mut self) {
        self.moved = Instant::now();
    }

    /// A tenth of how long nothing has happened, within bounds: what comes late is noticed hardly later.
    fn pause(&self) -> Option<Duration> {
        let still = self.moved.elapsed();
        (still > EAGER).then(|| (still / 10).clamp(PAUSE.start, PAUSE.end))
    }

    /// The next command, after a pause at most.
    pub fn next(&self, commands: &Receiver<Command>, busy: bool) -> Next {
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

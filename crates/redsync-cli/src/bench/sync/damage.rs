//! A communicator that does wrong, for fault tests: everything goes to the one behind it, but what this rank says is changed.
//! What must hold: nothing but the named damage is done, so that what the other ranks say is said of it alone.

use redsync_comm::{Communicator, Gathered, Pending, Tag};
use redsync_core::wire::Frame;
use std::sync::Arc;

/// What a rank does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// A bit of each of its frames of this step is wrong.
    At(u64),
    /// Where it says which version of the wire format it speaks, it says the next one.
    OtherVersion,
}

/// What stands before the version in what a rank says of itself.
const VERSION_KEY: &[u8] = b"\"the wire format\"";

impl Damage {
    fn apply(self, tag: Tag, mut message: Vec<u8>) -> Vec<u8> {
        match self {
            Damage::At(step) => {
                let is_frame = tag.step == step && Frame::parse(&message).is_ok();
                message.iter_mut().last().filter(|_| is_frame).into_iter().for_each(|byte| *byte ^= 1);
                message
            }
            Damage::OtherVersion => next_version(message),
        }
    }
}

/// The number behind the key, increased.
fn next_version(message: Vec<u8>) -> Vec<u8> {
    let Some(at) = message.windows(VERSION_KEY.len()).position(|here| here == VERSION_KEY) else {
        return message;
    };
    let behind = at + VERSION_KEY.len();
    let digit = |from: usize, is: bool| {
        message[from..].iter().position(|byte| byte.is_ascii_digit() == is).map(|more| from + more)
    };
    let Some(begin) = digit(behind, true) else { return message };
    let end = digit(begin, false).unwrap_or(message.len());
    let number = String::from_utf8_lossy(&message[begin..end]).parse::<u64>().unwrap_or(0) + 1;
    [&message[..begin], number.to_string().as_bytes(), &message[end..]].concat()
}

/// A communicator with a fault.
pub struct Damaging {
    inner: Arc<dyn Communicator>,
    damage: Damage,
}

impl Damaging {
    pub fn new(inner: Arc<dyn Communicator>, damage: Damage) -> Self {
        Damaging { inner, damage }
    }
}

impl Communicator for Damaging {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn host(&self) -> Option<String> {
        self.inner.host()
    }

    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered> {
        self.inner.allgather(tag, self.damage.apply(tag, message))
    }

    fn allreduce(&self, tag: Tag, values: Vec<f32>) -> Pending<Vec<f32>> {
        self.inner.allreduce(tag, values)
    }

    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        let messages = messages.into_iter().map(|message| self.damage.apply(tag, message));
        self.inner.alltoall(tag, messages.collect())
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.inner.barrier(tag)
    }

    fn give_up(&self, reason: &str) {
        self.inner.give_up(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redsync_core::wire::FrameWriter;

    const STEP: Tag = Tag { step: 5, op: 0 };

    #[test]
    fn only_frames_of_the_step_are_damaged() {
        let mut writer = FrameWriter::new();
        writer.begin(5, 1, 0);
        let frame = writer.finish().to_vec();
        let damaged = Damage::At(5).apply(STEP, frame.clone());
        assert!(Frame::parse(&damaged).is_err() && damaged.len() == frame.len());
        assert_eq!(Damage::At(4).apply(STEP, frame.clone()), frame);
        assert_eq!(Damage::At(5).apply(STEP, b"a hello".to_vec()), b"a hello");
        assert!(Damage::At(5).apply(STEP, Vec::new()).is_empty());
    }

    #[test]
    fn only_the_version_is_another_one() {
        let said =
            |text: &str| String::from_utf8(Damage::OtherVersion.apply(STEP, text.into())).expect("text");
        assert_eq!(
            said("[[\"the wire format\",\"9\"],[\"density\",1]]"),
            "[[\"the wire format\",\"10\"],[\"density\",1]]"
        );
        assert_eq!(said("a frame with 1 number"), "a frame with 1 number");
        assert_eq!(said("\"the wire format\""), "\"the wire format\"");
    }
}

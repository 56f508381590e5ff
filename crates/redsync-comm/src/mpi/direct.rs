//! The meeting of few ranks: every rank sends its header, with what is short of its payload, to every other.

use super::body::Body;
use super::exchange::{Heard, Meeting};
use super::header::{HEADER, PLACE, decode, encode, inline_bytes};
use super::library::{Lent, Library};
use crate::{Call, CommError, Kind};
use std::ffi::c_int;
use std::ops::Range;

pub(super) struct Direct {
    out: Lent<Vec<u8>, ()>,
    /// Where each peer's header lies in `out`, or one for all.
    letters: Vec<Range<usize>>,
    headers: Lent<Vec<u8>, usize>,
}

impl Direct {
    pub fn new(lib: &Library, call: Call, body: &dyn Body) -> Direct {
        let (mut message, mut letters) = (Vec::new(), Vec::new());
        for peer in 0..if call.kind == Kind::Alltoall { lib.size } else { 1 } {
            let (start, letter) = (message.len(), body.letter(peer));
            message.extend(encode(call, letter.length));
            message.extend_from_slice(letter.inline);
            letters.push(start..message.len());
        }
        Direct { out: Lent::new(message), letters, headers: Lent::new(vec![0; lib.size * PLACE]) }
    }
}

impl Meeting for Direct {
    fn begin(&mut self, lib: &Library, tag: c_int) -> Result<(), CommError> {
        for peer in lib.peers() {
            self.headers.receive(lib, peer * PLACE..(peer + 1) * PLACE, peer, tag, peer)?;
        }
        for peer in lib.peers() {
            let letter = self.letters[peer.min(self.letters.len() - 1)].clone();
            self.out.send(lib, letter, peer, tag, ())?;
        }
        Ok(())
    }

    fn progress(
        &mut self,
        _lib: &Library,
        hear: &mut dyn FnMut(Heard<'_>) -> Result<(), CommError>,
    ) -> Result<bool, CommError> {
        let mut heard = Vec::new();
        let mut moved = self.out.progress(drop)?;
        moved |= self.headers.progress(|peer| heard.push(peer))?;
        for peer in heard {
            let message = self.headers.read(peer * PLACE..(peer + 1) * PLACE);
            let (header, inline) = message.split_at(HEADER);
            let (call, length) = decode(header, peer)?;
            hear(Heard { peer, call, length, inline: &inline[..inline_bytes(call.kind, length)] })?;
        }
        Ok(moved)
    }

    fn missing(&self) -> Vec<usize> {
        self.headers.open().copied().collect()
    }

    fn idle(&self) -> bool {
        self.out.idle()
    }
}

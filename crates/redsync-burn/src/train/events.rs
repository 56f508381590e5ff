//! TensorBoard event files: scalars go in, length-prefixed, checksummed protobuf records go out. The few fields that a scalar needs
//! are written by hand; a protobuf library and its build step would be larger than this room.

use super::TrainError;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// A new event file in a directory; TensorBoard reads all that it finds there as one run.
    pub fn new(dir: &Path) -> Result<Self, TrainError> {
        let now = now();
        let path = dir.join(format!(
            "events.out.tfevents.{:010}.{:06}.redsync",
            now as u64,
            (now.fract() * 1e6) as u64
        ));
        let file = File::create(&path).map_err(|source| TrainError::Write { path: path.clone(), source })?;
        let mut events = Events { path, file };
        let mut first = Vec::new();
        double(&mut first, 1, now);
        bytes(&mut first, 3, b"brain.Event:2");
        events.write(&first)?;
        Ok(events)
    }

    /// Some scalars at a step.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), TrainError> {
        let mut summary = Vec::new();
        for (name, value) in scalars {
            let mut scalar = Vec::new();
            bytes(&mut scalar, 1, name.as_bytes());
            key(&mut scalar, 2, 5);
            scalar.extend((*value as f32).to_le_bytes());
            bytes(&mut summary, 1, &scalar);
        }
        let mut event = Vec::new();
        double(&mut event, 1, now());
        key(&mut event, 2, 0);
        varint(&mut event, step);
        bytes(&mut event, 5, &summary);
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<(), TrainError> {
        let record = record(event);
        self.file.write_all(&record).map_err(|source| TrainError::Write { path: self.path.clone(), source })
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Length, its checksum, the bytes, their checksum.
fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), event, &masked(event)].concat()
}

/// The format stores checksums turned and shifted, so that a checksum of data with checksums in them is no weaker.
fn masked(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn double(out: &mut Vec<u8>, field: u64, value: f64) {
    key(out, field, 1);
    out.extend(value.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(out, field, 2);
    varint(out, value.len() as u64);
    out.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_what_tensorboard_itself_writes() {
        // Written by TensorBoard's own writer for the same event; the last four, its checksum, computed bit by bit.
        let mut event = Vec::new();
        double(&mut event, 1, 1.5);
        bytes(&mut event, 3, b"brain.Event:2");
        let expected = [
            0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22, 0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, 0x1a,
            0x0d, b'b', b'r', b'a', b'i', b'n', b'.', b'E', b'v', b'e', b'n', b't', b':', b'2', 0x2a, 0x28,
            0x64, 0x6c,
        ];
        assert_eq!(record(&event), expected);
    }
}

//! Reading a checked file: every byte is hostile until the checksum says otherwise.

use super::{BLANK, CHUNK, Content, FileError, MAX_HEADER, OPENING, OURS, PREFIX, VERSION, hex};
use crc32fast::Hasher;
use safetensors::tensor::{Dtype, Metadata};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::path::Path;

/// What is wrong with a file whose name is known elsewhere.
#[derive(Debug)]
pub(super) enum Wrong {
    Io(io::Error),
    Damaged(String),
    Version(String),
}

impl Wrong {
    pub fn of(self, path: &Path) -> FileError {
        let path = path.into();
        match self {
            Wrong::Io(source) => FileError::Io { path, source },
            Wrong::Damaged(why) => FileError::Damaged { path, why },
            Wrong::Version(theirs) => FileError::Version { path, theirs, ours: VERSION },
        }
    }
}

impl From<io::Error> for Wrong {
    fn from(error: io::Error) -> Self {
        Wrong::Io(error)
    }
}

impl From<String> for Wrong {
    fn from(why: String) -> Self {
        Wrong::Damaged(why)
    }
}

impl From<&str> for Wrong {
    fn from(why: &str) -> Self {
        Wrong::Damaged(why.into())
    }
}

/// Reads a file of a known length; nothing is allocated that the file is too short to fill.
pub(super) fn read_from(file: &mut impl Read, length: u64, format: &str) -> Result<Content, Wrong> {
    let mut header = read_header(file, length)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(unreadable)?;
    let strings = metadata.metadata().as_ref().ok_or_else(|| foreign(format))?;
    check_version(strings, format)?;
    let (expected, got) = (metadata.data_len() as u64, length - (PREFIX + header.len()) as u64);
    if got != expected {
        return Err(format!("it has {got} bytes of tensors, its header announces {expected}").into());
    }
    let checksum = take_checksum(&mut header)?;
    let mut crc = Hasher::new();
    crc.update(&(header.len() as u64).to_le_bytes());
    crc.update(&header);
    let mut tensors = BTreeMap::new();
    for name in metadata.offset_keys() {
        let values = read_tensor(file, &metadata, &name, &mut crc)?;
        tensors.insert(name, values);
    }
    if hex(crc).as_bytes() != checksum {
        return Err("its checksum is wrong".into());
    }
    let theirs = strings.iter().filter(|(name, _)| !OURS.contains(&&name[..]));
    Ok(Content { about: theirs.map(|(name, text)| (name.clone(), text.clone())).collect(), tensors })
}

/// An error of the JSON reader, kept on one line whatever it quotes.
fn unreadable(error: serde_json::Error) -> String {
    format!("its header cannot be read: {}", error.to_string().escape_debug())
}

fn foreign(format: &str) -> String {
    format!("its format is not {format}")
}

fn read_header(file: &mut impl Read, length: u64) -> Result<Vec<u8>, Wrong> {
    if length < PREFIX as u64 {
        return Err(format!("it has {length} bytes, which is not even a header").into());
    }
    let mut prefix = [0; PREFIX];
    file.read_exact(&mut prefix)?;
    let size = u64::from_le_bytes(prefix);
    if size > MAX_HEADER as u64 || size > length - PREFIX as u64 {
        return Err(format!("its header cannot have {size} bytes").into());
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    Ok(header)
}

/// Comes before the checksum, which another version may compute in another way.
fn check_version(strings: &HashMap<String, String>, format: &str) -> Result<(), Wrong> {
    if strings.get("format").is_none_or(|theirs| theirs != format) {
        return Err(foreign(format).into());
    }
    match strings.get("version").map(String::as_str) {
        Some(VERSION) => Ok(()),
        Some(theirs) => Err(Wrong::Version(theirs.into())),
        None => Err("its header has no version".into()),
    }
}

/// Returns the checksum of a header and leaves a blank in its place.
pub(super) fn take_checksum(header: &mut [u8]) -> Result<[u8; 8], Wrong> {
    let opens = header.starts_with(OPENING);
    let place = header.get_mut(OPENING.len()..).and_then(|rest| rest.first_chunk_mut()).filter(|_| opens);
    let place = place.ok_or("its header does not open with a checksum")?;
    Ok(std::mem::replace(place, *BLANK))
}

fn read_tensor(
    file: &mut impl Read,
    metadata: &Metadata,
    name: &str,
    crc: &mut Hasher,
) -> Result<Vec<f32>, Wrong> {
    const WIDTH: usize = size_of::<f32>();
    let info = metadata.info(name).ok_or_else(|| format!("tensor {name:?} is missing"))?;
    let [size] = info.shape[..] else {
        return Err(format!("tensor {name:?} has the shape {:?}, expected one number", info.shape).into());
    };
    if info.dtype != Dtype::F32 {
        return Err(format!("tensor {name:?} is {}, expected F32", info.dtype).into());
    }
    let mut values: Vec<f32> = Vec::new();
    values.try_reserve_exact(size).map_err(|_| format!("no memory for a tensor of {size} elements"))?;
    let mut bytes = vec![0; size.min(CHUNK) * WIDTH];
    while values.len() < size {
        let part = &mut bytes[..(size - values.len()).min(CHUNK) * WIDTH];
        file.read_exact(part)?;
        crc.update(part);
        values.extend(part.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)));
    }
    Ok(values)
}

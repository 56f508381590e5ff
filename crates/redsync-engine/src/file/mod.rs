//! Files that are there whole or not at all, and that are checked to the last byte when they are read: named vectors and a
//! description come in, a safetensors file goes out, and the other way round.
//! What must hold: the bits that come back are those that went in, a file that was damaged anywhere is refused, and the
//! old file stays whole until the new one is complete.
//!
//! The header opens with the checksum, at a fixed place, which covers every other byte of the file. The description is the
//! header's metadata, under the names of its entries; the same content always gives the same bytes.

mod read;
mod replace;
#[cfg(test)]
mod tests;

pub use replace::replace;

use crc32fast::Hasher;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The version of this layout; another gets another number.
const VERSION: &str = "2";
/// What every header begins with.
const OPENING: &[u8] = br#"{"__metadata__":{"checksum":""#;
/// Stands for the checksum while it is computed.
const BLANK: &[u8; 8] = b"00000000";
/// The header's length, in front of it.
const PREFIX: usize = size_of::<u64>();
/// Safetensors allows no longer header.
const MAX_HEADER: usize = 100_000_000;
/// Elements that are converted at a time.
const CHUNK: usize = 1 << 16;
/// Entries of the metadata that are not the caller's.
const OURS: [&str; 3] = ["checksum", "format", "version"];

/// What a file is about, by name.
pub type About = BTreeMap<String, String>;

/// What a file holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Content {
    /// What it is about.
    pub about: About,
    /// Its vectors, by name.
    pub tensors: BTreeMap<String, Vec<f32>>,
}

/// Why a file was not written or read.
#[derive(Debug, Error)]
pub enum FileError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is not what was written.
    #[error("{}: the file is damaged: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The file has a layout that this program does not know.
    #[error("{}: the file has version {theirs:?}, this program reads version {ours:?}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        theirs: String,
        /// The version of this program.
        ours: &'static str,
    },
    /// What could not be read back is not written, and the old file stays.
    #[error("{}: the state is not written: {why}", path.display())]
    Unsound {
        /// The file.
        path: PathBuf,
        /// What is wrong with the content.
        why: String,
    },
}

impl FileError {
    /// Whether there is no such file.
    pub fn is_missing(&self) -> bool {
        matches!(self, FileError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn damaged(path: &Path, why: impl Into<String>) -> Self {
        FileError::Damaged { path: path.into(), why: why.into() }
    }
}

/// Writes a file of a format. The old file stays whole until the new one is complete and on disk.
///
/// ```
/// use redsync_engine::file::{About, read, write};
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("weights.safetensors");
/// let about = About::from([("model".to_string(), "digits-cnn".to_string())]);
/// write(&path, "example", &about, [("weight", &[0.5f32, -1.0][..])])?;
/// assert_eq!(read(&path, "example")?.tensors["weight"], [0.5, -1.0]);
/// assert!(read(&path, "another").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write<'a>(
    path: &Path,
    format: &str,
    about: &About,
    tensors: impl IntoIterator<Item = (&'a str, &'a [f32])>,
) -> Result<(), FileError> {
    let unsound = |why| FileError::Unsound { path: path.into(), why };
    let body = Body::new(format, about, tensors).map_err(unsound)?;
    replace(path, |file| body.write_to(file)).map_err(|source| FileError::Io { path: path.into(), source })
}

/// Reads a file of a format, and refuses whatever [`write()`] would not have written.
pub fn read(path: &Path, format: &str) -> Result<Content, FileError> {
    let read = || {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        read::read_from(&mut file, length, format)
    };
    read().map_err(|wrong: read::Wrong| wrong.of(path))
}

/// The checksum that a file of this content has, for content that travels in another way.
pub fn checksum<'a>(
    format: &str,
    about: &About,
    tensors: impl IntoIterator<Item = (&'a str, &'a [f32])>,
) -> Result<String, String> {
    let body = Body::new(format, about, tensors)?;
    body.each_part(|_| Ok::<_, io::Error>(())).map_err(|error| error.to_string())
}

/// A file before it is written.
struct Body<'a> {
    /// With a blank for the checksum.
    header: Vec<u8>,
    tensors: BTreeMap<&'a str, &'a [f32]>,
}

/// The header as it is in the file. The checksum comes first and everything else is sorted, so that a content has only one form.
#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "__metadata__", serialize_with = "in_order")]
    about: Vec<(&'a str, &'a str)>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, TensorInfo>,
}

/// Pairs as a map that keeps their order.
fn in_order<S: Serializer>(pairs: &[(&str, &str)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

impl<'a> Body<'a> {
    fn new(
        format: &str,
        about: &About,
        tensors: impl IntoIterator<Item = (&'a str, &'a [f32])>,
    ) -> Result<Self, String> {
        let mut sorted = BTreeMap::new();
        for (name, values) in tensors {
            if sorted.insert(name, values).is_some() {
                return Err(format!("two vectors have the name {name:?}"));
            }
        }
        if let Some(name) = about.keys().find(|name| OURS.contains(&&name[..])) {
            return Err(format!("{name} is not for the caller"));
        }
        let blank = String::from_utf8_lossy(BLANK);
        let texts = about.iter().map(|(name, text)| (&name[..], &text[..]));
        let mut about: Vec<_> = texts.chain([("format", format), ("version", VERSION)]).collect();
        about.sort_unstable();
        about.insert(0, ("checksum", &*blank));
        let mut end = 0;
        let infos = sorted.iter().map(|(name, values)| {
            let start = end;
            end += size_of_val(*values);
            let info =
                TensorInfo { dtype: Dtype::F32, shape: vec![values.len()], data_offsets: (start, end) };
            (*name, info)
        });
        let header = Header { about, tensors: infos.collect() };
        let mut header = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
        // Blanks at the end align the tensors, as safetensors asks.
        header.resize(header.len().next_multiple_of(PREFIX), b' ');
        if header.len() > MAX_HEADER {
            return Err(format!("its header has {} bytes, {MAX_HEADER} are allowed", header.len()));
        }
        Ok(Body { header, tensors: sorted })
    }

    /// Hands all bytes over in order, and returns their checksum.
    fn each_part<E>(&self, mut put: impl FnMut(&[u8]) -> Result<(), E>) -> Result<String, E> {
        let mut crc = Hasher::new();
        let mut both = |bytes: &[u8]| {
            crc.update(bytes);
            put(bytes)
        };
        both(&(self.header.len() as u64).to_le_bytes())?;
        both(&self.header)?;
        let mut bytes = vec![[0; size_of::<f32>()]; CHUNK];
        for chunk in self.tensors.values().flat_map(|values| values.chunks(CHUNK)) {
            let bytes = &mut bytes[..chunk.len()];
            bytes.iter_mut().zip(chunk).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
            both(bytes.as_flattened())?;
        }
        Ok(hex(crc))
    }

    /// Writes header and tensors, then the checksum into its place.
    fn write_to(&self, file: &mut (impl Write + Seek)) -> io::Result<()> {
        let mut out = BufWriter::new(file);
        let checksum = self.each_part(|bytes| out.write_all(bytes))?;
        out.seek(SeekFrom::Start((PREFIX + OPENING.len()) as u64))?;
        out.write_all(checksum.as_bytes())?;
        out.flush()
    }
}

fn hex(crc: Hasher) -> String {
    format!("{:08x}", crc.finalize())
}

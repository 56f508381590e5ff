//! The checkpoint file of one rank: a state comes in, a safetensors file goes out, and the other way round.
//! What must hold: the bits that come back are those that went in, a file that was damaged anywhere is refused, and the
//! old file stays whole until the new one is complete.
//!
//! The header opens with the checksum, at a fixed place, which covers every other byte of the file. u, v and extra
//! vectors are the tensors `u/NAME`, `v/NAME` and `extra/NAME`; the same state always gives the same bytes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use redsync_core::{Memory, Remembered};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use thiserror::Error;

const FORMAT: &str = "redsync-state";
const VERSION: &str = "1";
/// What every header begins with: its keys are sorted, and this is the first.
const OPENING: &[u8] = br#"{"__metadata__":{"checksum":""#;
/// Stands for the checksum while it is computed.
const BLANK: &[u8; 8] = b"00000000";
/// The header's length, in front of it.
const PREFIX: usize = size_of::<u64>();
/// Safetensors allows no longer header.
const MAX_HEADER: usize = 100_000_000;
/// Elements that are converted at a time.
const CHUNK: usize = 1 << 16;

/// What one layer carries from step to step.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    /// The layer's name.
    pub name: String,
    /// Its number of elements.
    pub size: usize,
    /// The local momentum; empty without momentum.
    pub u: Vec<f32>,
    /// The accumulated gradient that was not sent yet.
    pub v: Vec<f32>,
    /// What the selector remembers.
    pub memory: Memory,
}

/// The state of one rank after a step: with the weights it is all that the next step depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The global step.
    pub step: u64,
    /// Whose state it is.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// Of layers and configuration; opaque here, equal on all ranks.
    pub fingerprint: String,
    /// The hash of the replica, equal on all ranks.
    pub replica_hash: u64,
    /// The layers, in order.
    pub layers: Vec<LayerState>,
    /// Vectors of the caller, such as weights or the momentum of dense layers.
    pub extra: Vec<(String, Vec<f32>)>,
}

/// Why a state was not written, read or shared out anew.
#[derive(Debug, Error)]
pub enum StateError {
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
    /// The file has a version that this program does not know.
    #[error("{}: the file has version {theirs:?}, this program reads version {ours:?}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        theirs: String,
        /// The version of this program.
        ours: &'static str,
    },
    /// A state that could not be read back is not written, and the old file stays.
    #[error("{}: the state is not written: {why}", path.display())]
    Unsound {
        /// The file.
        path: PathBuf,
        /// What is wrong with the state.
        why: String,
    },
    /// A directory lacks the file of a rank.
    #[error("{}: {} is missing", dir.display(), Saved::file_name(*rank))]
    Incomplete {
        /// The directory.
        dir: PathBuf,
        /// The rank without a file.
        rank: usize,
    },
    /// The states to be shared out lack a rank.
    #[error("the state of rank {rank} is missing")]
    Missing {
        /// The rank without a state.
        rank: usize,
    },
    /// The states to be shared out hold a rank more than once.
    #[error("there is more than one state of rank {rank}")]
    Twice {
        /// The rank.
        rank: usize,
    },
    /// Ranks count from 0 to one less than their number.
    #[error("there is no rank {rank} among {ranks}")]
    NoRank {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// Two states are not of the same step of the same training.
    #[error("{first} and {other} differ in {what}: {ours} and {theirs}")]
    Differs {
        /// What should be equal.
        what: &'static str,
        /// The file or rank compared with.
        first: String,
        /// The file or rank that differs.
        other: String,
        /// What the first has.
        ours: String,
        /// What the other has.
        theirs: String,
    },
    /// The sum of the old ranks is not a state, as after an overflow.
    #[error("the old states do not add up for rank {rank}: {why}")]
    Sum {
        /// The new rank.
        rank: usize,
        /// What is wrong with the sum.
        why: String,
    },
}

impl Saved {
    /// Writes the state. The old file stays whole until the new one is complete and on disk.
    ///
    /// This holds for one file. The files of all ranks are one checkpoint only together: give each step its own
    /// directory if a crash between two ranks' files must leave a complete one.
    pub fn write(&self, path: &Path) -> Result<(), StateError> {
        let unsound = |why| StateError::Unsound { path: path.into(), why };
        self.check().map_err(unsound)?;
        let header = self.header().map_err(unsound)?;
        replace(path, |file| self.write_to(file, &header))
            .map_err(|source| StateError::Io { path: path.into(), source })
    }

    /// Reads a state, and refuses whatever [`Saved::write`] would not have written.
    pub fn read(path: &Path) -> Result<Saved, StateError> {
        let read = || -> Result<Saved, Fault> {
            let mut file = File::open(path)?;
            let length = file.metadata()?.len();
            read_from(&mut file, length)
        };
        read().map_err(|fault| fault.of(path))
    }

    /// What rank `rank` of `ranks` continues with, from the states of all old ranks, in any order.
    ///
    /// The sums over the ranks of u and of v stay what they were: the new rank takes the sum of the old ranks `rank`,
    /// `rank + ranks`, and so on, with the memory of the first of them; a rank beyond the old number starts from zero.
    /// With the old number of ranks u, v and memory are those of the old rank, to the bit. `extra` is that of the old
    /// rank 0, as replicas are identical.
    pub fn reshare(mut saved: Vec<Saved>, rank: usize, ranks: usize) -> Result<Saved, StateError> {
        if rank >= ranks {
            return Err(StateError::NoRank { rank, ranks });
        }
        saved.sort_by_key(|state| state.rank);
        check_complete(&saved)?;
        let beyond = rank >= saved.len();
        let extra = saved.first_mut().map(|first| std::mem::take(&mut first.extra)).unwrap_or_default();
        let mut taken = saved.into_iter().skip(if beyond { 0 } else { rank }).step_by(ranks);
        let Some(mut new) = taken.next() else {
            return Err(StateError::Missing { rank: 0 });
        };
        if beyond {
            new.layers.iter_mut().for_each(LayerState::clear);
        } else {
            taken.for_each(|other| new.add(&other));
        }
        let new = Saved { rank, ranks, extra, ..new };
        new.check().map_err(|why| StateError::Sum { rank, why })?;
        Ok(new)
    }

    /// The name of a rank's file in the directory of a checkpoint.
    pub fn file_name(rank: usize) -> String {
        format!("rank-{rank:04}.safetensors")
    }

    /// Reads all rank files of a directory, in the order of the ranks.
    ///
    /// The file of rank 0 says how many there are. Files of higher ranks are left alone: they are what an earlier run
    /// with more ranks left behind, or what a later one did not finish.
    pub fn read_all(dir: &Path) -> Result<Vec<Saved>, StateError> {
        let path = |rank| dir.join(Saved::file_name(rank));
        let mut all: Vec<Saved> = Vec::new();
        loop {
            let rank = all.len();
            let saved = match Saved::read(&path(rank)) {
                Err(StateError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    return Err(StateError::Incomplete { dir: dir.into(), rank });
                }
                read => read?,
            };
            if saved.rank != rank {
                let why = format!("it holds the state of rank {}", saved.rank);
                return Err(StateError::Damaged { path: path(rank), why });
            }
            if let Some(first) = all.first() {
                first.check_agrees(&saved, |rank| path(rank).display().to_string())?;
            }
            all.push(saved);
            if all.len() == all[0].ranks {
                return Ok(all);
            }
        }
    }

    /// Whether it is a state that can be written and read back; if not, why.
    fn check(&self) -> Result<(), String> {
        if self.rank >= self.ranks {
            return Err(format!("there is no rank {} among {}", self.rank, self.ranks));
        }
        let mut names = HashSet::new();
        for layer in &self.layers {
            if !names.insert(&layer.name) {
                return Err(format!("two layers have the name {:?}", layer.name));
            }
            layer.check().map_err(|why| format!("layer {:?}: {why}", layer.name))?;
        }
        names.clear();
        for (name, values) in &self.extra {
            if !names.insert(name) {
                return Err(format!("two extra vectors have the name {name:?}"));
            }
            check_finite(values).map_err(|why| format!("extra vector {name:?}: {why}"))?;
        }
        Ok(())
    }

    /// Whether another rank's state is of the same step of the same training; `name` says whose a state is.
    fn check_agrees(&self, other: &Saved, name: impl Fn(usize) -> String) -> Result<(), StateError> {
        let hash = |state: &Saved| format!("{:016x}", state.replica_hash);
        let pairs = [
            ("step", self.step.to_string(), other.step.to_string()),
            ("number of ranks", self.ranks.to_string(), other.ranks.to_string()),
            ("fingerprint", format!("{:?}", self.fingerprint), format!("{:?}", other.fingerprint)),
            ("replica hash", hash(self), hash(other)),
            ("number of layers", self.layers.len().to_string(), other.layers.len().to_string()),
        ];
        let layers = self.layers.iter().zip(&other.layers).map(|(a, b)| ("layer", a.shape(), b.shape()));
        match pairs.into_iter().chain(layers).find(|(_, ours, theirs)| ours != theirs) {
            None => Ok(()),
            Some((what, ours, theirs)) => {
                let (first, other) = (name(self.rank), name(other.rank));
                Err(StateError::Differs { what, first, other, ours, theirs })
            }
        }
    }

    /// Adds u and v of a state with the same layers.
    fn add(&mut self, other: &Saved) {
        for (layer, more) in self.layers.iter_mut().zip(&other.layers) {
            layer.u.iter_mut().zip(&more.u).for_each(|(sum, u)| *sum += u);
            layer.v.iter_mut().zip(&more.v).for_each(|(sum, v)| *sum += v);
        }
    }

    /// All vectors, by the names and in the order that they have in the file.
    fn tensors(&self) -> BTreeMap<String, &[f32]> {
        let mut tensors = BTreeMap::new();
        for layer in &self.layers {
            tensors.insert(tensor_name("v", &layer.name), &layer.v[..]);
            if !layer.u.is_empty() {
                tensors.insert(tensor_name("u", &layer.name), &layer.u[..]);
            }
        }
        tensors.extend(self.extra.iter().map(|(name, x)| (tensor_name("extra", name), &x[..])));
        tensors
    }

    /// The header, its checksum still blank.
    fn header(&self) -> Result<Vec<u8>, String> {
        let mut end = 0;
        let tensors = self.tensors().into_iter().map(|(name, values)| {
            let start = end;
            end += size_of_val(values);
            (name, TensorInfo { dtype: Dtype::F32, shape: vec![values.len()], data_offsets: (start, end) })
        });
        let header = Header { about: About::of(self).to_strings()?, tensors: tensors.collect() };
        let mut header = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
        // Blanks at the end align the tensors, as the format asks.
        header.resize(header.len().next_multiple_of(PREFIX), b' ');
        if header.len() > MAX_HEADER {
            return Err(format!("its header has {} bytes, {MAX_HEADER} are allowed", header.len()));
        }
        Ok(header)
    }

    /// Writes header and tensors, then the checksum into its place.
    fn write_to(&self, file: &mut (impl Write + Seek), header: &[u8]) -> io::Result<()> {
        let mut out = BufWriter::new(file);
        let mut crc = Hasher::new();
        let mut put = |out: &mut BufWriter<_>, bytes: &[u8]| {
            crc.update(bytes);
            out.write_all(bytes)
        };
        put(&mut out, &(header.len() as u64).to_le_bytes())?;
        put(&mut out, header)?;
        let mut bytes = vec![[0; size_of::<f32>()]; CHUNK];
        for chunk in self.tensors().into_values().flat_map(|values| values.chunks(CHUNK)) {
            let bytes = &mut bytes[..chunk.len()];
            bytes.iter_mut().zip(chunk).for_each(|(bytes, x)| *bytes = x.to_le_bytes());
            put(&mut out, bytes.as_flattened())?;
        }
        out.seek(SeekFrom::Start((PREFIX + OPENING.len()) as u64))?;
        out.write_all(hex(crc).as_bytes())?;
        out.flush()
    }
}

impl LayerState {
    fn check(&self) -> Result<(), String> {
        let (size, u, v) = (self.size, self.u.len(), self.v.len());
        if u32::try_from(size).is_err() {
            return Err(format!("{size} elements are too many (at most 2^32 - 1)"));
        }
        if v != size || (u != 0 && u != size) {
            return Err(format!("it has {size} elements, but u has {u} and v has {v}"));
        }
        if Memory::from_phases(self.memory.phases()).is_none() {
            return Err("the selector remembers a threshold that is none".into());
        }
        check_finite(&self.u).map_err(|why| format!("u: {why}"))?;
        check_finite(&self.v).map_err(|why| format!("v: {why}"))
    }

    /// What is equal on all ranks, in words.
    fn shape(&self) -> String {
        format!("{:?} ({} elements, u {}, v {})", self.name, self.size, self.u.len(), self.v.len())
    }

    fn clear(&mut self) {
        self.u.fill(0.0);
        self.v.fill(0.0);
        self.memory = Memory::default();
    }
}

fn check_finite(values: &[f32]) -> Result<(), String> {
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => Err(format!("element {index} is {}", values[index])),
    }
}

/// Whether sorted states are those of all ranks of one step, each once.
fn check_complete(saved: &[Saved]) -> Result<(), StateError> {
    let Some(first) = saved.first() else {
        return Err(StateError::Missing { rank: 0 });
    };
    for (rank, state) in saved.iter().enumerate() {
        if state.rank >= state.ranks {
            return Err(StateError::NoRank { rank: state.rank, ranks: state.ranks });
        }
        if state.rank > rank {
            return Err(StateError::Missing { rank });
        }
        if state.rank < rank {
            return Err(StateError::Twice { rank: state.rank });
        }
        first.check_agrees(state, |rank| format!("rank {rank}"))?;
    }
    if saved.len() < first.ranks {
        return Err(StateError::Missing { rank: saved.len() });
    }
    Ok(())
}

/// The header as it is in the file; both maps are sorted, so that a state has only one form.
#[derive(Serialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    about: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

/// A state without its vectors.
struct About {
    step: u64,
    rank: usize,
    ranks: usize,
    fingerprint: String,
    replica_hash: u64,
    layers: Vec<LayerEntry>,
    extra: Vec<ExtraEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerEntry {
    name: String,
    size: usize,
    /// Whether there is a u.
    momentum: bool,
    /// For each phase the bits of threshold and least, and searched: decimals might not come back as the same number.
    memory: [[u32; 3]; 3],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExtraEntry {
    name: String,
    size: usize,
}

impl About {
    fn of(saved: &Saved) -> Self {
        let layer = |layer: &LayerState| LayerEntry {
            name: layer.name.clone(),
            size: layer.size,
            momentum: !layer.u.is_empty(),
            memory: layer.memory.phases().map(|r| [r.threshold.to_bits(), r.least.to_bits(), r.searched]),
        };
        let extra =
            |(name, values): &(String, Vec<f32>)| ExtraEntry { name: name.clone(), size: values.len() };
        About {
            step: saved.step,
            rank: saved.rank,
            ranks: saved.ranks,
            fingerprint: saved.fingerprint.clone(),
            replica_hash: saved.replica_hash,
            layers: saved.layers.iter().map(layer).collect(),
            extra: saved.extra.iter().map(extra).collect(),
        }
    }

    fn to_strings(&self) -> Result<BTreeMap<&'static str, String>, String> {
        let layers = serde_json::to_string(&self.layers).map_err(|error| error.to_string())?;
        let extra = serde_json::to_string(&self.extra).map_err(|error| error.to_string())?;
        Ok(BTreeMap::from([
            ("checksum", String::from_utf8_lossy(BLANK).into_owned()),
            ("format", FORMAT.into()),
            ("version", VERSION.into()),
            ("step", self.step.to_string()),
            ("rank", self.rank.to_string()),
            ("ranks", self.ranks.to_string()),
            ("fingerprint", self.fingerprint.clone()),
            ("replica_hash", format!("{:016x}", self.replica_hash)),
            ("layers", layers),
            ("extra", extra),
        ]))
    }

    fn from_strings(strings: &HashMap<String, String>) -> Result<Self, Fault> {
        let replica_hash = u64::from_str_radix(string(strings, "replica_hash")?, 16);
        Ok(About {
            step: number(strings, "step")?,
            rank: number(strings, "rank")?,
            ranks: number(strings, "ranks")?,
            fingerprint: string(strings, "fingerprint")?.into(),
            replica_hash: replica_hash.map_err(|_| "its replica_hash is not a number")?,
            layers: serde_json::from_str(string(strings, "layers")?).map_err(|e| unreadable("layers", e))?,
            extra: serde_json::from_str(string(strings, "extra")?).map_err(|e| unreadable("extra", e))?,
        })
    }

    /// Whether the file has exactly the tensors that the lists announce.
    fn check_tensors(&self, metadata: &Metadata) -> Result<(), Fault> {
        let mut found = metadata.tensors();
        let mut expect = |kind: &str, name: &str, size: usize| {
            let name = tensor_name(kind, name);
            match found.remove(&name) {
                None => Err(format!("tensor {name:?} is missing, or listed twice")),
                Some(info) if info.dtype != Dtype::F32 || info.shape != [size] => {
                    let (dtype, shape) = (info.dtype, &info.shape);
                    Err(format!("tensor {name:?} is {dtype} of shape {shape:?}, expected F32 of [{size}]"))
                }
                Some(_) => Ok(()),
            }
        };
        for layer in &self.layers {
            expect("v", &layer.name, layer.size)?;
            if layer.momentum {
                expect("u", &layer.name, layer.size)?;
            }
        }
        for extra in &self.extra {
            expect("extra", &extra.name, extra.size)?;
        }
        match found.keys().min() {
            None => Ok(()),
            Some(name) => Err(format!("tensor {name:?} belongs to no layer").into()),
        }
    }

    /// Joins the lists with the vectors, of which none is missing after [`About::check_tensors`].
    fn with(self, mut tensors: HashMap<String, Vec<f32>>) -> Result<Saved, Fault> {
        let mut take = |kind, name: &str| tensors.remove(&tensor_name(kind, name)).unwrap_or_default();
        let layer = |LayerEntry { name, size, memory, .. }: LayerEntry| {
            let phases = memory.map(|[threshold, least, searched]| Remembered {
                threshold: f32::from_bits(threshold),
                least: f32::from_bits(least),
                searched,
            });
            let memory = Memory::from_phases(phases)
                .ok_or_else(|| format!("layer {name:?}: the remembered threshold is none"))?;
            Ok(LayerState { u: take("u", &name), v: take("v", &name), name, size, memory })
        };
        let About { step, rank, ranks, fingerprint, replica_hash, .. } = self;
        let layers = self.layers.into_iter().map(layer).collect::<Result<_, String>>()?;
        let mut extra = Vec::with_capacity(self.extra.len());
        for ExtraEntry { name, .. } in self.extra {
            let values = take("extra", &name);
            extra.push((name, values));
        }
        Ok(Saved { step, rank, ranks, fingerprint, replica_hash, layers, extra })
    }
}

fn tensor_name(kind: &str, name: &str) -> String {
    format!("{kind}/{name}")
}

fn string<'a>(strings: &'a HashMap<String, String>, key: &str) -> Result<&'a str, String> {
    strings.get(key).map(String::as_str).ok_or_else(|| format!("its header has no {key}"))
}

fn number<T: std::str::FromStr>(strings: &HashMap<String, String>, key: &str) -> Result<T, String> {
    string(strings, key)?.parse().map_err(|_| format!("its {key} is not a number"))
}

/// An error of the JSON reader, kept on one line whatever it quotes.
fn unreadable(what: &str, error: serde_json::Error) -> String {
    format!("its {what} cannot be read: {}", error.to_string().escape_debug())
}

fn hex(crc: Hasher) -> String {
    format!("{:08x}", crc.finalize())
}

/// What is wrong with a file whose name is known elsewhere.
#[derive(Debug)]
enum Fault {
    Io(io::Error),
    Damaged(String),
    Version(String),
}

impl Fault {
    fn of(self, path: &Path) -> StateError {
        let path = path.into();
        match self {
            Fault::Io(source) => StateError::Io { path, source },
            Fault::Damaged(why) => StateError::Damaged { path, why },
            Fault::Version(theirs) => StateError::Version { path, theirs, ours: VERSION },
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Io(error)
    }
}

impl From<String> for Fault {
    fn from(why: String) -> Self {
        Fault::Damaged(why)
    }
}

impl From<&str> for Fault {
    fn from(why: &str) -> Self {
        Fault::Damaged(why.into())
    }
}

/// Reads a file of a known length; nothing is allocated that the file is too short to fill.
fn read_from(file: &mut impl Read, length: u64) -> Result<Saved, Fault> {
    let mut header = read_header(file, length)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| unreadable("header", e))?;
    let strings = metadata.metadata().as_ref().ok_or("it is not a redsync state")?;
    check_version(strings)?;
    let about = About::from_strings(strings)?;
    let (expected, got) = (metadata.data_len() as u64, length - (PREFIX + header.len()) as u64);
    if got != expected {
        return Err(format!("it has {got} bytes of tensors, its header announces {expected}").into());
    }
    about.check_tensors(&metadata)?;

    let checksum = take_checksum(&mut header)?;
    let mut crc = Hasher::new();
    crc.update(&(header.len() as u64).to_le_bytes());
    crc.update(&header);
    let mut tensors = HashMap::new();
    for name in metadata.offset_keys() {
        let size = metadata.info(&name).map_or(0, |info| info.shape.iter().product());
        let values = read_floats(file, size, &mut crc)?;
        tensors.insert(name, values);
    }
    if hex(crc).as_bytes() != checksum {
        return Err("its checksum is wrong".into());
    }
    let saved = about.with(tensors)?;
    saved.check()?;
    Ok(saved)
}

fn read_header(file: &mut impl Read, length: u64) -> Result<Vec<u8>, Fault> {
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
fn check_version(strings: &HashMap<String, String>) -> Result<(), Fault> {
    if strings.get("format").is_none_or(|format| format != FORMAT) {
        return Err("it is not a redsync state".into());
    }
    match string(strings, "version")? {
        VERSION => Ok(()),
        theirs => Err(Fault::Version(theirs.into())),
    }
}

/// Returns the checksum of a header and leaves a blank in its place.
fn take_checksum(header: &mut [u8]) -> Result<[u8; 8], Fault> {
    let opens = header.starts_with(OPENING);
    let place = header.get_mut(OPENING.len()..).and_then(|rest| rest.first_chunk_mut()).filter(|_| opens);
    let place = place.ok_or("its header does not open with a checksum")?;
    Ok(std::mem::replace(place, *BLANK))
}

fn read_floats(file: &mut impl Read, size: usize, crc: &mut Hasher) -> Result<Vec<f32>, Fault> {
    const WIDTH: usize = size_of::<f32>();
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

/// Puts a new file in the place of an old one, which stays until the new one is complete and on disk.
fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path)?;
    let put = || {
        let mut file = File::create(&temporary)?;
        write(&mut file)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    if let Err(error) = put() {
        // It may not even exist, and the first error says more than one of the clean-up.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    // The new name is only safe once the directory is on disk too.
    File::open(directory(path))?.sync_all()
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Beside the target, as a rename does not cross file systems; hidden, and with a name that no rank file has.
fn temporary(path: &Path) -> io::Result<PathBuf> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".tmp-{}", std::process::id()));
    Ok(directory(path).join(hidden))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIN_SUBNORMAL: f32 = f32::from_bits(1);

    fn memory(seed: u32) -> Memory {
        let phase = |i| Remembered {
            threshold: 0.1 * (seed + i) as f32,
            least: f32::from_bits(seed + i),
            searched: u32::MAX - seed - i,
        };
        Memory::from_phases([phase(0), phase(1), phase(2)]).unwrap()
    }

    /// Two layers, with and without momentum; values are small integers, so that sums are exact in any order.
    fn state(rank: usize, ranks: usize) -> Saved {
        let r = rank as f32;
        let layers = vec![
            LayerState {
                name: "zz.weight".into(),
                size: 4,
                u: vec![1.0 + r, -2.0, 0.0, 8.0 * r],
                v: vec![r * r, -r, 3.0, 0.0],
                memory: memory(7 * rank as u32),
            },
            LayerState {
                name: "a".into(),
                size: 3,
                u: vec![],
                v: vec![r - 5.0, 2.0 * r, 1.0],
                memory: Memory::default(),
            },
        ];
        let extra = vec![("w".into(), vec![0.5, -0.25]), ("b".into(), vec![])];
        let fingerprint = "sha \"1\", \u{e9}".into();
        Saved { step: 12, rank, ranks, fingerprint, replica_hash: 0xfeed_0000_dead_beef, layers, extra }
    }

    /// A state as bits, in which -0.0 is not 0.0.
    fn bits(saved: &Saved) -> String {
        let vector = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let layer = |l: &LayerState| {
            let memory = l.memory.phases().map(|r| (r.threshold.to_bits(), r.least.to_bits(), r.searched));
            (l.name.clone(), l.size, vector(&l.u), vector(&l.v), memory)
        };
        let layers: Vec<_> = saved.layers.iter().map(layer).collect();
        let extra: Vec<_> = saved.extra.iter().map(|(name, x)| (name.clone(), vector(x))).collect();
        let Saved { step, rank, ranks, fingerprint, replica_hash, .. } = saved;
        format!("{:?}", (step, rank, ranks, fingerprint, replica_hash, layers, extra))
    }

    fn bytes(saved: &Saved) -> Vec<u8> {
        let mut file = io::Cursor::new(Vec::new());
        saved.write_to(&mut file, &saved.header().unwrap()).unwrap();
        file.into_inner()
    }

    fn parse(bytes: &[u8]) -> Result<Saved, Fault> {
        read_from(&mut &bytes[..], bytes.len() as u64)
    }

    fn split(bytes: &[u8]) -> (String, Vec<u8>) {
        let size = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let (header, tensors) = bytes[PREFIX..].split_at(size);
        (String::from_utf8(header.into()).unwrap(), tensors.into())
    }

    /// A file with the right checksum, whatever else is wrong with it.
    fn seal(header: &str, tensors: &[u8]) -> Vec<u8> {
        let mut header = header.as_bytes().to_vec();
        take_checksum(&mut header).unwrap();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(tensors);
        let place = PREFIX + OPENING.len();
        let mut crc = Hasher::new();
        crc.update(&file);
        file[place..place + 8].copy_from_slice(hex(crc).as_bytes());
        file
    }

    /// Why a file is refused in whose header a text was replaced, with the right checksum.
    fn refusal(from: &str, to: &str) -> String {
        let (header, tensors) = split(&bytes(&state(0, 2)));
        assert!(header.contains(from), "{header}");
        let fault = parse(&seal(&header.replace(from, to), &tensors)).unwrap_err();
        fault.of(Path::new("file")).to_string()
    }

    #[test]
    fn round_trip_is_exact_to_the_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(Saved::file_name(3));
        let mut saved = state(3, 5);
        saved.step = u64::MAX;
        saved.layers[0].u = vec![-0.0, MIN_SUBNORMAL, -MIN_SUBNORMAL, f32::MIN_POSITIVE / 2.0];
        saved.layers[0].v = vec![f32::MAX, f32::MIN, 0.1, -f32::EPSILON];
        saved.extra[0].1 = vec![-0.0, 0.0];
        saved.write(&path).unwrap();
        assert_eq!(bits(&Saved::read(&path).unwrap()), bits(&saved));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn round_trip_of_layers_longer_than_a_chunk_and_of_empty_ones() {
        let mut saved = state(0, 1);
        saved.layers[0].size = 2 * CHUNK + 3;
        saved.layers[0].v = (0..2 * CHUNK as u32 + 3).map(f32::from_bits).collect();
        saved.layers[0].u = saved.layers[0].v.iter().map(|x| -x).collect();
        saved.layers[1].size = 0;
        saved.layers[1].v.clear();
        assert_eq!(bits(&parse(&bytes(&saved)).unwrap()), bits(&saved));
        let nothing = Saved { layers: vec![], extra: vec![], ..saved };
        assert_eq!(bits(&parse(&bytes(&nothing)).unwrap()), bits(&nothing));
    }

    #[test]
    fn the_file_is_safetensors_and_the_same_state_gives_the_same_bytes() {
        let file = bytes(&state(1, 2));
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        assert_eq!(names, ["extra/b", "extra/w", "u/zz.weight", "v/a", "v/zz.weight"]);
        assert_eq!(tensors.tensor("extra/w").unwrap().data(), [0, 0, 0, 63, 0, 0, 128, 190]);
        assert_eq!(file, bytes(&state(1, 2)));
        let (header, tensors) = split(&file);
        assert_eq!(seal(&header, &tensors), file);
    }

    #[test]
    fn every_flipped_byte_is_refused() {
        let good = bytes(&state(0, 2));
        for i in 0..good.len() {
            for flip in (0..8).map(|bit| 1 << bit).chain([0xff]) {
                let mut bad = good.clone();
                bad[i] ^= flip;
                assert!(parse(&bad).is_err(), "byte {i} flipped by {flip:#x} is accepted");
            }
        }
    }

    #[test]
    fn truncation_at_every_length_and_a_longer_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut good = bytes(&state(0, 2));
        for length in 0..good.len() {
            fs::write(&path, &good[..length]).unwrap();
            let error = Saved::read(&path).unwrap_err();
            assert!(matches!(error, StateError::Damaged { .. }), "{length}: {error}");
        }
        good.push(0);
        assert!(matches!(parse(&good), Err(Fault::Damaged(_))));
    }

    #[test]
    fn a_header_that_does_not_open_with_the_checksum_is_refused() {
        let (header, tensors) = split(&bytes(&state(0, 2)));
        let mut file = ((header.len() + 1) as u64).to_le_bytes().to_vec();
        file.extend(header.replace("checksum\":", "checksum\" :").bytes().chain(tensors));
        assert!(matches!(parse(&file), Err(Fault::Damaged(why)) if why.contains("does not open")));
    }

    #[test]
    fn two_exchanged_values_are_refused() {
        let mut file = bytes(&state(0, 2));
        let end = file.len();
        file[end - 8..].rotate_left(4);
        assert!(matches!(parse(&file), Err(Fault::Damaged(why)) if why == "its checksum is wrong"));
    }

    #[test]
    fn another_version_or_format_is_refused() {
        let refused = refusal(r#""version":"1""#, r#""version":"2""#);
        assert_eq!(refused, r#"file: the file has version "2", this program reads version "1""#);
        assert!(refusal("redsync-state", "redsync-stats").contains("not a redsync state"));
        let error = parse(b"\x02\0\0\0\0\0\0\0{}").unwrap_err();
        assert!(matches!(error, Fault::Damaged(why) if why == "it is not a redsync state"));
    }

    #[test]
    fn what_does_not_fit_together_is_refused_even_with_the_right_checksum() {
        let size = r#"\"size\":"#;
        for (from, to, why) in [
            ("v/a", "v/b", r#"tensor "v/a" is missing"#),
            (r#"\"momentum\":true"#, r#"\"momentum\":false"#, r#"tensor "u/zz.weight" belongs to no layer"#),
            (r#"\"momentum\":false"#, r#"\"momentum\":true"#, r#"tensor "u/a" is missing"#),
            (r#"\"name\":\"b\""#, r#"\"name\":\"w\""#, r#"tensor "extra/w" is missing, or listed twice"#),
            (r#""dtype":"F32","shape":[3]"#, r#""dtype":"I32","shape":[3]"#, "is I32 of shape [3]"),
            ("[3]", "[3,1]", "of shape [3, 1], expected F32 of [3]"),
            (
                &format!("{size}3"),
                &format!("{size}18446744073709551615"),
                "of shape [3], expected F32 of [1844",
            ),
            (&format!("{size}3"), &format!("{size}-3"), "its layers cannot be read"),
            ("[3]", "[18446744073709551615]", "overflow"),
            (r#""rank":"0""#, r#""rank":"2""#, "no rank 2 among 2"),
            (r#""rank":"0""#, r#""rank":"x""#, "its rank is not a number"),
            (r#""step""#, r#""stop""#, "no step"),
            ("[[0,0,", "[[2143289344,0,", r#"layer "zz.weight": the remembered threshold is none"#),
        ] {
            let refused = refusal(from, to);
            assert!(refused.contains(why), "{from} -> {to}: {refused}");
            assert!(refused.starts_with("file: ") && refused.lines().count() == 1, "{refused}");
        }
    }

    #[test]
    fn values_that_are_not_finite_are_refused_on_both_ways() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        state(0, 2).write(&path).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut saved = state(0, 2);
            saved.layers[1].v[2] = bad;
            let (header, tensors) = split(&bytes(&saved));
            let refused = parse(&seal(&header, &tensors)).unwrap_err();
            assert!(
                matches!(refused, Fault::Damaged(why) if why == format!("layer \"a\": v: element 2 is {bad}"))
            );
            assert!(matches!(saved.write(&path), Err(StateError::Unsound { .. })));
            assert_eq!(Saved::read(&path).unwrap(), state(0, 2));
        }
    }

    #[test]
    fn a_state_that_could_not_be_read_back_is_not_written() {
        let breaks: [fn(&mut Saved); 6] = [
            |s| s.rank = 2,
            |s| s.layers[1].name = "zz.weight".into(),
            |s| s.layers[0].u.truncate(1),
            |s| s.layers[0].v.truncate(1),
            |s| s.layers[0].size = 1 << 32,
            |s| s.extra[1].0 = "w".into(),
        ];
        let dir = tempfile::tempdir().unwrap();
        for broken in breaks {
            let mut saved = state(0, 2);
            broken(&mut saved);
            let error = saved.write(&dir.path().join("file")).unwrap_err();
            assert!(matches!(error, StateError::Unsound { .. }), "{error}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_crash_while_writing_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(Saved::file_name(0));
        let (old, new) = (state(0, 1), Saved { step: 13, ..state(0, 1) });
        old.write(&path).unwrap();
        let file = bytes(&new);
        for length in [0, PREFIX, file.len() / 2, file.len()] {
            fs::write(temporary(&path).unwrap(), &file[..length]).unwrap();
            assert_eq!(Saved::read_all(dir.path()).unwrap(), std::slice::from_ref(&old));
        }
        new.write(&path).unwrap();
        assert_eq!(Saved::read(&path).unwrap(), new);
        assert!(!temporary(&path).unwrap().exists());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(Saved::file_name(0));
        state(0, 1).write(&path).unwrap();
        let full = |file: &mut File| file.write_all(b"half").and(Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(replace(&path, full).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(!temporary(&path).unwrap().exists());
        fs::create_dir(temporary(&path).unwrap()).unwrap(); // so that the file cannot be created
        let error = Saved { step: 13, ..state(0, 1) }.write(&path).unwrap_err();
        assert!(matches!(error, StateError::Io { .. }));
        assert!(error.to_string().contains("rank-0000.safetensors: "), "{error}");
        assert_eq!(Saved::read(&path).unwrap(), state(0, 1));
        assert!(state(0, 1).write(Path::new("/")).is_err());
    }

    #[test]
    fn read_all_wants_every_rank_of_one_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = |rank| dir.path().join(Saved::file_name(rank));
        let all = || Saved::read_all(dir.path());
        assert!(matches!(all(), Err(StateError::Incomplete { rank: 0, .. })));
        state(0, 3).write(&path(0)).unwrap();
        state(2, 3).write(&path(2)).unwrap();
        assert!(all().unwrap_err().to_string().ends_with("rank-0001.safetensors is missing"));
        Saved { step: 11, ..state(1, 3) }.write(&path(1)).unwrap();
        let error = all().unwrap_err().to_string();
        assert!(error.contains("rank-0001.safetensors differ in step: 12 and 11"), "{error}");
        state(1, 3).write(&path(1)).unwrap();
        state(3, 8).write(&path(3)).unwrap(); // left behind by another number of ranks
        assert_eq!(all().unwrap(), [state(0, 3), state(1, 3), state(2, 3)]);
        fs::copy(path(0), path(1)).unwrap();
        assert!(all().unwrap_err().to_string().contains("it holds the state of rank 0"));
    }

    /// The sums over ranks of every u and v.
    fn sums(states: &[Saved]) -> Vec<Vec<f32>> {
        let mut sum = vec![];
        for layer in 0..states[0].layers.len() {
            let (size, u) = (states[0].layers[layer].size, states[0].layers[layer].u.len());
            let (mut us, mut vs) = (vec![0.0; u], vec![0.0; size]);
            for state in states {
                us.iter_mut().zip(&state.layers[layer].u).for_each(|(sum, x)| *sum += x);
                vs.iter_mut().zip(&state.layers[layer].v).for_each(|(sum, x)| *sum += x);
            }
            sum.extend([us, vs]);
        }
        sum
    }

    #[test]
    fn another_number_of_ranks_keeps_the_sums() {
        for (old, new) in [1, 2, 3, 4, 7, 8].into_iter().flat_map(|n| [1, 2, 3, 4, 5, 16].map(|m| (n, m))) {
            let before: Vec<_> = (0..old).rev().map(|rank| state(rank, old)).collect();
            let after: Vec<_> =
                (0..new).map(|rank| Saved::reshare(before.clone(), rank, new).unwrap()).collect();
            assert_eq!(sums(&after), sums(&before), "{old} -> {new}");
            for (rank, state) in after.iter().enumerate() {
                assert_eq!((state.step, state.rank, state.ranks), (12, rank, new));
                assert_eq!((&state.extra, state.check()), (&before[0].extra, Ok(())));
                let expected = if rank < old { memory(7 * rank as u32) } else { Memory::default() };
                assert_eq!(state.layers[0].memory, expected);
            }
        }
    }

    #[test]
    fn the_same_number_of_ranks_keeps_every_bit() {
        let mut all: Vec<_> = (0..3).map(|rank| state(rank, 3)).collect();
        all[1].layers[0].v = vec![-0.0, MIN_SUBNORMAL, -MIN_SUBNORMAL, f32::MAX];
        for (rank, old) in all.iter().enumerate() {
            assert_eq!(bits(&Saved::reshare(all.clone(), rank, 3).unwrap()), bits(old));
        }
    }

    #[test]
    fn states_that_do_not_belong_together_are_not_added() {
        let refused = |states: Vec<Saved>| Saved::reshare(states, 0, 1).unwrap_err().to_string();
        assert_eq!(refused(vec![]), "the state of rank 0 is missing");
        assert_eq!(refused(vec![state(1, 2)]), "the state of rank 0 is missing");
        assert_eq!(refused(vec![state(2, 3), state(0, 3)]), "the state of rank 1 is missing");
        assert_eq!(refused(vec![state(0, 2)]), "the state of rank 1 is missing");
        assert_eq!(refused(vec![state(0, 2), state(0, 2)]), "there is more than one state of rank 0");
        assert_eq!(refused(vec![state(3, 2)]), "there is no rank 3 among 2");
        assert!(matches!(Saved::reshare(vec![state(0, 1)], 1, 1), Err(StateError::NoRank { .. })));
        assert!(matches!(Saved::reshare(vec![state(0, 1)], 0, 0), Err(StateError::NoRank { .. })));
        type Change = fn(&mut Saved);
        let changes: [(Change, &str); 8] = [
            (|s| s.step = 1, "rank 0 and rank 1 differ in step: 12 and 1"),
            (|s| s.ranks = 3, "number of ranks: 2 and 3"),
            (|s| s.fingerprint.clear(), "fingerprint"),
            (|s| s.replica_hash = 1, "replica hash: feed0000deadbeef and 0000000000000001"),
            (|s| s.layers.truncate(1), "number of layers"),
            (|s| s.layers.swap(0, 1), "layer: \"zz.weight\""),
            (|s| s.layers[0].u.clear(), "u 4, v 4) and \"zz.weight\" (4 elements, u 0, v 4)"),
            (
                |s| s.layers[0].v[3] = f32::NAN,
                "do not add up for rank 0: layer \"zz.weight\": v: element 3 is NaN",
            ),
        ];
        for (change, why) in changes {
            let mut states = vec![state(0, 2), state(1, 2)];
            change(&mut states[1]);
            let error = refused(states);
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_sum_that_overflows_is_refused() {
        let mut states = vec![state(0, 2), state(1, 2)];
        states.iter_mut().for_each(|state| state.layers[0].u[1] = f32::MAX);
        let error = Saved::reshare(states, 0, 1).unwrap_err();
        assert!(
            matches!(&error, StateError::Sum { rank: 0, why } if why.contains("u: element 1 is inf")),
            "{error}"
        );
    }
}

//! The state of one rank: with the weights it is all that the next step depends on. States of all ranks come in, the state of
//! a rank among another number goes out.
//! What must hold: the bits that come back are those that were saved; the sums over the ranks of u and of v stay what they
//! were; a difference between what was saved and what runs is named.

mod about;
mod reshare;
#[cfg(test)]
mod tests;

pub use crate::exchange::cut::Cut;
use crate::file::{self, FileError};
use crate::hosts::Seat;
use redsync_core::{Memory, Momentum, Second, Unfit};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The format of a rank's file.
pub const FORMAT: &str = "redsync-state";

/// What changes the results of a run, by name, in the order in which differences are told. Nothing else is compared when a run
/// is resumed: neither deadlines nor threads, and never a version.
pub type Identity = Vec<(String, String)>;

/// The first entry in which two runs differ, in words. What only one of them knows, an older or a newer version, is no difference.
///
/// ```
/// use redsync_engine::state::difference;
/// let run = |density: &str| vec![("density".to_string(), density.to_string())];
/// assert_eq!(difference(&run("0.001"), &run("0.01")).unwrap(), "density was 0.001, is 0.01");
/// assert_eq!(difference(&run("0.001"), &run("0.001")), None);
/// ```
pub fn difference(was: &Identity, is: &Identity) -> Option<String> {
    is.iter().find_map(|(name, is)| {
        let (_, was) = was.iter().find(|(old, _)| old == name)?;
        (was != is).then(|| format!("{name} was {was}, is {is}"))
    })
}

/// What one layer carries from step to step.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    /// The layer's name.
    pub name: String,
    /// Its number of elements.
    pub size: usize,
    /// The momentum that u is of.
    pub momentum: Momentum,
    /// The local momentum; empty without momentum.
    pub u: Vec<f32>,
    /// The accumulated gradient that was not sent yet.
    pub v: Vec<f32>,
    /// What the selector remembers.
    pub memory: Memory,
    /// The learning rate in whose units v is, if it was told.
    pub rate: Option<f32>,
    /// The second moment of Adam.
    pub second: Option<SecondMoment>,
    /// With an exchange by owners, what this rank keeps of its part of the layer.
    pub kept: Option<Kept>,
}

/// What an owner keeps of its part of a layer: sums that it has not sent on.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The sums, in the order of the layer.
    pub v: Vec<f32>,
    /// Which elements of the layer they are.
    pub cut: Cut,
    /// What the selector remembers.
    pub memory: Memory,
    /// The learning rate in whose units they are, if it was told.
    pub rate: Option<f32>,
}

/// The second moment of a layer; see [`Second`].
#[derive(Clone, Debug, PartialEq)]
pub struct SecondMoment {
    /// That of this rank's gradients.
    pub own: Vec<f32>,
    /// What the other ranks gave of theirs; empty if nothing was.
    pub given: Vec<f32>,
    /// Steps of the layer.
    pub steps: u64,
}

impl Kept {
    /// Adds the sums, times a factor, to a vector of the whole layer; `rank` is the owner's.
    pub(crate) fn add_to(&self, layer: &mut [f32], rank: usize, factor: f32) {
        for (place, value) in (0u32..).zip(&self.v) {
            if let Some(to) = layer.get_mut(self.cut.index(rank, place) as usize) {
                *to += factor * value;
            }
        }
    }
}

impl From<Second<'_>> for SecondMoment {
    fn from(Second { own, given, steps }: Second<'_>) -> Self {
        SecondMoment { own: own.to_vec(), given: given.to_vec(), steps }
    }
}

impl SecondMoment {
    /// As a layer takes it.
    pub fn as_second(&self) -> Second<'_> {
        Second { own: &self.own, given: &self.given, steps: self.steps }
    }
}

/// The state of one rank after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The global step.
    pub step: u64,
    /// Whose state it is.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// What the run is; equal on all ranks.
    pub identity: Identity,
    /// The hash of the replica, equal on all ranks.
    pub replica_hash: u64,
    /// Where the rank sits, if the ranks of a host sum among themselves: then its layers are only its parts of them.
    pub seat: Option<Seat>,
    /// The compressed layers, in order.
    pub layers: Vec<LayerState>,
    /// Vectors of the caller, such as weights or the momentum of dense layers.
    pub extra: Vec<(String, Vec<f32>)>,
}

/// Why a state was not written, read or shared out anew.
#[derive(Debug, Error)]
pub enum StateError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A directory lacks the file of a rank.
    #[error("{}: {} is missing", dir.display(), Saved::file_name(*rank))]
    Incomplete {
        /// The directory.
        dir: PathBuf,
        /// The rank without a file.
        rank: usize,
    },
    /// The states to be shared out lack a rank.
    #[error("the state of rank {rank} of {ranks} is missing")]
    Missing {
        /// The rank without a state.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
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
        what: String,
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
    /// The name of a rank's file in the directory of a checkpoint.
    pub fn file_name(rank: usize) -> String {
        format!("rank-{rank:04}.safetensors")
    }

    /// Writes the state. The old file stays whole until the new one is complete and on disk.
    ///
    /// This holds for one file. The files of all ranks are one checkpoint only together: give each step its own
    /// directory if a crash between two ranks' files must leave a complete one.
    pub fn write(&self, path: &Path) -> Result<(), StateError> {
        self.check().map_err(|why| FileError::Unsound { path: path.into(), why })?;
        let tensors = about::tensors(self);
        let tensors = tensors.iter().map(|(name, values)| (&name[..], *values));
        Ok(file::write(path, FORMAT, &about::of(self), tensors)?)
    }

    /// Reads a state, and refuses whatever [`Saved::write`] would not have written.
    pub fn read(path: &Path) -> Result<Saved, StateError> {
        let content = file::read(path, FORMAT)?;
        let saved = about::join(content).and_then(|saved| saved.check().map(|()| saved));
        Ok(saved.map_err(|why| FileError::damaged(path, why))?)
    }

    /// The checksum of the state, for one that travels in another way than by file.
    pub fn checksum(&self) -> Result<String, String> {
        self.check()?;
        let tensors = about::tensors(self);
        file::checksum(FORMAT, &about::of(self), tensors.iter().map(|(name, values)| (&name[..], *values)))
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
                Err(StateError::File(error)) if error.is_missing() => {
                    return Err(StateError::Incomplete { dir: dir.into(), rank });
                }
                read => read?,
            };
            if saved.rank != rank {
                let why = format!("it holds the state of rank {}", saved.rank);
                return Err(FileError::damaged(&path(rank), why).into());
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
    pub fn check(&self) -> Result<(), String> {
        if self.rank >= self.ranks {
            return Err(format!("there is no rank {} among {}", self.rank, self.ranks));
        }
        if let Some(seat) = self.seat.filter(|seat| !seat.is_one_of(self.ranks)) {
            return Err(format!("a seat that there is not among {} ranks: {seat:?}", self.ranks));
        }
        let mut names = HashSet::new();
        for layer in &self.layers {
            if !names.insert(&layer.name) {
                return Err(format!("two layers have the name {:?}", layer.name));
            }
            layer.check().map_err(|why| format!("layer {:?}: {why}", layer.name))?;
            let fits = |kept: &Kept| kept.cut.ranks == self.ranks && kept.cut.len(self.rank) == kept.v.len();
            if !layer.kept.as_ref().is_none_or(fits) {
                return Err(format!("layer {:?}: what its owner kept is of another rank", layer.name));
            }
        }
        names.clear();
        for (name, values) in &self.extra {
            if !names.insert(name) {
                return Err(format!("two extra vectors have the name {name:?}"));
            }
            let finite = check_finite("it", values);
            finite.map_err(|why| format!("extra vector {name:?}: {why}"))?;
        }
        Ok(())
    }

    /// Whether another rank's state is of the same step of the same training; `name` says whose a state is.
    fn check_agrees(&self, other: &Saved, name: impl Fn(usize) -> String) -> Result<(), StateError> {
        let hash = |state: &Saved| format!("{:016x}", state.replica_hash);
        let count = |state: &Saved| state.layers.len().to_string();
        let pair = |what: &str, ours: String, theirs: String| (what.to_string(), ours, theirs);
        let mut pairs = vec![
            pair("step", self.step.to_string(), other.step.to_string()),
            pair("number of ranks", self.ranks.to_string(), other.ranks.to_string()),
            pair("replica hash", hash(self), hash(other)),
            pair("number of layers", count(self), count(other)),
        ];
        let hosts = |state: &Saved| {
            state.seat.map_or("none".into(), |seat| format!("{} of {} ranks", seat.hosts, seat.on_each))
        };
        pairs.push(pair("hosts", hosts(self), hosts(other)));
        // Ranks of one host have other parts.
        if self.seat.map(|seat| seat.number) == other.seat.map(|seat| seat.number) {
            let shapes = self.layers.iter().zip(&other.layers);
            pairs.extend(shapes.map(|(a, b)| pair("layer", a.shape(), b.shape())));
        }
        let length = self.identity.len().max(other.identity.len());
        let entry = |state: &Saved, i: usize| state.identity.get(i).cloned().unwrap_or_default();
        pairs.extend((0..length).map(|i| {
            let ((what, ours), (theirs_what, theirs)) = (entry(self, i), entry(other, i));
            if what == theirs_what { (what, ours, theirs) } else { pair("what they run", what, theirs_what) }
        }));
        match pairs.into_iter().find(|(_, ours, theirs)| ours != theirs) {
            None => Ok(()),
            Some((what, ours, theirs)) => {
                let (first, other) = (name(self.rank), name(other.rank));
                Err(StateError::Differs { what, first, other, ours, theirs })
            }
        }
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
        self.momentum.check().map_err(|why| why.to_string())?;
        if self.second.is_some() != matches!(self.momentum, Momentum::Adam(_)) {
            return Err("a second moment is Adam's, and Adam has one".into());
        }
        if let Some(SecondMoment { own, given, .. }) = &self.second {
            let (own, given) = (own.len(), given.len());
            if u != size || own != size || (given != 0 && given != size) {
                return Err(format!(
                    "it has {size} elements, but u has {u} and its second moment {own} and {given}"
                ));
            }
        }
        if let Some(rate) = self.rate.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
            return Err(Unfit::Rate(rate).to_string());
        }
        if Memory::from_phases(self.memory.phases()).is_none() {
            return Err("the remembered threshold is damaged".into());
        }
        if let Some(Kept { v, cut, memory, rate }) = &self.kept {
            if !cut.is_sound() || cut.n != size || Memory::from_phases(memory.phases()).is_none() {
                return Err(format!("what its owner kept, {} of {size} elements, makes no sense", v.len()));
            }
            if let Some(rate) = rate.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
                return Err(Unfit::Rate(rate).to_string());
            }
            check_finite("what its owner kept", v).map_err(|why| why.to_string())?;
        }
        self.check_finite().map_err(|why| why.to_string())
    }

    /// Whether all of u, v and the second moment are numbers.
    pub fn check_finite(&self) -> Result<(), Unfit> {
        check_finite("u", &self.u)?;
        check_finite("v", &self.v)?;
        let Some(SecondMoment { own, given, .. }) = &self.second else { return Ok(()) };
        check_squares("the second moment", own)?;
        check_squares("the given second moment", given)
    }

    /// What is equal on all ranks, in words.
    fn shape(&self) -> String {
        let second = self.second.as_ref().map_or(0, |second| second.own.len());
        let squares = if second > 0 { format!(", second moment {second}") } else { String::new() };
        format!("{:?} ({} elements, u {}, v {}{squares})", self.name, self.size, self.u.len(), self.v.len())
    }
}

fn check_finite(what: &'static str, values: &[f32]) -> Result<(), Unfit> {
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => Err(Unfit::NotFinite { what, index, value: values[index] }),
    }
}

fn check_squares(what: &'static str, values: &[f32]) -> Result<(), Unfit> {
    check_finite(what, values)?;
    match values.iter().position(|x| *x < 0.0) {
        None => Ok(()),
        Some(index) => Err(Unfit::NotFinite { what, index, value: values[index] }),
    }
}

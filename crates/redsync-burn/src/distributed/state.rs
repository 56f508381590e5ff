//! What a module has on all ranks and on this one: how ranks begin alike, are compared, judged, saved and resumed.
//! What must hold: a run goes on to the bits of one that never stopped; what is of another module is refused, and what differs is named.
//!
//! ```text
//! DIR/model.safetensors       parameters, the optimizer's moments, and whatever else is the same on all ranks (rank 0)
//! DIR/rank-0003.safetensors   residuals, and what differs among the ranks, such as running statistics (each rank)
//! ```

use super::module::{Met, change, walk};
use super::place::Values;
use super::{Distributed, DistributedError};
use burn::module::{Module, ParamId};
use redsync_comm::{CommError, Tag};
use redsync_engine::file::{self, About, FileError};
use redsync_engine::replica_hash;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The file with what is the same on all ranks.
const MODEL_FILE: &str = "model.safetensors";
/// Its format.
const FORMAT: &str = "redsync-distributed";

/// How many local steps were made, and of what kind.
const STEPS: &str = "local-steps";
const KIND: &str = "local-steps-are";
const BETWEEN: &str = "local steps are saved right behind an exchange: agree comes before save";

/// The numbers of these collectives; the synchronizer's own are above and at the bottom, the trainer's between.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Op {
    Begin = u32::MAX - 203,
    Differ,
    Mean,
    Saved,
}

/// A tensor of a module, by its path.
type Held = (ParamId, String, Values);

impl Distributed {
    fn tag(&self, op: Op) -> Tag {
        Tag { step: self.sync.step(), op: op as u32 }
    }

    /// The module with the values that rank 0 has.
    pub(super) fn begin_alike<M: Module>(&self, model: M) -> Result<M, DistributedError> {
        let (own, failed) = (self.comm.rank(), |source| failed("the weights of rank 0", source));
        let mut begin = HashMap::new();
        for Met { id, path, tensor, .. } in walk(&model) {
            let Ok(tensor) = tensor else { continue };
            let bytes = match own {
                0 => tensor.read()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
                _ => Vec::new(),
            };
            let all = self.comm.allgather(self.tag(Op::Begin), bytes).wait(self.deadline).map_err(failed)?;
            let floats = all.from_rank(0).chunks_exact(4);
            let floats: Vec<f32> = floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            if own != 0 {
                begin.insert(id, fitting(&path, floats, tensor.len())?);
            }
        }
        put(model, begin)
    }

    /// Compares the trained parameters of all ranks, bit by bit, and returns their common hash; with local steps, those on which they agreed
    /// last. All ranks call this between two steps.
    pub fn check<M: Module>(&self, model: &M) -> Result<u64, DistributedError> {
        let checked = self.checked(&walk(model));
        self.or_give_up(checked)
    }

    fn checked(&self, met: &[Met]) -> Result<u64, DistributedError> {
        match self.local() {
            Some(local) => Ok(self.sync.check_replicas(&local.shared())?),
            None => self.with_layers(met, |layers| Ok(self.sync.check_replicas(layers)?))?,
        }
    }

    pub(super) fn with_layers<T>(
        &self,
        met: &[Met],
        with: impl FnOnce(&[&[f32]]) -> T,
    ) -> Result<T, DistributedError> {
        let mut layers: Vec<Option<Cow<'_, [f32]>>> = vec![None; self.trained.len()];
        for Met { id, path, tensor, .. } in met {
            if let Some(layer) = self.watch.number(*id) {
                let unserved = |why| DistributedError::Unserved { name: path.clone(), why };
                layers[layer] = Some(tensor.as_ref().map_err(|why| unserved(why.clone()))?.read()?);
            }
        }
        let layers: Option<Vec<&[f32]>> = layers.iter().map(Option::as_deref).collect();
        let other = || DistributedError::Model("this is not the module that was made distributed".into());
        Ok(with(&layers.ok_or_else(other)?))
    }

    /// The module as it is to be judged, without gradients, dropout and the like: running statistics, which every rank gathers from its own
    /// data, are averaged. All ranks call this between two steps, and get the same; with local steps only behind an exchange
    /// ([`Distributed::agree`]).
    pub fn valid<M: Module>(&self, model: &M) -> Result<M, DistributedError> {
        let valid = self.averaged_statistics(model.valid());
        self.or_give_up(valid)
    }

    fn averaged_statistics<M: Module>(&self, model: M) -> Result<M, DistributedError> {
        let (_, own) = self.alike_and_own(&model)?;
        if own.is_empty() {
            return Ok(model);
        }
        let mut joined = Vec::new();
        for (_, _, values) in &own {
            joined.extend_from_slice(&values.read()?);
        }
        let sum = self.comm.allreduce(self.tag(Op::Mean), joined).wait(self.deadline);
        let sum = sum.map_err(|source| failed("running statistics", source))?;
        let (share, mut rest, mut means) = (1.0 / self.comm.size() as f32, &sum[..], HashMap::new());
        for (id, _, values) in own {
            let (mine, behind) = rest.split_at(values.len());
            means.insert(id, mine.iter().map(|sum| sum * share).collect());
            rest = behind;
        }
        put(model, means)
    }

    /// What of a module is the same on all ranks, as all trained parameters are, and what is this rank's own.
    fn alike_and_own<M: Module>(&self, model: &M) -> Result<(Vec<Held>, Vec<Held>), DistributedError> {
        let held = walk(model).into_iter().filter_map(|met| Some((met.id, met.path, met.tensor.ok()?)));
        let (mut alike, rest): (Vec<Held>, Vec<Held>) =
            held.partition(|held| self.watch.number(held.0).is_some());
        let mut hashes = Vec::new();
        for (_, _, values) in &rest {
            hashes.extend(replica_hash(&[&values.read()?]).to_le_bytes());
        }
        let all = self.comm.allgather(self.tag(Op::Differ), hashes).wait(self.deadline);
        let all = all.map_err(|source| failed("hashes of running statistics", source))?;
        let mut own = Vec::new();
        for (at, held) in rest.into_iter().enumerate() {
            let part = 8 * at..8 * at + 8;
            let differs = all.iter().any(|rank| rank.get(part.clone()) != all.from_rank(0).get(part.clone()));
            if differs { own.push(held) } else { alike.push(held) }
        }
        Ok((alike, own))
    }

    /// Writes all that a run needs to go on to the same bits into a directory that all ranks share: parameters, running statistics,
    /// residuals, and the moments of [`Distributed::step`]. Optimizers of Burn, and random numbers, are the caller's to keep. All ranks
    /// call this between two steps; when it returns, all files are there.
    pub fn save<M: Module>(&self, dir: &Path, model: &M) -> Result<(), DistributedError> {
        let saved = self.saved(dir, model);
        self.or_give_up(saved)
    }

    fn saved<M: Module>(&self, dir: &Path, model: &M) -> Result<(), DistributedError> {
        if self.local().is_some_and(|local| local.since() > 0) {
            return Err(DistributedError::Model(BETWEEN.into()));
        }
        let io = |source| FileError::Io { path: dir.to_path_buf(), source };
        std::fs::create_dir_all(dir).map_err(io)?;
        let model = model.valid(); // brings running statistics up to date
        let hash = self.checked(&walk(&model))?;
        let (alike, own) = self.alike_and_own(&model)?;
        let read = |(_, path, values): Held| Ok((path, values.read()?.into_owned()));
        let mut own: Vec<_> = own.into_iter().map(read).collect::<Result<_, DistributedError>>()?;
        let moments: Vec<_> = self.optimizer.moments().collect();
        if self.alone.is_some() {
            own.extend(moments.iter().map(|(name, values)| (name.clone(), values.to_vec())));
        }
        if self.comm.rank() == 0 {
            let mut about = About::from([("replica-hash".into(), format!("{hash:016x}"))]);
            if let Some(alone) = &self.alone {
                about.insert(STEPS.into(), alone.steps.to_string());
                about.insert(KIND.into(), alone.told.clone());
            }
            let moments = moments.iter().filter(|_| self.alone.is_none());
            let moments = moments.map(|(name, values)| (name.as_str(), *values));
            let alike: Vec<_> = alike.into_iter().map(read).collect::<Result<_, DistributedError>>()?;
            let tensors = alike.iter().map(|(path, values)| (path.as_str(), &values[..]));
            file::write(&dir.join(MODEL_FILE), FORMAT, &about, tensors.chain(moments))?;
        }
        self.sync.save(dir, hash, own)?;
        let barrier = self.comm.barrier(self.tag(Op::Saved)).wait(self.deadline);
        barrier.map_err(|source| failed("a checkpoint", source))
    }

    /// Goes on from what [`Distributed::save`] wrote: the module comes back with its values. All ranks call this between two steps; another
    /// number of ranks goes on with the same weights, and after local steps with the moments of the first rank.
    pub fn load<M: Module>(&mut self, dir: &Path, model: M) -> Result<M, DistributedError> {
        let loaded = self.loaded(dir, model);
        self.or_give_up(loaded)
    }

    fn loaded<M: Module>(&mut self, dir: &Path, model: M) -> Result<M, DistributedError> {
        let path = dir.join(MODEL_FILE);
        let wrong = |why: String| DistributedError::Model(format!("{}: {why}", path.display()));
        let file::Content { about, mut tensors } = file::read(&path, FORMAT)?;
        let hash = about.get("replica-hash").and_then(|hash| u64::from_str_radix(hash, 16).ok());
        let hash = hash.ok_or_else(|| wrong("it does not say its replica-hash".into()))?;
        let (was, is) = (about.get(KIND), self.alone.as_ref().map(|alone| &alone.told));
        if was != is {
            let said = |kind: Option<&String>| kind.map_or("none".into(), String::clone);
            return Err(wrong(format!("local steps were {}, are {}", said(was), said(is))));
        }
        let mut own: BTreeMap<_, _> = self.sync.load_for(dir, hash)?.into_iter().collect();
        drop(model.valid()); // nothing that was gathered before may come after what is loaded
        let mut held = HashMap::new();
        for Met { id, path, tensor, .. } in walk(&model) {
            let Ok(tensor) = tensor else { continue };
            let kept = tensors.remove(&path).or_else(|| own.remove(&path));
            let kept = kept.ok_or_else(|| wrong(format!("it has no {path}: it is of another module")))?;
            held.insert(id, fitting(&path, kept, tensor.len())?);
        }
        self.optimizer.restore(|name, size| {
            let kept = tensors.remove(name).or_else(|| own.remove(name));
            kept.map(|kept| fitting(name, kept, size)).transpose()
        })?;
        if let Some(name) = tensors.keys().chain(own.keys()).next() {
            return Err(wrong(format!("it has {name}, which is not of this module")));
        }
        self.begun = None;
        self.watch.come().wanted = self.place.wanted(&self.sync);
        let model = put(model, held)?;
        if self.alone.is_some() {
            let steps = about.get(STEPS).and_then(|steps| steps.parse().ok());
            let steps = steps.ok_or_else(|| wrong("it does not say how many steps were made".into()))?;
            let copy = |layers: &[&[f32]]| layers.iter().map(|layer| layer.to_vec()).collect();
            let weights = self.read(&model, copy)?;
            self.alone.as_mut().map_or(Ok(()), |alone| {
                alone.steps = steps;
                alone.local.restore(weights, 0)
            })?;
        }
        match self.checked(&walk(&model))? == hash {
            true => Ok(model),
            false => Err(wrong("it does not belong to the residuals beside it".into())),
        }
    }
}

fn failed(what: &'static str, source: CommError) -> DistributedError {
    DistributedError::Comm { what, source }
}

pub(super) fn fitting(path: &str, values: Vec<f32>, size: usize) -> Result<Vec<f32>, DistributedError> {
    check_size(path, values.len(), size).map(|()| values)
}

pub(super) fn check_size(path: &str, is: usize, size: usize) -> Result<(), DistributedError> {
    let wrong = || DistributedError::Model(format!("{path} has {is} elements instead of {size}"));
    if is == size { Ok(()) } else { Err(wrong()) }
}

/// The module with these values.
pub(super) fn put<M: Module>(model: M, new: HashMap<ParamId, Vec<f32>>) -> Result<M, DistributedError> {
    change(model, |id, _| new.contains_key(&id), |id, tensor: Values| tensor.write(&new[&id]))
}

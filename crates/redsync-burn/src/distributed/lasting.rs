//! What lasts from step to step, in a module and beside it, for checkpoints in a format of one's own. Comes in and goes out: plain values,
//! in the order of the layers and of the module. What must hold: a module that got back what was read has the same bits.

use super::module::{change, walk};
use super::place::Values;
use super::state::{check_size, fitting, put};
use super::{Distributed, DistributedError};
use burn::module::{Module, ParamId};
use redsync_engine::{Local, Optimizer, Synchronizer};
use std::collections::HashMap;

/// What lasts from step to step beside a module, to be brought back from a checkpoint in a format of one's own.
pub struct Lasting<'a> {
    /// Residuals.
    pub synchronizer: &'a mut Synchronizer,
    /// The moments of [`Distributed::step`].
    pub optimizer: &'a mut Optimizer,
    /// Local steps: the weights on which the ranks agreed last, and how many steps were made in all.
    pub local: Option<(&'a mut Local, &'a mut u64)>,
}

impl Distributed {
    /// The trained parameters as they are on this rank, one slice for each layer: for a checkpoint in a format of one's own.
    pub fn read<M: Module, T>(
        &self,
        model: &M,
        with: impl FnOnce(&[&[f32]]) -> T,
    ) -> Result<T, DistributedError> {
        self.with_layers(&walk(model), with)
    }

    /// The module with other values, one vector for each layer. Whether all ranks say the same, [`Distributed::check`] finds out; with local
    /// steps those on which the ranks agreed are replaced by [`Distributed::restore`].
    pub fn write<M: Module>(&self, model: M, weights: &[Vec<f32>]) -> Result<M, DistributedError> {
        if weights.len() != self.trained.len() {
            let why = format!("there are values for {} of {} layers", weights.len(), self.trained.len());
            return Err(DistributedError::Model(why));
        }
        let put = |layer: usize, values: Values| {
            check_size(&self.sync.layers()[layer].name, weights[layer].len(), values.len())?;
            values.write(&weights[layer])
        };
        let is_layer = |id, _| self.watch.number(id).is_some();
        change(model, is_layer, |id, values| put(self.watch.number(id).unwrap_or_default(), values))
    }

    /// What the module keeps beside the parameters that are trained, in its order: running statistics, and what is frozen.
    pub fn statistics<M: Module>(&self, model: &M) -> Result<Vec<Vec<f32>>, DistributedError> {
        drop(model.valid()); // brings running statistics up to date
        self.kept_beside(model).map(|(_, values)| Ok(values.read()?.into_owned())).collect()
    }

    /// The module with other values in the place of its [`Distributed::statistics`].
    pub fn with_statistics<M: Module>(&self, model: M, values: Vec<Vec<f32>>) -> Result<M, DistributedError> {
        drop(model.valid()); // nothing that was gathered before may come after these
        let beside: Vec<_> = self.kept_beside(&model).collect();
        if values.len() != beside.len() {
            let why = format!("there are values for {} of {} statistics", values.len(), beside.len());
            return Err(DistributedError::Model(why));
        }
        let mut new = HashMap::new();
        for ((id, own), values) in beside.into_iter().zip(values) {
            new.insert(id, fitting("a statistic", values, own.len())?);
        }
        put(model, new)
    }

    fn kept_beside<M: Module>(&self, model: &M) -> impl Iterator<Item = (ParamId, Values)> {
        let beside = walk(model).into_iter().filter(|met| self.watch.number(met.id).is_none());
        beside.filter_map(|met| Some((met.id, met.tensor.ok()?)))
    }

    /// The optimizer behind [`Distributed::step`], for its moments.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Brings back what lasts from step to step, between two steps. All ranks call this.
    pub fn restore<T, E>(&mut self, with: impl FnOnce(Lasting<'_>) -> Result<T, E>) -> Result<T, E> {
        let local = self.alone.as_mut().map(|alone| (&mut alone.local, &mut alone.steps));
        let restored = with(Lasting { synchronizer: &mut self.sync, optimizer: &mut self.optimizer, local })?;
        self.begun = None;
        self.watch.come().wanted = self.place.wanted(&self.sync);
        Ok(restored)
    }
}

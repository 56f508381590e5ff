//! The way into a module and back: its float parameters come in one by one, with their paths, and go out changed.
//! What must hold: a parameter that stands at two places is met once and is one tensor at both afterwards; a changed tensor trains as the
//! one before did; nothing but values is changed.

use super::place::Values;
use super::{DistributedError, Watch};
use crate::flex::Unserved;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use std::collections::{HashMap, HashSet};

/// A float parameter, or what a module keeps like one, such as running statistics.
pub(super) struct Met {
    /// Where it is first met: the names of the fields that lead to it.
    pub path: String,
    pub id: ParamId,
    /// Whether it has gradients.
    pub trains: bool,
    pub shape: Vec<usize>,
    pub tensor: Result<Values, Unserved>,
}

/// All float parameters of a module, in its order.
pub(super) fn walk<M: Module>(model: &M) -> Vec<Met> {
    let mut walk = Walk { path: Vec::new(), met: Vec::new(), ids: HashSet::new() };
    model.visit(&mut walk);
    walk.met
}

struct Walk {
    path: Vec<String>,
    met: Vec<Met>,
    ids: HashSet<ParamId>,
}

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.insert(param.id) {
            let (path, trains) = (self.path.join("."), param.is_require_grad());
            let path = if path.is_empty() { "parameter".into() } else { path };
            let shape = param.shape().to_vec();
            self.met.push(Met { path, id: param.id, trains, shape, tensor: Values::of(param.base()) });
        }
    }
}

/// What becomes of a parameter's tensor, which is contiguous and, unless the user holds a clone, shared with nobody.
pub(super) type Changed = Result<Values, DistributedError>;

/// The module with other values where there are some for a parameter: by its id and whether it trains the first function says if there are,
/// the second then gets its tensor.
pub(super) fn change<M: Module>(
    model: M,
    has: impl Fn(ParamId, bool) -> bool,
    mut put: impl FnMut(ParamId, Values) -> Changed,
) -> Result<M, DistributedError> {
    let mut twice = Twice::default();
    model.visit(&mut twice);
    let tied = twice.0.into_iter().filter(|(_, count)| *count > 1).map(|(id, _)| id).collect();
    let mut change = Change { has: &has, put: &mut put, tied, done: GradientsParams::new(), failure: None };
    let model = model.map(&mut change);
    change.failure.map_or(Ok(model), Err)
}

/// The module with all its trained parameters changed at once: the function gets the values of each layer. Only in the memory of the host.
pub(super) fn change_all<M: Module>(
    model: M,
    watch: &Watch,
    with: impl FnOnce(&mut [&mut [f32]]) -> Result<(), DistributedError>,
) -> Result<M, DistributedError> {
    let is_layer = |id: ParamId, _| watch.number(id).is_some();
    let number = |id: ParamId| watch.number(id).unwrap_or_default();
    let mut taken: Vec<Option<Values>> = vec![None; watch.count()];
    // Nobody may share a tensor that is to be changed in place, so an empty one stands in the module meanwhile.
    let model = change(model, is_layer, |id, values| {
        let empty = values.empty();
        taken[number(id)] = Some(values);
        Ok(empty)
    })?;
    let mut all: Vec<&mut [f32]> =
        taken.iter_mut().filter_map(|values| values.as_mut().and_then(Values::host_mut)).collect();
    with(&mut all)?;
    change(model, is_layer, |id, empty| Ok(taken[number(id)].take().unwrap_or(empty)))
}

/// How often each parameter stands in a module.
#[derive(Default)]
struct Twice(HashMap<ParamId, usize>);

impl ModuleVisitor for Twice {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        *self.0.entry(param.id).or_default() += 1;
    }
}

struct Change<'a> {
    has: &'a dyn Fn(ParamId, bool) -> bool,
    put: &'a mut dyn FnMut(ParamId, Values) -> Changed,
    tied: HashSet<ParamId>,
    /// Tensors of the tied parameters that were changed: Burn's container of tensors by parameter.
    done: GradientsParams,
    failure: Option<DistributedError>,
}

impl ModuleMapper for Change<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        if self.failure.is_some() || !(self.has)(id, param.is_require_grad()) {
            return param;
        }
        if let Err(unserved) = Values::check(&*param) {
            self.failure = Some(unserved.into());
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.done.get::<D>(id) {
            Some(tensor) => tensor,
            None => self.changed(id, tensor),
        };
        if self.tied.contains(&id) {
            self.done.register(id, tensor.clone());
        }
        Param::from_mapped_value(id, tensor, mapper)
    }
}

impl Change<'_> {
    fn changed<const D: usize>(&mut self, id: ParamId, tensor: Tensor<D>) -> Tensor<D> {
        let (trains, strategy) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let made = Values::of(tensor).map_err(DistributedError::from).and_then(|inner| (self.put)(id, inner));
        let tensor = made.map(Values::tensor).unwrap_or_else(|error| {
            self.failure = Some(error);
            // The module is lost with the error.
            Tensor::zeros([1; D], &Device::flex())
        });
        match strategy {
            None => tensor,
            Some(strategy) => {
                tensor.autodiff().with_gradient_checkpointing_strategy(strategy).set_require_grad(trains)
            }
        }
    }
}

/// The gradients of a module by parameter; what is left belongs to parameters that are not of it.
pub(super) fn take<M: Module>(
    model: &M,
    gradients: &mut GradientsParams,
) -> HashMap<ParamId, Result<Values, Unserved>> {
    let mut take = Take { gradients, taken: HashMap::new() };
    model.visit(&mut take);
    take.taken
}

struct Take<'a> {
    gradients: &'a mut GradientsParams,
    taken: HashMap<ParamId, Result<Values, Unserved>>,
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.taken.insert(param.id, Values::of(gradient));
        }
    }
}

/// Values for the parameters of a module, as optimizers of Burn take them.
pub(super) fn give<M: Module>(model: &M, tensors: HashMap<ParamId, Values>) -> GradientsParams {
    let mut give = Give { tensors, given: GradientsParams::new() };
    model.visit(&mut give);
    give.given
}

struct Give {
    tensors: HashMap<ParamId, Values>,
    given: GradientsParams,
}

impl ModuleVisitor for Give {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(tensor) = self.tensors.remove(&param.id) {
            self.given.register(param.id, tensor.tensor::<D>());
        }
    }
}

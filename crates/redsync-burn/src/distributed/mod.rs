//! Any Burn module on several ranks. Comes in: a module, a configuration, a communicator, and at each step the gradients of this rank.
//! Goes out: gradients that are averaged over the ranks, for any optimizer of Burn, or the module with its weights updated.
//! What must hold: all ranks begin with the weights of rank 0 and keep the same weights, bit by bit; whatever one rank cannot do ends all.

mod alone;
mod lasting;
mod module;
mod place;
mod setup;
mod state;
mod threads;
mod watch;

pub use lasting::Lasting;
#[cfg(feature = "wgpu")]
pub use place::there::Copied;
pub use setup::Setup;
pub use threads::on_threads;
pub use watch::Watch;

use crate::flex::Unserved;
use alone::Alone;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use module::{change, give, take};
use place::{Place, Values};
use redsync_comm::{CommError, Communicator};
use redsync_engine::file::FileError;
use redsync_engine::offload::DeviceError;
use redsync_engine::{Config, Momentum, Optimizer, SyncError, Synchronizer, Traffic};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Why a module cannot be trained any further on several ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DistributedError {
    /// The exchange of gradients.
    #[error(transparent)]
    Sync(Box<SyncError>),
    /// A parameter is not where we work.
    #[error("parameter {name}: {why}")]
    Unserved {
        /// The parameter's path.
        name: String,
        /// Where it is.
        why: Unserved,
    },
    /// The module was moved to where we do not work.
    #[error("a parameter was moved: {0}")]
    Moved(#[from] Unserved),
    /// Parameters are on two devices.
    #[error("parameter {name} is on {device}, and {first} on {other}: a module is trained on one device")]
    Apart {
        /// The parameter's path.
        name: String,
        /// Where it is.
        device: String,
        /// The first parameter's path.
        first: String,
        /// Where that is.
        other: String,
    },
    /// A device could not do what it was asked for.
    #[error("the device failed: {0}")]
    Device(#[from] DeviceError),
    /// The module or its gradients are not what they were.
    #[error("{0}")]
    Model(String),
    /// Another collective.
    #[error("{what}: {source}")]
    Comm {
        /// What was being exchanged.
        what: &'static str,
        /// Why it failed.
        source: CommError,
    },
    /// A file of a checkpoint.
    #[error(transparent)]
    File(#[from] FileError),
}

impl From<SyncError> for DistributedError {
    fn from(error: SyncError) -> Self {
        DistributedError::Sync(Box::new(error))
    }
}

/// A model of one's own, trained by several ranks.
///
/// A training loop of Burn changes at two places: where the model was made, and where its weights are updated.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use redsync_burn::{Communicator, Config, Distributed, DistributedError, Momentum, on_threads};
/// use std::sync::Arc;
///
/// #[derive(Module, Debug)]
/// struct Net {
///     hidden: Linear,
///     out: Linear,
/// }
///
/// fn train(comm: Arc<dyn Communicator>) -> Result<u64, DistributedError> {
///     let device = Device::flex().autodiff();
///     let net = Net {
///         hidden: LinearConfig::new(20, 300).init(&device),
///         out: LinearConfig::new(300, 2).init(&device),
///     };
///     let config = Config { momentum: Momentum::Nesterov(0.9), ..Config::default() };
///     let (mut net, mut distributed) = Distributed::new(net, config, comm)?;
///     for _step in 0..3 {
///         let batch = Tensor::<2>::random([8, 20], Distribution::Default, &device); // this rank's own
///         let loss = net.out.forward(net.hidden.forward(batch)).powf_scalar(2.0).mean();
///         let gradients = GradientsParams::from_grads(loss.backward(), &net);
///         net = distributed.step(0.1, net, gradients)?; // as optimizers of Burn have it
///     }
///     distributed.check(&net)
/// }
///
/// let hashes = on_threads(2, train)?;
/// assert_eq!(hashes[0], hashes[1]);
/// # Ok::<(), DistributedError>(())
/// ```
pub struct Distributed {
    sync: Synchronizer,
    optimizer: Optimizer,
    watch: Watch,
    place: Arc<Place>,
    /// The parameters that are trained, by the number of their layer.
    trained: Vec<Trained>,
    comm: Arc<dyn Communicator>,
    deadline: Duration,
    momentum: Momentum,
    /// The rate with which the step that is under way began.
    begun: Option<f32>,
    /// With local steps, what they need.
    alone: Option<Alone>,
}

struct Trained {
    id: ParamId,
    shape: Vec<usize>,
}

impl Distributed {
    /// A module that all ranks train together, from the weights that rank 0 has. Layers have the names of the module's paths, such as
    /// `conv1.weight`; those of one axis are taken for biases and norms, and the last of several for the output. Parameters that are
    /// frozen stay as they are. All ranks call this.
    pub fn new<M: Module>(
        model: M,
        config: Config,
        comm: Arc<dyn Communicator>,
    ) -> Result<(M, Self), DistributedError> {
        Self::setup(config).make(model, comm)
    }

    /// The same with more to be said: what the layers are, whether all ranks have the same module already, local steps.
    pub fn setup(config: Config) -> Setup {
        Setup::new(config)
    }

    /// With [`Distributed::step`], weights decay by this, but not biases and norms. To be said before the first step.
    pub fn with_weight_decay(self, decay: f32) -> Self {
        Distributed { optimizer: Optimizer::of(self.sync.layers(), self.momentum, decay), ..self }
    }

    /// This rank and the number of ranks.
    pub fn rank(&self) -> (usize, usize) {
        self.sync.rank()
    }

    /// Where the bytes of this rank went.
    pub fn traffic(&self) -> Traffic {
        self.sync.traffic()
    }

    /// Bytes that crossed between the device of the module and the host since the last time this was asked; None if it is on the host.
    #[cfg(feature = "wgpu")]
    pub fn take_copied(&self) -> Option<Copied> {
        match &*self.place {
            Place::Host => None,
            Place::There(resident) => Some(resident.take_copied()),
        }
    }

    /// What is below: layers, choices, statistics of a step.
    pub fn synchronizer(&self) -> &Synchronizer {
        &self.sync
    }

    /// What makes layers hand over their gradients during the backward pass, so that the exchange proceeds beside it; an option, since
    /// without it the same is sent behind the pass. With [`Distributed::step`], [`Distributed::begin`] comes before the forward pass then.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// A step begins, whose updates will be applied at this rate: residuals have to know it before the first gradient, so that what waits
    /// in them keeps the rate at which it came. [`Distributed::step`] says it itself unless layers are watched. Before
    /// [`Distributed::average`] it is worth saying when the rate of the optimizer changes.
    pub fn begin(&mut self, rate: f64) -> Result<(), DistributedError> {
        let begun = self.tell_rate(rate as f32);
        self.begun = Some(rate as f32);
        self.or_give_up(begun)
    }

    fn tell_rate(&mut self, rate: f32) -> Result<(), DistributedError> {
        match self.alone {
            None => Ok(self.optimizer.begin(&self.sync, rate)?),
            // What waits then are differences of weights, which have no rate.
            Some(_) => Ok(()),
        }
    }

    /// Averages the gradients of all ranks, for an optimizer of Burn, whose momentum acts on what comes out. Every trained parameter gets
    /// a gradient, of zeros where no rank has sent anything. The configuration has no momentum then: in a residual it would act twice.
    pub fn average<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, DistributedError> {
        let averaged = self.averaged(model, gradients);
        self.or_give_up(averaged)
    }

    fn averaged<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, DistributedError> {
        if self.momentum != Momentum::None {
            return Err(DistributedError::Model(TWICE.into()));
        }
        if self.alone.is_some() {
            return Err(DistributedError::Model(ALONE.into()));
        }
        self.begun = None;
        self.exchange(model, gradients)?;
        let mut tensors = HashMap::new();
        for (layer, Trained { id, shape }) in self.trained.iter().enumerate() {
            tensors.insert(*id, self.place.averaged(&mut self.sync, layer, shape)?);
        }
        Ok(give(model, tensors))
    }

    /// Updates the weights by the gradients of all ranks, at a learning rate: SGD or AdamW, as the momentum of the configuration has it,
    /// applied once, in the residual of layers that are compressed and here for others. A parameter that was frozen meanwhile stays as it is.
    /// With local steps: by the gradients of this rank, and ranks exchange weights when it is time.
    pub fn step<M: Module>(
        &mut self,
        rate: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, DistributedError> {
        let stepped = self.stepped(rate, model, gradients);
        self.or_give_up(stepped)
    }

    fn stepped<M: Module>(
        &mut self,
        rate: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, DistributedError> {
        match self.begun.take() {
            None if self.watch.come().layers.contains(&true) => {
                return Err(DistributedError::Model(LATE.into()));
            }
            None => self.tell_rate(rate as f32)?,
            Some(begun) if begun == rate as f32 => {}
            Some(begun) => {
                let why = format!("the step began at the rate {begun} and cannot be made at {rate}");
                return Err(DistributedError::Model(why));
            }
        }
        if self.alone.is_some() {
            return self.stepped_alone(rate as f32, model, gradients);
        }
        self.exchange(&model, gradients)?;
        let (watch, place) = (&self.watch, &self.place);
        let (optimizer, sync) = (&mut self.optimizer, &mut self.sync);
        let moves = |id: ParamId, trains: bool| trains && watch.number(id).is_some();
        let mut any = false;
        let model = change(model, moves, |id, weights| {
            any = true;
            let layer = watch.number(id).unwrap_or_default();
            place.step(optimizer, sync, layer, weights, rate as f32)
        })?;
        if any { Ok(model) } else { Err(DistributedError::Model(IDLE.into())) }
    }

    /// Hands over what did not come during the backward pass, and waits for the updates.
    fn exchange<M: Module>(&mut self, model: &M, gradients: GradientsParams) -> Result<(), DistributedError> {
        let rest = self.rest(model, gradients)?;
        let wanted = self.watch.come().wanted.clone();
        for (layer, gradient) in rest {
            match gradient {
                Some(gradient) => {
                    self.place.submit(&self.sync.submitter(), layer, gradient, wanted[layer])?
                }
                None => self.sync.skip(layer)?,
            }
        }
        self.sync.finish()?;
        self.watch.come().wanted = self.place.wanted(&self.sync);
        Ok(())
    }

    /// What did not come during the backward pass, the last layer first: layers with their gradients, if they have one.
    fn rest<M: Module>(
        &mut self,
        model: &M,
        mut gradients: GradientsParams,
    ) -> Result<Vec<(usize, Option<Values>)>, DistributedError> {
        let mut taken = take(model, &mut gradients);
        let mut come = self.watch.come();
        let came = std::mem::replace(&mut come.layers, vec![false; self.trained.len()]);
        let failure = come.failure.take();
        drop(come);
        failure.map_or(Ok(()), Err)?;
        let mut rest = Vec::new();
        for (layer, trained) in self.trained.iter().enumerate().rev() {
            let name = || self.sync.layers()[layer].name.clone();
            match (taken.remove(&trained.id), came[layer]) {
                (None, true) => {}
                (None, false) => rest.push((layer, None)),
                (Some(_), true) => {
                    let why = format!("parameter {} is watched and used unwatched at the same step", name());
                    return Err(DistributedError::Model(why));
                }
                (Some(gradient), false) => {
                    let gradient =
                        gradient.map_err(|why| DistributedError::Unserved { name: name(), why })?;
                    rest.push((layer, Some(gradient)));
                }
            }
        }
        if !taken.is_empty() || !gradients.is_empty() {
            return Err(DistributedError::Model(STRANGE.into()));
        }
        Ok(rest)
    }

    /// No other rank waits for one that cannot go on.
    fn or_give_up<T>(&self, result: Result<T, DistributedError>) -> Result<T, DistributedError> {
        result.inspect_err(|error| self.sync.give_up(&error.to_string()))
    }
}

const IDLE: &str = "no parameter of the module is trained any more: all were frozen, or the module was moved to another device";
const TWICE: &str = "the configuration has momentum: let step update the weights, or choose Momentum::None and an optimizer with its own";
const ALONE: &str = "with local steps, step updates the weights: ranks exchange no gradients";
const LATE: &str = "layers are watched: begin(rate) comes before the forward pass";
const STRANGE: &str =
    "there is a gradient of a parameter that was frozen or not there when the module was made distributed";

//! What can be said of a module before it is made distributed. Comes in: a module of this rank. Goes out: the module as all ranks begin
//! with it, and what trains it. What must hold: ranks that were told unlike things find out before the first step.

use super::alone::Alone;
use super::module::{Met, walk};
use super::place::Place;
use super::{Distributed, DistributedError, Trained, Watch};
use crate::flex::called;
use burn::module::Module;
use redsync_comm::Communicator;
use redsync_engine::{Config, Kind, Layer, Local, Momentum, Optimizer};
use std::sync::Arc;

/// Makes a module distributed where [`Distributed::new`] would take something for granted.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use redsync_burn::{Config, Distributed, DistributedError, on_threads};
/// use redsync_engine::Layer;
///
/// let hashes = on_threads(2, |comm| {
///     let linear: Linear = LinearConfig::new(20, 3).init(&Device::flex().autodiff());
///     let setup = Distributed::setup(Config::default())
///         .layers(|layer| Layer { name: format!("first.{}", layer.name), ..layer });
///     let (linear, distributed) = setup.make(linear, comm)?;
///     assert_eq!(distributed.synchronizer().layers()[0].name, "first.weight");
///     distributed.check(&linear)
/// })?;
/// assert_eq!(hashes[0], hashes[1]);
/// # Ok::<(), DistributedError>(())
/// ```
pub struct Setup {
    config: Config,
    layer: Box<dyn Fn(Layer) -> Layer>,
    alike: bool,
    local: Option<(u64, f32)>,
}

impl Setup {
    pub(super) fn new(config: Config) -> Self {
        Setup { config, layer: Box::new(|layer| layer), alike: false, local: None }
    }

    /// What the layers are: the function gets each as it would be taken, a weight or a bias with the name of its path, and gives it another
    /// name, kind or momentum. Unless it calls one the output, the last weight is. The order of the layers and their sizes are the module's.
    pub fn layers(self, layer: impl Fn(Layer) -> Layer + 'static) -> Self {
        Setup { layer: Box::new(layer), ..self }
    }

    /// All ranks have made the same module, from one seed or one file: nothing is sent, and only compared.
    pub fn alike(self) -> Self {
        Setup { alike: true, ..self }
    }

    /// Local steps: [`Distributed::step`] updates the weights by the gradients of this rank alone, and after every so many steps the ranks
    /// exchange the largest differences of their weights, which are applied at a rate, usually 1. Momentum and clipping of the
    /// configuration are those of the steps. A parameter must not be frozen meanwhile: what waits of it is exchanged all the same.
    pub fn local_steps(self, every: u64, rate: f32) -> Self {
        Setup { local: Some((every, rate)), ..self }
    }

    /// The module, and what trains it. All ranks call this.
    pub fn make<M: Module>(
        self,
        model: M,
        comm: Arc<dyn Communicator>,
    ) -> Result<(M, Distributed), DistributedError> {
        let made = self.made(model, comm.clone());
        made.inspect_err(|error| comm.give_up(&error.to_string()))
    }

    fn made<M: Module>(
        self,
        model: M,
        comm: Arc<dyn Communicator>,
    ) -> Result<(M, Distributed), DistributedError> {
        let Found { layers, trained, mut place, agree } = self.find(&model)?;
        let Setup { mut config, alike, local, .. } = self;
        config.agree.extend(agree);
        let (deadline, momentum, clip) = (config.deadline, config.momentum, config.clip);
        let told = |every: u64, rate: f32| {
            format!("exchanged every {every} at {rate}, with {momentum}, clipped at {clip:?}")
        };
        if let Some((every, rate)) = local {
            if !place.is_host() {
                return Err(DistributedError::Model(ELSEWHERE.into()));
            }
            config.check_clip().map_err(DistributedError::Model)?;
            if let Some(layer) = layers.iter().find(|layer| layer.momentum.is_some()) {
                let why = format!(
                    "layer {} has a momentum of its own, and with local steps all have one",
                    layer.name
                );
                return Err(DistributedError::Model(why));
            }
            config.agree.push(("local steps".into(), told(every, rate)));
            // What is exchanged then are differences of weights.
            (config.momentum, config.clip) = (Momentum::None, None);
        }
        let sync = place.synchronizer(layers, config, comm.clone())?;
        let place = Arc::new(place);
        let numbers = trained.iter().enumerate().map(|(layer, trained)| (trained.id, layer)).collect();
        let wanted = place.wanted(&sync);
        let watch = Watch::new(numbers, sync.submitter(), place.clone(), wanted, local.is_some());
        let optimizer = Optimizer::of(sync.layers(), momentum, 0.0);
        let (begun, alone) = (None, None);
        let mut made =
            Distributed { sync, optimizer, watch, place, trained, comm, deadline, momentum, begun, alone };
        let model = match alike {
            true => made.check(&model).map(|_| model)?,
            false => made.begin_alike(model)?,
        };
        if let Some((every, rate)) = local {
            let local = made.read(&model, |weights| Local::new(every, rate, weights.iter().copied()))??;
            made.alone = Some(Alone { local, clip, steps: 0, told: told(every, rate) });
        }
        Ok((model, made))
    }

    /// What there is to train in a module, and where it is.
    fn find<M: Module>(&self, model: &M) -> Result<Found, DistributedError> {
        let (mut layers, mut trained, mut agree) = (Vec::<Layer>::new(), Vec::new(), Vec::new());
        let mut place = None;
        for met in walk(model) {
            let Met { path, id, trains, shape, tensor } = met;
            let kept = match (trains, &tensor) {
                (true, _) => "trained",
                (false, Ok(_)) => "frozen",
                (false, Err(_)) => "elsewhere",
            };
            agree.push((format!("parameter {path}"), format!("{shape:?}, {kept}")));
            if trains {
                let tensor = tensor.map_err(|why| DistributedError::Unserved { name: path.clone(), why })?;
                let place = place.get_or_insert_with(|| Place::of(&tensor));
                if tensor.device() != place.device() {
                    let (device, other) = (called(&tensor.device()), called(&place.device()));
                    let first = layers.first().map_or(String::new(), |layer| layer.name.clone());
                    return Err(DistributedError::Apart { name: path, device, first, other });
                }
                let kind = if shape.len() < 2 { Kind::BiasOrNorm } else { Kind::Weight };
                let size = shape.iter().product();
                layers.push(Layer { size, ..(self.layer)(Layer::new(path, size, kind)) });
                trained.push(Trained { id, shape });
            }
        }
        if layers.iter().all(|layer| layer.kind != Kind::Output)
            && let Some(last) = layers.iter_mut().rfind(|layer| layer.kind == Kind::Weight)
        {
            last.kind = Kind::Output;
        }
        let place = place.ok_or_else(|| DistributedError::Model(NOTHING.into()))?;
        Ok(Found { layers, trained, place, agree })
    }
}

/// What there is to train in a module, and where it is.
struct Found {
    layers: Vec<Layer>,
    trained: Vec<Trained>,
    place: Place,
    /// What must be the same on all ranks.
    agree: Vec<(String, String)>,
}

const NOTHING: &str = "the module has no parameter that is trained: make it on a device with gradients (Device::flex().autodiff())";
const ELSEWHERE: &str =
    "local steps are made in the memory of the host: make the module on Device::flex().autodiff()";

//! Where a module is trained: in the memory of the host, or in that of a device. Comes in: tensors of parameters and of gradients. Goes out:
//! gradients to the synchronizer, and parameters with their updates. What must hold: wherever it is, the same gradients give the same bits.

use super::DistributedError;
use crate::flex::{self, BurnGradient, Unserved, values, values_mut};
use burn::backend::flex::FlexTensor;
use burn::tensor::{Device, Tensor};
use redsync_comm::Communicator;
use redsync_engine::{Config, Layer, Optimizer, Submitter, SyncError, Synchronizer};
use std::borrow::Cow;
use std::sync::Arc;
#[cfg(feature = "wgpu")]
use {crate::cube, burn_cubecl::tensor::CubeTensor};

/// A tensor of a parameter or of its gradient: f32, contiguous, where it is.
#[derive(Clone)]
#[cfg_attr(feature = "wgpu", allow(clippy::large_enum_variant))] // A few at a time, and moved once.
pub(super) enum Values {
    /// In the memory of the host.
    Host(FlexTensor),
    /// On a device.
    #[cfg(feature = "wgpu")]
    There(CubeTensor),
}

impl Values {
    /// Anybody's tensor, off the tape, shared with it where that is possible.
    pub fn of<const D: usize>(tensor: Tensor<D>) -> Result<Self, Unserved> {
        #[cfg(feature = "wgpu")]
        if cube::is_here(&tensor) {
            return cube::served(tensor).map(Values::There);
        }
        flex::served(tensor).map(Values::Host)
    }

    /// Whether anybody's tensor is one.
    pub fn check<const D: usize>(tensor: &Tensor<D>) -> Result<(), Unserved> {
        #[cfg(feature = "wgpu")]
        if cube::is_here(tensor) && tensor.dtype() == burn::tensor::DType::F32 {
            return Ok(());
        }
        Unserved::check(tensor)
    }

    /// The values, if they are in the memory of the host.
    pub fn host(&self) -> Option<&[f32]> {
        match self {
            Values::Host(tensor) => Some(values(tensor)),
            #[cfg(feature = "wgpu")]
            Values::There(_) => None,
        }
    }

    /// The same, to change: in place unless somebody else shares them.
    pub fn host_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            Values::Host(tensor) => Some(values_mut(tensor)),
            #[cfg(feature = "wgpu")]
            Values::There(_) => None,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Values::Host(tensor) => values(tensor).len(),
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => cube::len(tensor),
        }
    }

    /// Its device.
    pub fn device(&self) -> Device {
        match self {
            Values::Host(_) => Device::flex(),
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => cube::device(tensor),
        }
    }

    /// The values, copied to the host if they are elsewhere.
    pub fn read(&self) -> Result<Cow<'_, [f32]>, DistributedError> {
        match self {
            Values::Host(tensor) => Ok(values(tensor).into()),
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => Ok(cube::read(tensor)?.into()),
        }
    }

    /// Other values, as many.
    pub fn write(self, new: &[f32]) -> Result<Self, DistributedError> {
        match self {
            Values::Host(mut tensor) => {
                values_mut(&mut tensor).copy_from_slice(new);
                Ok(Values::Host(tensor))
            }
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => Ok(Values::There(there::written(tensor, new)?)),
        }
    }

    /// What stands for it while it is away: as many axes, and in the memory of the host one element.
    pub fn empty(&self) -> Self {
        match self {
            Values::Host(tensor) => {
                Values::Host(flex::tensor(vec![0.0], &vec![1; flex::shape(tensor).len()]))
            }
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => Values::There(tensor.clone()),
        }
    }

    /// As Burn's operations take it, off the tape.
    pub fn tensor<const D: usize>(self) -> Tensor<D> {
        match self {
            Values::Host(tensor) => Tensor::from_primitive::<flex::Inner>(tensor),
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => Tensor::from_primitive::<cube::Inner>(tensor),
        }
    }
}

/// Where all trained parameters of a module are.
#[cfg_attr(feature = "wgpu", allow(clippy::large_enum_variant))] // There is one of it.
pub(super) enum Place {
    /// In the memory of the host.
    Host,
    /// On a device.
    #[cfg(feature = "wgpu")]
    There(there::Resident),
}

impl Place {
    /// The place of a parameter.
    pub fn of(values: &Values) -> Self {
        match values {
            Values::Host(_) => Place::Host,
            #[cfg(feature = "wgpu")]
            Values::There(tensor) => Place::There(there::Resident::new(tensor)),
        }
    }

    /// Whether it is the memory of the host.
    pub fn is_host(&self) -> bool {
        matches!(self, Place::Host)
    }

    /// Its device.
    pub fn device(&self) -> Device {
        match self {
            Place::Host => Device::flex(),
            #[cfg(feature = "wgpu")]
            Place::There(resident) => resident.device(),
        }
    }

    /// The synchronizer of layers that are here.
    pub fn synchronizer(
        &mut self,
        layers: Vec<Layer>,
        config: Config,
        comm: Arc<dyn Communicator>,
    ) -> Result<Synchronizer, SyncError> {
        match self {
            Place::Host => Synchronizer::new(layers, config, comm),
            #[cfg(feature = "wgpu")]
            Place::There(resident) => resident.synchronizer(layers, config, comm),
        }
    }

    /// For each layer, whether its gradient is wanted in the memory of the host at the step that is under way.
    pub fn wanted(&self, sync: &Synchronizer) -> Vec<bool> {
        match self {
            Place::Host => vec![true; sync.layers().len()],
            #[cfg(feature = "wgpu")]
            Place::There(resident) => resident.wanted(sync),
        }
    }

    /// Hands a gradient over. One that is elsewhere is refused with the name of its device.
    pub fn submit(
        &self,
        submitter: &Submitter,
        layer: usize,
        gradient: Values,
        wanted: bool,
    ) -> Result<(), DistributedError> {
        match (self, gradient) {
            (Place::Host, Values::Host(gradient)) => {
                submitter.submit(layer, BurnGradient::new(gradient))?;
            }
            #[cfg(feature = "wgpu")]
            (Place::There(resident), Values::There(gradient)) => {
                submitter.submit(layer, resident.source(gradient, wanted)?)?;
            }
            #[cfg(feature = "wgpu")]
            (_, gradient) => return Err(self.elsewhere(&gradient)),
        }
        // Without another place there is no choice.
        let _ = wanted;
        Ok(())
    }

    /// Updates the weights of a layer.
    pub fn step(
        &self,
        optimizer: &mut Optimizer,
        sync: &mut Synchronizer,
        layer: usize,
        weights: Values,
        rate: f32,
    ) -> Result<Values, DistributedError> {
        match (self, weights) {
            (Place::Host, Values::Host(mut weights)) => {
                optimizer.step_layer(sync, layer, values_mut(&mut weights), rate)?;
                Ok(Values::Host(weights))
            }
            #[cfg(feature = "wgpu")]
            (Place::There(resident), Values::There(weights)) => {
                Ok(Values::There(resident.step(optimizer, sync, layer, weights, rate)?))
            }
            #[cfg(feature = "wgpu")]
            (_, weights) => Err(self.elsewhere(&weights)),
        }
    }

    /// The averaged gradient of a layer.
    pub fn averaged(
        &self,
        sync: &mut Synchronizer,
        layer: usize,
        shape: &[usize],
    ) -> Result<Values, DistributedError> {
        match self {
            Place::Host => {
                let mut tensor = flex::tensor(vec![0.0; shape.iter().product()], shape);
                // Minus minus one: the update itself.
                sync.apply(layer, values_mut(&mut tensor), -1.0)?;
                Ok(Values::Host(tensor))
            }
            #[cfg(feature = "wgpu")]
            Place::There(resident) => Ok(Values::There(resident.averaged(sync, layer, shape)?)),
        }
    }

    #[cfg(feature = "wgpu")]
    fn elsewhere(&self, values: &Values) -> DistributedError {
        let (now, before) = (flex::called(&values.device()), flex::called(&self.device()));
        DistributedError::Model(format!(
            "a parameter was moved: it is on {now}, and was on {before} when the module was made distributed"
        ))
    }
}

#[cfg(feature = "wgpu")]
pub(super) mod there {
    //! The same on a device: u and v of compressed layers are there, and sparse updates are added there. What is dense at a step goes
    //! through the host.

    use super::*;
    use burn_cubecl::CubeDevice;
    use redsync_core::ConfigError;
    use redsync_engine::offload::serves;
    use redsync_engine::{Exchange, Host, LayerCompressor, Update};
    use redsync_gpu::{Gpu, GpuGradient, GpuWeights};
    use std::cell::RefCell;

    /// Bytes that crossed between the device and the host.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Copied {
        /// To accumulate, choose and take out, of layers whose u and v are on the device.
        pub selected: u64,
        /// To apply the messages of all ranks to the weights of those layers.
        pub applied: u64,
        /// For all other layers, and whatever else goes through the host.
        pub whole: u64,
    }

    pub struct Resident {
        device: CubeDevice,
        /// The same device three times, each with counters of its own.
        selects: Gpu,
        applies: Gpu,
        whole: Gpu,
        /// For each layer, whether its u and v are on the device.
        resident: Vec<bool>,
        clips: bool,
    }

    /// Says where the layers of a module live, and notes which are on the device.
    struct Placing<'a>(&'a Gpu, RefCell<&'a mut Vec<bool>>);

    impl redsync_engine::Device for Placing<'_> {
        fn compressor(
            &self,
            number: u32,
            layer: &Layer,
            config: redsync_core::Config,
        ) -> Result<Box<dyn LayerCompressor>, ConfigError> {
            if !serves(&config) {
                return Host.compressor(number, layer, config);
            }
            if let Some(resident) = self.1.borrow_mut().get_mut(number as usize) {
                *resident = true;
            }
            self.0.compressor(number, layer, config)
        }
    }

    impl Resident {
        pub fn new(tensor: &CubeTensor) -> Self {
            let gpu = || Gpu::on(tensor.client.clone());
            let device = tensor.device.clone();
            let (resident, clips) = (Vec::new(), false);
            Resident { device, selects: gpu(), applies: gpu(), whole: gpu(), resident, clips }
        }

        pub fn device(&self) -> Device {
            Device::new(self.device.clone())
        }

        pub fn synchronizer(
            &mut self,
            layers: Vec<Layer>,
            config: Config,
            comm: Arc<dyn Communicator>,
        ) -> Result<Synchronizer, SyncError> {
            self.clips = config.clip.is_some();
            self.resident = vec![false; layers.len()];
            let placing = Placing(&self.selects, RefCell::new(&mut self.resident));
            Synchronizer::on(&placing, layers, config, comm)
        }

        pub fn wanted(&self, sync: &Synchronizer) -> Vec<bool> {
            let whole = self.clips || sync.exchange() == Exchange::Hosts;
            let layers = self.resident.iter().enumerate();
            layers.map(|(layer, resident)| whole || !(*resident && sync.is_sparse(layer))).collect()
        }

        pub fn source(&self, gradient: CubeTensor, wanted: bool) -> Result<GpuGradient, DistributedError> {
            let source = cube::gradient(gradient);
            Ok(if wanted { source.for_host(&self.whole) } else { source })
        }

        /// What counts the bytes of a layer's update.
        fn counting(&self, layer: usize) -> &Gpu {
            if self.resident.get(layer) == Some(&true) { &self.applies } else { &self.whole }
        }

        pub fn step(
            &self,
            optimizer: &mut Optimizer,
            sync: &mut Synchronizer,
            layer: usize,
            weights: CubeTensor,
            rate: f32,
        ) -> Result<CubeTensor, DistributedError> {
            // What somebody else holds stays as it is for him.
            let (shared, n) = (!weights.handle.can_mut(), cube::len(&weights));
            let sparse = matches!(sync.update(layer), Some(Update::Sparse(_)));
            let gpu = if sparse { self.counting(layer) } else { &self.whole };
            let mut target = GpuWeights::new(gpu, weights.handle, n)?;
            if sparse {
                if shared {
                    target = target.copied();
                }
                if let Some(factor) = optimizer.shrinkage(layer, rate) {
                    target.scale(factor);
                }
                sync.apply_to(layer, &mut target, rate)?;
            } else {
                let mut values = target.read()?;
                optimizer.step_layer(sync, layer, &mut values, rate)?;
                target.replace(&values)?;
            }
            Ok(CubeTensor { handle: target.into_buffer(), ..weights })
        }

        pub fn averaged(
            &self,
            sync: &mut Synchronizer,
            layer: usize,
            shape: &[usize],
        ) -> Result<CubeTensor, DistributedError> {
            let n = shape.iter().product();
            let target = if matches!(sync.update(layer), Some(Update::Sparse(_))) {
                let mut target = GpuWeights::zeros(self.counting(layer), n);
                sync.apply_to(layer, &mut target, -1.0)?;
                target
            } else {
                let mut values = vec![0.0; n];
                sync.apply(layer, &mut values, -1.0)?;
                GpuWeights::upload(&self.whole, &values)
            };
            Ok(cube::tensor(&self.whole, &self.device, shape, target))
        }

        pub fn take_copied(&self) -> Copied {
            Copied {
                selected: self.selects.take_traffic().copied,
                applied: self.applies.take_traffic().copied,
                whole: self.whole.take_traffic().copied,
            }
        }
    }

    /// The tensor with other values.
    pub fn written(tensor: CubeTensor, new: &[f32]) -> Result<CubeTensor, DistributedError> {
        let (gpu, n) = (Gpu::on(tensor.client.clone()), cube::len(&tensor));
        let mut target = GpuWeights::new(&gpu, tensor.handle, n)?;
        target.replace(new)?;
        Ok(CubeTensor { handle: target.into_buffer(), ..tensor })
    }
}

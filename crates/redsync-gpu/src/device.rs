//! Devices by name, and the buffers of one: everything that is launched on a device, written to it or read from it goes through here.
//! What must hold: one device's work is done in the order of the calls, whichever thread they come from; every copied byte is counted.

use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::device::WgpuDeviceKind;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_environment::stream::StreamId;
use redsync_core::ConfigError;
use redsync_engine::offload::{DeviceError, Offloaded};
use redsync_engine::{Device, Layer, LayerCompressor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::layer::GpuLayer;

/// Units of a cube.
pub(crate) const UNITS: u32 = 256;
/// Cubes along one axis.
const AXIS: u32 = 65_535;

/// A device whose memory holds layers.
#[derive(Clone)]
pub struct Gpu {
    client: Client,
    /// That of the thread that opened the device: all work is done on it.
    stream: StreamId,
    traffic: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    copied: AtomicU64,
    moved: AtomicU64,
}

/// Bytes of some work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copied between host and device, either way.
    pub copied: u64,
    /// Read and written by kernels in the memory of the device, by what each launch has to touch.
    pub moved: u64,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({})", self.name())
    }
}

impl Gpu {
    /// The names of devices.
    pub const NAMES: [&str; 4] = ["wgpu", "software", "cuda", "hip"];

    /// Opens a device by its name: `wgpu` is the best that Vulkan, Metal or DirectX has, `software` Vulkan's on the CPU, `cuda` and `hip`
    /// the first of theirs. Those need the feature of the same name.
    pub fn open(name: &str) -> Result<Self, DeviceError> {
        let device = match name {
            // Without a driver of Vulkan the default silently becomes OpenGL, which lacks what is needed here.
            "wgpu" if cfg!(target_os = "linux") => {
                cubecl::Device::vulkan(WgpuDeviceKind::DefaultDevice).or_else(|_| software())
            }
            "wgpu" => cubecl::Device::wgpu(WgpuDeviceKind::DefaultDevice),
            "software" => software(),
            "cuda" => cubecl::Device::cuda(0),
            "hip" => cubecl::Device::rocm(0),
            _ => {
                let told = format!("there is no device {name}; there are {}", Self::NAMES.join(", "));
                return Err(DeviceError(told));
            }
        };
        device.map(|device| Self::on(device.client())).map_err(|e| DeviceError(e.to_string()))
    }

    /// The device behind a client, such as a framework's.
    pub fn on(client: Client) -> Self {
        Gpu { client, stream: StreamId::current(), traffic: Arc::default() }
    }

    /// The same device and counters, for work in the order of what was done to a buffer: whoever uses the buffer next waits for the
    /// stream on which it was made, and for no other.
    pub(crate) fn beside(&self, buffer: &Handle) -> Self {
        Gpu { client: self.client.clone(), stream: buffer.stream, traffic: self.traffic.clone() }
    }

    /// Whether a buffer is in the memory of this device.
    pub(crate) fn has(&self, buffer: &Handle) -> bool {
        buffer.service == self.client.service_id()
    }

    /// What CubeCL calls it.
    pub fn name(&self) -> &'static str {
        self.client.name()
    }

    /// What launches kernels.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What was copied and moved since the last time this was asked.
    pub fn take_traffic(&self) -> Traffic {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Traffic { copied: take(&self.traffic.copied), moved: take(&self.traffic.moved) }
    }

    /// A launch touches so many words of the device's memory.
    pub(crate) fn moves(&self, words: usize) {
        self.traffic.moved.fetch_add(4 * words as u64, Ordering::Relaxed);
    }

    /// Does something in the order of this device's work.
    pub(crate) fn in_order<T>(&self, work: impl FnOnce(&Client) -> T) -> T {
        self.stream.executes(|| work(&self.client))
    }

    fn count(&self, bytes: usize) {
        self.traffic.copied.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A buffer with these bytes, and zeros up to a whole number of vectors.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Handle {
        self.count(bytes.len());
        let whole = bytes.len().next_multiple_of(16).max(16);
        if whole == bytes.len() {
            return self.in_order(|client| client.create_from_slice(bytes));
        }
        let mut padded = bytes.to_vec();
        padded.resize(whole, 0);
        self.in_order(|client| client.create_from_slice(&padded))
    }

    /// A buffer with these bytes and no others.
    pub(crate) fn upload_exactly(&self, bytes: &[u8]) -> Handle {
        if bytes.is_empty() {
            return self.empty(0);
        }
        self.count(bytes.len());
        self.in_order(|client| client.create_from_slice(bytes))
    }

    /// Replaces what a buffer begins with.
    pub(crate) fn write(&self, buffer: &Handle, bytes: &[u8]) {
        self.count(bytes.len());
        let bytes = Bytes::from_bytes_vec(bytes.to_vec());
        self.in_order(|client| client.write(buffer, bytes));
    }

    /// A buffer of so many words, of unknown content.
    pub(crate) fn empty(&self, n: usize) -> Handle {
        self.in_order(|client| client.empty((4 * n).next_multiple_of(16).max(16)))
    }

    /// The first `n` words of a buffer.
    pub(crate) fn download(&self, buffer: &Handle, n: usize) -> Result<Vec<u32>, DeviceError> {
        if n == 0 {
            return Ok(Vec::new());
        }
        self.count(4 * n);
        let unread = buffer.size_in_used().saturating_sub(4 * n as u64);
        let part = buffer.clone().offset_end(unread);
        let bytes = self.in_order(|client| client.read_one(part)).map_err(|e| DeviceError(e.to_string()))?;
        Ok(bytes[..4 * n].chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// The same as floats.
    pub(crate) fn download_floats(&self, buffer: &Handle, n: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(self.download(buffer, n)?.into_iter().map(f32::from_bits).collect())
    }

    /// How many elements one buffer can hold.
    pub fn capacity(&self) -> usize {
        (self.client.properties().memory.max_page_size / 4) as usize
    }

    /// Waits until all that was launched is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        let done = self.in_order(|client| cubecl::future::block_on(client.sync()));
        done.map_err(|e| DeviceError(e.to_string()))
    }
}

fn software() -> Result<cubecl::Device, cubecl::device::DeviceUnavailable> {
    cubecl::Device::vulkan(WgpuDeviceKind::Cpu)
}

/// Cubes for so many units, each with so much to do.
pub(crate) fn cubes(work: usize, per: u32) -> CubeCount {
    let cubes = work.div_ceil((UNITS * per) as usize) as u32;
    if cubes <= AXIS {
        return CubeCount::Static(cubes, 1, 1);
    }
    CubeCount::Static(AXIS, cubes.div_ceil(AXIS), 1)
}

impl Device for Gpu {
    fn compressor(
        &self,
        number: u32,
        layer: &Layer,
        config: redsync_core::Config,
    ) -> Result<Box<dyn LayerCompressor>, ConfigError> {
        let kernels = GpuLayer::new(self, layer.size)?;
        Ok(Box::new(Offloaded::new(number, &layer.name, layer.size, config, kernels)?))
    }
}

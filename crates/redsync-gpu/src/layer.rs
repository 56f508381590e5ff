//! u and v of one layer in the buffers of a device, and the launches that change them. What must hold: buffers are whole vectors of four,
//! zero beyond the layer, so that every pass works on vectors.

use crate::device::{Gpu, UNITS, cubes};
use crate::kernels::{self, Form};
use crate::source::{GpuGradient, Kind};
use crate::weights::GpuWeights;
use cubecl::prelude::*;
use cubecl::server::Handle;
use redsync_core::{Lens, Momentum, Phase, StatLanes};
use redsync_engine::Source;
use redsync_engine::offload::{DeviceError, Digit, Edge, Found, Kernels, Pass, Seek, Sent};
use std::any::Any;
use std::borrow::Cow;

/// Elements of a vector.
const WIDTH: usize = 4;
/// Vectors that a unit of a pass works on.
const PER: u32 = 8;
/// Elements that a unit of a histogram counts: many, since a cube's bins are added to the common ones at its end.
const COUNTED: u32 = 64;

/// Numbers that say where the largest elements end.
const EDGE: usize = 3;

/// Numbers that a pass counts in: what was found, and what is not finite.
const HEAD: usize = 2;

/// One layer on a device.
pub struct GpuLayer {
    gpu: Gpu,
    n: usize,
    u: Option<Handle>,
    v: Handle,
    /// u and v before the last pass that saved them.
    saved: Option<(Option<Handle>, Handle)>,
    /// What was found last: indices and bits, `listed` of them.
    list: Handle,
    listed: usize,
    capacity: usize,
    /// Stands for a buffer that a kernel does not touch.
    nothing: Handle,
}

/// A whole buffer as an argument of a kernel, with its length in elements of what the kernel takes it for.
pub(crate) fn all(buffer: &Handle, length: usize) -> BufferArg {
    // SAFETY: every buffer here was made with at least as many elements by the functions of `Gpu`, or checked in `gradient_on`.
    unsafe { BufferArg::from_raw_parts(buffer.clone(), length) }
}

/// A buffer of so many words, all zero, up to whole vectors. They do not come from the host.
fn zeros(gpu: &Gpu, n: usize) -> Handle {
    GpuWeights::zeros(gpu, n.next_multiple_of(WIDTH)).into_buffer()
}

/// The bits of a floor that is not negative, as the kernels compare them.
fn bits(floor: f32) -> i32 {
    floor.to_bits() as i32
}

impl GpuLayer {
    /// Zeros on a device.
    pub fn new(gpu: &Gpu, n: usize) -> Result<Self, DeviceError> {
        if n > gpu.capacity() {
            let (most, name) = (gpu.capacity(), gpu.name());
            let told = format!("{n} elements do not fit in one buffer of {name}, which has room for {most}");
            return Err(DeviceError(told));
        }
        Ok(GpuLayer {
            gpu: gpu.clone(),
            n,
            u: None,
            v: zeros(gpu, n),
            saved: None,
            list: gpu.empty(0),
            listed: 0,
            capacity: 0,
            nothing: gpu.empty(WIDTH),
        })
    }

    /// The buffer of v.
    pub fn v(&self) -> &Handle {
        &self.v
    }

    fn vectors(&self) -> usize {
        self.n.div_ceil(WIDTH)
    }

    fn u_or_nothing(&self) -> (&Handle, usize) {
        self.u.as_ref().map_or((&self.nothing, WIDTH), |u| (u, self.vectors() * WIDTH))
    }

    /// Makes the list large enough.
    fn make_room(&mut self, capacity: usize) {
        self.listed = 0;
        if capacity > self.capacity {
            (self.list, self.capacity) = (self.gpu.empty(2 * capacity), capacity);
        }
    }

    /// A copy of a buffer, times a factor.
    fn copied(&self, from: &Handle, factor: f32) -> Handle {
        let (to, length) = (self.gpu.empty(self.n), self.vectors());
        if length > 0 {
            self.gpu.moves(2 * self.n);
            self.gpu.in_order(|client| {
                // SAFETY: both buffers have `length` vectors.
                unsafe {
                    kernels::copy::launch_unchecked(
                        client,
                        cubes(length, 1),
                        CubeDim::new_1d(UNITS),
                        WIDTH,
                        all(from, length),
                        all(&to, length),
                        length as u32,
                        factor,
                        factor != 1.0,
                    );
                }
            });
        }
        to
    }

    /// A gradient on this device, and the width of vectors in which it can be read.
    fn gradient_on<'a>(&self, source: &'a dyn Source) -> Result<(Cow<'a, GpuGradient>, usize), DeviceError> {
        let any: &dyn Any = source;
        let (gradient, padded) = match (any.downcast_ref::<GpuGradient>(), source.host()) {
            (Some(gradient), _) => (Cow::Borrowed(gradient), false),
            (None, Some(values)) => (Cow::Owned(GpuGradient::upload(&self.gpu, values)), true),
            (None, None) => return Err(DeviceError("the gradient is on another kind of device".into())),
        };
        if !self.gpu.has(&gradient.buffer) {
            return Err(DeviceError("the gradient is on another device".into()));
        }
        let words = if gradient.kind == Kind::F32 { gradient.len } else { gradient.len.div_ceil(2) };
        if gradient.buffer.size_in_used() < 4 * words as u64 {
            return Err(DeviceError(format!(
                "the gradient's buffer is shorter than its {} elements",
                self.n
            )));
        }
        let whole = padded || self.n.is_multiple_of(WIDTH);
        Ok((gradient, if whole { WIDTH } else { 1 }))
    }

    /// Reads what a pass has found, if it fits.
    fn read_found(
        &mut self,
        head: &Handle,
        seek: Option<Seek>,
        found: &mut Found,
    ) -> Result<bool, DeviceError> {
        let head = self.gpu.download(head, HEAD)?;
        let (count, finite) = (head[0] as usize, head[1] == 0);
        found.count = count;
        found.elements.clear();
        if let Some(seek) = seek.filter(|seek| finite && seek.takes(count)) {
            debug_assert!(seek.capacity <= self.capacity);
            let words = self.gpu.download(&self.list, 2 * count)?;
            found.elements.extend(words.chunks_exact(2).map(|pair| (pair[0], f32::from_bits(pair[1]))));
            self.listed = count;
        }
        self.gpu.moves(2 * count.min(self.capacity));
        Ok(finite)
    }

    /// Puts values in v, or adds them.
    fn scatter(&mut self, indices: &[u32], values: &[f32], adds: bool, clear_u: bool) {
        if indices.is_empty() {
            return;
        }
        let (at, values) =
            (self.gpu.upload(bytemuck::cast_slice(indices)), self.gpu.upload(bytemuck::cast_slice(values)));
        let (u, u_length) = self.u_or_nothing();
        let count = indices.len();
        self.gpu.moves(count * (3 + usize::from(adds) + usize::from(clear_u)));
        self.gpu.in_order(|client| {
            // SAFETY: indices are those of the layer, and there are as many values.
            unsafe {
                kernels::scatter::launch_unchecked(
                    client,
                    cubes(count, 1),
                    CubeDim::new_1d(UNITS),
                    all(u, u_length),
                    all(&self.v, self.n),
                    all(&at, count),
                    all(&values, count),
                    count as u32,
                    adds,
                    clear_u,
                );
            }
        });
    }

    /// Plain `v += g` with a gradient of f32 on this device: what every pass is compared with.
    pub fn add_plain(&mut self, gradient: &GpuGradient) {
        let length = self.vectors();
        self.gpu.moves(3 * self.n);
        self.gpu.in_order(|client| {
            // SAFETY: `upload` makes whole vectors.
            unsafe {
                kernels::add::launch_unchecked(
                    client,
                    cubes(length, PER),
                    CubeDim::new_1d(UNITS),
                    WIDTH,
                    all(&gradient.buffer, length),
                    all(&self.v, length),
                    length as u32,
                    PER,
                );
            }
        });
    }
}

impl Kernels for GpuLayer {
    fn make_u(&mut self) -> Result<(), DeviceError> {
        self.u = Some(zeros(&self.gpu, self.n));
        Ok(())
    }

    fn accumulate(
        &mut self,
        source: &dyn Source,
        pass: &Pass,
        seek: Option<Seek>,
        found: &mut Found,
    ) -> Result<bool, DeviceError> {
        if self.n == 0 {
            *found = Found::default();
            return Ok(true);
        }
        let (gradient, width) = self.gradient_on(source)?;
        if pass.save {
            self.saved = Some((self.u.as_ref().map(|u| self.copied(u, 1.0)), self.copied(&self.v, 1.0)));
        }
        self.make_room(seek.map_or(0, |seek| seek.capacity));
        let Lens { keep, flip } = seek.map_or(Phase::Both, |seek| seek.phase).lens();
        let (rule, m) = match pass.momentum {
            Momentum::None => (kernels::NONE, 0.0),
            Momentum::Plain(m) => (kernels::PLAIN, m),
            Momentum::Nesterov(m) => (kernels::NESTEROV, m),
            Momentum::Adam(_) => return Err(DeviceError("it has no kernels for Adam".into())),
        };
        let kind = match gradient.kind {
            Kind::F32 => kernels::SINGLE,
            Kind::F16 => kernels::HALF,
            Kind::Bf16 => kernels::BRAIN,
        };
        let form = Form {
            rule,
            kind,
            scales: pass.scale != 1.0,
            carries: pass.carry != 1.0,
            seeks: seek.is_some(),
            both: seek.is_none_or(|seek| seek.phase == Phase::Both),
        };
        let (capacity, floor) = seek.map_or((0, 0.0), |seek| (seek.capacity, seek.floor));
        // A gradient that is not whole vectors is read by elements, and so is the rest.
        let length = if width == 1 { self.n } else { self.vectors() };
        let (u, u_length) = self.u_or_nothing();
        let head = zeros(&self.gpu, HEAD);
        // Halves come as words, half as many in a vector; by elements, two share one.
        let halves = kind != kernels::SINGLE;
        let (packed, words) = match (halves, width) {
            (false, _) => (width, length),
            (true, 1) => (1, self.n.div_ceil(2)),
            (true, _) => (width / 2, length),
        };
        self.gpu.moves(self.n * if rule == kernels::NONE { 2 } else { 4 });
        self.gpu.moves(if halves { self.n.div_ceil(2) } else { self.n });
        self.gpu.in_order(|client| {
            // SAFETY: all buffers have `length` vectors of this width, the list room for `capacity` pairs.
            unsafe {
                kernels::accumulate::launch_unchecked(
                    client,
                    cubes(length, PER),
                    CubeDim::new_1d(UNITS),
                    width,
                    packed,
                    all(&gradient.buffer, words),
                    all(u, u_length / width),
                    all(&self.v, length),
                    all(&head, HEAD),
                    all(&self.list, (2 * self.capacity).max(WIDTH)),
                    length as u32,
                    capacity as u32,
                    pass.scale,
                    pass.carry,
                    m,
                    bits(floor),
                    keep,
                    flip,
                    0,
                    form,
                    PER,
                );
            }
        });
        self.read_found(&head, seek, found)
    }

    fn collect(&mut self, seek: Seek, found: &mut Found) -> Result<(), DeviceError> {
        if self.n == 0 {
            *found = Found::default();
            return Ok(());
        }
        self.make_room(seek.capacity);
        let (length, head) = (self.vectors(), zeros(&self.gpu, HEAD));
        let Lens { keep, flip } = seek.phase.lens();
        self.gpu.moves(self.n);
        self.gpu.in_order(|client| {
            // SAFETY: v has `length` vectors, the list room for `capacity` pairs.
            unsafe {
                kernels::compact::launch_unchecked(
                    client,
                    cubes(length, PER),
                    CubeDim::new_1d(UNITS),
                    WIDTH,
                    all(&self.v, length),
                    all(&head, HEAD),
                    all(&self.list, (2 * self.capacity).max(WIDTH)),
                    length as u32,
                    seek.capacity as u32,
                    bits(seek.floor),
                    keep,
                    flip,
                    PER,
                );
            }
        });
        self.read_found(&head, Some(seek), found).map(drop)
    }

    fn edge(
        &mut self,
        phase: Phase,
        digit: Digit,
        prefix: u32,
        above: usize,
        keep: usize,
    ) -> Result<Edge, DeviceError> {
        let size = 1 << digit.bits;
        let bins = zeros(&self.gpu, size);
        let lens = phase.lens();
        if self.n > 0 {
            self.gpu.moves(self.n);
            self.gpu.in_order(|client| {
                // SAFETY: v has `n` elements, and there are `size` bins.
                unsafe {
                    kernels::histogram::launch_unchecked(
                        client,
                        cubes(self.n, COUNTED),
                        CubeDim::new_1d(UNITS),
                        all(&self.v, self.n),
                        all(&bins, size),
                        self.n as u32,
                        prefix,
                        digit.shift,
                        digit.shift + digit.bits,
                        lens.keep,
                        lens.flip,
                        size as u32,
                        COUNTED,
                    );
                }
            });
        }
        let edge = self.gpu.empty(EDGE);
        self.gpu.in_order(|client| {
            // SAFETY: there are `size` bins, and three numbers that say where the edge is.
            unsafe {
                kernels::edge::launch_unchecked(
                    client,
                    cubes(1, 1),
                    CubeDim::new_1d(UNITS),
                    all(&bins, size),
                    all(&edge, EDGE),
                    above as u32,
                    keep as u32,
                    size as u32,
                    UNITS,
                );
            }
        });
        let told = self.gpu.download(&edge, EDGE)?;
        Ok(Edge { bin: told[0], above: told[1] as usize, count: told[2] as usize })
    }

    fn count_above(&mut self, phase: Phase, thresholds: &[f32]) -> Result<Vec<usize>, DeviceError> {
        let many = thresholds.len();
        let floors: Vec<i32> = thresholds.iter().map(|t| bits(*t)).collect();
        let (floors, counts) = (self.gpu.upload(bytemuck::cast_slice(&floors)), zeros(&self.gpu, many));
        let length = self.vectors();
        let Lens { keep, flip } = phase.lens();
        if length > 0 && many > 0 {
            self.gpu.moves(self.n);
            self.gpu.in_order(|client| {
                // SAFETY: v has `length` vectors; there are `many` thresholds and counts.
                unsafe {
                    kernels::count_above::launch_unchecked(
                        client,
                        cubes(length, PER),
                        CubeDim::new_1d(UNITS),
                        WIDTH,
                        all(&self.v, length),
                        all(&floors, many),
                        all(&counts, many),
                        length as u32,
                        keep,
                        flip,
                        many as u32,
                        PER,
                    );
                }
            });
        }
        Ok(self.gpu.download(&counts, many)?.into_iter().map(|count| count as usize).collect())
    }

    fn stats(&mut self, phase: Phase) -> Result<Vec<StatLanes>, DeviceError> {
        const LANES: usize = StatLanes::LANES;
        let units = self.n.div_ceil(StatLanes::CHUNK) * LANES;
        let (sums, others) = (self.gpu.empty(units), self.gpu.empty(2 * units));
        let Lens { keep, flip } = phase.lens();
        if units > 0 {
            self.gpu.moves(self.n + 3 * units);
            self.gpu.in_order(|client| {
                // SAFETY: v has `n` elements; every unit has its own places.
                unsafe {
                    kernels::stats::launch_unchecked(
                        client,
                        cubes(units, 1),
                        CubeDim::new_1d(UNITS),
                        all(&self.v, self.n),
                        all(&sums, units),
                        all(&others, 2 * units),
                        self.n as u32,
                        units as u32,
                        keep,
                        flip,
                        StatLanes::CHUNK as u32,
                        LANES as u32,
                    );
                }
            });
        }
        let sums = self.gpu.download_floats(&sums, units)?;
        let others = self.gpu.download(&others, 2 * units)?;
        let chunk = |(sums, others): (&[f32], &[u32])| StatLanes {
            sum: std::array::from_fn(|lane| sums[lane]),
            max: std::array::from_fn(|lane| f32::from_bits(others[2 * lane])),
            count: std::array::from_fn(|lane| others[2 * lane + 1]),
        };
        Ok(sums.chunks_exact(LANES).zip(others.chunks_exact(2 * LANES)).map(chunk).collect())
    }

    fn take_out(&mut self, least: (u32, f32), sent: Sent<'_>, clear_u: bool) -> Result<(), DeviceError> {
        let count = std::mem::take(&mut self.listed);
        if count == 0 {
            return Ok(());
        }
        let nothing = || self.nothing.clone();
        let (kind, same, values, which) = match sent {
            Sent::Whole => (kernels::WHOLE, 0.0, (nothing(), 1), nothing()),
            Sent::Same(mean) => (kernels::SAME, mean, (nothing(), 1), nothing()),
            Sent::Rounded => (kernels::ROUNDED, 0.0, (nothing(), 1), nothing()),
            Sent::Listed { values, which } => {
                let uploaded = self.gpu.upload(bytemuck::cast_slice(values));
                (kernels::LISTED, 0.0, (uploaded, values.len()), self.gpu.upload(which))
            }
        };
        let words = if kind == kernels::LISTED { count.div_ceil(4) } else { 1 };
        let (u, u_length) = self.u_or_nothing();
        self.gpu.moves(count * (3 + usize::from(clear_u)) + if kind == kernels::LISTED { words } else { 0 });
        self.gpu.in_order(|client| {
            // SAFETY: the list holds `count` pairs whose indices are those of the layer.
            unsafe {
                kernels::take_out::launch_unchecked(
                    client,
                    cubes(count, 1),
                    CubeDim::new_1d(UNITS),
                    all(u, u_length),
                    all(&self.v, self.n),
                    all(&self.list, 2 * count),
                    all(&values.0, values.1),
                    all(&which, words),
                    count as u32,
                    least.1.abs().to_bits(),
                    least.0,
                    same,
                    kind,
                    clear_u,
                );
            }
        });
        Ok(())
    }

    fn put(&mut self, indices: &[u32], values: &[f32], clear_u: bool) -> Result<(), DeviceError> {
        self.scatter(indices, values, false, clear_u);
        Ok(())
    }

    fn add(&mut self, indices: &[u32], values: &[f32]) -> Result<(), DeviceError> {
        self.scatter(indices, values, true, false);
        Ok(())
    }

    fn scale_u(&mut self, factor: f32) -> Result<(), DeviceError> {
        self.u = self.u.as_ref().map(|u| self.copied(u, factor));
        Ok(())
    }

    fn take_back(&mut self) -> Result<(), DeviceError> {
        (self.u, self.v) = self.saved.take().ok_or_else(|| DeviceError("no step was saved".into()))?;
        Ok(())
    }

    fn gradient(&self, source: &dyn Source) -> Result<Vec<f32>, DeviceError> {
        self.gradient_on(source)?.0.read(&self.gpu)
    }

    fn read_u(&self) -> Result<Vec<f32>, DeviceError> {
        self.u.as_ref().map_or(Ok(Vec::new()), |u| self.gpu.download_floats(u, self.n))
    }

    fn read_v(&self) -> Result<Vec<f32>, DeviceError> {
        self.gpu.download_floats(&self.v, self.n)
    }

    fn write(&mut self, u: Option<&[f32]>, v: Option<&[f32]>) -> Result<(), DeviceError> {
        if let Some(u) = u {
            self.u = Some(self.gpu.upload(bytemuck::cast_slice(u)));
        }
        if let Some(v) = v {
            self.v = self.gpu.upload(bytemuck::cast_slice(v));
        }
        Ok(())
    }
}

//! A layer whose u and v stay where the model is: the engine's kernels, as calls to the package's `device.layer.Layer`.
//! What must hold: the interpreter is held for the calls only; what Python is lent, it has used when a call returns.

use crate::memory::{Tensor, lent};
use crate::tensor::Given;
use pyo3::prelude::*;
use redsync_core::{Compressor, Config, ConfigError, Momentum, Phase, StatLanes};
use redsync_engine::offload::{
    DeviceError, Digit, Edge, Found, Kernels, Offloaded, Pass, Seek, Sent, serves,
};
use redsync_engine::{Device, Layer, LayerCompressor, Source};
use std::any::Any;

/// Where the layers of a model live: for each the package is asked, which answers with an object of the device or with None, for
/// the host.
pub struct Devices(pub Option<Py<PyAny>>);

impl Device for Devices {
    fn compressor(
        &self,
        number: u32,
        layer: &Layer,
        config: Config,
    ) -> Result<Box<dyn LayerCompressor>, ConfigError> {
        let made = self.0.as_ref().filter(|_| serves(&config)).map(|make| {
            Python::attach(|py| {
                make.call1(py, (number,))?.extract::<Option<Py<PyAny>>>(py).map_err(PyErr::from)
            })
        });
        let refused = |error: PyErr| ConfigError::Device(error.to_string());
        match made.transpose().map_err(refused)?.flatten() {
            Some(there) => {
                Ok(Box::new(Offloaded::new(number, &layer.name, layer.size, config, There(there))?))
            }
            None => Ok(Box::new(Compressor::new(number, &layer.name, layer.size, config)?)),
        }
    }
}

/// A `device.layer.Layer`.
struct There(Py<PyAny>);

/// Words of what was found: the value's bits above, the index below.
const WORD: usize = 8;

fn failed(error: PyErr) -> DeviceError {
    DeviceError(error.to_string())
}

fn wrong(what: &str) -> DeviceError {
    DeviceError(format!("the device gave {what} in another form"))
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Both => "both",
        Phase::Positive => "positive",
        Phase::Negative => "negative",
    }
}

/// A seek as Python takes it.
fn sought(Seek { phase, floor, capacity, .. }: Seek) -> (&'static str, f32, usize) {
    (name(phase), floor, capacity)
}

/// What a pass does, as Python takes it.
fn rule(pass: &Pass) -> (&'static str, f32, f32, f32) {
    let form = match pass.momentum {
        Momentum::Nesterov(_) => "nesterov",
        _ => "plain",
    };
    (form, pass.momentum.coefficient(), pass.scale, pass.carry)
}

/// Bytes from Python as numbers of four bytes.
fn numbers(tensor: &Tensor) -> Result<impl Iterator<Item = u32> + '_, DeviceError> {
    let bytes = tensor.bytes().ok_or_else(|| wrong("numbers"))?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|four| u32::from_ne_bytes(*four)))
}

fn take(found: &mut Found, (count, words): (usize, Option<Tensor>)) -> Result<(), DeviceError> {
    found.count = count;
    found.elements.clear();
    let Some(words) = words else { return Ok(()) };
    let bytes = words.bytes().filter(|bytes| bytes.len() == WORD * count).ok_or_else(|| wrong("elements"))?;
    found.elements.extend(bytes.as_chunks::<WORD>().0.iter().map(|word| {
        let word = u64::from_ne_bytes(*word);
        (word as u32, f32::from_bits((word >> 32) as u32))
    }));
    Ok(())
}

/// A gradient on a device, and the bucket with which it came.
fn on_device(source: &dyn Source) -> Result<(&Py<PyAny>, &Py<PyAny>), DeviceError> {
    let any: &dyn Any = source;
    match any.downcast_ref() {
        Some(Given::There(piece, _)) => Ok((&piece.flat, &piece.bucket)),
        _ => Err(DeviceError("its gradient is not where its residual is".into())),
    }
}

impl There {
    fn floats(&self, which: &str) -> Result<Vec<f32>, DeviceError> {
        let read = Python::attach(|py| self.0.call_method1(py, "read", (which,))?.extract(py));
        let read: Option<Tensor> = read.map_err(failed)?;
        read.map_or_else(|| Ok(Vec::new()), |tensor| copied(&tensor))
    }
}

fn copied(tensor: &Tensor) -> Result<Vec<f32>, DeviceError> {
    tensor.floats().map(<[f32]>::to_vec).ok_or_else(|| wrong("floats"))
}

impl Kernels for There {
    /// For a bucket.
    fn waits_for_many(&self) -> bool {
        true
    }

    fn make_u(&mut self) -> Result<(), DeviceError> {
        Python::attach(|py| self.0.call_method0(py, "make_u")).map(drop).map_err(failed)
    }

    fn announce(&mut self, source: &dyn Source, pass: &Pass, seek: Option<Seek>) -> Result<(), DeviceError> {
        let (flat, bucket) = on_device(source)?;
        let arguments = (flat, bucket, rule(pass), pass.save, seek.map(sought));
        Python::attach(|py| self.0.call_method1(py, "announce", arguments)).map(drop).map_err(failed)
    }

    fn accumulate(
        &mut self,
        source: &dyn Source,
        pass: &Pass,
        seek: Option<Seek>,
        found: &mut Found,
    ) -> Result<bool, DeviceError> {
        let (flat, bucket) = on_device(source)?;
        let arguments = (flat, bucket, rule(pass), pass.save, seek.map(sought));
        let done = Python::attach(|py| {
            self.0.call_method1(py, "accumulate", arguments)?.extract::<(bool, (usize, Option<Tensor>))>(py)
        });
        let (finite, what) = done.map_err(failed)?;
        take(found, what)?;
        Ok(finite)
    }

    fn collect(&mut self, seek: Seek, found: &mut Found) -> Result<(), DeviceError> {
        let done = Python::attach(|py| self.0.call_method1(py, "collect", (sought(seek),))?.extract(py));
        take(found, done.map_err(failed)?)
    }

    fn edge(
        &mut self,
        phase: Phase,
        digit: Digit,
        prefix: u32,
        above: usize,
        keep: usize,
    ) -> Result<Edge, DeviceError> {
        let arguments = (name(phase), (digit.shift, digit.bits, prefix), above, keep);
        let found = Python::attach(|py| self.0.call_method1(py, "edge", arguments)?.extract(py));
        let found: Tensor = found.map_err(failed)?;
        let found: Vec<u32> = numbers(&found)?.collect();
        let [bin, above, count] = found[..] else { return Err(wrong("an edge")) };
        Ok(Edge { bin, above: above as usize, count: count as usize })
    }

    fn count_above(&mut self, phase: Phase, thresholds: &[f32]) -> Result<Vec<usize>, DeviceError> {
        if thresholds.is_empty() {
            return Ok(Vec::new());
        }
        let counted = Python::attach(|py| {
            self.0.call_method1(py, "count_above", (name(phase), lent(py, thresholds)?))?.extract(py)
        });
        let counted: Tensor = counted.map_err(failed)?;
        Ok(numbers(&counted)?.map(|count| count as usize).collect())
    }

    fn stats(&mut self, phase: Phase) -> Result<Vec<StatLanes>, DeviceError> {
        let told = Python::attach(|py| self.0.call_method1(py, "statistics", (name(phase),))?.extract(py));
        let told: Tensor = told.map_err(failed)?;
        let told: Vec<u32> = numbers(&told)?.collect();
        let (sums, rest) = told.split_at(told.len() / 3);
        let (tops, counts) = rest.split_at(sums.len());
        let lanes = |at: &[u32]| at.as_chunks().0.to_vec();
        let chunks = lanes(sums).into_iter().zip(lanes(tops)).zip(lanes(counts));
        let chunks = chunks.map(|((sum, max), count)| StatLanes {
            sum: sum.map(f32::from_bits),
            max: max.map(f32::from_bits),
            count,
        });
        Ok(chunks.collect())
    }

    fn take_out(&mut self, least: (u32, f32), sent: Sent<'_>, clear_u: bool) -> Result<(), DeviceError> {
        let (last, value) = least;
        let (how, same) = match sent {
            Sent::Whole => ("whole", 0.0),
            Sent::Same(value) => ("same", value),
            Sent::Rounded => ("rounded", 0.0),
            Sent::Listed { .. } => ("listed", 0.0),
        };
        Python::attach(|py| {
            let listed = match sent {
                Sent::Listed { values, which } => lent(py, values)?.zip(lent(py, which)?),
                _ => None,
            };
            let arguments = (value.to_bits() & 0x7fff_ffff, last, how, same, listed, clear_u);
            self.0.call_method1(py, "take_out", arguments).map(drop)
        })
        .map_err(failed)
    }

    fn put(&mut self, indices: &[u32], values: &[f32], clear_u: bool) -> Result<(), DeviceError> {
        if indices.is_empty() {
            return Ok(());
        }
        Python::attach(|py| {
            self.0.call_method1(py, "put", (lent(py, indices)?, lent(py, values)?, clear_u)).map(drop)
        })
        .map_err(failed)
    }

    fn add(&mut self, indices: &[u32], values: &[f32]) -> Result<(), DeviceError> {
        if indices.is_empty() {
            return Ok(());
        }
        Python::attach(|py| self.0.call_method1(py, "add", (lent(py, indices)?, lent(py, values)?)).map(drop))
            .map_err(failed)
    }

    fn scale_u(&mut self, factor: f32) -> Result<(), DeviceError> {
        Python::attach(|py| self.0.call_method1(py, "scale_u", (factor,))).map(drop).map_err(failed)
    }

    fn take_back(&mut self) -> Result<(), DeviceError> {
        Python::attach(|py| self.0.call_method0(py, "take_back")).map(drop).map_err(failed)
    }

    fn gradient(&self, source: &dyn Source) -> Result<Vec<f32>, DeviceError> {
        let (flat, bucket) = on_device(source)?;
        let read = Python::attach(|py| self.0.call_method1(py, "gradient", (flat, bucket))?.extract(py));
        copied(&read.map_err(failed)?)
    }

    fn read_u(&self) -> Result<Vec<f32>, DeviceError> {
        self.floats("u")
    }

    fn read_v(&self) -> Result<Vec<f32>, DeviceError> {
        self.floats("v")
    }

    fn write(&mut self, u: Option<&[f32]>, v: Option<&[f32]>) -> Result<(), DeviceError> {
        Python::attach(|py| {
            let bytes = |values: Option<&[f32]>| values.map(|values| lent(py, values)).transpose();
            self.0.call_method1(py, "write", (bytes(u)?.flatten(), bytes(v)?.flatten())).map(drop)
        })
        .map_err(failed)
    }
}

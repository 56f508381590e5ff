//! Memory of PyTorch's tensors: a Python object comes in, a slice of its elements goes out; and memory of ours, lent to PyTorch as
//! a tensor. The only room with `unsafe`. What must hold: a slice lives no longer than the tensor, which is held here, and is as
//! long as the tensor says.
#![allow(unsafe_code)]

use bytemuck::NoUninit;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use redsync_core::{Gradient, bf16, f16};

/// Bytes of this program as a tensor of bytes, in their place. PyTorch may use them as long as it works with the tensor: whoever
/// lends them leaves them alone until it is done, and for ever if that cannot be known.
pub fn lend<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    at(py, bytes.as_ptr().addr(), bytes.len(), "uint8")
}

/// Numbers of this program as such a tensor; None where there are none, of which no tensor can be made.
pub fn lent<'py, T: NoUninit>(py: Python<'py>, values: &[T]) -> PyResult<Option<Bound<'py, PyAny>>> {
    (!values.is_empty()).then(|| lend(py, bytemuck::cast_slice(values))).transpose()
}

/// Values of this program as a tensor that PyTorch may change, in their place; for the rest see [`lend`].
pub fn lend_mut<'py>(py: Python<'py>, values: &mut [f32]) -> PyResult<Bound<'py, PyAny>> {
    at(py, values.as_mut_ptr().addr(), size_of_val(values), "float32")
}

fn at<'py>(py: Python<'py>, address: usize, bytes: usize, element: &str) -> PyResult<Bound<'py, PyAny>> {
    let (ctypes, torch) = (py.import(intern!(py, "ctypes"))?, py.import(intern!(py, "torch"))?);
    let kind = ctypes.getattr(intern!(py, "c_uint8"))?.mul(bytes)?;
    let array = kind.call_method1(intern!(py, "from_address"), (address,))?;
    let settings = PyDict::new(py);
    settings.set_item(intern!(py, "dtype"), torch.getattr(element)?)?;
    torch.call_method(intern!(py, "frombuffer"), (array,), Some(&settings))
}

/// What a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    U8,
    F16,
    Bf16,
    F32,
}

/// A tensor in the memory of this process, without gaps. While one exists, nothing else may write to its elements, nor read
/// them while they are written here; the package's threads hand each buffer on only when they are done with it.
#[derive(Debug)]
pub struct Tensor {
    /// Keeps the memory alive.
    _owner: Py<PyAny>,
    address: usize,
    len: usize,
    element: Element,
}

impl<'py> FromPyObject<'_, 'py> for Tensor {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let dtype = object.getattr("dtype")?.str()?;
        let (element, size) = match dtype.to_str()? {
            "torch.uint8" => (Element::U8, 1),
            "torch.float16" => (Element::F16, 2),
            "torch.bfloat16" => (Element::Bf16, 2),
            "torch.float32" => (Element::F32, 4),
            other => return Err(PyTypeError::new_err(format!("a tensor of {other} cannot be compressed"))),
        };
        if !object.call_method0("is_contiguous")?.extract::<bool>()? || !is_on_host(&object)? {
            return Err(PyValueError::new_err("a tensor has to be contiguous and in the memory of the host"));
        }
        let (address, len): (usize, usize) =
            (object.call_method0("data_ptr")?.extract()?, object.call_method0("numel")?.extract()?);
        if len > 0 && (address == 0 || !address.is_multiple_of(size)) {
            return Err(PyValueError::new_err("a tensor without memory, or with memory that is not aligned"));
        }
        Ok(Tensor { _owner: object.to_owned().unbind(), address, len, element })
    }
}

fn is_on_host(object: &Borrowed<'_, '_, PyAny>) -> PyResult<bool> {
    Ok(object.getattr("device")?.getattr("type")?.extract::<String>()? == "cpu")
}

impl Tensor {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its elements as they are compressed; None if they are bytes.
    pub fn gradient(&self) -> Option<Gradient<'_>> {
        Some(match self.element {
            Element::U8 => return None,
            Element::F16 => Gradient::F16(self.slice::<f16>()),
            Element::Bf16 => Gradient::Bf16(self.slice::<bf16>()),
            Element::F32 => Gradient::F32(self.slice::<f32>()),
        })
    }

    /// Its bytes; None if it holds something else.
    pub fn bytes(&self) -> Option<&[u8]> {
        (self.element == Element::U8).then(|| self.slice::<u8>())
    }

    /// Its bytes to be written; None if it holds something else.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        (self.element == Element::U8).then(|| self.slice_mut::<u8>())
    }

    /// Its elements, if they are f32.
    pub fn floats(&self) -> Option<&[f32]> {
        (self.element == Element::F32).then(|| self.slice::<f32>())
    }

    /// Its elements to be written, if they are f32.
    pub fn floats_mut(&mut self) -> Option<&mut [f32]> {
        (self.element == Element::F32).then(|| self.slice_mut::<f32>())
    }

    /// Writes as many values as there are elements, rounded to what the elements are. False if they are bytes or the number
    /// is another.
    pub fn write_rounded(&mut self, values: &[f32]) -> bool {
        if values.len() != self.len {
            return false;
        }
        match self.element {
            Element::U8 => return false,
            Element::F16 => {
                self.slice_mut::<f16>().iter_mut().zip(values).for_each(|(x, v)| *x = f16::from_f32(*v));
            }
            Element::Bf16 => {
                self.slice_mut::<bf16>().iter_mut().zip(values).for_each(|(x, v)| *x = bf16::from_f32(*v));
            }
            Element::F32 => self.slice_mut::<f32>().copy_from_slice(values),
        }
        true
    }

    /// Callers name the type that `element` stands for.
    fn slice<T>(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the tensor says that `len` elements of this type, every bit pattern of which is a value, lie at `address`
        // without gaps; it is aligned and not null; the tensor is held, so the memory lives at least as long as `self`.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.len) }
    }

    fn slice_mut<T>(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as for `slice`; that nobody else uses the elements meanwhile is the contract of the type.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.len) }
    }
}

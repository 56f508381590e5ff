//! The suite that every engine must pass, for ranks that are Python processes: the name of a case comes in, what went wrong goes out.
//! Only in builds with the feature `conformance`.

use super::Group;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use redsync_comm::conformance::{BREAKING, HEALTHY, Seat};
use redsync_comm::{Communicator, Pending, Tag};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The names of the cases that leave a group usable, and of those that break it.
#[pyfunction]
pub fn conformance_cases() -> (Vec<&'static str>, Vec<&'static str>) {
    (HEALTHY.iter().map(|case| case.0).collect(), BREAKING.iter().map(|case| case.0).collect())
}

/// Runs a case on this rank; what went wrong, if something did. `meet` returns once all ranks have called it.
#[pyfunction]
pub fn conformance_run(
    py: Python<'_>,
    name: &str,
    group: &Group,
    meet: Py<PyAny>,
) -> PyResult<Option<String>> {
    let find = |known: &&str| *known == name;
    if let Some((_, case)) = HEALTHY.iter().find(|case| find(&case.0)) {
        let torch = group.communicator()?;
        return Ok(py.detach(|| complaint(|| case(&*torch))));
    }
    let unknown = || PyValueError::new_err(format!("there is no case {name}"));
    let (_, case) = BREAKING.iter().find(|case| find(&case.0)).ok_or_else(unknown)?;
    let comm = group.take().and_then(Arc::into_inner);
    let comm = comm.ok_or_else(|| PyValueError::new_err("this group is in use, or was closed"))?;
    let meet = || {
        let met = Python::try_attach(|py| meet.call0(py).map(drop));
        assert!(matches!(met, Some(Ok(()))), "the ranks did not meet: {met:?}");
    };
    Ok(py.detach(|| complaint(|| case(Seat { comm: Box::new(comm), meet: &meet }))))
}

fn complaint(case: impl FnOnce()) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(case)).err()?;
    let text = panic.downcast_ref::<String>().cloned();
    Some(text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default())
}

/// Does a collective `times` times, one after the other; the seconds of each. `kind` is `allgather` of so many bytes, or
/// `allreduce` of so many values.
#[pyfunction]
pub fn conformance_time(
    py: Python<'_>,
    group: &Group,
    kind: &str,
    length: usize,
    times: u64,
) -> PyResult<Vec<f64>> {
    fn wait<T: Send + 'static>(pending: Pending<T>) -> PyResult<T> {
        pending.wait(Duration::from_secs(60)).map_err(|cause| PyValueError::new_err(cause.to_string()))
    }
    let torch = group.communicator()?;
    py.detach(|| {
        let (mut seconds, mut message, mut values) = (Vec::new(), vec![7; length], vec![1.0; length]);
        for step in 0..times {
            let (tag, begin) = (Tag { step, op: 0 }, Instant::now());
            if kind == "allgather" {
                let gathered = wait(torch.allgather(tag, message))?;
                seconds.push(begin.elapsed().as_secs_f64());
                message = gathered.from_rank(0).to_vec();
            } else {
                values = wait(torch.allreduce(tag, values))?;
                seconds.push(begin.elapsed().as_secs_f64());
                values.fill(1.0);
            }
        }
        Ok(seconds)
    })
}

//! The suite that every engine must pass, for ranks that are Python processes: the name of a case comes in, what went wrong goes out.
//! Only in builds with the feature `conformance`.

use super::Group;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use redsync_comm::conformance::{BREAKING, HEALTHY, Seat};
use redsync_comm::{CommError, Communicator, Tag};
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

/// One collective, waited for: the text of its error and the ranks to blame, if it fails. `kind` is `allgather` or `alltoall` of so
/// many bytes, `allreduce` of so many values, or `barrier`.
#[pyfunction]
pub fn conformance_try(
    py: Python<'_>,
    group: &Group,
    kind: &str,
    step: u64,
    length: usize,
    deadline: f64,
) -> PyResult<Option<(String, Vec<usize>)>> {
    let torch = group.communicator()?;
    let outcome = py.detach(|| once(&*torch, kind, step, length, Duration::from_secs_f64(deadline)));
    Ok(outcome.err().map(|cause| (cause.to_string(), cause.ranks())))
}

/// Gives up, with this reason.
#[pyfunction]
pub fn conformance_give_up(group: &Group, reason: &str) -> PyResult<()> {
    group.communicator().map(|torch| torch.give_up(reason))
}

/// Does a collective `times` times, one after the other; the seconds of each.
#[pyfunction]
pub fn conformance_time(
    py: Python<'_>,
    group: &Group,
    kind: &str,
    length: usize,
    times: u64,
) -> PyResult<Vec<f64>> {
    let torch = group.communicator()?;
    py.detach(|| {
        let time =
            |step| once(&*torch, kind, step, length, Duration::from_secs(60)).map(|time| time.as_secs_f64());
        let times: Result<Vec<f64>, CommError> = (0..times).map(time).collect();
        times.map_err(|cause| PyValueError::new_err(cause.to_string()))
    })
}

/// How long one collective took, from its start to its result.
fn once(
    comm: &dyn Communicator,
    kind: &str,
    step: u64,
    length: usize,
    deadline: Duration,
) -> Result<Duration, CommError> {
    let (tag, bytes, values) = (Tag { step, op: 0 }, vec![7; length], vec![1.0; length]);
    let messages = vec![bytes.clone(); if kind == "alltoall" { comm.size() } else { 0 }];
    let begin = Instant::now();
    match kind {
        "allgather" => drop(comm.allgather(tag, bytes).wait(deadline)?),
        "alltoall" => drop(comm.alltoall(tag, messages).wait(deadline)?),
        "allreduce" => drop(comm.allreduce(tag, values).wait(deadline)?),
        _ => comm.barrier(tag).wait(deadline)?,
    }
    Ok(begin.elapsed())
}

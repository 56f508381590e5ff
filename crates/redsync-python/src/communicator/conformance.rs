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

/// Does an allgather of so many bytes, or an allreduce of so many values, `times` times, one after the other; the seconds of each.
#[pyfunction]
pub fn conformance_time(
    py: Python<'_>,
    group: &Group,
    kind: &str,
    length: usize,
    times: u64,
) -> PyResult<Vec<f64>> {
    let torch = group.communicator()?;
    let deadline = Duration::from_secs(60);
    let sums = kind == "allreduce";
    py.detach(|| {
        let (mut message, mut values) =
            (vec![7; if sums { 0 } else { length }], vec![1.0; if sums { length } else { 0 }]);
        let mut time = |step| {
            let (tag, begin) = (Tag { step, op: 0 }, Instant::now());
            if sums {
                values = torch.allreduce(tag, std::mem::take(&mut values)).wait(deadline)?;
                return Ok(begin.elapsed().as_secs_f64());
            }
            let gathered = torch.allgather(tag, std::mem::take(&mut message)).wait(deadline)?;
            let time = begin.elapsed().as_secs_f64();
            message = gathered.reclaim().pop().unwrap_or_default();
            Ok(time)
        };
        let times: Result<Vec<f64>, CommError> = (0..times).map(&mut time).collect();
        times.map_err(|cause| PyValueError::new_err(cause.to_string()))
    })
}

fn once(
    comm: &dyn Communicator,
    kind: &str,
    step: u64,
    length: usize,
    deadline: Duration,
) -> Result<(), CommError> {
    let tag = Tag { step, op: 0 };
    match kind {
        "allgather" => comm.allgather(tag, vec![7; length]).wait(deadline).map(drop),
        "alltoall" => comm.alltoall(tag, vec![vec![7; length]; comm.size()]).wait(deadline).map(drop),
        "allreduce" => comm.allreduce(tag, vec![1.0; length]).wait(deadline).map(drop),
        _ => comm.barrier(tag).wait(deadline),
    }
}

//! Errors of the engine as exceptions of the package: what went wrong, where, and the ranks that are to blame.

use pyo3::prelude::*;
use redsync_engine::SyncError;

/// The exception that an error is.
pub fn raise(py: Python<'_>, error: SyncError) -> PyErr {
    let text = error.to_string();
    match &error {
        SyncError::Hello { .. } | SyncError::Replicas { .. } => exception(py, "MismatchError", text, None),
        SyncError::Layer(_) => exception(py, "GradientError", format!("this rank gave up: {text}"), None),
        SyncError::Peer { .. } if error.is_gradient() => exception(py, "GradientError", text, None),
        SyncError::Peer { .. }
        | SyncError::Exchange { .. }
        | SyncError::Frame { .. }
        | SyncError::Message { .. } => exception(py, "PeerError", text, Some(error.ranks())),
        SyncError::Source { .. } | SyncError::Failed(_) => exception(py, "Error", text, None),
        _ => exception(py, "UsageError", text, None),
    }
}

/// The same while ranks attach: who gives up then cannot attach.
pub fn refuse(py: Python<'_>, error: SyncError) -> PyErr {
    match error {
        SyncError::Peer { rank, reason, blames } if blames.is_empty() => {
            exception(py, "MismatchError", format!("rank {rank} cannot attach: {reason}"), None)
        }
        error => raise(py, error),
    }
}

fn exception(py: Python<'_>, class: &str, text: String, ranks: Option<Vec<usize>>) -> PyErr {
    let make = || {
        let class = py.import("redsync.errors")?.getattr(class)?;
        match ranks {
            Some(ranks) => class.call1((text, pyo3::types::PyTuple::new(py, ranks)?)),
            None => class.call1((text,)),
        }
    };
    make().map_or_else(|error| error, PyErr::from_value)
}

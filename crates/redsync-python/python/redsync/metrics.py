"""A run as lines of JSON, in the format of `redsync train`, for `redsync report`.

Comes in: what steps cost, and the losses that the user tells. Goes out: one line for the run, one every so many steps, one per
epoch, one at the end. What must hold: only rank 0 writes; lines are only ever added, so no run takes another's away. A run that
goes on from a state says with which step, and the report leaves out what the file has beyond it.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

import torch

from .errors import UsageError
from .stats import Stats

USUAL_STEPS = 20
"""Steps between two lines, if nothing is said."""


class Metrics:
    """The metrics file of a run."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any], every: int) -> None:
        self._path = pathlib.Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"log cannot be written to {os.fspath(path)}: {error.strerror}") from None
        self._about, self._every = about, every
        self._begun = False
        self._step = self._epochs = 0
        self._losses: list[float | torch.Tensor] = []
        self._epoch_losses: list[float] = []
        self._since = self._epoch_since = time.perf_counter()
        self._clear()

    def _clear(self) -> None:
        self._steps = self._bytes = self._dense = 0
        self._compressing = self._exposed = 0.0

    def step(self, number: int, steps: int, stats: Stats) -> None:
        """An exchange has ended, at this step, the first for so many."""
        # The loss of a step is told after its backward pass, so a line waits for the next one.
        if self._steps >= self._every:
            self._write_steps()
        if not self._begun:
            self._write("run", {**self._about, "step": number - steps})
            self._begun = True
        self._step = number
        self._steps += steps
        self._bytes += stats.bytes_sent
        self._dense += stats.dense_bytes
        self._compressing += stats.compress_ms
        self._exposed += stats.exposed_ms

    def loss(self, loss: float | torch.Tensor) -> None:
        """The loss of a step; a tensor is not waited for."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def epoch(self, stats: Stats, told: dict[str, Any]) -> None:
        """An epoch has ended."""
        self._write_steps()
        self._epochs += 1
        now = time.perf_counter()
        record = {
            "epoch": self._epochs,
            "step": self._step,
            "train_loss": _mean(self._epoch_losses),
            "seconds": now - self._epoch_since,
            "bytes_sent": stats.total_bytes_sent,
            "dense_bytes": stats.total_dense_bytes,
        }
        self._write("epoch", {**record, **{key: value for key, value in told.items() if value is not None}})
        self._epoch_losses, self._epoch_since = [], now

    def end(self, stats: Stats) -> None:
        """The run has ended."""
        if self._file.closed:
            return
        self._write_steps()
        traffic = {name: getattr(stats.traffic, name) for name in ("messages", "rest", "headers", "warm_up", "moments", "dense")}
        sent = {"bytes_sent": stats.total_bytes_sent, "dense_bytes": stats.total_dense_bytes}
        if self._begun:
            self._write("final", {**sent, "traffic": traffic, "steps": stats.steps})
        self._file.close()

    def _write_steps(self) -> None:
        """Averages since the line before."""
        if not self._steps:
            return
        losses, self._losses = [float(loss) for loss in self._losses], []
        self._epoch_losses += losses
        now = time.perf_counter()
        each = {"select": self._compressing, "exchange": self._exposed, "total": 1e3 * (now - self._since)}
        record = {
            "epoch": self._epochs + 1,
            "step": self._step,
            "loss": _mean(losses),
            "ms": {name: ms / self._steps for name, ms in each.items()},
            "exposed_ms": self._exposed / self._steps,
            "bytes_sent": round(self._bytes / self._steps),
            "dense_bytes": round(self._dense / self._steps),
        }
        self._write("step", record)
        self._since = now
        self._clear()

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        """A whole line at once; whoever reads while the run goes on sees no half of it."""
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        self._file.flush()


def _mean(losses: list[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None

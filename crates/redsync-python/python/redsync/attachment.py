"""What ties a model to the engine, whatever it exchanges: gradients (`gradients.py`) or weights after local steps (`local.py`).

Comes in: the parameters of a model and a process group. Goes out: statistics, state, comparisons, and an orderly end. What must
hold: everything that decides about messages is the same on all ranks, and is compared when they attach; what failed once is
said again by everything that comes later.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _redsync, state
from .errors import Error, UsageError
from .metrics import USUAL_STEPS, Metrics
from .parameters import Described, shapes
from .residents import Residents, why_not
from .settings import host_of
from .staging import Staging
from .stats import LayerStats, Stats, Traffic

log = logging.getLogger("redsync")

_attached: weakref.WeakKeyDictionary[torch.nn.Module, Attachment] = weakref.WeakKeyDictionary()
"""What `of` finds."""
_open: weakref.WeakSet[Attachment] = weakref.WeakSet()
"""What acts on an optimizer, also where the model is gone and waits to be collected."""


def _check_free(parameters: Sequence[torch.Tensor]) -> None:
    """A parameter has one compressor: two would take its momentum away from each other."""

    def taken() -> bool:
        return any(not set(other._parameters).isdisjoint(parameters) for other in _open)

    if taken():
        gc.collect()  # a model that nobody has any more closes its attachment when it goes
    if taken():
        raise UsageError("redsync is attached to another model with the same parameters; close() that attachment first")


class Attachment:
    """What ties a model to the engine, made by `attach`: its statistics, its state for checkpoints, and its end."""

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        process_group: dist.ProcessGroup,
        settings: dict[str, Any],
        describe: Callable[[], list[Described]],
        deadline: float,
        log_every: int,
    ) -> None:
        """`describe` checks whatever can be wrong and says what the engine is to know; what it raises, all ranks hear."""
        self._named = dict(named)
        self._names, self._parameters = list(self._named), list(self._named.values())
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._dense_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self._log_every = log_every
        self._metrics: Metrics | None = None
        # The rest of the deadline is for finding out who is missing.
        settings["deadline"] = deadline - min(5.0, deadline / 4)
        problem: str | None = None
        described: list[Described] = []
        try:
            _check_free(self._parameters)
            settings["host"] = host_of(dist.get_rank(process_group), settings.pop("ranks_per_host"))
            described = describe()
        except (ValueError, TypeError, OverflowError) as error:
            problem = str(error)
        self._rules = [rule for *_, rule in described]
        settings["agree"] = [*settings.get("agree", []), *shapes(self._named)]
        # Made in any case, because a rank that has nothing to say would let the others wait.
        self._group = _redsync.Group(process_group, settings["deadline"])
        with contextlib.ExitStack() as opened:
            opened.callback(self._group.close)
            if problem is not None:
                self._group.give_up(problem)
                raise UsageError(problem)
            device = self._parameters[0].device if self._parameters else torch.device("cpu")
            self._staging = Staging(device) if device.type != "cpu" else None
            self._residents: Residents | None = None
            if self._staging is not None:
                self._residents = Residents(self._staging, self._parameters, why_not(settings))
            self._clips = settings["clip"] is not None
            self._sync = self._synchronizer(described, settings)
            opened.callback(self._sync.close)
            self._choices = self._sync.choices()
            self._compressed = [number for number, choice in enumerate(self._choices) if choice != "dense"]
            if self._residents is not None:
                log.info("%s", self._residents.report(len(self._compressed), self._clips))
            self._failure: BaseException | None = None
            self._number = self._counted = self._stands_for = 0
            self._last, self._traffic = self._sync.stats(), self._sync.traffic()
            opened.pop_all()
        self._closing = weakref.finalize(self, _close, self._sync, self._group)

    def _synchronizer(self, described: list[Described], settings: dict[str, Any]) -> _redsync.Synchronizer:
        try:
            return _redsync.Synchronizer(self._group, described, settings, self._residents)
        except Error:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            # Which argument it is about stands in a note.
            problem = "; ".join([str(error), *getattr(error, "__notes__", [])])
            self._group.give_up(problem)
            raise UsageError(problem) from None

    def _submit(self, parts: Sequence[tuple[int, torch.Tensor, bool]], sparse: bool) -> None:
        """Hands gradients over that were computed together, each with the number of its parameter and whether it was used. The
        host needs all of those that it compresses or clips, or that are dense at this step."""
        bucket = None
        if self._staging is not None:
            there = self._residents.layers if self._residents is not None and sparse and not self._clips else {}
            bucket = self._staging.bucket({number: flat for number, flat, used in parts if used and number not in there})
        self._sync.submit(parts, bucket)

    def _enter(self, model: torch.nn.Module) -> None:
        """Everything is made: `of` finds it from now on, until the model goes."""
        _attached[model] = self
        _open.add(self)
        # The optimizer holds on to this object, and may go on with another model.
        weakref.finalize(model, self.close).atexit = False

    def _count(self, steps: int = 1) -> None:
        """An exchange has ended, the first for so many steps."""
        self._counted += steps
        self._stands_for = steps
        self._last, self._traffic = self._sync.stats(), self._sync.traffic()
        if self._log_every and self.step % self._log_every < steps:
            log.info("%s", self.stats())
        if self._metrics is not None:
            self._metrics.step(self.step, steps, self.stats())

    def _log_to(self, path: str | os.PathLike[str], model: torch.nn.Module, settings: Mapping[str, Any]) -> None:
        """Rank 0 writes a metrics file from now on."""
        if self._group.rank != 0:
            return
        about = {
            "model": type(getattr(model, "module", model)).__name__,
            "method": settings["method"],
            "density": settings["density"],
            "every": settings["every"],
            "workers": self._group.size,
            "comm": "torch",
            "seed": torch.initial_seed(),
            "parameters": sum(p.numel() for p in self._parameters),
            "compressed": sum(self._parameters[number].numel() for number in self._compressed),
        }
        self._metrics = Metrics(path, about, self._log_every or USUAL_STEPS)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What fails once is said again by everything that comes later."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Called by the user.

    @property
    def step(self) -> int:
        """The number of steps: of synchronized backward passes, or of local steps."""
        return self._number

    def stats(self) -> Stats:
        """What all steps since `attach` sent, and what the last one cost, per layer and in all.

        A state that is loaded brings no bytes along: what a run sent before it was interrupted is not counted again.

        Example:
            >>> print(attachment.stats())                                               # doctest: +SKIP
            150 steps: sent 6.73 MB of 1,751 MB (1/260): messages 2%, warm-up 97%, rest 1%, headers 0%; last step 149: \
sent 7,076 of 11,671,656 bytes (1/1649), compressing 3.8 ms, exchange 102.4 ms, waited 104.9 ms
        """
        step, exchange_ms, exposed_ms, costs = self._last
        costs = costs or [(0, 0, 0.0)] * len(self._names)  # before the first step
        described = zip(self._names, self._choices, self._parameters)
        layers = [LayerStats(name, choice, p.numel(), *cost) for (name, choice, p), cost in zip(described, costs)]
        # The engine counts 32 bits per element; without it, DDP would send half precision as it is.
        traffic = Traffic(*self._traffic, dense=self._counted * self._dense_bytes)
        return Stats(
            step=step if self._counted else -1,
            layers=layers,
            bytes_sent=sum(layer.bytes for layer in layers),
            dense_bytes=self._stands_for * self._dense_bytes,
            total_bytes_sent=traffic.sent,
            total_dense_bytes=traffic.dense,
            compress_ms=sum(layer.ms for layer in layers if layer.choice != "dense"),
            exchange_ms=exchange_ms,
            exposed_ms=exposed_ms,
            steps=self._counted,
            traffic=traffic,
        )

    def log_loss(self, loss: float | torch.Tensor) -> None:
        """Tells the metrics file (``attach(log=...)``) the loss of a step, after its backward pass. Without a file, and on all
        ranks but the first, nothing happens.

        Example:
            >>> loss.backward()                                                         # doctest: +SKIP
            >>> attachment.log_loss(loss)                                               # doctest: +SKIP
        """
        if self._metrics is not None:
            self._metrics.loss(loss)

    def log_epoch(self, test_loss: float | None = None, metric: float | None = None, metric_name: str = "accuracy") -> None:
        """Tells the metrics file that an epoch has ended, and what a test said.

        Args:
            test_loss: the loss on the test data, if there is one.
            metric: what is judged, such as the accuracy, as a fraction of one.
            metric_name: its name; ``accuracy`` is shown in percent.
        """
        if self._metrics is not None:
            name = metric_name if metric is not None else None
            self._metrics.epoch(self.stats(), {"test_loss": test_loss, "metric": metric, "metric_name": name})

    def residual_norms(self) -> dict[str, float]:
        """What waits: for each layer that is not sent as f32, the norm of what was accumulated and not sent. Reads all of it."""
        return {self._names[number]: self._sync.residual_norm(number) or 0.0 for number in self._compressed}

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries from step to step: every rank has its own and saves it.

        Together with the model, the optimizer and the order of the data it makes a resumed run equal to one that was never
        interrupted, bit by bit. Plain tensors, numbers and texts, with a checksum over all of them.

        Example:
            >>> torch.save(attachment.state_dict(), f"redsync-{rank}.pt")               # doctest: +SKIP
        """
        self._check_between()
        return state.as_dict(self._sync.capture(), self._named, self._local())

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state. All ranks call it, after `attach`; after an error nothing has changed.

        Args:
            saved: this rank's state; or, for another number of ranks than before, a list of the states of all old ranks. Then
                the sums over the ranks of residuals and momentum stay what they were.
        """
        self._check_between()
        problem, states = None, []
        try:
            states = [state.from_dict(each, self._named) for each in ([saved] if isinstance(saved, Mapping) else saved)]
            if not states:
                raise UsageError("there is no state in the list")
        except UsageError as error:
            problem = str(error)
        problem = problem or self._problem_of(states)
        self._sync.restore(states, problem)
        self._restored(states)

    def check_replicas(self) -> int:
        """Compares the parameters of all ranks, bit by bit, and returns their hash. All ranks call it."""
        self._check_between()
        return self._sync.check_replicas([p.detach().to("cpu", torch.float32).contiguous().view(-1) for p in self._parameters])

    # What the kinds of attachments do differently.

    def _check_between(self) -> None:
        self._check()

    def _local(self) -> state.Local | None:
        """What local steps keep besides the engine's state."""
        return None

    def _problem_of(self, states: list[dict[str, Any]]) -> str | None:
        """Why states cannot be continued from, if they cannot."""
        return None

    def _restored(self, states: list[dict[str, Any]]) -> None:
        """The engine continues from a state."""
        self._number = self._sync.step

    def close(self) -> None:
        """Ends the threads and lets go of the optimizer. The model cannot be trained any further with this attachment; that
        happens by itself when the model goes."""
        _open.discard(self)
        try:
            if self._metrics is not None:
                self._metrics.end(self.stats())
        finally:
            for model in [model for model, attachment in _attached.items() if attachment is self]:
                del _attached[model]
            self._closing()


def _close(sync: _redsync.Synchronizer, group: _redsync.Group) -> None:
    sync.close()
    group.close()


def is_attached(model: torch.nn.Module) -> bool:
    """Whether redsync is attached to a model."""
    return model in _attached


def of(model: torch.nn.Module | None = None) -> Attachment:
    """The attachment of a model; without a model, the only one there is."""
    if model is not None:
        if model not in _attached:
            raise UsageError("redsync is not attached to this model")
        return _attached[model]
    if len(_attached) != 1:
        raise UsageError(f"redsync is attached to {len(_attached)} models; say which one")
    return next(iter(_attached.values()))

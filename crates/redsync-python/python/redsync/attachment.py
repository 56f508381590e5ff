"""What ties a DDP model to the engine.

The walk of a gradient. The backward pass fills a bucket of DDP, whose hook is ours. The hook submits the bucket's parameters to
the engine and returns a future; compression and exchange go on in the engine's threads, over a process group of their own
(`_redsync.Group`). The engine writes each averaged gradient where the local one was. The hook of the last bucket waits for what
is left and raises what went wrong. By then each ``p.grad`` holds the average: all of it for a dense layer; for a compressed
one what all ranks sent of their residuals, momentum included. A bias of which every element is sent in a few bits is compressed
in this sense: it has a residual, and its momentum is there. ``optimizer.step()`` applies momentum to dense layers only
(`optimizer.py`).

What must hold: everything that decides about messages is the same on all ranks, and is compared when they attach; state is
kept by parameter, never by bucket, which DDP builds anew.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from . import _redsync, state
from .errors import Error, UsageError
from .optimizer import Steps, check_optimizer
from .parameters import Described, check_model, describe, left_alone, rule, shapes, trained
from .settings import warm_up
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
    """What ties a model to the engine. Made by `attach`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        output: str | None,
        scaler: torch.amp.GradScaler | None,
        deadline: float,
        log_every: int,
    ) -> None:
        self._named = trained(model)
        self._names, self._parameters = list(self._named), list(self._named.values())
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._dense_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self._scaler, self._log_every = scaler, log_every
        # The rest of the deadline is for finding out who is missing.
        settings["deadline"] = deadline - min(5.0, deadline / 4)
        problem, described = None, []
        try:
            settings["warm_up"] = warm_up(settings["warm_up"], settings["method"], settings["plan"])
            check_model(model)
            _check_free(self._parameters)
            check_optimizer(optimizer, scaler is not None)
            described = describe(model, self._named, optimizer, output)
            settings["choices"] = {**left_alone(self._named, optimizer), **settings["choices"]}
        except (ValueError, TypeError, OverflowError) as error:
            problem = str(error)
        self._rules = [rule for *_, rule in described]
        self._rates: dict[int, float] = {}
        settings["agree"] = [("a GradScaler", str(scaler is not None)), *shapes(self._named)]
        # Made in any case, because a rank that has nothing to say would let the others wait.
        self._group = _redsync.Group(model.process_group, settings["deadline"])
        with contextlib.ExitStack() as opened:
            opened.callback(self._group.close)
            if problem is not None:
                self._group.give_up(problem)
                raise UsageError(problem)
            self._sync = self._synchronizer(described, settings)
            opened.callback(self._sync.close)
            self._choices = self._sync.choices()
            self._compressed = [number for number, choice in enumerate(self._choices) if choice != "dense"]
            self._unused = self._notice_use() if model.find_unused_parameters or model.static_graph else None
            device = self._parameters[0].device if self._parameters else torch.device("cpu")
            self._staging = Staging(device) if device.type != "cpu" else None
            self._compressed_now: frozenset[torch.Tensor] = frozenset()
            self._buckets: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
            self._flats: list[torch.Tensor] = []
            self._open = self._warned = False
            self._failure: BaseException | None = None
            self._number = self._exchanged = 0
            self._last, self._traffic = self._sync.stats(), self._sync.traffic()
            _register(model, self)
            opened.pop_all()
        assert isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam))
        self._steps = Steps(optimizer, lambda: self._compressed_now)
        self._closing = weakref.finalize(self, _close, self._sync, self._group)
        _attached[model] = self
        _open.add(self)
        # The optimizer holds on to this object, and may go on with another model.
        weakref.finalize(model, self.close).atexit = False

    def _synchronizer(self, described: list[Described], settings: dict[str, Any]) -> _redsync.Synchronizer:
        try:
            return _redsync.Synchronizer(self._group, described, settings)
        except Error:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            # Which argument it is about stands in a note.
            problem = "; ".join([str(error), *getattr(error, "__notes__", [])])
            self._group.give_up(problem)
            raise UsageError(problem) from None

    def _notice_use(self) -> set[int]:
        """The compressed layers that got no gradient since the last exchange; they send nothing then."""
        unused = set(self._compressed)
        for number in self._compressed:
            # A tensor's hook runs before DDP's, which waits for the accumulated gradient.
            self._parameters[number].register_hook(lambda _, number=number: unused.discard(number))  # type: ignore[no-untyped-call]
        return unused

    # Called by DDP and autograd, during the backward pass.

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._check()
        if not self._open or bucket.index() == 0:
            self._begin()
        if bucket.index() != len(self._buckets):
            raise Error(f"DDP reduces bucket {bucket.index()} after {len(self._buckets)} others; is there another hook?")
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise UsageError("sparse gradients cannot be compressed; make embeddings with sparse=False")
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        ready = self._staging.mark() if self._staging is not None else None
        with self._guarded():
            for number, flat in self._parts(bucket, buffer):
                used = self._unused is None or number not in self._unused
                self._sync.submit(number, flat, used, self._staging, ready)
                if self._scaler is not None:
                    self._flats.append(flat)
        self._buckets.append((buffer, future))
        if bucket.is_last():
            # Here, and not at the end of the backward pass: nothing that DDP needs is left to be computed, and where it delays its
            # buckets to that end (a static graph does, once) it waits for them before it calls anything of ours.
            self._finish()
        return future

    def _parts(self, bucket: GradBucket, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        begin = 0
        for parameter in bucket.parameters():
            number, size = self._numbers.get(parameter), parameter.numel()
            if number is None:
                raise UsageError(
                    "DDP reduces a parameter that was frozen between DistributedDataParallel(...) and redsync.attach(...): "
                    "set requires_grad before the first of them"
                )
            yield number, buffer.narrow(0, begin, size)
            begin += size

    def _begin(self) -> None:
        """The first bucket of a backward pass is there."""
        if self._open:
            raise Error("the backward pass before this one did not end; redsync cannot tell what other ranks got of it")
        if self._scaler is not None:
            self._sync.set_loss_scale(float(self._scaler.get_scale()))
        if self._sync.density is not None:
            self._follow_optimizer()
        if self._compressed_now and not self._steps.taken and not self._warned:
            self._warned = True
            warnings.warn(
                "two backward passes were synchronized without optimizer.step() in between: what the first one sent is lost "
                "or counted twice; accumulate gradients within model.no_sync()",
                stacklevel=2,
            )
        self._steps.taken = False
        self._open = True

    def _follow_optimizer(self) -> None:
        """Compressors follow rate and momentum of the user's groups; what the optimizer has gathered becomes theirs, once."""
        compressed, adopts = set(self._compressed), self._sync.turns_sparse
        for parameter, group in self._steps.groups():
            number = self._numbers.get(parameter)
            if number is None or number not in compressed:
                continue
            rate = float(group["lr"])
            if rate != self._rates.get(number):
                self._sync.set_rate(number, rate)
                self._rates[number] = rate
            now = rule(group)
            if now != self._rules[number]:
                self._sync.set_momentum(number, now)
                self._rules[number] = now
            moments = self._steps.take_moments(parameter)
            if moments is None or not adopts:
                continue
            first, second, steps = moments
            if second is None:
                self._sync.adopt_momentum(number, state.flat_like(first, parameter))
            else:
                self._sync.adopt_adam(number, state.flat_like(first, parameter), state.flat_like(second, parameter), steps)

    def _finish(self) -> None:
        """All gradients are there; what is under way is waited for."""
        sparse = self._sync.density is not None
        with self._guarded():
            done = self._sync.finish()
        if not done:
            # A GradScaler will skip this step on all ranks, if it finds what is not finite on all.
            for flat in self._flats:
                flat.fill_(float("inf"))
        if self._staging is not None:
            self._staging.synchronize()
        for buffer, future in self._buckets:
            future.set_result(buffer)
        self._buckets, self._flats, self._open = [], [], False
        self._compressed_now = frozenset(self._parameters[n] for n in self._compressed) if sparse and done else frozenset()
        self._steps.taken |= not done
        if self._unused is not None:
            self._unused.update(self._compressed)
        self._number += 1
        self._exchanged += 1
        self._last, self._traffic = self._sync.stats(), self._sync.traffic()
        if self._log_every and self.step % self._log_every == 0:
            log.info("%s", self.stats())

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What fails once is said again by everything that comes later; nobody waits for a bucket that will not come."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            for _, future in self._buckets:
                future.set_exception(error)  # type: ignore[arg-type]
            self._buckets, self._flats = [], []
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Called by the user.

    @property
    def step(self) -> int:
        """The number of synchronized backward passes."""
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
        traffic = Traffic(*self._traffic, dense=self._exchanged * self._dense_bytes)
        return Stats(
            step=step if self._exchanged else -1,
            layers=layers,
            bytes_sent=sum(layer.bytes for layer in layers),
            dense_bytes=self._dense_bytes,
            total_bytes_sent=traffic.sent,
            total_dense_bytes=traffic.dense,
            compress_ms=sum(layer.ms for layer in layers if layer.choice != "dense"),
            exchange_ms=exchange_ms,
            exposed_ms=exposed_ms,
            steps=self._exchanged,
            traffic=traffic,
        )

    def residual_norms(self) -> dict[str, float]:
        """The norm of what each layer that is not sent as f32 has accumulated and not sent. One pass over memory."""
        return {self._names[number]: self._sync.residual_norm(number) or 0.0 for number in self._compressed}

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries from step to step: every rank has its own and saves it.

        Together with the model, the optimizer and the order of the data it makes a resumed run equal to one that was never
        interrupted, bit by bit. Plain tensors, numbers and texts, with a checksum over all of them.

        Example:
            >>> torch.save(attachment.state_dict(), f"redsync-{rank}.pt")               # doctest: +SKIP
        """
        self._check_between()
        return state.as_dict(self._sync.capture(), self._named)

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
        self._sync.restore(states, problem)
        self._rates.clear()
        self._number = self._sync.step
        # Of the momentum that was, in the Nesterov form; a schedule may have moved on.
        for layer in states[0]["layers"]:
            if layer["u"] is not None:
                self._rules[self._names.index(layer["name"])] = layer["momentum"]
        self._compressed_now = frozenset()

    def check_replicas(self) -> int:
        """Compares the parameters of all ranks, bit by bit, and returns their hash. All ranks call it."""
        self._check_between()
        return self._sync.check_replicas([p.detach().to("cpu", torch.float32).contiguous().view(-1) for p in self._parameters])

    def _check_between(self) -> None:
        self._check()
        if self._open:
            raise UsageError("a backward pass is under way; this has to happen between two steps")

    def close(self) -> None:
        """Ends the threads and leaves the optimizer as it was. The model cannot be trained any further with this attachment; that
        happens by itself when the model goes."""
        self._steps.close()
        self._compressed_now = frozenset()
        _open.discard(self)
        for model in [model for model, attachment in _attached.items() if attachment is self]:
            del _attached[model]
        self._closing()


def _register(model: DistributedDataParallel, attachment: Attachment) -> None:
    try:
        model.register_comm_hook(attachment, _hook)
    except RuntimeError as error:
        raise UsageError(f"DDP does not take the communication hook: {str(error).splitlines()[0]}") from error


def _close(sync: _redsync.Synchronizer, group: _redsync.Group) -> None:
    sync.close()
    group.close()


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants these names, and no annotations that it does not know
    return state._take(bucket)


def is_attached(model: torch.nn.Module) -> bool:
    """Whether redsync is attached to a model."""
    return model in _attached


def of(model: torch.nn.Module | None = None) -> Attachment:
    """The attachment of a model; without one, that of the only model."""
    if model is not None:
        if model not in _attached:
            raise UsageError("redsync is not attached to this model")
        return _attached[model]
    if len(_attached) != 1:
        raise UsageError(f"redsync is attached to {len(_attached)} models; say which one")
    return next(iter(_attached.values()))

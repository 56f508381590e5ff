"""Gradients of a DDP model, exchanged while the backward pass goes on.

The walk of a gradient. The backward pass fills a bucket of DDP, whose hook is ours. The hook submits the bucket's parameters to
the engine and returns a future; compression and exchange go on in the engine's threads, over a process group of their own
(`_redsync.Group`). The engine writes each averaged gradient where the local one was. The hook of the last bucket waits for what
is left and raises what went wrong. By then each ``p.grad`` holds the average: all of it for a dense layer; for a compressed
one what all ranks sent of their residuals, momentum included. A bias of which every element is sent in a few bits is compressed
in this sense: it has a residual, and its momentum is there. ``optimizer.step()`` applies momentum to dense layers only
(`optimizer.py`).

What must hold: state is kept by parameter, never by bucket, which DDP builds anew.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from . import state
from .attachment import Attachment
from .errors import Error, UsageError
from .optimizer import Steps, check_optimizer
from .parameters import Described, Rule, check_model, describe, left_alone, rule, trained
from .settings import warm_up


class Gradients(Attachment):
    """An attachment whose gradients are exchanged, in DDP's hook."""

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
        named = trained(model)

        def described() -> list[Described]:
            settings["warm_up"] = warm_up(settings["warm_up"], settings["method"], settings["plan"])
            check_model(model)
            check_optimizer(optimizer, scaler is not None)
            settings["choices"] = {**left_alone(named, optimizer), **settings["choices"]}
            return describe(model.module, named, optimizer, output)

        settings["agree"] = [("a GradScaler", str(scaler is not None))]
        super().__init__(named, model.process_group, settings, described, deadline, log_every)
        self._scaler = scaler
        self._rates: dict[int, float] = {}
        self._followed: dict[int, Rule] = {}
        self._unused = self._notice_use() if model.find_unused_parameters or model.static_graph else None
        self._compressed_now: frozenset[torch.Tensor] = frozenset()
        self._buckets: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._flats: list[torch.Tensor] = []
        self._open = self._warned = self._sparse = False
        with contextlib.ExitStack() as opened:
            opened.callback(self._closing)
            _register(model, self)
            opened.pop_all()
        assert isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam))
        self._steps = Steps(optimizer, lambda: self._compressed_now)
        self._enter(model)

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
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        with self._guarded():
            unused = self._unused or ()
            parts = [(number, flat, number not in unused) for number, flat in self._parts(bucket, buffer)]
            self._submit(parts, self._sparse)
            if self._scaler is not None:
                self._flats += [flat for _, flat, _ in parts]
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
        self._sparse = self._sync.density is not None
        if self._sparse:
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
        self._steps.check(self._scaler is not None)  # groups may have come since, or a state with other settings
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
            if now != self._followed.get(number):
                self._sync.set_momentum(number, now)
                self._rules[number] = self._followed[number] = now
            moments = self._steps.take_moments(parameter)
            if moments is None or not adopts:
                continue
            first, second, steps = moments
            first = -first if group["maximize"] else first  # an optimizer that climbs gathers the opposite of gradients
            if second is None:
                self._sync.adopt_momentum(number, state.flat_like(first, parameter))
            else:
                self._sync.adopt_adam(number, state.flat_like(first, parameter), state.flat_like(second, parameter), steps)

    def _finish(self) -> None:
        """All gradients are there; what is under way is waited for."""
        with self._guarded():
            done = self._sync.finish()
        # A future of a device waits for what the stream in which it gets its result has yet to do, and the host does not.
        with contextlib.nullcontext() if self._staging is None else self._staging.stream:
            if not done:
                # A GradScaler will skip this step on all ranks, if it finds what is not finite on all.
                for flat in self._flats:
                    flat.fill_(float("inf"))
            for buffer, future in self._buckets:
                future.set_result(buffer)
        self._buckets, self._flats, self._open = [], [], False
        self._compressed_now = frozenset(self._parameters[n] for n in self._compressed) if self._sparse and done else frozenset()
        self._steps.taken |= not done
        if self._unused is not None:
            self._unused.update(self._compressed)
        self._number += 1
        self._count()

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

    def _check_between(self) -> None:
        self._check()
        if self._open:
            raise UsageError("a backward pass is under way; this has to happen between two steps")

    @torch.no_grad()
    def _hand_back(self) -> None:
        if self._sync.density is None or self._sync.turns_sparse:
            return  # nothing was compressed yet, and the optimizer still has all of it
        groups = dict(self._steps.groups())
        for number in self._compressed:
            parameter = self._parameters[number]
            group, form = groups[parameter], self._rules[number]
            adam, momentum = form[0] == "adam", form[0] == "adam" or form[1] > 0
            first, second, waiting = (torch.empty_like(parameter, dtype=torch.float32, device="cpu") for _ in range(3))
            flats = (state.flat(first) if momentum else None, state.flat(second) if adam else None)
            steps, rate = self._sync.hand_back(number, *flats, state.flat(waiting))
            sign = 1.0 if group["maximize"] else -1.0
            first *= -sign  # an optimizer that climbs gathers the opposite of gradients
            parameter.add_(waiting.to(parameter), alpha=sign * (rate if rate is not None else float(group["lr"])))
            self._steps.give_moments(parameter, group, first if momentum else None, second if adam else None, steps)

    def _restored(self, states: list[dict[str, Any]]) -> None:
        super()._restored(states)
        self._rates.clear()
        self._followed.clear()
        # Of the momentum that was; a schedule may have moved on.
        # In parts of hosts, some ranks have nothing of a layer.
        for layer in reversed([layer for saved in states for layer in saved["layers"]]):
            if layer["u"] is not None and layer["u"].numel() > 0:
                self._rules[self._names.index(layer["name"])] = layer["momentum"]
        self._compressed_now = frozenset()

    def close(self, hand_back: bool = False) -> None:
        """Ends the threads and lets go of the optimizer. The model cannot be trained any further with this attachment; that
        happens by itself when the model goes.

        What the compressor has gathered, momentum and Adam's second moment, goes with it, as a rank alone has only its part; the
        optimizer begins anew with these parameters unless it is handed back.

        Args:
            hand_back: to go on dense, with another DDP of the same module. The optimizer gets back what the compressor has
                gathered, momentum and Adam's second moment, summed up over the ranks, and what waits in residuals is applied to
                the weights at the learning rate of the last step. All ranks call it then, after the same step.
        """
        if hand_back:
            self._check_between()
            with self._guarded():
                self._hand_back()
        self._steps.close()
        self._compressed_now = frozenset()
        super().close()


def _register(model: DistributedDataParallel, attachment: Attachment) -> None:
    try:
        model.register_comm_hook(attachment, _hook)
    except RuntimeError as error:
        raise UsageError(f"DDP does not take the communication hook: {str(error).splitlines()[0]}") from error


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants these names, and no annotations that it does not know
    return state._take(bucket)

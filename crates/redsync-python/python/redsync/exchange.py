"""From gradients of a bucket to averaged gradients in the same place, while the backward pass goes on.

    hook --> [send: compress, start collectives] --> [receive: wait, decode, write] --> future of the bucket

Comes in: buckets, in the order in which DDP reduces them, the same on every rank. Goes out: their buffers, averaged. What must
hold: only the sending thread starts collectives until the last bucket of a step, only the receiving one after it, so every
rank starts the same ones in the same order; the bits of a gradient depend on no bucket, because DDP builds its buckets anew
after the first step, and a resumed run must not differ.

A bucket holds three kinds of layers. Compressed ones share one frame, exchanged as one block per rank and summed in rank
order. Large dense ones, as in a dense warm-up, are summed one by one in their place. All small dense ones of a step are summed
together at its end, in a buffer whose order never changes.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from . import _redsync
from .channel import FRAME, GAVE_UP, LEAST_BYTES, NOT_FINITE, Broken, Channel, Gathered, wait
from .errors import Error, GradientError, PeerError
from .staging import Staging
from .stats import Meter
from .watch import Watch

MESSAGE_HEADER = 24
FRAME_HEADER = 32


@dataclass
class Step:
    """One synchronized backward pass."""

    number: int
    density: float | None
    """What compressed layers send; None while everything is dense."""
    loss_scale: float | None
    """By what a GradScaler multiplied the loss; None without one."""
    buckets: list[Bucket] = field(default_factory=list)
    short: list[Flight] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    reason: str | None = None
    """Why this rank gives up."""
    not_finite: bool = False
    """Some rank has a gradient that is not finite, and a GradScaler will skip the step."""


@dataclass
class Part:
    """One layer's elements in a bucket, in the order of memory."""

    layer: int
    flat: torch.Tensor
    used: bool


@dataclass
class Bucket:
    """What DDP hands over at once."""

    step: Step
    index: int
    parts: list[Part]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    last: bool
    ready: object = None
    """On a GPU: the event after which the gradients are there."""


@dataclass
class Sum:
    """A dense sum under way; `copy` is where it happens if not in place."""

    work: dist.Work
    flat: torch.Tensor
    copy: torch.Tensor | None


@dataclass
class Flight:
    """A bucket whose collectives were started."""

    bucket: Bucket
    compressed: list[Part]
    gathered: Gathered | None
    sums: list[Sum]
    begin: float


class Exchange:
    """The two threads of one model."""

    def __init__(
        self,
        layers: _redsync.Layers,
        sizes: list[int],
        bits: list[int],
        small: list[int],
        channel: Channel,
        watch: Watch,
        meter: Meter,
        staging: Staging,
        patience: float,
    ) -> None:
        self._layers, self._sizes, self._bits = layers, sizes, bits
        self._channel, self._watch, self._meter, self._staging = channel, watch, meter, staging
        self._patience = patience
        self._small = torch.zeros(sum(sizes[layer] for layer in small), device=staging.device)
        ends = list(itertools.accumulate((sizes[layer] for layer in small), initial=0))
        self._small_of = {layer: self._small[begin:end] for layer, begin, end in zip(small, ends, ends[1:])}
        self._outbox: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._failure: Error | None = None
        self._open: Step | None = None
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._send, "redsync-send"), (self._receive, "redsync-receive"))
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raises what went wrong before, if anything did."""
        if self._failure is not None:
            raise self._failure

    def submit(self, bucket: Bucket) -> None:
        """Hands a bucket over. Returns at once."""
        self.check()
        self._open = bucket.step
        bucket.step.buckets.append(bucket)
        self._outbox.put(bucket)

    def wait(self, step: Step) -> None:
        """Waits until all buckets of a step are averaged."""
        # Every wait of the threads ends within the patience of the group; there are two per bucket, and two at the end.
        limit = time.monotonic() + self._patience * (2 * len(step.buckets) + 2)
        while not step.done.wait(1.0):
            alive = all(thread.is_alive() for thread in self._threads)
            if self._failure is None and (not alive or time.monotonic() > limit):
                self._fail(Error(f"the exchange of step {step.number} does not end; look at what was logged before"))
        self.check()

    def close(self) -> None:
        """Ends the threads, after what is under way."""
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._patience)
        if self._failure is None:
            self._failure = Error("redsync was closed for this model")

    # The sending thread.

    def _send(self) -> None:
        while (bucket := self._outbox.get()) is not None:
            if self._failure is None:
                self._guarded(lambda: self._inbox.put(self._launch(bucket)))
        self._inbox.put(None)

    def _launch(self, bucket: Bucket) -> Flight:
        step, begin = bucket.step, time.perf_counter()
        self._watch.note(step.number, bucket.index)
        with self._staging.stream(bucket.ready):
            if bucket.index == 0:
                self._small.zero_()
            compressed = [part for part in bucket.parts if self._is_compressed(part, step)]
            gathered = self._start_frame(step, compressed) if compressed else None
            sums = [self._start_sum(part.flat) for part in bucket.parts if self._is_large(part, step)]
            for part in bucket.parts:
                if part.layer in self._small_of:
                    self._small_of[part.layer].copy_(part.flat)
            if bucket.last and self._small.numel():
                self._small.div_(self._channel.size)
                sums.append(Sum(self._channel.sum(self._small), self._small, None))
        return Flight(bucket, compressed, gathered, sums, begin)

    def _is_compressed(self, part: Part, step: Step) -> bool:
        return step.density is not None and self._bits[part.layer] > 0

    def _is_large(self, part: Part, step: Step) -> bool:
        return part.layer not in self._small_of and not self._is_compressed(part, step)

    def _start_sum(self, flat: torch.Tensor) -> Sum:
        # Half precision is summed in single precision, as compressed layers are.
        copy = None if flat.dtype == torch.float32 else flat.float()
        target = flat if copy is None else copy
        target.div_(self._channel.size)
        return Sum(self._channel.sum(target), flat, copy)

    def _start_frame(self, step: Step, compressed: list[Part]) -> Gathered:
        kind, payload = self._frame(step, compressed)
        layers = tuple(part.layer for part in compressed)
        sizes = [self._sizes[layer] for layer in layers]
        guess = [size * (step.density or 0.0) * self._bits[layer] / 8 for size, layer in zip(sizes, layers)]
        headers = FRAME_HEADER + MESSAGE_HEADER * len(layers)
        expected = max(LEAST_BYTES, headers + int(sum(guess)) + 64)
        # Codes of indices are shorter than 64 bits.
        limit = LEAST_BYTES + headers + sum(12 * size + 8 for size in sizes)
        return self._channel.start((layers, step.density), kind, payload, expected, limit)

    def _frame(self, step: Step, compressed: list[Part]) -> tuple[int, bytes]:
        """The frame of a bucket, or why there is none; whatever happens, something is sent, for the others wait for it."""
        if step.reason is None and not step.not_finite:
            gradients = [(part.layer, self._staging.fetch(part.layer, part.flat) if part.used else None) for part in compressed]
            scale = 1.0 / (self._channel.size * (step.loss_scale or 1.0))
            try:
                payload, costs = self._layers.compress(step.number, scale, gradients)
                self._meter.compressed(costs)
                return FRAME, payload
            except _redsync.RefusedGradient as error:
                if step.loss_scale is not None:
                    step.not_finite = True
                else:
                    step.reason = str(error)
        if step.reason is None:
            return NOT_FINITE, b""
        return GAVE_UP, step.reason.encode()[:LEAST_BYTES]

    # The receiving thread.

    def _receive(self) -> None:
        while (flight := self._inbox.get()) is not None:
            if self._failure is None:
                self._guarded(lambda: self._land(flight))

    def _land(self, flight: Flight) -> None:
        bucket, step = flight.bucket, flight.bucket.step
        with self._staging.stream(None):
            if flight.gathered is not None:
                self._channel.finish(flight.gathered)
                self._check_kinds(flight.gathered, step)
                if not step.not_finite and not flight.gathered.missing:
                    self._fill(flight)
                step.short.append(flight)
            for sum in flight.sums:
                wait(sum.work)
                if sum.copy is not None:
                    sum.flat.copy_(sum.copy)
            self._meter.exchanged(flight)
            if bucket.last:
                self._end(step)

    def _check_kinds(self, gathered: Gathered, step: Step) -> None:
        for rank, kind in enumerate(gathered.kinds):
            if kind == GAVE_UP:
                reason = bytes(gathered.message(rank).tolist()).decode(errors="replace")
                who = "this rank" if rank == self._channel.rank else f"rank {rank}"
                raise GradientError(f"{who} gave up: {reason}")
            step.not_finite |= kind == NOT_FINITE

    def _fill(self, flight: Flight) -> None:
        assert flight.gathered is not None
        step = flight.bucket.step
        targets = [(part.layer, self._staging.target(part.layer, part.flat)) for part in flight.compressed]
        self._layers.fill(step.number, step.loss_scale or 1.0, flight.gathered.messages(), targets)
        for part, (_, target) in zip(flight.compressed, targets):
            self._staging.store(part.flat, target)

    def _end(self, step: Step) -> None:
        gathered = [flight.gathered for flight in step.short if flight.gathered is not None]
        late = [flight for flight in step.short if flight.gathered is not None and flight.gathered.missing]
        self._channel.finish_rest(gathered)
        for bucket in step.buckets:
            for part in bucket.parts:
                if part.layer in self._small_of:
                    part.flat.copy_(self._small_of[part.layer])
        if step.loss_scale is not None and step.density is not None:
            self._skip_if_not_finite(step)
        if not step.not_finite:
            for flight in late:
                self._fill(flight)
        self._staging.synchronize()
        for bucket in step.buckets:
            bucket.future.set_result(bucket.buffer)
        step.done.set()

    def _skip_if_not_finite(self, step: Step) -> None:
        """A GradScaler will skip this step on all ranks: what was sent at it is not lost, but taken back."""
        dense = [part.flat for bucket in step.buckets for part in bucket.parts if not self._is_compressed(part, step)]
        step.not_finite |= not all(bool(flat.isfinite().all()) for flat in dense)
        if step.not_finite:
            self._layers.roll_back(step.number)
            for bucket in step.buckets:
                for part in bucket.parts:
                    if self._is_compressed(part, step):
                        part.flat.fill_(float("inf"))

    # Both.

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Broken as error:
            self._fail(self._watch.blame(str(error)), error.__cause__)
        except Error as error:
            self._fail(error)
        except _redsync.RefusedMessage as error:
            text, *rank = error.args
            self._fail(PeerError(text, tuple(rank)), error)
        except BaseException as error:
            self._fail(Error(f"redsync failed: {type(error).__name__}: {error}"), error)

    def _fail(self, error: Error, cause: BaseException | None = None) -> None:
        if self._failure is not None:
            return
        error.__cause__ = cause
        self._failure = error
        step = self._open
        if step is not None:
            for bucket in list(step.buckets):
                if not bucket.future.done():
                    bucket.future.set_exception(error)  # type: ignore[arg-type]
            step.done.set()

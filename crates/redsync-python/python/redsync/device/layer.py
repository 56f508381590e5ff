"""u and v of one layer on a device, as the engine's sending thread uses them.

Comes in: a piece of DDP's bucket, and what the engine wants to know. Goes out: candidates, through memory of the host. What must
hold: everything happens on the stream of the `Staging`, in order; memory of the host is read only after an event, and rewritten
only after what was to be sent from it is gone; the usual step of a bucket of layers waits once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .operations import Digit, How, Operations, Pass, Phase, Sent
from .stream import Stream

if TYPE_CHECKING:
    from ..staging import Bucket

Rule = tuple[str, float, float, float]
"""The form of the momentum, its coefficient, and what multiplies the gradient and v."""
Seek = tuple[Phase, float, int]
"""The signs that compete, a floor, and how many elements above it can be handed out."""
NOTHING: Seek = ("both", float("inf"), 0)
"""What is sought where nothing is."""
Found = tuple[int, torch.Tensor | None]
"""How many elements were found; if there was room for them their words, as bytes of the host, good until the next call."""


class Layer:
    """One layer. What comes from the engine as a tensor is lent for the call only."""

    def __init__(self, operations: Operations, stream: Stream, elements: int) -> None:
        self._operations, self._stream = operations, stream
        self._u: torch.Tensor | None = None
        with stream:
            self._v = stream.zeros(elements)
            self._found = stream.empty(1, torch.int64)
        self._saved: tuple[torch.Tensor | None, torch.Tensor] | None = None
        self._usual: dict[Phase, int] = {}
        self._handed = 0
        self._begun: tuple[Rule, bool, Seek | None] | None = None
        self._down, self._up = stream.mail(), stream.mail()

    def make_u(self) -> None:
        """Makes a u of zeros."""
        with self._stream:
            self._u = torch.zeros_like(self._v)
            if self._saved is not None:
                self._saved = torch.zeros_like(self._v), self._saved[1]

    def announce(self, flat: torch.Tensor, bucket: Bucket, does: Rule, save: bool, seek: Seek | None) -> None:
        """Begins with what `accumulate` is asked for next, in the same words; what is found comes with that of all its bucket."""
        form, *numbers = does
        phase, floor, capacity = seek or NOTHING
        with self._stream:
            self._stream.wait_for(bucket.ready)
            if save and self._saved is None:
                self._saved = None if self._u is None else torch.empty_like(self._u), torch.empty_like(self._v)
            room = self._room(capacity)
            saved = self._saved if save else None
            rule = Pass("nesterov" if form == "nesterov" else "momentum", *numbers)
            self._operations.accumulate(flat, self._u, self._v, saved, rule, phase, floor, room)
            bucket.list(self, room[: 1 + self._usually(phase, capacity)])
        self._begun = does, save, seek

    def accumulate(self, flat: torch.Tensor, bucket: Bucket, does: Rule, save: bool, seek: Seek | None) -> tuple[bool, Found]:
        """Adds a gradient, by a rule; whether v is finite then, and what was sought in it."""
        if self._begun is None:
            self.announce(flat, bucket, does, save, seek)
        elif self._begun != (does, save, seek):
            raise RuntimeError("another pass was announced than is wanted")
        self._begun = None
        phase, _, capacity = seek or NOTHING
        with self._stream:
            bad, found = self._take(phase, self._room(capacity), bucket.words(self))
        return bad == 0, found

    def collect(self, seek: Seek) -> Found:
        """What is sought in v as it is."""
        phase, floor, capacity = seek
        with self._stream:
            room = self._room(capacity)
            self._operations.compact(self._v, phase, floor, room)
            words = self._down.fetch(room[: 1 + self._usually(phase, capacity)])
            return self._take(phase, room, words)[1]

    def _room(self, capacity: int) -> torch.Tensor:
        if self._found.numel() <= capacity:
            self._found = self._stream.empty(1 + capacity, torch.int64)
        return self._found[: 1 + capacity]

    def _usually(self, phase: Phase, capacity: int) -> int:
        """As much as was found the last time comes along with the counts."""
        return min(self._usual.get(phase, 0), capacity)

    def _take(self, phase: Phase, room: torch.Tensor, came: torch.Tensor) -> tuple[int, Found]:
        """How many are not finite, and what was found. What did not come along is fetched now."""
        capacity, had = room.numel() - 1, came.numel()
        count, bad = came[:8].view(torch.int32).tolist()
        if count > capacity:
            return bad, (count, None)
        words, size = came, 8 + 8 * count
        if size > had:
            words = self._down.memory(size)
            words[:had] = came
            words = self._down.fetch(room[: 1 + count], begin=had // 8)
        self._usual[phase] = self._handed = count
        return bad, (count, words[8:size])

    def edge(self, phase: Phase, digit: tuple[int, int, int], above: int, wanted: int) -> torch.Tensor:
        """Where the largest elements end in a histogram of a digit, as bytes: it stays on the device."""
        with self._stream:
            bins = self._operations.histogram(self._v, phase, Digit(*digit))
            return self._down.fetch(self._operations.edge(bins, above, wanted))

    def count_above(self, phase: Phase, thresholds: torch.Tensor) -> torch.Tensor:
        """How many elements are greater than each threshold, as bytes."""
        with self._stream:
            (given,) = self._up.send(thresholds)
            return self._down.fetch(self._operations.count_above(self._v, given.view(torch.float32), phase))

    def statistics(self, phase: Phase) -> torch.Tensor:
        """Sums, maxima and numbers of the elements that compete, each for all lanes of all chunks, as bytes."""
        with self._stream:
            parts = self._operations.statistics(self._v, phase)
            return self._down.fetch(torch.stack([part.view(torch.int32).view(-1) for part in parts]).view(-1))

    def take_out(
        self, least: int, last: int, how: How, same: float, listed: tuple[torch.Tensor, torch.Tensor] | None, clear: bool
    ) -> None:
        """Takes elements out of those that were handed out last."""
        with self._stream:
            given = None
            if listed is not None:
                values, which = self._up.send(*listed)
                given = values.view(torch.float32), which
            u, sent = self._u if clear else None, Sent(least, last, how, same)
            self._operations.take_out(u, self._v, self._found, self._handed, sent, given)

    def put(self, indices: torch.Tensor, values: torch.Tensor, clear: bool) -> None:
        """Replaces elements of v, and clears u there if asked to."""
        with self._stream:
            at, x = self._up.send(indices, values)
            self._operations.put(self._u if clear else None, self._v, at.view(torch.int32), x.view(torch.float32))

    def add(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Adds to elements of v."""
        with self._stream:
            at, x = self._up.send(indices, values)
            self._operations.add(self._v, at.view(torch.int32), x.view(torch.float32))

    def scale_u(self, factor: float) -> None:
        """Multiplies u."""
        if self._u is not None:
            with self._stream:
                self._u.mul_(factor)

    def take_back(self) -> None:
        """u and v as they were before the last pass."""
        if self._saved is None:
            raise RuntimeError("the last pass did not save what it changed")
        (self._u, self._v), self._saved = self._saved, (self._u, self._v)

    def read(self, which: str) -> torch.Tensor | None:
        """All of u or v, on the host."""
        tensor = self._u if which == "u" else self._v
        with self._stream:
            return None if tensor is None else tensor.cpu()

    def write(self, u: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Replaces all of u, or of v, or of both, by floats as bytes."""
        with self._stream:
            if v is not None:
                self._v.copy_(v.view(torch.float32))
            if u is not None and self._u is not None:
                self._u.copy_(u.view(torch.float32))

    def gradient(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """A gradient as f32, on the host."""
        with self._stream:
            self._stream.wait_for(bucket.ready)
            return flat.to("cpu", torch.float32)

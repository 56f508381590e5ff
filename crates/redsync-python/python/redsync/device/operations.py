"""The passes over a layer, as plain operations of PyTorch, for every device that has them.

Comes in: tensors of a device. Goes out: the next u and v, and of them what the host asks for. What must hold: the bits are those
of the host's loops and of the Triton kernels (`kernels.py`), so products and sums are operations of their own; where the device
can do it (`nonzero` of some cannot), nothing waits for it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

Form = Literal["momentum", "nesterov"]
How = Literal["whole", "same", "rounded", "listed"]
Phase = Literal["both", "positive", "negative"]

CHUNK, LANES = 32768, 8
"""In which order the host sums up: a chunk at a time, its elements dealt out to lanes."""
BINS = 1 << 11
"""Values that the widest digit has."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """What an accumulating pass does to u and v."""

    form: Form
    coefficient: float
    scale: float
    """Multiplies the gradient as it enters."""
    carry: float
    """Multiplies what v held before."""


@dataclasses.dataclass(frozen=True)
class Digit:
    """Some of the 31 bits of a magnitude, by which elements are told apart."""

    shift: int
    """Bits below."""
    width: int
    """How many; at most eleven."""
    prefix: int
    """The bits above that elements must have to be counted."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """Which of the elements that were found are taken out, and what was sent of them."""

    least: int
    """The bits of the smallest magnitude that was chosen."""
    last: int
    """The largest index at which it was."""
    how: How
    """All, one value for all, each rounded to bfloat16, or one of a few values for each. What was not sent stays."""
    same: float


def see(x: torch.Tensor, phase: Phase) -> torch.Tensor:
    """Sizes as a phase sees them; at most zero for what does not compete."""
    return x.abs() if phase == "both" else x if phase == "positive" else -x


class Operations:
    """The passes. What is found goes into `found`: words of 64 bits, the first for the counts of what was found and of what is not
    finite, then one per element, the bits of its value above and its index below. Counts go on where the room has ended."""

    name = "torch operations"

    def accumulate(
        self,
        gradient: torch.Tensor,
        u: torch.Tensor | None,
        v: torch.Tensor,
        saved: tuple[torch.Tensor | None, torch.Tensor] | None,
        does: Pass,
        phase: Phase,
        floor: float,
        found: torch.Tensor,
    ) -> None:
        """u and v of the next step, and what of v is greater than the floor; `saved` gets u and v as they were."""
        if saved is not None:
            saved_u, saved_v = saved
            saved_v.copy_(v)
            if u is not None and saved_u is not None:
                saved_u.copy_(u)
        step = gradient.to(torch.float32, copy=True).mul_(does.scale)
        if does.carry != 1.0:
            v.mul_(does.carry)
        if u is None:
            v.add_(step)
        elif does.form == "momentum":
            v.add_(u.mul_(does.coefficient).add_(step))
        else:
            v.add_(step.add_(u.add_(step).mul_(does.coefficient)))
        self.compact(v, phase, floor, found)
        found[:1].view(torch.int32)[1:].copy_((~v.isfinite()).sum())

    def compact(self, v: torch.Tensor, phase: Phase, floor: float, found: torch.Tensor) -> None:
        """What of v is greater than the floor: the paper's stream compaction."""
        hits = see(v, phase) > floor
        count, words = found[:1].view(torch.int32), found[1:]
        count[0], count[1] = hits.sum(), 0
        index = torch.nonzero_static(hits, size=words.numel(), fill_value=0).view(-1)
        words.copy_((v[index].view(torch.int32).to(torch.int64) << 32) | index)

    def histogram(self, v: torch.Tensor, phase: Phase, digit: Digit) -> torch.Tensor:
        """How many elements that compete have which value of a digit."""
        bits = see(v, phase).view(torch.int32)
        inside = (bits > 0) & ((bits >> digit.shift) >> digit.width == digit.prefix)
        bins = torch.zeros(BINS, dtype=torch.int32, device=v.device)
        values = (bits >> digit.shift) & ((1 << digit.width) - 1)
        return bins.scatter_add_(0, values.to(torch.int64), inside.to(torch.int32))

    def edge(self, bins: torch.Tensor, above: int, wanted: int) -> torch.Tensor:
        """The highest bin with which there are as many as wanted, or the lowest; how many are above it, and how many with it."""
        sums = bins.flip(0).cumsum(0).flip(0).add_(above)
        bin = (sums >= wanted).sum().sub_(1).clamp_(min=0).view(1)
        count = sums[bin]
        return torch.cat([bin, count - bins[bin], count]).to(torch.int32)

    def count_above(self, v: torch.Tensor, thresholds: torch.Tensor, phase: Phase) -> torch.Tensor:
        """How many elements are greater than each of several thresholds."""
        seen = see(v, phase)
        return torch.stack([(seen > threshold).sum(dtype=torch.int32) for threshold in thresholds.unbind()])

    def statistics(self, v: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sum, maximum and number of what competes, for each lane of each chunk: the paper's mean and maximum."""
        seen = see(v, phase).clamp(min=0.0)
        padded = torch.nn.functional.pad(seen, (0, -v.numel() % CHUNK)).view(-1, CHUNK // LANES, LANES)
        sums = torch.zeros_like(padded[:, 0])
        for row in padded.unbind(1):  # one after the other, as the host does
            sums.add_(row)
        return sums, padded.amax(1), (padded > 0).sum(1, dtype=torch.int32)

    def take_out(
        self,
        u: torch.Tensor | None,
        v: torch.Tensor,
        found: torch.Tensor,
        many: int,
        sent: Sent,
        listed: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Takes elements out, of the first `many` that were found, and clears u there if it is given. `listed` are values, and for
        each of the many which of them was sent."""
        words = found[1 : 1 + many]
        bits, at = (words >> 32).to(torch.int32), words & 0xFFFFFFFF
        size, value = bits & 0x7FFFFFFF, bits.view(torch.float32)
        taken = (size > sent.least) | ((size == sent.least) & (at <= sent.last))
        if sent.how == "whole":
            rest = torch.zeros_like(value)
        elif sent.how == "same":
            rest = value - sent.same
        elif sent.how == "rounded":
            near = ((size + 0x7FFF + ((size >> 16) & 1)) & -0x10000).clamp(max=0x7F7F0000)
            rest = value - (near | (bits & -0x80000000)).view(torch.float32)
        else:
            assert listed is not None
            values, which = listed
            rest = value - values[which.to(torch.int64)]
        # What is not taken is written as it is: to leave it out would need a number that only the device knows.
        v.index_copy_(0, at, torch.where(taken, rest, value))
        if u is not None:
            u.index_copy_(0, at, torch.where(taken, 0.0, u[at]))

    def put(self, u: torch.Tensor | None, v: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces elements of v, each index once, and clears u there if it is given."""
        at = indices.to(torch.int64)
        v.index_copy_(0, at, values)
        if u is not None:
            u.index_fill_(0, at, 0.0)

    def add(self, v: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Adds to elements of v, each index once."""
        at = indices.to(torch.int64)
        v.index_copy_(0, at, v[at].add_(values))

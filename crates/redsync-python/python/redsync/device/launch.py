"""Launches of the Triton kernels: the same passes as `operations.py`, one reading of memory each.

Comes in: tensors of a CUDA or ROCm device. Goes out: what `Operations` gives, in another order where it gives an order. What must
hold: launches go to the current stream, and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton

from . import kernels
from .operations import BINS, CHUNK, LANES, Digit, Form, Operations, Pass, Phase, Sent

_FORMS: dict[Form, int] = {"momentum": 1, "nesterov": 2}
_HOWS = {"whole": 0, "same": 1, "rounded": 2, "listed": 3}
_LENSES: dict[Phase, tuple[int, int]] = {"both": (0x7FFFFFFF, 0), "positive": (-1, 0), "negative": (-1, -0x80000000)}
"""Two bit operations that show of an element what a phase sees."""

BLOCK = 1024
"""Elements of one program: two vectors of four per thread and tensor, with four warps."""
TURNS = 8
"""Blocks whose bins one program of a histogram sums up before it adds them to the others'."""
FEW = 256
"""Elements of one program where indices are followed."""
CHUNKS = 4
"""Chunks that one program of statistics takes side by side."""


def _blocks(n: int, block: int) -> tuple[int]:
    return (triton.cdiv(n, block),)


class Kernels(Operations):
    """The passes, as Triton kernels."""

    name = "Triton kernels"

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
        found[:1].zero_()
        if v.numel() == 0:
            return
        halves = gradient.dtype == torch.bfloat16
        given = gradient.view(torch.int16) if halves else gradient
        saved_u, saved_v = saved or (None, v)
        # What a kernel has no use for is any memory.
        kernels.accumulate[_blocks(v.numel(), BLOCK)](
            given, v if u is None else u, v, saved_v if saved_u is None else saved_u, saved_v, found,
            v.numel(), does.coefficient, does.scale, does.carry, *_LENSES[phase], floor, found.numel() - 1,
            FORM=0 if u is None else _FORMS[does.form], HALVES=halves, SAVE=saved is not None, BLOCK=BLOCK, **kernels.UNFUSED,
        )  # fmt: skip

    def compact(self, v: torch.Tensor, phase: Phase, floor: float, found: torch.Tensor) -> None:
        found[:1].zero_()
        if v.numel() == 0:
            return
        room = found.numel() - 1
        kernels.compact[_blocks(v.numel(), BLOCK)](v, found, v.numel(), *_LENSES[phase], floor, room, BLOCK=BLOCK)

    def histogram(self, v: torch.Tensor, phase: Phase, digit: Digit) -> torch.Tensor:
        bins = torch.zeros(BINS, dtype=torch.int32, device=v.device)
        if v.numel() > 0:
            kernels.histogram[_blocks(v.numel(), BLOCK * TURNS)](
                v, bins, v.numel(), *_LENSES[phase], digit.prefix, digit.shift, digit.width, BLOCK=BLOCK, TURNS=TURNS, BINS=BINS
            )
        return bins

    def edge(self, bins: torch.Tensor, above: int, wanted: int) -> torch.Tensor:
        where = torch.empty(3, dtype=torch.int32, device=bins.device)
        kernels.edge[(1,)](bins, where, above, wanted, BINS=BINS)
        return where

    def count_above(self, v: torch.Tensor, thresholds: torch.Tensor, phase: Phase) -> torch.Tensor:
        counts = torch.zeros(thresholds.numel(), dtype=torch.int32, device=v.device)
        if v.numel() > 0:
            kernels.count_above[_blocks(v.numel(), BLOCK)](
                v, thresholds, counts, v.numel(), *_LENSES[phase], MANY=thresholds.numel(), BLOCK=BLOCK
            )
        return counts

    def statistics(self, v: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (triton.cdiv(v.numel(), CHUNK), LANES)
        sums, tops = (torch.empty(shape, dtype=torch.float32, device=v.device) for _ in range(2))
        counts = torch.empty(shape, dtype=torch.int32, device=v.device)
        if v.numel() > 0:
            programs = _blocks(v.numel(), CHUNK * CHUNKS)
            kernels.statistics[programs](v, sums, tops, counts, v.numel(), *_LENSES[phase], CHUNKS=CHUNKS, num_warps=1)
        return sums, tops, counts

    def take_out(
        self,
        u: torch.Tensor | None,
        v: torch.Tensor,
        found: torch.Tensor,
        many: int,
        sent: Sent,
        listed: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        if many > 0:
            values, which = listed or (v, found)
            kernels.take_out[_blocks(many, FEW)](
                v if u is None else u, v, found, values, which, many, sent.least, sent.last, sent.same,
                HOW=_HOWS[sent.how], CLEAR=u is not None, BLOCK=FEW, num_warps=2,
            )  # fmt: skip

    def put(self, u: torch.Tensor | None, v: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        many = indices.numel()
        if many > 0:
            target = v if u is None else u
            kernels.put[_blocks(many, FEW)](target, v, indices, values, many, CLEAR=u is not None, BLOCK=FEW, num_warps=2)

    def add(self, v: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        many = indices.numel()
        if many > 0:
            kernels.add[_blocks(many, FEW)](v, indices, values, many, BLOCK=FEW, num_warps=2)

"""What can be chosen, as types, and choices in the words that the engine takes."""

from __future__ import annotations

import operator
import os
import platform
from typing import Any, Literal

from .errors import UsageError

Method = Literal["rgc+asq", "rgc+2bit", "rgc", "rgc-naive", "sgd"]
Exchange = Literal["gather", "owners", "hosts"]
Rest = Literal["8bit", "2bit", "f32"]
Warmup = int | tuple[Literal["dense", "ramp"], int]

RAMP = 2000
"""Steps of the warm-up of a run that says nothing about it."""


def host_of(rank: int, ranks_per_host: int | None) -> str:
    """The host of a rank: by count, as torchrun numbers it, or by the name of the machine."""
    if ranks_per_host is not None:
        if ranks_per_host < 1:
            raise UsageError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        return str(rank // ranks_per_host)
    return os.environ.get("GROUP_RANK") or platform.node()


def warm_up(warmup: Any, method: Any, plan: Any, every: int = 1) -> tuple[str, int]:
    """How the run begins: kind and exchanges, of which there is one every so many steps. None is what suits method and plan."""
    if warmup is None:
        # A ramp is cheap because its indices are coded and its values take two bits. The paper's messages have neither.
        plain = plan == "paper" or method in ("sgd", "rgc-naive")
        return ("dense", 0) if plain else ("ramp", -(-RAMP // every))
    kind, steps = warmup if isinstance(warmup, tuple) and len(warmup) == 2 else ("dense", warmup)
    try:
        steps = operator.index(steps)
    except TypeError:
        steps = -1
    if steps < 0 or kind not in ("dense", "ramp"):
        raise UsageError(f'warmup must be a whole number of steps, or ("ramp", steps) or ("dense", steps); got {warmup!r}')
    return kind, steps

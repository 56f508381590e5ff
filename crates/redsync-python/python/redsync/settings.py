"""What can be chosen, as types, and choices in the words that the engine takes."""

from __future__ import annotations

import operator
from typing import Any, Literal

from .errors import UsageError

Method = Literal["rgc+asq", "rgc", "rgc-naive", "sgd"]
Warmup = int | tuple[Literal["dense", "ramp"], int]


def warm_up(warmup: Any) -> tuple[str, int]:
    """How the run begins: kind and steps."""
    kind, steps = warmup if isinstance(warmup, tuple) and len(warmup) == 2 else ("dense", warmup)
    try:
        steps = operator.index(steps)
    except TypeError:
        steps = -1
    if steps < 0 or not isinstance(kind, str):
        raise UsageError(f'a warmup of {warmup!r} is none: give a number of steps, or ("ramp", steps)')
    return kind, steps

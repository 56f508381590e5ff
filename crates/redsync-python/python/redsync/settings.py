"""What can be chosen, as types, and choices in the words that the engine takes."""

from __future__ import annotations

import operator
from typing import Any, Literal

from .errors import UsageError

Method = Literal["rgc+asq", "rgc", "rgc-naive", "sgd"]
Rest = Literal["8bit", "2bit", "f32"]
Warmup = int | tuple[Literal["dense", "ramp"], int]

RAMP = 2000
"""Steps of the warm-up of a run that says nothing about it."""


def warm_up(warmup: Any, method: Any, plan: Any) -> tuple[str, int]:
    """How the run begins: kind and steps. None is what suits method and plan."""
    if warmup is None:
        # A ramp is cheap because its indices are coded and its values take two bits. The paper's messages have neither.
        plain = plan == "paper" or method in ("sgd", "rgc-naive")
        return ("dense", 0) if plain else ("ramp", RAMP)
    kind, steps = warmup if isinstance(warmup, tuple) and len(warmup) == 2 else ("dense", warmup)
    try:
        steps = operator.index(steps)
    except TypeError:
        steps = -1
    if steps < 0 or kind not in ("dense", "ramp"):
        raise UsageError(f'warmup must be a whole number of steps, or ("ramp", steps) or ("dense", steps); got {warmup!r}')
    return kind, steps

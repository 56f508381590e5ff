"""Compressed gradient exchange for PyTorch's DistributedDataParallel, and local steps for any optimizer.

One call, and each rank sends the 0.1% largest entries of an accumulated residual instead of the whole gradient:

    >>> import redsync                                                                  # doctest: +SKIP
    >>> model = DistributedDataParallel(net)                                            # doctest: +SKIP
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)           # doctest: +SKIP
    >>> redsync.attach(model, optimizer)                                                # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._redsync import VERSION as __version__
from .attach import attach
from .attachment import Attachment, of
from .errors import Error, GradientError, MismatchError, PeerError, UsageError
from .stats import LayerStats, Stats, Traffic

__all__ = [
    "Attachment",
    "Error",
    "GradientError",
    "LayerStats",
    "MismatchError",
    "PeerError",
    "Stats",
    "Traffic",
    "UsageError",
    "__version__",
    "attach",
    "load_state_dict",
    "of",
    "state_dict",
    "stats",
]


def stats(model: torch.nn.Module | None = None) -> Stats:
    """What a model's run sent, and what its last step cost; see `Attachment.stats`. Without a model, of the only one."""
    return of(model).stats()


def state_dict(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """This rank's residuals and momentum, for a checkpoint; see `Attachment.state_dict`."""
    return of(model).state_dict()


def load_state_dict(state: Mapping[str, Any] | Sequence[Mapping[str, Any]], model: torch.nn.Module | None = None) -> None:
    """Continues from a checkpoint; see `Attachment.load_state_dict`."""
    of(model).load_state_dict(state)

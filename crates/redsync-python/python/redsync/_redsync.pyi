"""The native half of the package: everything that touches every element of a gradient."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

VERSION: str
WIRE_VERSION: int

class RefusedGradient(RuntimeError):
    """A gradient that cannot be accumulated."""

class RefusedMessage(RuntimeError):
    """A peer's message that is not what it should be: a text and, if it is known, the rank."""

def replica_hash(tensors: Sequence[torch.Tensor]) -> int:
    """The hash of tensors of single precision, to compare replicas by."""

class Group:
    """The ranks of a process group, for the engine. Made by all of them; a rank that does not answer is waited for so many
    seconds."""

    def __init__(self, process_group: dist.ProcessGroup, patience: float) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def close(self) -> None: ...

class Layers:
    """The compressors of one model on one rank. Tensors are contiguous and on the host."""

    def __init__(
        self,
        layers: Sequence[tuple[str, int, str]],
        momenta: Sequence[tuple[float, bool]],
        *,
        rank: int,
        ranks: int,
        method: str,
        preset: str,
        plan: dict[str, str],
        density: float,
        dense_below: int,
        masking: bool,
        bf16: bool,
        warm_up: tuple[str, int],
        undo: bool,
        threads: int,
    ) -> None: ...
    def choices(self) -> list[str]: ...
    def begin(self, step: int) -> float | None: ...
    def set_momentum(self, layer: int, coefficient: float, nesterov: bool) -> None: ...
    def has_momentum(self, layer: int) -> bool: ...
    def adopt_momentum(self, layer: int, buffer: torch.Tensor, ranks: int) -> None: ...
    def compress(
        self, step: int, scale: float, gradients: Sequence[tuple[int, torch.Tensor | None]]
    ) -> tuple[bytes, list[tuple[int, int, int, float]]]: ...
    def fill(
        self,
        step: int,
        scale: float,
        frames: Sequence[torch.Tensor],
        targets: Sequence[tuple[int, torch.Tensor]],
    ) -> None: ...
    def roll_back(self, step: int) -> None: ...
    def save(self, layer: int, u: torch.Tensor | None, v: torch.Tensor) -> list[list[int]]: ...
    def restore(self, layer: int, u: torch.Tensor | None, v: torch.Tensor, remembering: Sequence[Sequence[int]]) -> None: ...
    def residual_norm(self, layer: int) -> float: ...

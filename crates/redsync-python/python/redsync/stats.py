"""What a step cost, per layer and in all. Cheap enough to be always on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exchange import Flight


@dataclass
class LayerStats:
    """One parameter at the last step."""

    name: str
    choice: str
    """``dense``, or how it is compressed: a selector, with ``+asq`` if it is quantized."""
    elements: int
    """Its size."""
    sent: int = 0
    """How many of its elements this rank sent."""
    bytes: int = 0
    """The bytes of this rank's message, or of its dense gradient."""
    ms: float = 0.0
    """Milliseconds of accumulating, selecting and encoding; 0 if it was dense."""

    @property
    def density(self) -> float:
        """The fraction that was sent."""
        return self.sent / self.elements if self.elements else 0.0


@dataclass
class Stats:
    """The last step of a model."""

    step: int = -1
    layers: list[LayerStats] = field(default_factory=list)
    bytes_sent: int = 0
    """What this rank contributed: messages and dense gradients, before the backend sends them to one or more peers."""
    dense_bytes: int = 0
    """What it would have contributed without compression."""
    total_bytes_sent: int = 0
    """The same of all steps since `attach`."""
    total_dense_bytes: int = 0
    compress_ms: float = 0.0
    exchange_ms: float = 0.0
    """From the first bucket's start to the end of the last, hidden behind the backward pass or not."""
    exposed_ms: float = 0.0
    """How long the backward pass had to wait at its end."""

    def __str__(self) -> str:
        ratio = self.dense_bytes / max(1, self.bytes_sent)
        return (
            f"step {self.step}: sent {self.bytes_sent:,} of {self.dense_bytes:,} bytes (1/{ratio:.0f}), "
            f"compressing {self.compress_ms:.1f} ms, exchange {self.exchange_ms:.1f} ms, waited {self.exposed_ms:.1f} ms"
        )


class Meter:
    """Collects the statistics of one model; each thread writes its own numbers."""

    def __init__(self, names: Sequence[str], choices: Sequence[str], sizes: Sequence[int], item_sizes: Sequence[int]) -> None:
        self._item_sizes = item_sizes
        self._layers = [LayerStats(*each) for each in zip(names, choices, sizes)]
        self._stats = Stats(layers=self._layers)
        self._begin: float | None = None
        self._touched: set[int] = set()

    def compressed(self, costs: Sequence[tuple[int, int, int, float]]) -> None:
        """What compressing a bucket cost."""
        for layer, sent, size, ms in costs:
            entry = self._layers[layer]
            entry.sent, entry.bytes, entry.ms = sent, size, ms
            self._touched.add(layer)

    def exchanged(self, flight: Flight) -> None:
        """A bucket's collectives have ended."""
        if self._begin is None or flight.begin < self._begin:
            self._begin = flight.begin
        self._stats.exchange_ms = 1e3 * (time.perf_counter() - self._begin)

    def finish(self, step: int, exposed_ms: float, sparse: bool) -> None:
        """The step is over; at a sparse one, compressed layers that were refused sent nothing."""
        for layer, entry in enumerate(self._layers):
            if layer not in self._touched and sparse and entry.choice != "dense":
                entry.sent, entry.bytes, entry.ms = 0, 0, 0.0
            elif layer not in self._touched:
                entry.sent, entry.bytes, entry.ms = entry.elements, entry.elements * self._item_sizes[layer], 0.0
        self._touched.clear()
        self._begin = None
        stats = self._stats
        stats.step, stats.exposed_ms = step, exposed_ms
        stats.bytes_sent = sum(entry.bytes for entry in self._layers)
        stats.dense_bytes = sum(entry.elements * size for entry, size in zip(self._layers, self._item_sizes))
        stats.compress_ms = sum(entry.ms for entry in self._layers)
        stats.total_bytes_sent += stats.bytes_sent
        stats.total_dense_bytes += stats.dense_bytes

    def snapshot(self) -> Stats:
        """The statistics of the last step, which later steps do not change."""
        return Stats(**{**self._stats.__dict__, "layers": [LayerStats(**entry.__dict__) for entry in self._layers]})

"""What a step cost, per layer and in all. Cheap enough to be always on."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Milliseconds of accumulating, selecting and encoding; of copying, if it was dense."""

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
    """From the start of the first exchange to the end of the last, hidden behind the backward pass or not."""
    exposed_ms: float = 0.0
    """How long the backward pass had to wait at its end."""

    def __str__(self) -> str:
        ratio = self.dense_bytes / max(1, self.bytes_sent)
        return (
            f"step {self.step}: sent {self.bytes_sent:,} of {self.dense_bytes:,} bytes (1/{ratio:.0f}), "
            f"compressing {self.compress_ms:.1f} ms, exchange {self.exchange_ms:.1f} ms, waited {self.exposed_ms:.1f} ms"
        )

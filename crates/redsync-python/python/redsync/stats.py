"""What a run sent, and what its last step cost, per layer and in all. Cheap enough to be always on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """Where the bytes of this rank went, of all steps since `attach`. Each is counted once, however many ranks it goes to."""

    messages: int = 0
    """After the warm-up: chosen elements of compressed layers."""
    rest: int = 0
    """After the warm-up: biases, normalization, small and dense layers."""
    headers: int = 0
    """After the warm-up: headers of frames and messages."""
    warm_up: int = 0
    """Everything that was sent during the warm-up."""
    moments: int = 0
    """After the warm-up: second moments of Adam."""
    dense: int = 0
    """What DDP would have sent in the same steps, gradients in the precision of their parameters."""

    @property
    def sent(self) -> int:
        """All that was sent."""
        return self.messages + self.rest + self.headers + self.warm_up + self.moments

    @property
    def ratio(self) -> float:
        """How many times less than by DDP was sent; 1 if there was nothing to send."""
        return self.dense / self.sent if self.sent else 1.0

    def __str__(self) -> str:
        parts = {"messages": self.messages, "warm-up": self.warm_up, "rest": self.rest, "headers": self.headers}
        parts["second moments"] = self.moments
        shares = ", ".join(f"{name} {100 * part / self.sent:.0f}%" for name, part in parts.items() if part)
        text = f"sent {_megabytes(self.sent)} of {_megabytes(self.dense)} (1/{self.ratio:.0f})"
        return f"{text}: {shares}" if shares else text


def _megabytes(count: int) -> str:
    size = count / 1e6
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.3g} MB"


@dataclass
class LayerStats:
    """One parameter at the last step."""

    name: str
    """The parameter's name in the model."""
    choice: str
    """``dense``; ``dense+8bit`` or ``dense+2bit``, if every element is sent in so many bits; or how it is compressed: a selector,
    with ``+asq`` if it is quantized. During a dense warm-up everything is dense, whatever this says."""
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
    """A model's run since `attach`, and its last step."""

    step: int = -1
    """The number of the last step; -1 before the first."""
    layers: list[LayerStats] = field(default_factory=list)
    """The parameters at the last step."""
    bytes_sent: int = 0
    """What this rank contributed to the last step: messages and dense gradients, before the backend sends them to one or more
    peers."""
    dense_bytes: int = 0
    """What it would have contributed to that step without compression, in the precision of its parameters."""
    total_bytes_sent: int = 0
    """`bytes_sent` of all steps since `attach`."""
    total_dense_bytes: int = 0
    """`dense_bytes` of all steps since `attach`."""
    compress_ms: float = 0.0
    """Milliseconds of accumulating, selecting and encoding at the last step, all layers together."""
    exchange_ms: float = 0.0
    """Milliseconds from the start of the first exchange to the end of the last, hidden behind the backward pass or not."""
    exposed_ms: float = 0.0
    """Milliseconds that the backward pass had to wait at its end."""
    steps: int = 0
    """How many steps there were since `attach`."""
    traffic: Traffic = field(default_factory=Traffic)
    """Where the bytes of all these steps went."""

    def __str__(self) -> str:
        if not self.steps:
            return "no step yet"
        ratio = self.dense_bytes / max(1, self.bytes_sent)
        return (
            f"{self.steps:,} steps: {self.traffic}; "
            f"last step {self.step}: sent {self.bytes_sent:,} of {self.dense_bytes:,} bytes (1/{ratio:.0f}), "
            f"compressing {self.compress_ms:.1f} ms, exchange {self.exchange_ms:.1f} ms, waited {self.exposed_ms:.1f} ms"
        )

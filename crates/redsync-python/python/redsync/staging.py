"""Where a gradient lives while it is compressed: on the host.

Comes in: elements of a bucket on a device. Goes out: the same elements as a tensor of the host, and back. What must hold: they go
through page-locked memory, on a stream of their own. The engine's threads call this.
"""

from __future__ import annotations

import warnings

import torch


class Staging:
    """The way to the host and back for the layers of one model."""

    def __init__(self, device: torch.device) -> None:
        warnings.warn(
            "redsync compresses on the host for now: gradients are copied there and back through pinned memory", stacklevel=4
        )
        self._device = device
        self._hosts: dict[int, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """The moment from which the gradients that were computed so far can be read."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def fetch(self, layer: int, flat: torch.Tensor, ready: torch.cuda.Event) -> torch.Tensor:
        """A layer's elements on the host."""
        host = self.target(layer, flat)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
        self.synchronize()
        return host

    def target(self, layer: int, flat: torch.Tensor) -> torch.Tensor:
        """Where the host writes a layer's elements."""
        host = self._hosts.get(layer)
        if host is None or host.dtype != flat.dtype:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._hosts[layer] = host
        return host

    def store(self, layer: int, flat: torch.Tensor) -> None:
        """Brings what the host wrote back."""
        with torch.cuda.stream(self._stream):
            flat.copy_(self._hosts[layer], non_blocking=True)

    def synchronize(self) -> None:
        """Waits until everything that was started is done."""
        self._stream.synchronize()

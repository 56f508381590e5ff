"""Where a gradient lives while it is compressed: on the host.

Comes in: elements of a bucket. Goes out: the same elements as a tensor of the host, and back. What must hold: gradients of the
host are never copied; those of a GPU go through page-locked memory, on a stream of their own.
"""

from __future__ import annotations

import contextlib
import warnings

import torch


class Staging:
    """The way to the host and back for the layers of one model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts: dict[int, torch.Tensor] = {}
        self._stream = None
        if device.type == "cuda":
            warnings.warn(
                "redsync compresses on the host for now: gradients are copied there and back through pinned memory",
                stacklevel=4,
            )
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> object:
        """The moment from which the gradients that were computed so far can be read."""
        return torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None

    def stream(self, ready: object) -> contextlib.AbstractContextManager[object]:
        """Work inside happens on the stream of this model, after `ready`."""
        if self._stream is None:
            return contextlib.nullcontext()
        if isinstance(ready, torch.cuda.Event):
            self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Waits until everything that was started is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def fetch(self, layer: int, flat: torch.Tensor) -> torch.Tensor:
        """A layer's elements on the host."""
        if self._stream is None:
            return flat
        host = self.target(layer, flat)
        host.copy_(flat, non_blocking=True)
        self.synchronize()
        return host

    def target(self, layer: int, flat: torch.Tensor) -> torch.Tensor:
        """Where the host writes a layer's elements."""
        if self._stream is None:
            return flat
        host = self._hosts.get(layer)
        if host is None or host.dtype != flat.dtype:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._hosts[layer] = host
        return host

    def store(self, flat: torch.Tensor, host: torch.Tensor) -> None:
        """Brings what the host wrote back."""
        if self._stream is not None:
            flat.copy_(host, non_blocking=True)

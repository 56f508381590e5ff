"""The way of gradients between a device and the host.

Comes in: elements of a bucket on a device. Goes out: the same elements as a tensor of the host, and what replaces them. What must
hold: all goes over one stream of redsync's own, in order, through page-locked memory. The engine's threads call this.
"""

from __future__ import annotations

import torch

from .device.stream import Mail, Stream, pins


class Staging:
    """The way to the host and back for the layers of one model."""

    def __init__(self, device: torch.device) -> None:
        self.stream = Stream(device)
        self._hosts: dict[int, torch.Tensor] = {}
        self._gone: dict[int, torch.Event] = {}
        self._mails: dict[int, Mail] = {}

    def mark(self) -> torch.Event:
        """The moment from which the gradients that were computed so far can be read."""
        return self.stream.mark()

    def fetch(self, layer: int, flat: torch.Tensor, ready: torch.Event) -> torch.Tensor:
        """All of a layer's elements on the host: for a layer that is compressed there, or not at all."""
        host = self.target(layer, flat)
        with self.stream:
            self.stream.wait_for(ready)
            host.copy_(flat, non_blocking=True)
            self.stream.done().synchronize()
        return host

    def target(self, layer: int, flat: torch.Tensor) -> torch.Tensor:
        """Where the host writes a layer's elements."""
        if (gone := self._gone.pop(layer, None)) is not None:
            gone.synchronize()
        host = self._hosts.get(layer)
        if host is None or host.dtype != flat.dtype:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pins(flat.device))
            self._hosts[layer] = host
        return host

    def store(self, layer: int, flat: torch.Tensor, ready: torch.Event) -> None:
        """Brings what the host wrote to the device, once DDP has filled the bucket: it clears what has no gradient."""
        with self.stream:
            self.stream.wait_for(ready)
            flat.copy_(self._hosts[layer], non_blocking=True)
            self._gone[layer] = self.stream.done()

    def scatter(
        self, layer: int, flat: torch.Tensor, ready: torch.Event, indices: torch.Tensor | None, values: torch.Tensor | None
    ) -> None:
        """Leaves zeros but for some elements, each index once, after the same moment; both tensors are lent for the call only."""
        with self.stream:
            self.stream.wait_for(ready)
            flat.zero_()
            if indices is None or values is None:
                return
            at, x = self._mails.setdefault(layer, self.stream.mail()).send(indices, values)
            flat.index_copy_(0, at.view(torch.int32).to(torch.int64), x.view(torch.float32).to(flat.dtype))

    def synchronize(self) -> None:
        """Waits until everything that was started is done."""
        self.stream.done().synchronize()

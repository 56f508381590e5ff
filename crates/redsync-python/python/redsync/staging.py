"""The way of gradients between a device and the host.

Comes in: elements of a bucket on a device. Goes out: the same elements as a tensor of the host, and what replaces them. What must
hold: all goes over one stream of redsync's own, in order, through page-locked memory; what a bucket sends to the host is waited
for once. The engine's threads call this.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from .device.stream import Mail, Stream, pins


class Staging:
    """The way to the host and back for the layers of one model."""

    def __init__(self, device: torch.device) -> None:
        self.stream = Stream(device)
        self.down = self.stream.mail()
        self._hosts: dict[int, torch.Tensor] = {}
        self._gone: dict[int, torch.Event] = {}
        self._mails: dict[int, Mail] = {}

    def bucket(self, whole: Mapping[int, torch.Tensor]) -> Bucket:
        """Gradients that were computed so far; of some the host needs all elements, because they are compressed there or not at
        all."""
        return Bucket(self, self.stream.mark(), whole)

    def host(self, layer: int) -> torch.Tensor:
        """The memory of the host for a layer's elements."""
        return self._hosts[layer]

    def target(self, layer: int, flat: torch.Tensor) -> torch.Tensor:
        """The same, free to be written."""
        if (gone := self._gone.pop(layer, None)) is not None:
            gone.synchronize()
        host = self._hosts.get(layer)
        if host is None or host.dtype != flat.dtype:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pins(flat.device))
            self._hosts[layer] = host
        return host

    def store(self, layer: int, flat: torch.Tensor) -> None:
        """Brings what the host wrote to the device, within the stream."""
        flat.copy_(self._hosts[layer], non_blocking=True)
        self._gone[layer] = self.stream.done()

    def send(self, layer: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Brings a few numbers of a layer to the device, within the stream."""
        return self._mails.setdefault(layer, self.stream.mail()).send(*tensors)

    def synchronize(self) -> None:
        """Waits until everything that was started is done."""
        self.stream.done().synchronize()


class Bucket:
    """Gradients that were computed together. What the host needs of all of them is copied when the first of it is wanted:
    gradients that it needs whole, each to its own memory, and what layers on the device have listed, in one copy. Then it
    waits, once."""

    def __init__(self, staging: Staging, ready: torch.Event, whole: Mapping[int, torch.Tensor]) -> None:
        self.staging, self.ready = staging, ready
        self._whole, self._fetched = dict(whole), False
        self._lists: dict[Hashable, torch.Tensor] = {}
        self._places: dict[Hashable, slice] = {}
        self._brought = torch.empty(0, dtype=torch.uint8)

    def list(self, layer: Hashable, words: torch.Tensor) -> None:
        """Words of 64 bits that a layer on the device wants to be brought along, within the stream."""
        self._lists[layer] = words

    def words(self, layer: Hashable) -> torch.Tensor:
        """What a layer listed, as bytes of the host; good until the next bucket is brought."""
        if layer in self._lists:
            self._bring()
        return self._brought[self._places.pop(layer)]

    def fetch(self, layer: int) -> torch.Tensor | None:
        """All elements of a layer, if the host needs it whole."""
        if layer not in self._whole:
            return None
        if not self._fetched:
            self._bring()
        return self.staging.host(layer)

    def _bring(self) -> None:
        stream = self.staging.stream
        with stream:
            stream.wait_for(self.ready)
            if not self._fetched:
                for layer, flat in self._whole.items():
                    self.staging.target(layer, flat).copy_(flat, non_blocking=True)
                self._fetched = True
            begin = 0
            for owner, words in self._lists.items():
                self._places[owner] = slice(begin, begin := begin + 8 * words.numel())
            lists = list(self._lists.values())
            self._lists = {}
            if lists:
                self._brought = self.staging.down.fetch(lists[0] if len(lists) == 1 else torch.cat(lists))
            else:
                stream.done().synchronize()

    # What replaces them goes to the device once DDP has filled the bucket: it clears what has no gradient.

    def target(self, layer: int, flat: torch.Tensor) -> torch.Tensor:
        """Where the host writes a layer's elements."""
        return self.staging.target(layer, flat)

    def store(self, layer: int, flat: torch.Tensor) -> None:
        """Brings what the host wrote to the device."""
        with self.staging.stream:
            self.staging.stream.wait_for(self.ready)
            self.staging.store(layer, flat)

    def scatter(self, layer: int, flat: torch.Tensor, indices: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Leaves zeros but for some elements, each index once; both tensors are lent for the call only."""
        with self.staging.stream:
            self.staging.stream.wait_for(self.ready)
            flat.zero_()
            if indices is None or values is None:
                return
            at, x = self.staging.send(layer, indices, values)
            flat.index_copy_(0, at.view(torch.int32).to(torch.int64), x.view(torch.float32).to(flat.dtype))

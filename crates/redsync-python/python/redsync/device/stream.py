"""A stream of a device, and memory of the host through which little things go to and fro.

Comes in: tensors of the device or of the host. Goes out: the same on the other side. What must hold: memory of the host is read
only after what goes there has come, and written only after what was sent from it is gone.
"""

from __future__ import annotations

import itertools
import threading
from types import TracebackType

import torch


def pins(device: torch.device) -> bool:
    """Whether memory of the host can be page-locked for a device: without, copies are slower, and right as well."""
    return device.type == "cuda"


class Stream:
    """A stream of redsync's own. Within it, the calling thread's operations go there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device)
        self._before = threading.local()

    def __enter__(self) -> None:
        # Two threads may be here at once, and which stream is current is each one's own; a stream of PyTorch entered as a context
        # would keep the other's.
        before: list[torch.Stream] = self._before.__dict__.setdefault("streams", [])
        before.append(torch.accelerator.current_stream(self.device))
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.accelerator.set_stream(self._before.streams.pop())

    def mark(self) -> torch.Event:
        """The moment from which can be read what the current stream, which is another, has computed so far."""
        return torch.accelerator.current_stream(self.device).record_event()

    def wait_for(self, ready: torch.Event) -> None:
        """What comes later here happens after that moment. The host does not wait."""
        self._stream.wait_event(ready)

    def done(self) -> torch.Event:
        """The moment at which everything is done that was started so far."""
        return self._stream.record_event()

    def zeros(self, elements: int) -> torch.Tensor:
        """Floats of the device."""
        return torch.zeros(elements, dtype=torch.float32, device=self.device)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(elements, dtype=dtype, device=self.device)

    def mail(self) -> Mail:
        """Memory of the host for this stream."""
        return Mail(self)


class Mail:
    """Bytes of the host that grow as needed, for one direction."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._gone: torch.Event | None = None

    def memory(self, many: int) -> torch.Tensor:
        """So many bytes; what was there stays."""
        if self._bytes.numel() < many:
            room = torch.empty(many + many // 4, dtype=torch.uint8, pin_memory=pins(self._stream.device))
            room[: self._bytes.numel()] = self._bytes
            self._bytes = room
        return self._bytes[:many]

    def fetch(self, tensor: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """A tensor of the device as bytes of the host, from one of its elements on; those before are as they were fetched last."""
        size = tensor.element_size()
        memory = self.memory(size * tensor.numel())
        memory[size * begin :].copy_(tensor.view(torch.uint8)[size * begin :], non_blocking=True)
        self._stream.done().synchronize()
        return memory

    def send(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of the host as bytes of the device, in one copy."""
        if self._gone is not None:
            self._gone.synchronize()
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        memory, there = self.memory(sum(sizes)), self._stream.empty(sum(sizes), torch.uint8)
        ends = list(itertools.accumulate(sizes))
        for tensor, size, end in zip(tensors, sizes, ends):
            memory[end - size : end] = tensor.view(torch.uint8)
        there.copy_(memory, non_blocking=True)
        self._gone = self._stream.done()
        return [there[end - size : end] for size, end in zip(sizes, ends)]

"""Which layers of a model are compressed on its device, and how.

Comes in: the parameters, and the engine's question for each layer that can be. Goes out: a `Layer` for it, and a sentence for the
log. What must hold: a layer is on the device for as long as the attachment lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .device import LONGEST, choose
from .device.layer import Layer
from .staging import Staging


def why_not(settings: Mapping[str, Any]) -> str | None:
    """Why no layer can stay, if none can."""
    if settings["exchange"] == "hosts":
        return "ranks of a host sum gradients in its memory"
    if settings["plan"] == "measured" and settings["exchange"] is None:
        return 'plan="measured" counts with cores of the host, and may sum there; exchange="gather" or "owners" leaves layers here'
    return None


class Residents:
    """Called by the engine for each layer, by its number; answers with None for one that is compressed on the host."""

    def __init__(self, staging: Staging, parameters: Sequence[torch.Tensor], why_not: str | None = None) -> None:
        self._staging, self._parameters, self._why_not = staging, parameters, why_not
        self._operations, self._why = choose(staging.stream.device)
        self.layers: dict[int, Layer] = {}

    def __call__(self, number: int) -> Layer | None:
        parameter, device = self._parameters[number], self._staging.stream.device
        if self._why_not is not None or parameter.device != device or parameter.numel() > LONGEST:
            return None
        self.layers[number] = Layer(self._operations, self._staging.stream, parameter.numel())
        return self.layers[number]

    def report(self, compressed: int, clips: bool) -> str:
        """What was decided, in one line."""
        here, device = len(self.layers), self._staging.stream.device
        if self._why_not is not None:
            return f"gradients on {device} are copied to the host and compressed there: {self._why_not}"
        text = f"{here} of {compressed} compressed layers stay on {device}, with {self._operations.name} ({self._why})"
        if here < compressed:
            text += f"; {compressed - here} are copied to the host, which compresses what is sent whole, and Adam"
        if clips:
            text += "; gradients are copied to the host for their common norm"
        return text

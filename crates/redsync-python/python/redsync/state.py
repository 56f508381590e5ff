"""The engine's state as plain tensors, numbers and texts of a dictionary: ``torch.load(weights_only=True)`` reads it.

Comes in: what a rank carries from step to step. Goes out: a dictionary, and the same again, bit by bit. What must hold: tensors
have the shapes of their parameters, whatever the layout of memory; the engine's checksum covers every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import _redsync
from .errors import UsageError

FORMAT = "redsync-state-3"
_FORMS = ("plain", "nesterov")


def flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order in which a parameter's gradient lies in memory."""
    if tensor.shape != parameter.shape:
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)} where {tuple(parameter.shape)} is needed")
    placed = _empty_like(parameter)
    placed.copy_(tensor)
    return _flat(placed)


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    # DDP lays a gradient out like its parameter, unless that has gaps; `empty_like` follows the same rule.
    return torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)


def _flat(placed: torch.Tensor) -> torch.Tensor:
    return placed.as_strided((placed.numel(),), (1,))


def as_dict(captured: _redsync.State, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A state as it is saved."""
    layers = {}
    for at, (name, (has_u, (form, *numbers), remembering, rate, second)) in enumerate(captured.layers()):
        kept = {"u": has_u, "v": True, "second": second is not None, "given": second is not None and second[0]}
        vectors = {key: _empty_like(parameters[name]) for key, wanted in kept.items() if wanted}
        flat = {key: _flat(vectors[key]) if key in vectors else None for key in kept}
        captured.copy(at, flat["u"], _flat(vectors["v"]), flat["second"], flat["given"])
        layer = {**vectors, "remembering": torch.tensor(remembering, dtype=torch.int64)}
        if second is not None:
            layer |= {"adam": torch.tensor(numbers, dtype=torch.float64), "steps": torch.tensor([second[1]])}
        elif has_u:
            layer["momentum"] = torch.tensor([numbers[0], _FORMS.index(form)], dtype=torch.float64)
        if rate is not None:
            layer["rate"] = torch.tensor([rate], dtype=torch.float64)
        layers[name] = layer
    step, rank, ranks = captured.place
    saved = {
        "format": FORMAT,
        "step": step,
        "rank": rank,
        "ranks": ranks,
        "identity": [list(entry) for entry in captured.identity],
        "layers": layers,
    }
    return {**saved, "checksum": _checksum(saved)}


def from_dict(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A saved state as the engine takes it, with tensors in the order of memory; a sentence, if it is none."""
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise UsageError(f"this is not a state of redsync in the format {FORMAT}")
    problems = (_problem(layer, parameters.get(name)) for name, layer in saved["layers"].items())
    for name, problem in zip(saved["layers"], problems):
        if problem is not None:
            raise UsageError(f"{name}: {problem}")
    try:
        checksum = _checksum(saved)
    except ValueError as error:  # of what cannot be a state there is none
        raise UsageError(str(error)) from None
    if checksum != saved.get("checksum"):
        raise UsageError("the state is damaged: its checksum is wrong")
    return _plain(saved, lambda name, tensor: flat_like(tensor, parameters[name]) if name in parameters else tensor.reshape(-1))


def _checksum(saved: Mapping[str, Any]) -> str:
    """Of the elements in the order of their shapes, which no layout of memory changes."""
    return _redsync.checksum(_plain(saved, lambda _, tensor: tensor.contiguous().view(-1)))


def _plain(saved: Mapping[str, Any], flat: Any) -> dict[str, Any]:
    layers = []
    for name, layer in saved["layers"].items():
        rate = layer.get("rate")  # older states have none
        vectors = {key: flat(name, layer[key]) if key in layer else None for key in ("u", "v", "second", "given")}
        layers.append(
            {
                "name": name,
                "momentum": _rule(layer),
                "remembering": layer["remembering"].tolist(),
                "rate": None if rate is None else float(rate),
                "steps": int(layer.get("steps", 0)),
                **vectors,
            }
        )
    about = {key: saved[key] for key in ("step", "rank", "ranks")}
    return {**about, "identity": [tuple(entry) for entry in saved["identity"]], "layers": layers}


def _rule(layer: Mapping[str, torch.Tensor]) -> _redsync.Rule:
    if "adam" in layer:
        first, second, eps = layer["adam"].tolist()
        return "adam", first, second, eps
    coefficient, form = layer["momentum"].tolist() if "u" in layer else (0.0, 0.0)
    return _FORMS[int(form)], coefficient, 0.0, 0.0


def _problem(layer: Mapping[str, torch.Tensor], parameter: torch.Tensor | None) -> str | None:
    """What is wrong with the form of a layer's state, if anything; the engine judges the rest."""
    if missing := {"v", "remembering"} - set(layer):
        return f"the state has no {', '.join(sorted(missing))}"
    for key in ("u", "v", "second", "given"):
        tensor = layer.get(key)
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            return f"{key} of the state is not of finite numbers in single precision"
        if parameter is not None and tensor.shape != parameter.shape:
            return f"{key} of the state has another shape"
    remembering = layer["remembering"]
    if remembering.dtype != torch.int64 or remembering.shape != (3, 3):
        return "remembering of the state is none"
    if int(remembering.min()) < 0 or int(remembering.max()) >= 1 << 32:
        return "remembering of the state is none"
    momentum, adam, steps = layer.get("momentum"), layer.get("adam"), layer.get("steps")
    if "second" in layer:
        if adam is None or adam.shape != (3,) or steps is None or steps.shape != (1,) or not 0 <= int(steps) < 1 << 63:
            return "Adam of the state is none"
    elif adam is not None or ("u" in layer and (momentum is None or momentum.shape != (2,) or not 0 <= momentum[0] < 1)):
        return "momentum of the state is none"
    elif momentum is not None and momentum[1] not in (0, 1):
        return "momentum of the state is none"
    rate = layer.get("rate")
    if rate is not None and (rate.shape != (1,) or not 0 < float(rate) < float("inf")):
        return "the learning rate of the state is none"
    return None

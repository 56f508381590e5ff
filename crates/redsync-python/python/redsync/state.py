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

Local = tuple[tuple[int, int], Mapping[str, torch.Tensor]]
"""Local steps since the last exchange and in all, and the weights on which the ranks agreed there."""

_FORMS = ("plain", "nesterov")


def flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order in which a parameter's gradient lies in memory."""
    if tensor.shape != parameter.shape:
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)} where {tuple(parameter.shape)} is needed")
    placed = _empty_like(parameter)
    placed.copy_(tensor)
    return flat(placed)


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    # DDP lays a gradient out like its parameter, unless that has gaps; `empty_like` follows the same rule.
    return torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False)


def _room(captured: _redsync.State, at: int, parameter: torch.Tensor) -> torch.Tensor:
    """Where a vector of a layer is copied to: like the parameter, but a part of it in the order of memory."""
    if captured.seat is None:
        return _empty_like(parameter)
    return torch.empty(captured.size(at), dtype=torch.float32, device="cpu")


def flat(placed: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, in the order of memory."""
    return placed.as_strided((placed.numel(),), (1,))


def as_dict(captured: _redsync.State, parameters: Mapping[str, torch.Tensor], local: Local | None = None) -> dict[str, Any]:
    """A state as it is saved."""
    layers = {}
    for at, (name, (has_u, (form, *numbers), remembering, rate, second)) in enumerate(captured.layers()):
        kept = {"u": has_u, "v": True, "second": second is not None, "given": second is not None and second[0]}
        vectors = {key: _room(captured, at, parameters[name]) for key, has in kept.items() if has}
        wanted = {key: flat(vectors[key]) if key in vectors else None for key in kept}
        captured.copy(at, wanted["u"], flat(vectors["v"]), wanted["second"], wanted["given"])
        layer = {**vectors, "remembering": torch.tensor(remembering, dtype=torch.int64)}
        if second is not None:
            layer |= {"adam": torch.tensor(numbers, dtype=torch.float64), "steps": torch.tensor([second[1]])}
        elif has_u:
            layer["momentum"] = torch.tensor([numbers[0], _FORMS.index(form)], dtype=torch.float64)
        if rate is not None:
            layer["rate"] = torch.tensor([rate], dtype=torch.float64)
        if (owned := captured.kept(at)) is not None:
            length, cut, remembered, kept_rate = owned
            sums = torch.empty(length, dtype=torch.float32, device="cpu")
            captured.copy_kept(at, sums)
            layer |= {"kept": sums, "cut": torch.tensor(cut), "kept_remembering": torch.tensor(remembered, dtype=torch.int64)}
            if kept_rate is not None:
                layer["kept_rate"] = torch.tensor([kept_rate], dtype=torch.float64)
        if captured.seat is not None:
            layer["strides"] = torch.tensor(_empty_like(parameters[name]).stride(), dtype=torch.int64)
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
    if captured.seat is not None:
        saved["seat"] = list(captured.seat)
    if local is not None:
        since, shared = local
        weights = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in shared.items()}
        saved["local"] = {"since": torch.tensor(since, device="cpu"), "shared": weights}
    return {**saved, "checksum": _checksum(saved)}


def from_dict(saved: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A saved state as the engine takes it, with tensors in the order of memory; a sentence, if it is none."""
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise UsageError(f"this is not a state of redsync in the format {FORMAT}")
    seat = saved.get("seat", [0, 1, 0, 1])
    if not isinstance(seat, list) or [type(each) for each in seat] != [int] * 4 or min(seat) < 0:
        raise UsageError("the place among hosts in the state is damaged")
    problems = (_problem(layer, parameters.get(name), "seat" in saved) for name, layer in saved["layers"].items())
    for name, problem in zip(saved["layers"], problems):
        if problem is not None:
            raise UsageError(f"{name}: {problem}")
    if "local" in saved and (problem := _problem_of_local(saved["local"], parameters)) is not None:
        raise UsageError(problem)
    try:
        checksum = _checksum(saved)
    except ValueError as error:  # of what cannot be a state there is none
        raise UsageError(str(error)) from None
    if checksum != saved.get("checksum"):
        raise UsageError("the state is damaged: its checksum is wrong")

    def in_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
        whole = name in parameters and tensor.shape == parameters[name].shape
        return flat_like(tensor, parameters[name]) if whole else tensor.reshape(-1)

    return _plain(saved, in_memory)


def _problem_of_local(local: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
    if not isinstance(local, Mapping) or set(local) != {"since", "shared"}:
        return "what local steps keep is not in the state"
    since, shared = local["since"], local["shared"]
    if since.shape != (2,) or since.dtype != torch.int64 or not 0 <= int(since[0]) <= int(since[1]):
        return "the number of local steps in the state is damaged"
    for name, tensor in shared.items():
        fits = name in parameters and tensor.shape == parameters[name].shape
        if not fits or tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            return f"{name}: the weights of the state do not fit"
    return None if len(shared) == len(parameters) else "the state lacks weights on which the ranks agreed"


def _checksum(saved: Mapping[str, Any]) -> str:
    """Of the elements in the order of their shapes, which no layout of memory changes."""
    return _redsync.checksum(_plain(saved, lambda _, tensor: tensor.contiguous().view(-1)))


def _plain(saved: Mapping[str, Any], order: Any) -> dict[str, Any]:
    layers = []
    for name, layer in saved["layers"].items():
        rate = layer.get("rate")  # older states have none
        vectors = {key: order(name, layer[key]) if key in layer else None for key in ("u", "v", "second", "given")}
        layers.append(
            {
                "name": name,
                "momentum": _rule(layer),
                "remembering": layer["remembering"].tolist(),
                "rate": None if rate is None else float(rate),
                "steps": int(layer.get("steps", 0)),
                "kept": _kept(layer),
                **vectors,
            }
        )
    about = {key: saved[key] for key in ("step", "rank", "ranks")}
    about["seat"] = tuple(saved["seat"]) if "seat" in saved else None
    local, extra = saved.get("local"), []
    if local is not None:
        extra = [(f"shared/{name}", order(name, tensor)) for name, tensor in local["shared"].items()]
        extra.append(("since", local["since"].to(torch.float32)))
    return {**about, "identity": [tuple(entry) for entry in saved["identity"]], "layers": layers, "extra": extra, "local": local}


def _kept(layer: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[int], list[list[int]], float | None] | None:
    """What an owner keeps of a layer: a part of it in its own order, whatever the layout of memory."""
    if "kept" not in layer:
        return None
    rate = layer.get("kept_rate")
    return layer["kept"], layer["cut"].tolist(), layer["kept_remembering"].tolist(), None if rate is None else float(rate)


def _rule(layer: Mapping[str, torch.Tensor]) -> _redsync.Rule:
    if "adam" in layer:
        first, second, eps = layer["adam"].tolist()
        return "adam", first, second, eps
    coefficient, form = layer["momentum"].tolist() if "u" in layer else (0.0, 0.0)
    return _FORMS[int(form)], coefficient, 0.0, 0.0


def _problem(layer: Mapping[str, torch.Tensor], parameter: torch.Tensor | None, in_parts: bool) -> str | None:
    """What is wrong with the form of a layer's state, if anything; the engine judges the rest."""
    if missing := {"v", "remembering", *(["strides"] if in_parts else [])} - set(layer):
        return f"the state has no {', '.join(sorted(missing))}"
    for key in ("u", "v", "second", "given"):
        tensor = layer.get(key)
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            return f"{key} of the state is not of finite numbers in single precision"
        if in_parts:
            fits = tensor.dim() == 1
        else:
            fits = parameter is None or tensor.shape == parameter.shape
        if not fits:
            return f"{key} of the state has another shape"
    if in_parts and (not isinstance(layer["strides"], torch.Tensor) or layer["strides"].dtype != torch.int64):
        return "the layout of memory in the state is damaged"
    if in_parts and parameter is not None and layer["strides"].tolist() != list(_empty_like(parameter).stride()):
        return "parts of it were saved with another layout of memory"
    remembering = layer["remembering"]
    if remembering.dtype != torch.int64 or remembering.shape != (3, 3):
        return "the remembered thresholds in the state are damaged"
    if int(remembering.min()) < 0 or int(remembering.max()) >= 1 << 32:
        return "the remembered thresholds in the state are damaged"
    momentum, adam, steps = layer.get("momentum"), layer.get("adam"), layer.get("steps")
    if "second" in layer:
        if adam is None or adam.shape != (3,) or steps is None or steps.shape != (1,) or not 0 <= int(steps) < 1 << 63:
            return "what is Adam's in the state is damaged"
    elif adam is not None or ("u" in layer and (momentum is None or momentum.shape != (2,) or not 0 <= momentum[0] < 1)):
        return "the momentum in the state is damaged"
    elif momentum is not None and momentum[1] not in (0, 1):
        return "the momentum in the state is damaged"
    if "kept" in layer:
        kept, cut, remembered = (layer.get(key) for key in ("kept", "cut", "kept_remembering"))
        if kept is None or kept.dtype != torch.float32 or kept.dim() != 1 or not bool(kept.isfinite().all()):
            return "what an owner keeps is not of finite numbers in single precision"
        if cut is None or cut.dtype != torch.int64 or cut.shape != (5,) or int(cut.min()) < 0:
            return "which part an owner keeps is not in the state"
        kept_rate = layer.get("kept_rate")
        if kept_rate is not None and (kept_rate.shape != (1,) or not 0 < float(kept_rate) < float("inf")):
            return "the learning rate of an owner in the state is damaged"
        if remembered is None or remembered.dtype != torch.int64 or remembered.shape != (3, 3):
            return "the remembered thresholds of an owner in the state are damaged"
        if int(remembered.min()) < 0 or int(remembered.max()) >= 1 << 32:
            return "the remembered thresholds of an owner in the state are damaged"
    rate = layer.get("rate")
    if rate is not None and (rate.shape != (1,) or not 0 < float(rate) < float("inf")):
        return "the learning rate in the state is damaged"
    return None

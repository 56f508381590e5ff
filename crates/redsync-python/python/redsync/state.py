"""What a rank carries from step to step, as plain tensors, numbers and texts: ``torch.load(weights_only=True)`` reads it.

Comes in: the compressors of a model. Goes out: a dictionary, and the same compressors again, bit by bit. What must hold: the
sums over the ranks of u and of v stay what they were, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _redsync
from .errors import UsageError

FORMAT = "redsync-state-2"

_LARGEST_FLOAT = 0x7F7F_FFFF
"""The bits of the largest finite number of single precision."""


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


def save_layer(
    layers: _redsync.Layers, layer: int, parameter: torch.Tensor, momentum: tuple[float, bool]
) -> dict[str, torch.Tensor]:
    """u with the momentum that it is of, v, and what the selector remembers."""
    v = _empty_like(parameter)
    u = _empty_like(parameter) if layers.has_momentum(layer) else None
    remembering = layers.save(layer, None if u is None else _flat(u), _flat(v))
    state = {"v": v, "remembering": torch.tensor(remembering, dtype=torch.int64)}
    return state if u is None else {**state, "u": u, "momentum": torch.tensor(momentum, dtype=torch.float64)}


def momentum_of(state: Mapping[str, torch.Tensor]) -> tuple[float, bool]:
    """The momentum that u is of: its coefficient, and whether it is Nesterov's."""
    coefficient, nesterov = state["momentum"].tolist()
    return coefficient, bool(nesterov)


def check_layer(state: Mapping[str, torch.Tensor], parameter: torch.Tensor, momentum: tuple[float, bool] | None) -> str | None:
    """What is wrong with the state of a layer that has this momentum, or none."""
    if missing := {"v", "remembering"} - set(state):
        return f"the state has no {', '.join(sorted(missing))}"
    for key in ("u", "v"):
        tensor = state.get(key)
        if tensor is not None and (tensor.shape != parameter.shape or not bool(tensor.isfinite().all())):
            return f"{key} of the state has another shape, or is not finite"
    remembering = state["remembering"]
    if remembering.dtype != torch.int64 or remembering.shape != (3, 3):
        return "remembering of the state is none"
    thresholds, counts = remembering[:, :2], remembering[:, 2]
    if int(remembering.min()) < 0 or int(thresholds.max()) > _LARGEST_FLOAT or int(counts.max()) >= 1 << 32:
        return "remembering of the state is none"
    if "u" not in state:
        return None if momentum is None else "the optimizer has momentum, the state has none"
    if state.get("momentum", torch.empty(0)).shape != (2,) or not 0 <= momentum_of(state)[0] < 1:
        return "momentum of the state is none"
    if momentum is not None and momentum[1] != momentum_of(state)[1]:
        return "only one of the state and the optimizer has Nesterov momentum"
    return None


def restore_layer(layers: _redsync.Layers, layer: int, parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
    """The other way round."""
    u = flat_like(state["u"], parameter) if "u" in state else None
    layers.restore(layer, u, flat_like(state["v"], parameter), state["remembering"].tolist())


def reshare(states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> Mapping[str, Any]:
    """What a rank continues with, from the states of all old ranks.

    With the old number of ranks it is the state of the same rank. Otherwise the new rank takes the sum of the old ranks
    `rank`, `rank + ranks`, and so on, and a rank beyond the old number starts from zero.
    """
    for state in states:
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise UsageError(f"this is not a state of redsync in the format {FORMAT}")
    old = sorted(states, key=lambda state: state["rank"])
    want, found = list(range(old[0]["ranks"])), [state["rank"] for state in old]
    if found != want:
        raise UsageError(
            f"the state is of {len(want)} ranks, this job has {ranks}: pass the states of all {len(want)} old ranks as a list "
            f"(found: rank {', '.join(map(str, found))})"
        )
    if len({state["step"] for state in old}) > 1:
        raise UsageError(f"the states are of different steps: {sorted({state['step'] for state in old})}")
    if len({frozenset(state["layers"]) for state in old}) > 1:
        raise UsageError("the states are of different layers")
    if len(old) == ranks:
        return old[rank]
    layers = {
        name: _share([state["layers"][name] for state in old[rank::ranks]], old[0]["layers"][name]) for name in old[0]["layers"]
    }
    return {**old[0], "rank": rank, "ranks": ranks, "layers": layers}


def _share(taken: Sequence[Mapping[str, torch.Tensor]], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not taken:
        return {key: tensor.clone() if key == "momentum" else torch.zeros_like(tensor) for key, tensor in like.items()}
    total = {key: tensor.clone() for key, tensor in taken[0].items()}
    for state in taken[1:]:
        for key in ("u", "v"):
            if key in total:
                total[key] += state[key]
    return total

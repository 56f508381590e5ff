"""What the engine has to know of a model's parameters, and what cannot be trained with it.

Comes in: a DDP model and its optimizer. Goes out: name, size, kind and momentum of each parameter. What must hold: it is the same
on every rank that has the same model and optimizer; what cannot work is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .errors import UsageError

_NO_GROUP: dict[str, Any] = {"momentum": 0.0, "nesterov": False}

Rule = tuple[str, float, float, float]
"""How gradients enter the residual: ``plain`` or ``nesterov`` and its coefficient, or ``adam`` with both coefficients and eps."""

Described = tuple[str, int, str, Rule]
"""Name, number of elements, kind and rule."""


def trained(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """The parameters that DDP reduces, by name."""
    ignored = set(model.parameters_to_ignore)  # by DDP, which leaves them to the user
    return {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}


def rule(group: Mapping[str, Any]) -> Rule:
    """That of a parameter group."""
    if "betas" in group:
        first, second = group["betas"]
        return "adam", float(first), float(second), float(group["eps"])
    return "nesterov" if group["nesterov"] else "plain", float(group["momentum"]), 0.0, 0.0


def describe(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    output: str | None,
) -> list[Described]:
    """What the engine is told of each parameter; without an optimizer, that there is no momentum."""
    if output is not None and output not in parameters:
        raise UsageError(f"output={output!r} is no parameter of the model that is trained")
    last = output if output is not None else _output(model)
    groups = {p: group for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
    described = []
    for name, parameter in parameters.items():
        kind = "bias-or-norm" if parameter.dim() <= 1 else "output" if name == last else "weight"
        described.append((name, parameter.numel(), kind, rule(groups.get(parameter, _NO_GROUP))))
    return described


def left_alone(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Choices for parameters that this optimizer does not update: whoever does gets the average, without a residual."""
    ours = {p for group in optimizer.param_groups for p in group["params"]}
    return {name: "dense" for name, parameter in parameters.items() if parameter not in ours}


def shapes(parameters: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """What ranks compare of their parameters besides that."""
    return [
        (f"parameter {number}", f"{name} {tuple(p.shape)} {p.stride()} {p.dtype}")
        for number, (name, p) in enumerate(parameters.items())
    ]


def check_model(model: DistributedDataParallel) -> None:
    """Refuses what the engine cannot take."""
    if model.mixed_precision is not None:
        raise UsageError("DDP's mixed_precision is not supported; use torch.autocast, with a GradScaler for float16")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise UsageError(f"{name} yields sparse gradients, which cannot be compressed; make it with sparse=False")
    check_parameters(model.module)


def check_parameters(model: torch.nn.Module) -> None:
    """The same of what need not be wrapped by DDP."""
    if not hasattr(dist.distributed_c10d.Store, "clone"):
        raise UsageError(f"PyTorch {torch.__version__} is too old: its stores cannot be cloned; 2.15 is tested")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(f"{name} is of {kind}; gradients of float32, float16 and bfloat16 can be compressed: model.float()")


def _output(model: torch.nn.Module) -> str | None:
    """The last weight of a model; of a tied one, the name that `named_parameters` gives it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad and p.dim() > 1]
    return names[weights[-1]] if weights else None

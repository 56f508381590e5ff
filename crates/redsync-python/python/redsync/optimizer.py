"""The optimizer's share of momentum and weight decay.

Comes in: averaged gradients in ``p.grad``, and the user's ``torch.optim.SGD``. Goes out: updated weights. What must hold:
momentum is applied once. For a compressed layer, and for a bias that was sent in a few bits per element, it was applied before
the exchange, by the compressor, so its update here is plain, and weight decay, which is never sent, is as strong as momentum
would have made it: w *= 1 - lr*wd/(1-m).

The user's parameter groups stay as they are, because schedulers, checkpoints and the user's own code rely on them. Before
each step, compressed layers are updated here and their gradients hidden, so that the optimizer passes over them; after it,
the gradients are back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import UsageError

SUPPORTED = "use torch.optim.SGD (momentum, nesterov and weight_decay are fine)"


def check_optimizer(optimizer: Any, scaled: bool) -> None:
    """Refuses what cannot work, with a sentence that says what does."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(
            f"{type(optimizer).__name__} is not supported: momentum is corrected for SGD, and an optimizer that divides by "
            f"running moments would see rare, large values instead of gradients; {SUPPORTED}"
        )
    for group in optimizer.param_groups:
        if group["dampening"]:
            raise UsageError(f"SGD with dampening is not supported; {SUPPORTED}, with dampening=0")
        if group["differentiable"]:
            raise UsageError(f"SGD(differentiable=True) is not supported; {SUPPORTED}")
        if scaled and group["fused"]:
            raise UsageError("SGD(fused=True) takes over the work of the GradScaler; use SGD(fused=False) with a scaler")
        if not 0 <= group["momentum"] < 1:
            raise UsageError(f"momentum {group['momentum']} is not at least 0 and below 1")


class Steps:
    """The hooks around ``optimizer.step()``."""

    def __init__(self, optimizer: torch.optim.SGD, compressed: Callable[[], frozenset[torch.Tensor]]) -> None:
        """`compressed` tells which parameters got compressed gradients at the last backward pass."""
        self._optimizer = optimizer
        self._compressed = compressed
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.taken = False
        """Whether the optimizer took a step since this was last set to False."""
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Leaves the optimizer as it was."""
        for handle in self._handles:
            handle.remove()

    def groups(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter with its group, which may be another than at the last step."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def take_momentum(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Takes the optimizer's momentum of a parameter away."""
        state = self._optimizer.state.get(parameter)
        return state.pop("momentum_buffer", None) if state else None

    @torch.no_grad()
    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise UsageError("step(closure) is not supported: call backward() before step()")
        self.taken = True
        compressed = self._compressed()
        for group in self._optimizer.param_groups:
            chosen = [p for p in group["params"] if p in compressed and p.grad is not None]
            if chosen:
                _plain_step(chosen, group)
                self._hidden += [(p, p.grad) for p in chosen if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


def _plain_step(parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    if decay:
        torch._foreach_mul_(parameters, 1.0 - rate * decay / (1.0 - float(group["momentum"])))
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_add_(parameters, gradients, alpha=rate if group["maximize"] else -rate)

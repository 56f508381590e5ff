"""The optimizer's share of momentum and weight decay.

Comes in: averaged gradients in ``p.grad``, and the user's ``torch.optim.SGD``, ``AdamW`` or ``Adam``. Goes out: updated weights.
What must hold: momentum, and what Adam divides it by, is applied once. For a compressed layer, and for a bias that was sent in a
few bits per element, it was applied before the exchange, by the compressor, so its update here is plain. Weight decay is never
sent: with SGD it is as strong as momentum would have made it, w *= 1 - lr*wd/(1-m); with AdamW, w *= 1 - lr*wd.

The user's parameter groups stay as they are, because schedulers, checkpoints and the user's own code rely on them. Before
each step, compressed layers are updated here and their gradients hidden, so that the optimizer passes over them; after it,
the gradients are back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import UsageError

SUPPORTED = "use torch.optim.SGD (momentum, nesterov and weight_decay are fine), AdamW or Adam"
OR_LOCAL_STEPS = "or let it make local steps: attach(..., every=8) takes any optimizer"

Supported = torch.optim.SGD | torch.optim.Adam
"""AdamW is an Adam to PyTorch."""


def check_optimizer(optimizer: Any, scaled: bool) -> None:
    """Refuses what cannot work, with a sentence that says what does."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam)):
        raise UsageError(
            f"{name} is not supported: it would see rare, large values instead of gradients, and what it makes of them is not "
            f"what it would have made of the gradients; {SUPPORTED}, {OR_LOCAL_STEPS}"
        )
    usual = torch.optim.Adam if isinstance(optimizer, torch.optim.Adam) else torch.optim.SGD
    # PyTorch wraps the step of every class of which an object was made.
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(usual.step):
        raise UsageError(
            f"{name}, a kind of {usual.__name__}, has a step() of its own, whose place the compressor would take; {SUPPORTED}, "
            f"{OR_LOCAL_STEPS}"
        )
    if isinstance(optimizer, torch.optim.Adam):
        return _check_adam(name, optimizer, scaled)
    for group in optimizer.param_groups:
        if group["dampening"]:
            raise UsageError(f"SGD with dampening is not supported; {SUPPORTED}, with dampening=0")
        if group["differentiable"]:
            raise UsageError(f"SGD(differentiable=True) is not supported; {SUPPORTED}")
        if scaled and group["fused"]:
            raise UsageError("SGD(fused=True) takes over the work of the GradScaler; use SGD(fused=False) with a scaler")
        if not 0 <= group["momentum"] < 1:
            raise UsageError(f"momentum must be at least 0 and below 1, got {group['momentum']}")


def _check_adam(name: str, optimizer: torch.optim.Adam, scaled: bool) -> None:
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group[flag]:
                raise UsageError(f"{name}({flag}=True) is not supported; use {name}({flag}=False), {OR_LOCAL_STEPS}")
        if scaled and group["fused"]:
            raise UsageError(f"{name}(fused=True) takes over the work of the GradScaler; use {name}(fused=False) with a scaler")
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise UsageError(f"the weight decay of {name} is added to gradients; use AdamW, which does not")
        for beta in group["betas"]:
            if not 0 <= float(beta) < 1:
                raise UsageError(f"betas must be at least 0 and below 1, got {float(beta)}")
        if not float(group["eps"]) >= torch.finfo(torch.float32).tiny:
            raise UsageError(f"eps must be large enough to divide by in single precision, such as 1e-8, got {group['eps']}")


class Steps:
    """The hooks around ``optimizer.step()``."""

    def __init__(self, optimizer: Supported, compressed: Callable[[], frozenset[torch.Tensor]]) -> None:
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

    def check(self, scaled: bool) -> None:
        """Refuses what the optimizer has become since it was attached, if that cannot work."""
        check_optimizer(self._optimizer, scaled)

    def close(self) -> None:
        """Calls nothing of ours any more."""
        for handle in self._handles:
            handle.remove()

    def groups(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter with its group, which may be another than at the last step."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def take_moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, int] | None:
        """Takes what the optimizer has gathered for a parameter away: momentum, Adam's second moment, and its steps."""
        state = self._optimizer.state.get(parameter)
        if not state:
            return None
        first = state.pop("momentum_buffer", None)
        if first is not None:
            return first, None, 0
        first, second, steps = (state.pop(key, None) for key in ("exp_avg", "exp_avg_sq", "step"))
        return None if first is None or second is None else (first, second, int(steps or 0))

    def give_moments(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        steps: int,
    ) -> None:
        """Gives the optimizer what it would have gathered for a parameter of a group."""
        if first is None:
            return
        state = self._optimizer.state[parameter]
        if second is None:
            state["momentum_buffer"] = first.to(parameter)
        else:
            # Fused kernels want the number of steps where the parameter is, the others on the host.
            device = parameter.device if group["fused"] else None
            number = torch.tensor(float(steps), dtype=torch.float32, device=device)
            state |= {"step": number, "exp_avg": first.to(parameter), "exp_avg_sq": second.to(parameter)}

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
        # Only a decay that is part of the gradient is enlarged by momentum.
        torch._foreach_mul_(parameters, 1.0 - rate * decay / (1.0 - float(group.get("momentum", 0.0))))
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_add_(parameters, gradients, alpha=rate if group["maximize"] else -rate)

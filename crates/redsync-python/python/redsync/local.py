"""Local steps: every rank trains by itself, with any optimizer, and after some steps the ranks agree on common weights.

The walk of a difference. ``optimizer.step()`` is counted by a hook. After the last of `every` steps, the difference between the
weights that all ranks had and those of this rank goes to the engine, as gradients do elsewhere: into a residual, of which the
largest are sent. What all ranks sent moves the common weights, and everybody continues from them.

What must hold: after an exchange the parameters of all ranks are equal, bit by bit; between two exchanges nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import state
from .attachment import Attachment
from .errors import UsageError
from .parameters import Described, check_parameters, describe
from .settings import warm_up


class LocalSteps(Attachment):
    """An attachment that exchanges weights every so many steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        output: str | None,
        every: int,
        outer_rate: float,
        scaler: torch.amp.GradScaler | None,
        process_group: dist.ProcessGroup | None,
        deadline: float,
        log_every: int,
    ) -> None:
        if process_group is None:
            if not dist.is_initialized():
                raise UsageError("local steps need a process group: call torch.distributed.init_process_group first")
            process_group = dist.group.WORLD
        assert process_group is not None
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def described() -> list[Described]:
            if isinstance(model, DistributedDataParallel):
                raise UsageError(
                    "local steps exchange no gradients: attach the model itself, not wrapped by DistributedDataParallel"
                )
            if scaler is not None:
                raise UsageError(
                    "a GradScaler leaves steps out on one rank and not on others, so local steps cannot be counted; use bfloat16, "
                    "which needs none"
                )
            if every < 1:
                raise UsageError(f"every must be a whole number of steps from 1 on, got {every}")
            if not 0 < outer_rate < float("inf"):
                raise UsageError(f"outer_rate must be a positive number, got {outer_rate}")
            if settings["clip"] is not None:
                raise UsageError("clip= is for gradients that are exchanged; with local steps clip p.grad before optimizer.step()")
            if settings["plan"] == "measured":
                raise UsageError('plan="measured" decides for steps that exchange gradients; local steps do not')
            check_parameters(model)
            settings["warm_up"] = warm_up(settings["warm_up"], settings["method"], settings["plan"], every)
            return describe(model, named, None, output)

        settings["agree"] = [("local steps", str(every)), ("outer rate", str(outer_rate))]
        super().__init__(named, process_group, settings, described, deadline, log_every)
        self._every, self._rate, self._since = every, outer_rate, 0
        self._begin_equal(model, process_group)
        # Dense in memory, in the order of the parameter where that is: the order in which the state is kept.
        self._shared = [torch.empty_like(p, dtype=torch.float32, requires_grad=False) for p in self._parameters]
        for shared, p in zip(self._shared, self._parameters):
            shared.copy_(p.detach())
        self._handle = optimizer.register_step_post_hook(lambda *_: self._after_step())
        self._enter(model)

    def _begin_equal(self, model: torch.nn.Module, process_group: dist.ProcessGroup) -> None:
        """As DDP does: all ranks begin with the weights and statistics of the first."""
        first = dist.get_global_rank(process_group, 0)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=first, group=process_group)

    def _after_step(self) -> None:
        self._check()
        self._since += 1
        self._number += 1
        if self._since >= self._every:
            self.agree()

    @torch.no_grad()
    def agree(self) -> None:
        """Exchanges now, however many steps were made since the last time. All ranks call it, after the same number of steps.

        To be called where weights are used that should be the same everywhere and the number of steps is no multiple of `every`:
        at the end of a training, or before a judgement by all ranks.
        """
        self._check()
        if not self._since:
            return
        # Moved as far from what this rank began with, which in half precision is the common weights, rounded.
        found = [torch.empty_like(shared) for shared in self._shared]
        for difference, shared, p in zip(found, self._shared, self._parameters):
            torch.sub(shared.to(p.dtype).to(torch.float32), p, out=difference)
        with self._guarded():
            parts = [(number, state.flat(difference), True) for number, difference in enumerate(found)]
            self._submit(parts[::-1], sparse=self._sync.density is not None)
            self._sync.finish()
        if self._staging is not None:
            self._staging.synchronize()
        for shared, p, mean in zip(self._shared, self._parameters, found):
            shared.add_(mean, alpha=-self._rate)
            p.copy_(shared)
        steps, self._since = self._since, 0
        self._count(steps)

    def check_replicas(self) -> int:
        """Compares the weights on which the ranks agreed last, bit by bit, and returns their hash. All ranks call it."""
        self._check()
        return self._sync.check_replicas([state.flat(shared).cpu() for shared in self._shared])

    def _local(self) -> state.Local:
        return (self._since, self._number), dict(zip(self._names, self._shared))

    def _problem_of(self, states: list[dict[str, Any]]) -> str | None:
        if any(each["local"] is None for each in states):
            return "it is of a run that exchanged gradients, not of local steps"
        if int(states[0]["local"]["since"][0]) and states[0]["ranks"] != self._group.size:
            return "it was kept between two exchanges of local steps: resume with the same number of ranks"
        return None

    def _restored(self, states: list[dict[str, Any]]) -> None:
        local = states[0]["local"]
        self._since, self._number = local["since"].tolist()
        for shared, name in zip(self._shared, self._names):
            shared.copy_(local["shared"][name])

    def close(self) -> None:
        """Ends the threads and no longer counts steps: from then on the ranks go their own ways."""
        self._handle.remove()
        super().close()

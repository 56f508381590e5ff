"""One call on a DDP model: `attach`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .attachment import Attachment, is_attached
from .errors import UsageError
from .gradients import Gradients
from .local import LocalSteps
from .settings import Exchange, Method, Rest, Warmup


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    density: float | None = None,
    method: Method | None = None,
    warmup: Warmup | None = None,
    clip: float | None = None,
    clip_power: float = 0.75,
    plan: str | Mapping[str, str] = "carried",
    output: str | None = None,
    dense_below: int | None = None,
    rest: Rest | None = None,
    whole_output: bool | None = None,
    exchange: Exchange | None = None,
    ranks_per_host: int | None = None,
    at_least: int = 96,
    masking: bool = True,
    lower_momentum: bool = True,
    bf16: bool = True,
    share_moments: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    every: int | None = None,
    outer_rate: float = 1.0,
    keep: float = 0.95,
    process_group: dist.ProcessGroup | None = None,
    deadline: float = 60.0,
    threads: int = 1,
    log: str | os.PathLike[str] | None = None,
    log_every: int = 0,
) -> Attachment:
    """Makes a DDP model exchange compressed gradients, or with `every` any model compressed weights after some local steps.

    All ranks call it, with the same settings, before training.

    Each rank adds its gradients to a residual, sends the largest entries of it and keeps the rest for later steps. Forward,
    backward and ``optimizer.step()`` are written as always.

    A model whose process group is not the whole world: let every rank of the world attach the same number of times, or make all
    groups before; PyTorch numbers the groups that ranks make, and `attach` makes one.

    Args:
        model: the model, wrapped by ``DistributedDataParallel``; with `every`, not wrapped.
        optimizer: its ``torch.optim.SGD``, ``AdamW`` or ``Adam``; with `every`, any. Momentum of all that is not sent as f32, and
            Adam's second moment, move into the compressor.
        density: the fraction of a compressed layer that is sent at a step. By default 0.001; 0.01 with ``AdamW`` and ``Adam``, and
            1/64 with `every`.
        method: ``rgc+asq`` (one mean stands for all values of a layer, signs alternate by step), ``rgc+2bit`` (each value in two
            bits: four levels that travel along), ``rgc`` (each value for itself), ``rgc-naive`` (full selection, for comparison)
            or ``sgd`` (nothing is compressed). By default ``rgc+asq``; ``rgc+2bit`` with ``AdamW`` and ``Adam``, and with `every`.
        warmup: how the run begins. ``("ramp", n)``: n steps with falling densities, 25% for the first 1/40 of them, 6.25% for the
            next 3/40, 1.5625% for 9/40 and 0.4% for 27/40, as far as these are above `density`. ``n`` or ``("dense", n)``: n
            steps during which everything is dense. ``0``: none. By default ``("ramp", 2000)``, whose messages cost the bytes of
            about 8 dense steps in all, as those of n steps cost n/240; the rest is sent as at every other step and comes on top
            (10 to 15 dense steps together for models with many small layers). With ``plan="paper"`` and the methods ``rgc-naive``
            and ``sgd`` there is none by default: their messages are too large for it. About five epochs are a good ramp; a run of
            fewer than 2400 steps should have a shorter one, of at most 5/6 of it. Momentum carries over.
        clip: the largest norm of all gradients together, each rank's share of it, before they are accumulated; while everything is
            dense, of the averaged gradients. The first gradient then waits for the last. Clipping ``p.grad`` after the backward
            pass, as usual, clips what was exchanged instead.
        clip_power: that share among N ranks is N to the power of minus this, where gradients carry 1/N: 0.5, as the paper has it,
            for gradients that have nothing in common, 1 for equal ones. Nothing if all is dense, or with ``plan="paper"``.
        plan: ``carried`` (carried threshold, Rice-coded indices; ``auto`` is an older name of it), ``measured`` (the same, but
            machines and network are measured first, for some seconds, and only what is then predicted to be faster is compressed),
            ``paper`` (trimmed selection, plain indices and values of 32 bits, no warm-up unless given), or a choice for some
            parameters by name: ``dense``, ``dense+8bit``, ``dense+2bit``, or ``carried``, ``trimmed``, ``threshold``, ``exact``,
            with ``+asq`` or not.
        output: the name of the output layer's weight, which is never quantized to one mean; by default the last weight of the
            model.
        dense_below: weights of fewer bytes in single precision are not compressed. By default 4096, and 128 KB with
            ``plan="paper"``.
        at_least: elements that a small compressed layer sends at least at a step, 16 times as many during a ramp, but at most 1/16
            of the layer; 0.1% of a small one is a handful, and each element would wait for a thousand steps.
        rest: how biases, normalization and weights of less than 4096 bytes travel: every element at every step, with ``8bit`` or
            ``2bit`` each and the error kept for later steps, or as ``f32``, exact. By default ``8bit``, and ``2bit`` with
            ``AdamW`` and ``Adam`` at a density below 0.4%. With ``plan="paper"`` and the method ``rgc-naive`` always ``f32``, as
            is every parameter that the optimizer does not have.
        whole_output: send every element of the output layer at every step, in two bits each, the error kept, instead of its
            largest ones. By default with ``AdamW`` and ``Adam``, where the method quantizes and that takes at most three times the
            bits of all other messages: there most of what compression costs came from an output layer whose elements wait
            (docs/results.md).
        exchange: how messages travel: ``gather`` (every rank receives every rank's), ``owners`` (every element has an owner, who
            adds what all ranks sent of it and sends on the largest: what a rank receives does not grow with their number) or
            ``hosts`` (ranks of one host sum their gradients densely, in its memory, and a host sends what a single rank would;
            each of them keeps a part of the residual). By default ``gather``, and with ``plan="measured"`` what is predicted to be
            faster.
        ranks_per_host: with ``hosts``, how many ranks are on each host, one after the other. By default as torchrun started them,
            or those on machines of the same name.
        masking: clear the momentum of what was sent.
        lower_momentum: while less than a sixteenth of a layer is sent, its residual has less momentum, of the same strength, since
            what waits acts like momentum too, and both together last too long: 0.9 becomes 0.8 at 3.1%, 0.6 at 1.6% and 0.2 below
            0.8%. With ``AdamW`` and ``Adam`` as soon as not everything is sent: 0.6 instead of 0.9, and never less than that.
        bf16: send values that are not quantized as bfloat16, the rounding error kept. With ``plan="paper"`` and the method
            ``rgc-naive`` they are of 32 bits in any case.
        share_moments: ``AdamW`` and ``Adam``: the steps within which a rank tells the others all of its second moments, a part of
            them at each step, in four bits per element. Momentum is divided by the root of the mean over the ranks, in which the
            others' part is as old as that. 0: never, every rank divides by its own. By default never, if the output layer goes
            whole; otherwise 64, and 256 with a density below 0.4%, which takes about as many bytes as what is sent.
        scaler: the ``torch.amp.GradScaler`` of the loss, if there is one. A step that it skips is taken back everywhere.
        every: local steps, for the slowest links. No gradients are exchanged: every rank trains by itself, and after every so many
            calls of ``optimizer.step()`` the ranks exchange the largest differences of their weights, and continue from common
            ones; of several optimizers, attach the one that steps last. It costs loss, the more the longer: a transformer of 1M
            ended 3% behind with 8 and 20% with 30 (docs/results.md). Warm-ups are counted in exchanges then.
            Running statistics (of batch normalization) stay each rank's own. With ``method="sgd"`` weights are averaged, and
            nothing is compressed.
        outer_rate: with `every`, the rate at which what the ranks found is applied.
        keep: with `every`, how much of what was not sent is kept until the next exchange.
        process_group: with `every`, the ranks that exchange; by default all. A DDP model brings its own.
        deadline: seconds after which a rank that does not answer is given up. A rank that is busy with something else for longer
            (a validation on rank 0 only, a slow checkpoint) does not answer either: give more than that takes.
        threads: threads that compress one layer.
        log: a file to which rank 0 adds what the run sends and how long it takes, as JSON lines for ``redsync report``, every
            `log_every` steps, or 20. Losses come from you: `Attachment.log_loss`, `Attachment.log_epoch`; ``close()`` ends it.
        log_every: a line to the logger ``redsync`` at level INFO every so many steps; 0 for none.

    Returns:
        the `Attachment`, for statistics and checkpoints.

    Raises:
        UsageError: the model, the optimizer or a setting does not fit.
        MismatchError: the ranks do not agree.

    Example:
        >>> model = DistributedDataParallel(net)                                        # doctest: +SKIP
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)       # doctest: +SKIP
        >>> redsync.attach(model, optimizer)                                            # doctest: +SKIP
        >>> for inputs, labels in loader:                                               # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     loss(model(inputs), labels).backward()
        ...     optimizer.step()
    """
    if every is None and not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"attach takes a model wrapped by DistributedDataParallel, not a {type(model).__name__}; one that is not wrapped can "
            "make local steps: attach(..., every=8)"
        )
    if is_attached(model):
        raise UsageError("redsync is attached to this model already; DDP allows one communication hook per model")
    if not deadline > 0:
        raise UsageError(f"deadline must be a positive number of seconds, got {deadline}")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    adam = isinstance(optimizer, torch.optim.Adam)
    if method is None:
        method = "rgc+2bit" if every is not None or adam else "rgc+asq"
    if density is None:
        density = 1 / 64 if every is not None else 0.01 if adam else 0.001
    plan, choices = (plan, {}) if isinstance(plan, str) else ("carried", dict(plan))
    settings: dict[str, Any] = {
        "method": method,
        "plan": plan,
        "choices": choices,
        "density": density,
        "dense_below": dense_below,
        "rest": rest,
        "whole_output": whole_output,
        "exchange": exchange,
        "ranks_per_host": ranks_per_host,
        "at_least": at_least,
        "masking": masking,
        "lower_momentum": lower_momentum,
        "keep": keep if every is not None else 1.0,
        "share_moments": share_moments,
        "bf16": bf16,
        "warm_up": warmup,
        "clip": clip,
        "clip_power": clip_power,
        "undo": scaler is not None,
        "threads": threads,
    }
    attachment: Attachment
    if every is None:
        assert isinstance(model, DistributedDataParallel)
        attachment = Gradients(model, optimizer, settings, output, scaler, deadline, log_every)
    else:
        attachment = LocalSteps(model, optimizer, settings, output, every, outer_rate, scaler, process_group, deadline, log_every)
    if log is not None:
        try:
            attachment._log_to(log, model, {**settings, "every": every or 1})
        except UsageError:
            attachment.close()  # the other ranks hear of it
            raise
    return attachment

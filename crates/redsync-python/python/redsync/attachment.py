"""One call on a DDP model: `attach`, and the `Attachment` that it returns.

The walk of a gradient. The backward pass fills a bucket of DDP, whose hook is ours. The hook hands the bucket to the exchange
(`exchange.py`) and returns a future; compression and collectives go on in two threads. When the backward pass ends, it waits
for what is left and raises what went wrong. By then each ``p.grad`` holds the average: all of it for a dense layer; for a
compressed one what all ranks sent of their residuals, momentum included. ``optimizer.step()`` applies momentum to dense layers
only (`optimizer.py`).

What must hold: everything that decides about messages is the same on all ranks, and is compared when they attach; state is
kept by parameter, never by bucket, which DDP builds anew.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import operator
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from . import _redsync
from .channel import Broken, Channel
from .errors import Error, MismatchError, PeerError, UsageError
from .exchange import Bucket, Exchange, Part, Step
from .optimizer import Steps, check_optimizer
from .staging import Staging
from .state import FORMAT, check_layer, flat_like, momentum_of, reshare, restore_layer, save_layer
from .stats import Meter, Stats
from .watch import Watch

log = logging.getLogger("redsync")

Method = Literal["rgc+asq", "rgc", "rgc-naive", "sgd"]
Warmup = int | tuple[Literal["dense", "ramp"], int]

_attached: weakref.WeakKeyDictionary[torch.nn.Module, Attachment] = weakref.WeakKeyDictionary()
"""What `of` finds."""
_open: weakref.WeakSet[Attachment] = weakref.WeakSet()
"""What acts on an optimizer, also where the model is gone and waits to be collected."""


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    density: float = 0.001,
    method: Method = "rgc+asq",
    warmup: Warmup = 0,
    plan: str | Mapping[str, str] = "auto",
    output: str | None = None,
    dense_below: int = 128 << 10,
    masking: bool = True,
    bf16: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    deadline: float = 60.0,
    threads: int = 1,
    log_every: int = 0,
) -> Attachment:
    """Makes a DDP model exchange compressed gradients. All ranks call it, with the same settings, before training.

    Each rank adds its gradients to a residual, sends the largest of it and keeps the rest for later steps. Forward, backward
    and ``optimizer.step()`` are written as always.

    A model whose process group is not the whole world: let every rank of the world attach the same number of times, or make all
    groups before; PyTorch numbers the groups that ranks make, and `attach` makes one.

    Args:
        model: the model, wrapped by ``DistributedDataParallel``.
        optimizer: its ``torch.optim.SGD``. Momentum of compressed layers moves into the compressor.
        density: the fraction of a compressed layer that is sent at a step.
        method: ``rgc+asq`` (one mean stands for all values of a layer, signs alternate by step), ``rgc`` (values of 32 bits),
            ``rgc-naive`` (full selection, for comparison) or ``sgd`` (nothing is compressed).
        warmup: steps at the start during which everything is dense; or ``("ramp", n)`` for n steps each at 25, 6.25, 1.5625
            and 0.4%. Momentum carries over.
        plan: ``auto`` (carried threshold, Rice-coded indices), ``paper`` (trimmed selection, plain indices), or a choice
            for some parameters by name: ``dense``, or ``carried``, ``trimmed``, ``threshold``, ``exact``, with ``+asq`` or not.
        output: the name of the output layer's weight, which is never quantized; by default the last weight of the model.
        dense_below: parameters of fewer bytes in single precision stay dense, as do biases and normalization.
        masking: clear the momentum of what was sent.
        bf16: send values that are not quantized as bfloat16.
        scaler: the ``torch.amp.GradScaler`` of the loss, if there is one. A step that it skips is taken back everywhere.
        deadline: seconds after which a rank that does not answer is given up. A rank that is busy with something else for longer
            (a validation on rank 0 only, a slow checkpoint) does not answer either: give more than that takes.
        threads: threads that compress one layer.
        log_every: a line to the logger ``redsync`` at level INFO every so many steps; 0 for none.

    Returns:
        The `Attachment`: statistics, state for checkpoints.

    Raises:
        UsageError: the model, the optimizer or a setting does not fit.
        MismatchError: the ranks do not agree.

    Example:
        >>> model = DistributedDataParallel(net)                                        # doctest: +SKIP
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)       # doctest: +SKIP
        >>> redsync.attach(model, optimizer, warmup=500)                                # doctest: +SKIP
        >>> for inputs, labels in loader:                                               # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     loss(model(inputs), labels).backward()
        ...     optimizer.step()
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"attach takes a model wrapped by DistributedDataParallel, not a {type(model).__name__}")
    if model in _attached:
        raise UsageError("redsync is attached to this model already; DDP allows one communication hook per model")
    if not deadline > 0:
        raise UsageError(f"a deadline of {deadline} seconds is none")
    preset, choices = (plan, {}) if isinstance(plan, str) else ("auto", dict(plan))
    settings: dict[str, Any] = {
        "method": method,
        "preset": preset,
        "plan": choices,
        "density": density,
        "dense_below": dense_below,
        "masking": masking,
        "bf16": bf16,
        "warm_up": warmup,
    }
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    return Attachment(model, optimizer, settings, output, scaler, deadline, threads, log_every)


def _warm_up(warmup: Any) -> tuple[str, int]:
    kind, steps = warmup if isinstance(warmup, tuple) and len(warmup) == 2 else ("dense", warmup)
    try:
        steps = operator.index(steps)
    except TypeError:
        steps = -1
    if steps < 0 or not isinstance(kind, str):
        raise UsageError(f'a warmup of {warmup!r} is none: give a number of steps, or ("ramp", steps)')
    return kind, steps


def _check_free(parameters: Sequence[torch.Tensor]) -> None:
    """A parameter has one compressor: two would take its momentum away from each other."""

    def taken() -> bool:
        return any(not set(other._parameters).isdisjoint(parameters) for other in _open)

    if taken():
        gc.collect()  # a model that nobody has any more closes its attachment when it goes
    if taken():
        raise UsageError("redsync is attached to another model with the same parameters; close() that attachment first")


def _check_model(model: DistributedDataParallel) -> None:
    if model.mixed_precision is not None:
        raise UsageError("DDP's mixed_precision is not supported; use torch.autocast, with a GradScaler for float16")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise UsageError(f"{name} yields sparse gradients, which cannot be compressed; make it with sparse=False")
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(f"{name} is of {kind}; gradients of float32, float16 and bfloat16 can be compressed: model.float()")


def _output(model: torch.nn.Module) -> str | None:
    """The last weight of a model; of a tied one, the name that `named_parameters` gives it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad and p.dim() > 1]
    return names[weights[-1]] if weights else None


class Attachment:
    """What ties a model to its compressors. Made by `attach`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        output: str | None,
        scaler: torch.amp.GradScaler | None,
        deadline: float,
        threads: int,
        log_every: int,
    ) -> None:
        ignored = set(model.parameters_to_ignore)  # by DDP, which leaves them to the user
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._scaler, self._log_every = scaler, log_every
        self._compressed_now: frozenset[torch.Tensor] = frozenset()
        grace = min(5.0, deadline / 4)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        problem = self._prepare(model, optimizer, settings, output, threads)
        # Only now, because a rank that has nothing to say would let the others wait.
        channel = Channel(model.process_group, deadline - grace, device)
        with contextlib.ExitStack() as opened:
            opened.callback(channel.close)
            self._agree(channel, settings, problem)
            self._watch = Watch(str(channel.group.group_name), channel.rank, channel.size, grace)
            opened.pop_all()
        assert isinstance(optimizer, torch.optim.SGD)
        choices = self._layers.choices()
        self._channel = channel
        self._compressed = [number for number, choice in enumerate(choices) if choice != "dense"]
        self._fresh = set(self._compressed)
        sizes = [parameter.numel() for parameter in self._parameters]
        bits = [_bits(choice, settings["bf16"]) for choice in choices]
        small = [n for n, size in enumerate(sizes) if bits[n] == 0 and 4 * size < max(settings["dense_below"], 1)]
        self._meter = Meter(self._names, choices, sizes, [p.element_size() for p in self._parameters])
        self._staging = Staging(device)
        self._exchange = Exchange(self._layers, sizes, bits, small, channel, self._watch, self._meter, self._staging, deadline)
        self._number = 0
        self._step: Step | None = None
        self._warned = False
        self._unused = self._notice_use() if model.find_unused_parameters or model.static_graph else None
        self._closing = weakref.finalize(self, _close, self._exchange, self._watch, channel)
        try:
            model.register_comm_hook(self, _hook)
        except RuntimeError as error:
            self._closing()
            raise UsageError(f"DDP does not take the communication hook: {str(error).splitlines()[0]}") from error
        self._steps = Steps(optimizer, lambda: self._compressed_now)
        _attached[model] = self
        _open.add(self)
        # The optimizer holds on to this object, and may go on with another model.
        weakref.finalize(model, self.close).atexit = False

    def _prepare(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        output: str | None,
        threads: int,
    ) -> str | None:
        """Everything that needs no other rank. Returns what is wrong with it."""
        try:
            settings["warm_up"] = _warm_up(settings["warm_up"])
            if not hasattr(dist.distributed_c10d.Store, "clone"):
                raise UsageError(f"PyTorch {torch.__version__} is too old: its stores cannot be cloned; 2.15 is tested")
            _check_model(model)
            _check_free(self._parameters)
            check_optimizer(optimizer, self._scaler is not None)
            groups = {p: group for group in optimizer.param_groups for p in group["params"]}
            layers = self._describe(output if output is not None else _output(model.module), output, groups)
            chosen = [groups.get(parameter, _NO_GROUP) for parameter in self._parameters]
            self._momenta = [(float(group["momentum"]), bool(group["nesterov"])) for group in chosen]
            rank, ranks = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
            undo = self._scaler is not None
            self._layers = _redsync.Layers(layers, self._momenta, rank=rank, ranks=ranks, undo=undo, threads=threads, **settings)
        except (ValueError, TypeError, OverflowError) as error:
            # Which argument it is about stands in a note.
            return "; ".join([str(error), *getattr(error, "__notes__", [])])
        return None

    def _describe(self, last: str | None, asked: str | None, groups: Mapping[torch.Tensor, Any]) -> list[tuple[str, int, str]]:
        if asked is not None and asked not in self._names:
            raise UsageError(f"output={asked!r} is no parameter of the model that is trained")
        layers = []
        for name, parameter in zip(self._names, self._parameters):
            # What the optimizer does not update needs no residual.
            plain = parameter.dim() <= 1 or parameter not in groups
            kind = "bias-or-norm" if plain else "output" if name == last else "weight"
            layers.append((name, parameter.numel(), kind))
        return layers

    def _agree(self, channel: Channel, settings: dict[str, Any], problem: str | None) -> None:
        """Compares what decides about messages with all other ranks."""
        ours: dict[str, Any] = {"problem": problem}
        if problem is None:
            shapes = [[n, list(p.shape), list(p.stride()), str(p.dtype)] for n, p in zip(self._names, self._parameters)]
            ours |= {
                "redsync": _redsync.VERSION,
                "the wire format": _redsync.WIRE_VERSION,
                **{key: value for key, value in settings.items() if key != "plan"},
                "a GradScaler": self._scaler is not None,
                "the number of parameters": len(shapes),
                **{f"parameter {number}": shape for number, shape in enumerate(shapes)},
                **{f"the choice for {name}": choice for name, choice in zip(self._names, self._layers.choices())},
                **{f"the momentum of {name}": m for name, m in zip(self._names, self._momenta)},
            }
        text = json.dumps(ours)
        everyone = [json.loads(theirs) for theirs in _exchange_texts(channel, text)]
        if problem is not None:
            raise UsageError(problem)
        for rank, theirs in enumerate(everyone):
            if theirs["problem"] is not None:
                raise MismatchError(f"rank {rank} cannot attach: {theirs['problem']}")
            _compare(rank, theirs, json.loads(text))

    def _notice_use(self) -> set[int]:
        """The compressed layers that got no gradient since the last exchange; they send nothing then."""
        unused = set(self._compressed)
        for number in self._compressed:
            # A tensor's hook runs before DDP's, which waits for the accumulated gradient.
            self._parameters[number].register_hook(lambda _, number=number: unused.discard(number))
        return unused

    # Called by DDP and autograd, during the backward pass.

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._exchange.check()
        if self._step is None or bucket.index() == 0:
            self._begin()
        step = self._step
        assert step is not None
        if bucket.index() != len(step.buckets):
            raise Error(f"DDP reduces bucket {bucket.index()} after {len(step.buckets)} others; is there another hook?")
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise UsageError("sparse gradients cannot be compressed; make embeddings with sparse=False")
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        parts = self._parts(bucket, buffer)
        self._exchange.submit(Bucket(step, bucket.index(), parts, buffer, future, bucket.is_last(), self._staging.mark()))
        if bucket.is_last():
            # Not before: a backward pass may end without it (DDP complains then, at the next forward pass), and what an inner
            # backward pass queues, as of checkpointed activations, is called at the end of that one.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return future

    def _parts(self, bucket: GradBucket, buffer: torch.Tensor) -> list[Part]:
        parts, begin = [], 0
        for parameter in bucket.parameters():
            number, size = self._numbers.get(parameter), parameter.numel()
            if number is None:
                raise UsageError(
                    "DDP reduces a parameter that was frozen between DistributedDataParallel(...) and redsync.attach(...): "
                    "set requires_grad before the first of them"
                )
            used = self._unused is None or number not in self._unused
            parts.append(Part(number, buffer.narrow(0, begin, size), used))
            begin += size
        return parts

    def _begin(self) -> None:
        """The first bucket of a backward pass is there."""
        if self._step is not None:
            raise Error("the backward pass before this one did not end; redsync cannot tell what other ranks got of it")
        density = self._layers.begin(self._number)
        scale = None if self._scaler is None else float(self._scaler.get_scale())
        if density is not None:
            try:
                self._move_momentum()
            except ValueError as error:
                raise UsageError(str(error)) from None
        if self._compressed_now and not self._steps.taken and not self._warned:
            self._warned = True
            warnings.warn(
                "two backward passes were synchronized without optimizer.step() in between: what the first one sent is lost "
                "or counted twice; accumulate gradients within model.no_sync()",
                stacklevel=2,
            )
        self._steps.taken = False
        self._step = Step(self._number, density, scale)

    def _move_momentum(self) -> None:
        """Compressors follow the momentum of the user's groups; what the optimizer has gathered becomes theirs, once."""
        compressed = set(self._compressed)
        for parameter, group in self._steps.groups():
            number = self._numbers.get(parameter)
            if number is None or number not in compressed:
                continue
            now = (float(group["momentum"]), bool(group["nesterov"]))
            if now != self._momenta[number]:
                self._layers.set_momentum(number, *now)
                self._momenta[number] = now
            buffer = self._steps.take_momentum(parameter)
            if buffer is not None and number in self._fresh:
                self._layers.adopt_momentum(number, flat_like(buffer, parameter), self._channel.size)
        self._fresh.clear()

    def _finish(self) -> None:
        """The backward pass has ended, but for what is under way."""
        step, begin = self._step, time.perf_counter()
        assert step is not None
        self._exchange.wait(step)
        self._step = None
        self._number += 1
        compressed = self._compressed if step.density is not None and not step.not_finite else []
        self._compressed_now = frozenset(self._parameters[number] for number in compressed)
        self._steps.taken |= step.not_finite
        if self._unused is not None:
            self._unused.update(self._compressed)
        self._meter.finish(step.number, 1e3 * (time.perf_counter() - begin), step.density is not None)
        if self._log_every and self._number % self._log_every == 0:
            log.info("%s", self._meter.snapshot())

    # Called by the user.

    @property
    def step(self) -> int:
        """The number of synchronized backward passes."""
        return self._number

    def stats(self) -> Stats:
        """What the last step cost, per layer and in all.

        Example:
            >>> print(attachment.stats())                                               # doctest: +SKIP
            step 99: sent 82,699 of 58,896,168 bytes (1/712), compressing 11.2 ms, exchange 240.1 ms, waited 1.9 ms
        """
        return self._meter.snapshot()

    def residual_norms(self) -> dict[str, float]:
        """The norm of what each compressed layer has accumulated and not sent. One pass over memory."""
        return {self._names[number]: self._layers.residual_norm(number) for number in self._compressed}

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries from step to step: every rank has its own and saves it.

        Together with the model, the optimizer and the order of the data it makes a resumed run equal to one that was never
        interrupted, bit by bit. Plain tensors, numbers and texts.

        Example:
            >>> torch.save(attachment.state_dict(), f"redsync-{rank}.pt")               # doctest: +SKIP
        """
        self._check_between()
        layers = {self._names[n]: save_layer(self._layers, n, self._parameters[n], self._momenta[n]) for n in self._compressed}
        return {
            "format": FORMAT,
            "step": self._number,
            "rank": self._channel.rank,
            "ranks": self._channel.size,
            "fresh": sorted(self._names[number] for number in self._fresh),
            "layers": layers,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state. All ranks call it, after `attach`; after an error nothing has changed.

        Args:
            state: this rank's state; or, for another number of ranks than before, a list of the states of all old ranks. Then
                the sums over the ranks of residuals and momentum stay what they were.
        """
        self._check_between()
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise UsageError("there is no state in the list")
        rank, ranks = self._channel.rank, self._channel.size
        problem = None
        try:
            mine = states[0] if len(states) == 1 and states[0].get("ranks") == ranks else reshare(states, rank, ranks)
            self._check_state(mine)
        except UsageError as error:
            problem, mine = str(error), {}
        said = json.dumps({"the state": problem, "the step of the state": mine.get("step")})
        for peer, text in enumerate(_exchange_texts(self._channel, said, self._watch)):
            if problem is None:
                _compare(peer, json.loads(text), json.loads(said))
        if problem is not None:
            raise UsageError(problem)
        for number in self._compressed:
            saved = mine["layers"][self._names[number]]
            if "u" in saved:  # which is of the momentum that was, in the Nesterov form; a schedule may have moved on
                self._momenta[number] = momentum_of(saved)
                self._layers.set_momentum(number, *self._momenta[number])
            restore_layer(self._layers, number, self._parameters[number], saved)
        self._number = int(mine["step"])
        self._fresh = {number for number in self._compressed if self._names[number] in set(mine["fresh"])}
        self._compressed_now = frozenset()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != FORMAT:
            raise UsageError(f"this is not a state of redsync in the format {FORMAT}")
        if state["rank"] != self._channel.rank:
            raise UsageError(
                f"this is the state of rank {state['rank']}, not of rank {self._channel.rank}: each rank loads its own"
            )
        ours, theirs = {self._names[n] for n in self._compressed}, set(state["layers"])
        if ours != theirs:
            raise UsageError(f"the state compresses other layers; not in both: {', '.join(sorted(ours ^ theirs))}")
        for number in self._compressed:
            problem = check_layer(
                state["layers"][self._names[number]],
                self._parameters[number],
                self._momenta[number] if self._layers.has_momentum(number) else None,
            )
            if problem is not None:
                raise UsageError(f"{self._names[number]}: {problem}")

    def check_replicas(self) -> int:
        """Compares the parameters of all ranks, bit by bit, and returns their hash. All ranks call it."""
        self._check_between()
        tensors = [p.detach().to("cpu", torch.float32).contiguous() for p in self._parameters]
        ours = {name: _redsync.replica_hash([tensor]) for name, tensor in zip(self._names, tensors)}
        texts = _exchange_texts(self._channel, json.dumps(ours), self._watch)
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            theirs = json.loads(text)
            for name in first:
                if theirs.get(name) != first[name]:
                    raise MismatchError(f"replicas differ at step {self._number}: {name} of rank {rank} is not that of rank 0")
        return _redsync.replica_hash(tensors)

    def _check_between(self) -> None:
        self._exchange.check()
        if self._step is not None:
            raise UsageError("a backward pass is under way; this has to happen between two steps")

    def close(self) -> None:
        """Ends the threads and leaves the optimizer as it was. The model cannot be trained any further with this attachment; that
        happens by itself when the model goes."""
        self._steps.close()
        self._compressed_now = frozenset()
        _open.discard(self)
        for model in [model for model, attachment in _attached.items() if attachment is self]:
            del _attached[model]
        self._closing()


_NO_GROUP: dict[str, Any] = {"momentum": 0.0, "nesterov": False}


def _close(exchange: Exchange, watch: Watch, channel: Channel) -> None:
    exchange.close()
    watch.close()
    channel.close()


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants these names, and no annotations that it does not know
    return state._take(bucket)


def _bits(choice: str, bf16: bool) -> int:
    """About how many bits a sent element takes; 0 for a dense layer."""
    if choice == "dense":
        return 0
    return 12 if choice.endswith("+asq") else 28 if bf16 else 44


def _exchange_texts(channel: Channel, text: str, watch: Watch | None = None) -> list[str]:
    try:
        return channel.exchange(text)
    except PeerError:
        raise
    except RuntimeError as error:
        if watch is not None and isinstance(error, Broken):
            raise watch.blame(str(error)) from error
        raise Error(f"the ranks could not be compared, because not all of them came: {str(error).splitlines()[0]}") from error


def _compare(rank: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """The first thing that differs; ours comes in an order that tells most first."""
    for key in [*ours, *theirs]:
        if theirs.get(key) != ours.get(key):
            raise MismatchError(f"rank {rank} runs something else: {key} is {theirs.get(key)} there, {ours.get(key)} here")


def of(model: torch.nn.Module | None = None) -> Attachment:
    """The attachment of a model; without one, that of the only model."""
    if model is not None:
        if model not in _attached:
            raise UsageError("redsync is not attached to this model")
        return _attached[model]
    if len(_attached) != 1:
        raise UsageError(f"redsync is attached to {len(_attached)} models; say which one")
    return next(iter(_attached.values()))

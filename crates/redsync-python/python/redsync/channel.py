"""Bytes among ranks, over a process group of PyTorch. Knows nothing of gradients.

Comes in: one message per rank, of any length. Goes out: the messages of all ranks. What must hold: every rank starts the
same collectives in the same order; the sizes that collectives need follow from what all ranks have seen.

A message of unknown length would need two collectives, one for the sizes. Here it needs one: all ranks send blocks of the
same size, a little more than the largest message of the last time, with the true length in front. If a message turns out to
be longer, all ranks see that in the same collective, and fetch the rest in another one at the end of the step.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .errors import Error, PeerError


class Broken(Error):
    """A collective failed; the text is the backend's."""


HEADER = 8
"""Bytes in front of a message: its length and, in the lowest byte, its kind."""

LEAST_BYTES = 480
"""Every block has room for so many, so that a reason to give up arrives at once."""

FRAME, GAVE_UP, NOT_FINITE = 0, 1, 2
"""Kinds of messages: a frame; the reason why this rank cannot go on; a gradient that overflowed, of a scaled loss."""


@dataclass
class Gathered:
    """A collective that was started, and then what it brought."""

    key: Hashable
    capacity: int
    limit: int
    payload: torch.Tensor
    block: torch.Tensor
    blocks: torch.Tensor
    work: dist.Work
    kinds: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rest: torch.Tensor | None = None

    @property
    def missing(self) -> int:
        """Bytes of the longest message that did not fit."""
        return max(0, max(self.lengths) - self.capacity)

    def message(self, rank: int) -> torch.Tensor:
        """The message of a rank."""
        row, length = self.blocks[rank], self.lengths[rank]
        if length <= self.capacity:
            return row[HEADER : HEADER + length]
        assert self.rest is not None
        return torch.cat([row[HEADER:], self.rest[rank, : length - self.capacity]])

    def messages(self) -> list[torch.Tensor]:
        """The messages of all ranks, in rank order."""
        return [self.message(rank) for rank in range(len(self.lengths))]


class Channel:
    """Collectives on a group of their own, of the same ranks and backend as the model's.

    DDP starts collectives of its own on the model's group whenever it likes (the map of unused parameters, the broadcast of
    buffers). From another thread, ours could fall between them in another order on each rank; on their own group they cannot.
    """

    def __init__(self, model_group: dist.ProcessGroup, patience: float, device: torch.device) -> None:
        ranks = dist.get_process_group_ranks(model_group)
        backend = dist.get_backend(model_group)
        timeout = datetime.timedelta(seconds=patience)
        # With MPI all ranks of the world have to make every group together.
        local = "mpi" not in backend
        group = dist.new_group(ranks, timeout, backend, use_local_synchronization=local)
        assert isinstance(group, dist.ProcessGroup)  # a member of the model's group is one of this
        self.group = group
        self.rank: int = dist.get_rank(self.group)
        self.size: int = dist.get_world_size(self.group)
        # NCCL carries nothing but tensors of a GPU.
        self.device = device if "nccl" in backend and "gloo" not in backend else torch.device("cpu")
        self._capacities: dict[Hashable, int] = {}

    def start(self, key: Hashable, kind: int, payload: bytes, expected: int, limit: int) -> Gathered:
        """Starts to exchange messages; those of the same key are of about the same length on all ranks and at all steps.

        `expected`, the same on all ranks, is a guess for the first time; no valid message is longer than `limit`.
        """
        # Rows of whole words, so that headers can be read as numbers.
        capacity = -(-self._capacities.setdefault(key, expected) // HEADER) * HEADER
        message = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        block = torch.empty(HEADER + capacity, dtype=torch.uint8)
        block[:HEADER].view(torch.int64).fill_(len(payload) << 8 | kind)
        fitting = min(len(payload), capacity)
        block[HEADER : HEADER + fitting] = message[:fitting]
        block[HEADER + fitting :] = 0
        block = block.to(self.device)
        blocks = torch.empty(self.size, HEADER + capacity, dtype=torch.uint8, device=self.device)
        work = self._gather(blocks, block)
        return Gathered(key, capacity, limit, message, block, blocks, work)

    def _gather(self, into: torch.Tensor, block: torch.Tensor) -> dist.Work:
        return _start(lambda: dist.all_gather_into_tensor(into.view(-1), block, group=self.group, async_op=True))

    def finish(self, gathered: Gathered) -> None:
        """Waits for the messages. Those that did not fit are not whole yet."""
        wait(gathered.work)
        gathered.blocks = gathered.blocks.cpu()
        headers = gathered.blocks.view(torch.int64)[:, 0].tolist()
        gathered.kinds = [header & 0xFF for header in headers]
        gathered.lengths = [header >> 8 for header in headers]
        for rank, (kind, length) in enumerate(zip(gathered.kinds, gathered.lengths)):
            if kind > NOT_FINITE or not 0 <= length <= gathered.limit:
                raise PeerError(f"rank {rank} sent a message of {length} bytes of kind {kind}, which cannot be", (rank,))
        self._learn(gathered)

    def _learn(self, gathered: Gathered) -> None:
        """The size of the next block, from what all ranks have seen: up at once, down slowly."""
        longest = max(gathered.lengths)
        need = longest + longest // 64 + 32
        old = gathered.capacity
        self._capacities[gathered.key] = max(LEAST_BYTES, need, old - (old - need) // 8)

    def finish_rest(self, some: Sequence[Gathered]) -> None:
        """Exchanges what did not fit, of all collectives of a step in one. Does nothing if all did."""
        short = [gathered for gathered in some if gathered.missing]
        if not short:
            return
        parts = [torch.zeros(gathered.missing, dtype=torch.uint8) for gathered in short]
        for gathered, part in zip(short, parts):
            rest = gathered.payload[gathered.capacity :]
            part[: len(rest)] = rest
        block = torch.cat(parts).to(self.device)
        blocks = torch.empty(self.size, len(block), dtype=torch.uint8, device=self.device)
        wait(self._gather(blocks, block))
        begin = 0
        for gathered, part in zip(short, parts):
            gathered.rest = blocks[:, begin : begin + len(part)].cpu()
            begin += len(part)

    def sum(self, tensor: torch.Tensor) -> dist.Work:
        """Starts to sum a tensor over the ranks, in its place.

        The order of additions depends on the backend, the size of the tensor and the place in it, and on nothing else.
        """
        return _start(lambda: dist.all_reduce(tensor, group=self.group, async_op=True))

    def exchange(self, text: str) -> list[str]:
        """One text from each rank."""
        payload = text.encode()
        gathered = self.start(("text",), FRAME, payload, expected=4096, limit=1 << 28)
        self.finish(gathered)
        self.finish_rest([gathered])
        self._capacities.pop(("text",))
        return [bytes(message.tolist()).decode(errors="replace") for message in gathered.messages()]

    def close(self) -> None:
        """Leaves the group. Not waited for: the others may be gone."""
        try:
            dist.destroy_process_group(self.group)
        except (AssertionError, RuntimeError, ValueError):  # the program has destroyed its groups already, with this one
            pass


def _start(collective: Callable[[], dist.Work | None]) -> dist.Work:
    try:
        work = collective()
    except RuntimeError as error:
        raise Broken(_line(error)) from error
    assert work is not None
    return work


def wait(work: dist.Work) -> None:
    """Waits for a collective, at most as long as its group allows."""
    try:
        work.wait()
    except RuntimeError as error:
        raise Broken(_line(error)) from error


def _line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

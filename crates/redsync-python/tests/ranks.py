"""Ranks for tests: real processes that talk through gloo. A function runs on every rank; what it returns comes back in order."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # DDP imports it when the first model is made; once here is faster than once on every rank
import torch.distributed as dist

# Forked children have torch imported already; nothing in this process may start threads of its own.
_processes = multiprocessing.get_context("fork")


class Failed(Exception):
    """A rank raised something; the text is its traceback."""


def _store(rank: int, ranks: int, ports: Any) -> dist.TCPStore:
    """The store of a job: rank 0 holds it, at a port that the system gives it, so that no two jobs can meet."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        for _ in range(1, ranks):
            ports.put(store.port)
        return store
    return dist.TCPStore("127.0.0.1", ports.get(), ranks, is_master=False)


def _child(rank: int, ranks: int, ports: Any, out: pathlib.Path, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    atexit._clear()  # what is registered there is the parent's
    torch.set_num_threads(1)
    with (out / f"{rank}.stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        _run(rank, ranks, ports, out, run, arguments)
        os._exit(0)


def _run(rank: int, ranks: int, ports: Any, out: pathlib.Path, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        dist.init_process_group("gloo", store=_store(rank, ranks, ports), rank=rank, world_size=ranks)
        result = ("ok", run(*arguments))
    except BaseException as error:
        result = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
    torch.save(result, out / f"{rank}.tmp")
    (out / f"{rank}.tmp").rename(out / f"{rank}.pt")
    atexit._run_exitfuncs()  # as at the end of a program, which a forked child does not have: a rank that gave up is heard


class Job:
    """A function that runs on every rank of a group of its own."""

    def __init__(self, ranks: int, run: Callable[..., Any], *arguments: Any) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._out, ports = pathlib.Path(self._directory.name), _processes.SimpleQueue()
        places = [(rank, ranks, ports, self._out, run, arguments) for rank in range(ranks)]
        self._children = [_processes.Process(target=_child, args=place) for place in places]
        for child in self._children:
            child.start()

    def outcomes(self, limit: float, stopped: Sequence[int] = ()) -> list[tuple[str, Any]]:
        """See the function of this name."""
        ranks = len(self._children)
        with self._directory:
            try:
                for rank in sorted(range(ranks), key=lambda rank: rank in stopped):
                    if rank in stopped:
                        self._children[rank].kill()
                    self._children[rank].join(limit)
                    if self._children[rank].is_alive():
                        raise Failed(f"rank {rank} of {ranks} still ran after {limit} seconds\n{self._whereabouts()}")
            finally:
                for child in self._children:
                    child.kill()
            return [_outcome(child, self._out / f"{rank}.pt") for rank, child in enumerate(self._children)]

    def _whereabouts(self) -> str:
        """Where ranks that run are, thread by thread, and what the others ended with."""
        for child in self._children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGUSR1)
        time.sleep(1.0)
        texts = []
        for rank, child in enumerate(self._children):
            text = (self._out / f"{rank}.stacks").read_text() if child.is_alive() else _outcome(child, self._out / f"{rank}.pt")
            texts.append(f"rank {rank}: {text}")
        return "\n".join(texts)

    def results(self, limit: float) -> list[Any]:
        """What every rank returned; raises what one of them raised."""
        found = self.outcomes(limit)
        for rank, (kind, value) in enumerate(found):
            if kind != "ok":
                raise Failed(f"rank {rank}: {kind}: {value}")
        return [value for _, value in found]


def outcomes(
    ranks: int, run: Callable[..., Any], *arguments: Any, limit: float = 120.0, stopped: Sequence[int] = ()
) -> list[tuple[str, Any]]:
    """What every rank returned as ("ok", value), or the name of what it raised with its text; ("dead", signal) if killed.

    `stopped` ranks do not end by themselves, and are killed when all others have.
    """
    return Job(ranks, run, *arguments).outcomes(limit, stopped)


def _outcome(child: Any, path: pathlib.Path) -> tuple[str, Any]:
    if path.exists():
        kind, value = torch.load(path, weights_only=False)
        return kind, value
    return "dead", signal.Signals(-child.exitcode).name if child.exitcode else "?"


def on_ranks(ranks: int, run: Callable[..., Any], *arguments: Any, limit: float = 120.0) -> list[Any]:
    """What every rank returned; raises what one of them raised."""
    return Job(ranks, run, *arguments).results(limit)

"""Ranks for tests: real processes that talk through gloo. A function runs on every rank; what it returns comes back in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pathlib
import signal
import socket
import tempfile
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _child(rank: int, ranks: int, port: int, out: pathlib.Path, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        dist.init_process_group("gloo")
        result = ("ok", run(*arguments))
    except BaseException as error:
        result = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
    torch.save(result, out / f"{rank}.tmp")
    (out / f"{rank}.tmp").rename(out / f"{rank}.pt")
    gc.collect()  # what lives on in cycles is finished here as at the end of a program
    os._exit(0)


def outcomes(
    ranks: int, run: Callable[..., Any], *arguments: Any, limit: float = 120.0, stopped: Sequence[int] = ()
) -> list[tuple[str, Any]]:
    """What every rank returned as ("ok", value), or the name of what it raised with its text; ("dead", signal) if killed.

    `stopped` ranks do not end by themselves, and are killed when all others have.
    """
    with tempfile.TemporaryDirectory() as name:
        out, port = pathlib.Path(name), _free_port()
        children = [_processes.Process(target=_child, args=(rank, ranks, port, out, run, arguments)) for rank in range(ranks)]
        for child in children:
            child.start()
        try:
            for rank in sorted(range(ranks), key=lambda rank: rank in stopped):
                if rank in stopped:
                    children[rank].kill()
                children[rank].join(limit)
                if children[rank].is_alive():
                    raise Failed(f"rank {rank} of {ranks} still ran after {limit} seconds")
        finally:
            for child in children:
                child.kill()
        return [_outcome(child, out / f"{rank}.pt") for rank, child in enumerate(children)]


def _outcome(child: Any, path: pathlib.Path) -> tuple[str, Any]:
    if path.exists():
        kind, value = torch.load(path, weights_only=False)
        return kind, value
    return "dead", signal.Signals(-child.exitcode).name if child.exitcode else "?"


def on_ranks(ranks: int, run: Callable[..., Any], *arguments: Any, limit: float = 120.0) -> list[Any]:
    """What every rank returned; raises what one of them raised."""
    found = outcomes(ranks, run, *arguments, limit=limit)
    for rank, (kind, value) in enumerate(found):
        if kind != "ok":
            raise Failed(f"rank {rank}: {kind}: {value}")
    return [value for _, value in found]

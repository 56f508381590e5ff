"""What only the engine over PyTorch's process group has to hold: peers that die, a store that goes, programs that end.

It needs the same build as `test_conformance.py`, which says where.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, outcomes
from test_conformance import PATIENCE, extension


def until_it_breaks(victim: int, end: int, kind: str, length: int):
    module = extension()
    group = module.Group(dist.group.WORLD, patience=PATIENCE)
    for step in range(5):
        if step == 3 and group.rank == victim:
            os.kill(os.getpid(), end)
        found = module.conformance_try(group, kind, step, length, 4.0)
        if found is not None:
            group.close()
            return found
    return None


@pytest.mark.parametrize("ranks, victim", [(2, 1), (2, 0), (4, 2)])
@pytest.mark.parametrize("kind, length", [("allgather", 100), ("allreduce", 1 << 20)])
def test_a_killed_peer_is_named_by_every_survivor(ranks, victim, kind, length):
    found = outcomes(ranks, until_it_breaks, victim, signal.SIGKILL, kind, length, limit=60)
    assert found.pop(victim) == ("dead", "SIGKILL")
    for outcome, value in found:
        assert outcome == "ok", value
        text, named = value
        assert named == [victim], text
        assert f"rank {victim}" in text and "step 3" in text and "\n" not in text


@pytest.mark.parametrize("ranks, victim", [(2, 1), (2, 0), (4, 2)])
def test_a_frozen_peer_is_named_by_every_survivor(ranks, victim):
    found = outcomes(ranks, until_it_breaks, victim, signal.SIGSTOP, "allgather", 100, limit=60, stopped=[victim])
    assert found.pop(victim) == ("dead", "SIGKILL")
    for outcome, value in found:
        assert outcome == "ok", value
        text, named = value
        assert named == [victim], text
        assert text == f"no answer from rank {victim} within 4s in step 3 op 0" or "gave up" in text


def test_a_silent_rank_is_named_though_another_has_left_because_of_it():
    def run():
        module = extension()
        group = module.Group(dist.group.WORLD, patience=PATIENCE)
        assert module.conformance_try(group, "barrier", 0, 0, 4.0) is None
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 1:
            group.close()
            return None
        return module.conformance_try(group, "barrier", 1, 0, 60.0)

    found = outcomes(4, run, limit=60)
    for rank in (0, 3):
        kind, (text, named) = found[rank]
        assert kind == "ok" and named == [2], text


def test_a_message_of_an_absurd_length_is_refused_before_memory_is_taken():
    def run():
        module = extension()
        make = dist.new_group

        class Lying:
            def __init__(self, *arguments, **settings):
                self._group = make(*arguments, **settings)

            def __getattr__(self, name):
                return getattr(self._group, name)

            def alltoall_base(self, into, out, *splits):
                if dist.get_rank() == 1 and self.lies:
                    out[32:48].view(torch.int64).fill_(1 << 60)
                return self._group.alltoall_base(into, out, *splits)

        Lying.lies = False
        dist.new_group = Lying
        group = module.Group(dist.group.WORLD, patience=PATIENCE)
        assert module.conformance_try(group, "allgather", 0, 100, 4.0) is None
        Lying.lies = True
        return module.conformance_try(group, "allgather", 1, 100, 4.0)

    honest, _ = on_ranks(2, run)
    assert "rank 1 sends 1152921504606846976 bytes" in honest[0]


def test_a_group_outlives_a_fork_and_the_end_of_all_groups():
    def run():
        module = extension()
        group = module.Group(dist.group.WORLD, patience=PATIENCE)
        child = os.fork()
        if child == 0:
            group.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        said = [module.conformance_try(group, "allreduce", step, 100_000, 20.0) for step in range(3)]
        dist.barrier()
        dist.destroy_process_group()
        said.append(module.conformance_try(group, "allgather", 3, 100_000, 20.0))
        group.close()
        return said

    assert on_ranks(2, run) == [[None] * 4] * 2


def test_what_is_wrong_with_a_group_is_an_exception():
    def run():
        module = extension()
        for patience in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="is none"):
                module.Group(dist.group.WORLD, patience=patience)
        group = module.Group(dist.group.WORLD, patience=PATIENCE)
        group.close()
        group.close()
        with pytest.raises(ValueError, match="was closed"):
            print(group.rank)

    on_ranks(1, run)


PROGRAM = textwrap.dedent("""
    import sys, threading
    import torch.distributed as dist
    sys.path.insert(0, sys.argv[5])
    from test_conformance import extension

    module, path, rank, ranks, end = extension(), sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=ranks)
    # Whoever waits for PyTorch to give up waits for longer than the test lets it.
    group = module.Group(dist.group.WORLD, patience=600.0)
    for step in range(3):
        assert module.conformance_try(group, "allgather", step, 1000, 60.0) is None
    if end == "gives up":
        module.conformance_give_up(group, "enough")
    if end == "blocked" and rank == 0:
        threading.Thread(target=module.conformance_try, args=(group, "allgather", 3, 1000, 60.0), daemon=True).start()
    if end == "destroys":
        dist.barrier()
        dist.destroy_process_group()
    if end == "raises":
        raise SystemExit(7)
""")


@pytest.mark.parametrize("end", ["returns", "gives up", "blocked", "destroys", "raises"])
def test_a_program_ends_without_a_wait_or_a_crash(end, tmp_path):
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    programs = [
        subprocess.Popen([*command, str(rank), "3", end, here], stderr=subprocess.PIPE, text=True, env=os.environ)
        for rank in range(3)
    ]
    try:
        for program in programs:
            _, said = program.communicate(timeout=120)
            assert program.returncode == (7 if end == "raises" else 0), said
    finally:
        for program in programs:
            program.kill()

"""What only the engine over PyTorch's process group has to hold: peers that die, a store that goes, programs that end.

It needs the same build as `test_conformance.py`, which says where.
"""

from __future__ import annotations

import contextlib
import json
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


def test_a_group_of_some_ranks_goes_on_without_the_others_and_blames_none_of_them():
    def run():
        module, rank = extension(), dist.get_rank()
        if rank == 0:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        some = dist.new_group([1, 2], use_local_synchronization=True)
        group = module.Group(some, patience=PATIENCE)
        assert (group.rank, group.size) == (rank - 1, 2)
        said = [module.conformance_try(group, "allreduce", 0, 100_000, 20.0)]
        dist.barrier()
        said += [module.conformance_try(group, kind, 1, 100_000, 20.0) for kind in ("allgather", "alltoall", "barrier")]
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        _, named = module.conformance_try(group, "barrier", 2, 0, 20.0)
        return said, named

    found = outcomes(3, run, limit=60)
    assert found == [("dead", "SIGKILL"), ("ok", ([None] * 4, [])), ("dead", "SIGKILL")]


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
            with pytest.raises(ValueError, match="patience must be a positive number of seconds"):
                module.Group(dist.group.WORLD, patience=patience)
        group = module.Group(dist.group.WORLD, patience=PATIENCE)
        group.close()
        group.close()
        with pytest.raises(ValueError, match="was closed"):
            print(group.rank)

    on_ranks(1, run)


PROGRAM = textwrap.dedent("""
    import json, os, sys, threading
    import torch.distributed as dist
    from test_conformance import extension

    def run(place, end, rank, ranks):
        module = extension()
        dist.init_process_group("gloo", init_method=f"file://{place}/{end}", rank=rank, world_size=ranks)
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
        globals()["group"] = group  # as a script has it, to its very end

    children = {}
    for end in sys.argv[2:]:
        for rank in range(3):
            child = os.fork()
            if child == 0:
                run(sys.argv[1], end, rank, 3)
                sys.exit()
            children[child] = end
    statuses = {end: [] for end in sys.argv[2:]}
    for child, end in children.items():
        statuses[end].append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses))
""")
ENDS = {"returns": 0, "gives up": 0, "blocked": 0, "destroys": 0, "raises": 7}


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    """How programs end, whose interpreters are ended in order: a script that becomes three ranks for each way."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("stores")), *ENDS]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, start_new_session=True) as program:
        try:
            said, _ = program.communicate(timeout=240)
        finally:
            # The ranks are in the session of the script.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    return json.loads(said)


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_without_a_wait_or_a_crash(end, statuses):
    assert statuses[end] == [ENDS[end]] * 3

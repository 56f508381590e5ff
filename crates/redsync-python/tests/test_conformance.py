"""The suite that every engine of `redsync_comm` must pass, on ranks that are real processes over gloo.

It needs a build of the extension with the feature `conformance`; the environment variable REDSYNC_CONFORMANCE says where.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pathlib
from typing import Any

import pytest
import torch.distributed as dist
from ranks import on_ranks

PLACE = os.environ.get("REDSYNC_CONFORMANCE")
PATIENCE = 10.0


def extension() -> Any:
    path = pathlib.Path(PLACE or "") / "_redsync.abi3.so"
    assert path.is_file(), f"REDSYNC_CONFORMANCE is {PLACE}, and {path} is not there"
    loader = importlib.machinery.ExtensionFileLoader("_redsync", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_redsync", loader))
    loader.exec_module(module)
    return module


if PLACE is None:
    pytest.skip("REDSYNC_CONFORMANCE does not say where the build for this is", allow_module_level=True)
HEALTHY, BREAKING = extension().conformance_cases()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_healthy_ranks_hold_what_every_engine_must(ranks: int) -> None:
    def run() -> dict[str, str | None]:
        module = extension()
        group = module.Group(dist.group.WORLD, patience=PATIENCE * 6)
        return {case: module.conformance_run(case, group, dist.barrier) for case in HEALTHY}

    for complaints in on_ranks(ranks, run):
        assert complaints == dict.fromkeys(HEALTHY)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", BREAKING)
def test_what_breaks_breaks_as_on_every_engine(case: str, ranks: int) -> None:
    def run() -> str | None:
        module = extension()
        complaint: str | None = module.conformance_run(case, module.Group(dist.group.WORLD, patience=PATIENCE), dist.barrier)
        return complaint

    assert on_ranks(ranks, run) == [None] * ranks

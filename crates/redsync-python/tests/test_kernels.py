"""The Triton kernels without a GPU: what they compute, in Triton's interpreter, and what they are compiled to."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import lab_device
import pytest

HERE = pathlib.Path(__file__).parent
compiled = pytest.importorskip("compiled", reason="Triton is not installed", exc_type=ImportError)


def interpreted(script: str) -> None:
    """Runs a script with Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, HERE / script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_kernels_give_the_bits_of_torch_operations() -> None:
    interpreted("kernels_alike.py")


def test_ranks_train_with_the_kernels_to_the_bits_of_the_host() -> None:
    lab_device.load()
    interpreted("kernels_train.py")


# Vectors of 16 bytes: for a thread's eight elements (four on AMD) of the gradient, u and v in, u and v out.
VECTORS = {
    ("sm_80", "fp32"): (6, 4), ("sm_90", "fp32"): (6, 4), ("gfx942", "fp32"): (3, 2),
    ("sm_80", "fp16"): (5, 4), ("sm_90", "fp16"): (5, 4), ("gfx942", "fp16"): (2, 2),
    ("sm_80", "bf16"): (5, 4), ("sm_90", "bf16"): (5, 4), ("gfx942", "bf16"): (2, 2),
}  # fmt: skip


@pytest.mark.parametrize(("target", "gradient"), VECTORS)
def test_accumulating_moves_vectors_rounds_as_the_host_and_leaves_room_for_other_threads(target: str, gradient: str) -> None:
    code = compiled.compile_kernel("accumulate", target, gradient)
    assert (code.vector_loads, code.vector_stores) == VECTORS[target, gradient]
    assert code.fused == code.flushed == code.spills == 0
    # With 64 registers a multiprocessor of NVIDIA's still has half of the threads that it can have, one of AMD's all.
    assert code.registers <= 64


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_other_passes_are_as_lean(target: str) -> None:
    wanted = {"compact": 1, "histogram": 1, "edge": 2, "count_above": 1, "statistics": 0, "take_out": 0, "put": 0, "add": 0}
    for name, loads in wanted.items():
        code = compiled.compile_kernel(name, target)
        assert code.fused == code.flushed == code.spills == 0, name
        assert code.vector_loads == loads * (1 if target == "gfx942" else 2), name
        assert code.registers <= (192 if (name, target) == ("histogram", "gfx942") else 64), name


@pytest.mark.parametrize("form", [0, 1])
def test_other_forms_of_momentum_round_as_the_host(form: int) -> None:
    for target in compiled.TARGETS:
        assert compiled.compile_kernel("accumulate", target, form=form).fused == 0


def test_a_gradient_that_starts_anywhere_costs_only_its_own_vectors() -> None:
    code = compiled.compile_kernel("accumulate", "sm_80", aligned=False)
    assert (code.vector_loads, code.vector_stores) == (4, 4)


def test_fused_products_would_be_seen() -> None:
    for target in compiled.TARGETS:
        assert compiled.compile_kernel("accumulate", target, unfused=False).fused > 0

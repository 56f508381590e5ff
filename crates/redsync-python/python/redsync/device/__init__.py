"""Compression where the gradient is: u and v of a layer in the memory of a GPU.

Comes in: the device of a parameter. Goes out: how the passes over its layers are made there, and why so. What must hold: whatever
is chosen gives the same bits.
"""

from __future__ import annotations

import torch

from .operations import Operations

LONGEST = (1 << 31) - (1 << 16)
"""Elements of a layer that 32 bits can number, and a block more."""


def choose(device: torch.device) -> tuple[Operations, str]:
    """The passes for a device, and a reason."""
    if device.type != "cuda":
        return Operations(), "Triton has kernels for CUDA and ROCm only"
    try:
        import triton

        from .launch import Kernels
    except ImportError:
        return Operations(), "Triton is not installed"
    try:
        _try_out(Kernels(), device)
    except Exception as error:  # of its compiler, of the C compiler that it calls, or of the driver
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return Operations(), f"Triton {triton.__version__} does not work here: {first}"
    return Kernels(), f"Triton {triton.__version__}"


def _try_out(kernels: Operations, device: torch.device) -> None:
    """Compiles and runs a small pass: what Triton lacks shows at its first launch."""
    found = torch.empty(9, dtype=torch.int64, device=device)
    kernels.compact(torch.arange(8.0, device=device), "both", 3.5, found)
    if found[:1].view(torch.int32).tolist() != [4, 0]:
        raise RuntimeError("a pass over eight numbers gave another result")

"""The Triton kernels, compiled for GPUs that are not here, and what can be read in their code.

Comes in: a kernel's name, a target, the type of gradients. Goes out: registers, vector instructions, fused multiply-adds. What
must hold: they are compiled as `redsync.device.launch` launches them. Triton needs neither a GPU nor its driver for this.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile

import triton
from redsync.device import kernels, launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_SIZES = {
    "n": "i32", "many": "i32", "capacity": "i32", "keep": "i32", "flip": "i32", "prefix": "i32", "shift": "i32",
    "width": "i32", "above": "i32", "wanted": "i32", "least": "i32", "last": "i32",
}  # fmt: skip
_REALS = {"m": "fp32", "scale": "fp32", "carry": "fp32", "floor": "fp32", "same": "fp32"}
_MEMORY = {
    **dict.fromkeys(("u", "v", "saved_u", "saved_v", "values", "thresholds", "sums", "tops"), "*fp32"),
    **dict.fromkeys(("bins", "where", "counts", "indices"), "*i32"),
    "found": "*i64",
    "which": "*u8",
}

_ACCUMULATE = {"FORM": 2, "HALVES": False, "SAVE": False, "BLOCK": launch.BLOCK}
_LAUNCHES: dict[str, tuple[dict[str, object], int]] = {
    "accumulate": (_ACCUMULATE, 4),
    "compact": ({"BLOCK": launch.BLOCK}, 4),
    "histogram": ({"BLOCK": launch.BLOCK, "TURNS": launch.TURNS, "BINS": launch.BINS}, 4),
    "edge": ({"BINS": launch.BINS}, 4),
    "count_above": ({"MANY": 5, "BLOCK": launch.BLOCK}, 4),
    "statistics": ({"CHUNKS": launch.CHUNKS}, 1),
    "take_out": ({"HOW": 3, "CLEAR": True, "BLOCK": launch.FEW}, 2),
    "put": ({"CLEAR": True, "BLOCK": launch.FEW}, 2),
    "add": ({"BLOCK": launch.FEW}, 2),
}
KERNELS = list(_LAUNCHES)


@dataclasses.dataclass
class Code:
    """What was read in a kernel's code."""

    registers: int
    """Of one thread."""
    spills: int
    vector_loads: int
    """Of 16 bytes."""
    vector_stores: int
    fused: int
    """Multiplications that are not rounded before they are added to."""
    flushed: int
    """Instructions that take numbers near zero for zero."""


def compile_kernel(
    name: str, target: str, gradient: str = "fp32", form: int = 2, aligned: bool = True, unfused: bool = True
) -> Code:
    """A kernel as it is launched; `aligned` is whether the gradient starts where vectors do."""
    fn = getattr(kernels, name)
    constants, warps = _LAUNCHES[name]
    if name == "accumulate":
        constants = {**constants, "HALVES": gradient == "bf16", "FORM": form}
    types = {"g": "*i16" if gradient == "bf16" else f"*{gradient}", **_MEMORY, **_SIZES, **_REALS}
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in fn.arg_names}
    pointers = [at for at, arg in enumerate(fn.arg_names) if signature[arg].startswith("*") and (aligned or arg != "g")]
    attributes = {(at,): [["tt.divisibility", 16]] for at in pointers}
    source = ASTSource(fn, signature=signature, constexprs=constants, attrs=attributes)
    rounding = kernels.UNFUSED if unfused else {"enable_fp_fusion": True}
    made = triton.compile(source, target=TARGETS[target], options={"num_warps": warps, **rounding})
    return _read_amd(made.asm["amdgcn"]) if target.startswith("gfx") else _read_nvidia(made.asm)


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _read_nvidia(asm: dict) -> Code:
    ptx = asm["ptx"]
    usage, code = (_tell(asm["cubin"], *how) for how in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "--print-code")))
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return Code(
        registers=used["REG"],
        spills=used["LOCAL"] + used["STACK"],
        vector_loads=_count(r"ld\.global[.\w:]*\.v4\.b32", ptx) + _count(r"ld\.global[.\w:]*\.v2\.b64", ptx),
        vector_stores=_count(r"st\.global[.\w:]*\.v4\.b32", ptx),
        fused=_count(r"\bFFMA\b", code),  # the assembler fuses too
        flushed=_count(r"\.ftz", ptx),
    )


def _tell(cubin: bytes, tool: str, option: str) -> str:
    """What a tool of Triton's says about the assembled kernel."""
    path = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def _read_amd(text: str) -> Code:
    def field(name: str) -> int:
        return max(int(number) for number in re.findall(rf"\.{name}:\s+(\d+)", text))

    return Code(
        registers=field("vgpr_count"),
        spills=field("vgpr_spill_count") + field("sgpr_spill_count"),
        vector_loads=_count(r"(?:global|buffer)_load_dwordx4", text),
        vector_stores=_count(r"(?:global|buffer)_store_dwordx4", text),
        fused=_count(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)_(?:f32|legacy_f32)", text),
        flushed=_count(r"float_denorm_mode_32[ \t]+(?:0|2)\b", text),
    )

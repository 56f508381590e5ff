"""What the Triton kernels of the Python package are compiled to, and what they should cost. No GPU is needed, and none measured.

    target/python/bin/python lab/device-kernels.py

Comes in: the kernels, as the package launches them. Goes out: two tables for docs/gpu-pytorch.md. What must hold: the first is
read in compiled code; the second is arithmetic, from bytes moved and from data sheets, and says so.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "crates/redsync-python/tests"))
from compiled import KERNELS, TARGETS, compile_kernel

BYTES = {
    ("accumulate", "fp32"): "20: gradient, u and v in, u and v out",
    ("accumulate", "bf16"): "18",
    ("accumulate", "fp16"): "18",
    ("compact", "fp32"): "4",
    ("histogram", "fp32"): "4",
    ("edge", "fp32"): "none; 8 KB in all",
    ("count_above", "fp32"): "4, for all thresholds",
    ("statistics", "fp32"): "4",
    ("take_out", "fp32"): "none; 17 per candidate",
    ("put", "fp32"): "none; 16 per element given",
    ("add", "fp32"): "none; 16 per element given",
}
"""Of the GPU's memory, per element of the layer, with momentum."""

STEP = 24
"""Bytes of the GPU's memory per element and usual step: accumulating in single precision, and zeros where the update goes."""
GPUS = {"A100 SXM 40 GB": (1555e9, 312e12), "H100 SXM": (3350e9, 989e12)}
"""Bytes per second of the memory, and operations per second of bfloat16 without sparsity: NVIDIA's data sheets."""
MODELS = {"ResNet-50, 64 images": (25.6e6, 64 * 3 * 8.2e9), "VGG16, 64 images": (138.4e6, 64 * 3 * 31e9)}
"""Parameters, and operations of a step: three times those of the forward pass."""


def compiled_table() -> None:
    print("| kernel | gradient |", " | ".join(TARGETS), "| bytes per element |")
    print("| --- |" + " --- |" * (len(TARGETS) + 2))
    for name in KERNELS:
        for gradient in ("fp32", "bf16", "fp16") if name == "accumulate" else ("fp32",):
            cells = []
            for target in TARGETS:
                code = compile_kernel(name, target, gradient)
                assert code.fused == code.spills == code.flushed == 0
                cells.append(f"{code.registers} registers, {code.vector_loads} / {code.vector_stores}")
            print(f"| {name} | {gradient} |", " | ".join(cells), f"| {BYTES[name, gradient]} |")


def derived_table() -> None:
    print("| model | GPU | passes | a step at least | share at most |")
    print("| --- | --- | --- | --- | --- |")
    for model, (parameters, operations) in MODELS.items():
        for gpu, (bandwidth, rate) in GPUS.items():
            passes, step = STEP * parameters / bandwidth, operations / rate
            print(f"| {model} | {gpu} | {1e3 * passes:.2f} ms | {1e3 * step:.1f} ms | {passes / step:.0%} |")


if __name__ == "__main__":
    compiled_table()
    print()
    derived_table()

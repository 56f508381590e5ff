"""The test device for PyTorch (`device/device.cpp`), called ``lab``: built once, loaded, and made known.

Comes in: a C++ compiler. Goes out: a device of PyTorch, what crosses between it and the host in bytes, and a process group for it.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import shutil
import subprocess
import types

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = pathlib.Path(__file__).parent / "device/device.cpp"
BUILT = pathlib.Path(__file__).parents[3] / "target/test-device"


def _build() -> pathlib.Path:
    """The library; the same as the last time if nothing has changed."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = BUILT / f"device-{digest}.so"
    if not library.exists():
        if shutil.which("g++") is None:
            pytest.skip("the test device needs g++")
        BUILT.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(".new")
        paths = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
        command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", SOURCE, "-o", made, *paths]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
        made.rename(library)
    return library


@functools.cache
def load() -> torch.device:
    """The device."""
    torch.ops.load_library(_build())
    torch.utils.rename_privateuse1_backend("lab")
    module = types.ModuleType("torch.lab")
    answers = {"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "_is_in_bad_fork": False}
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("lab", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    dist.Backend.register_backend("copying", _copying, devices=["cpu", "lab"])
    return torch.device("lab", 0)


def traffic() -> tuple[int, int, int, int, int]:
    """Since the last time: bytes to the host and to the device, copies, how often a thread had to wait for one, and how often that
    was none of the engine's."""
    told = tuple(torch.ops.redsync_device.traffic())
    torch.ops.redsync_device.reset()
    return told


class _Copying(dist.ProcessGroup):
    """What DDP itself exchanges, by way of the host."""

    def __init__(self, rank: int, size: int, gloo: dist.ProcessGroup) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def getBackendName(self) -> str:
        return "copying"

    def _through(self, call, tensors, *more):
        host = [tensor.cpu() for tensor in tensors]
        call(host, *more).wait()
        for tensor, result in zip(tensors, host):
            tensor.copy_(result)
        future = torch.futures.Future()
        future.set_result(tensors)
        return _create_work_from_future(future)

    def broadcast(self, tensors, options):
        return self._through(self._gloo.broadcast, tensors, options)

    def allreduce(self, tensors, options):
        return self._through(self._gloo.allreduce, tensors, options)

    def allgather(self, gathered, tensors, options):
        host, parts = [tensor.cpu() for tensor in tensors], [[part.cpu() for part in each] for each in gathered]
        self._gloo.allgather(parts, host, options).wait()
        for each, results in zip(gathered, parts):
            for tensor, result in zip(each, results):
                tensor.copy_(result)
        future = torch.futures.Future()
        future.set_result(gathered)
        return _create_work_from_future(future)


def _copying(store, rank: int, size: int, timeout) -> dist.ProcessGroup:
    return _Copying(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


def group() -> dist.ProcessGroup:
    """All ranks, for a DDP of the device."""
    return dist.new_group(backend="copying")

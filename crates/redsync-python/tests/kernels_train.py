"""Run by `test_kernels.py` in a process of its own, like `kernels_alike.py`: two ranks train on the test device with the Triton
kernels in Triton's interpreter, and on the host; everything must be equal."""

from __future__ import annotations

import threading
import warnings

import lab_device
import redsync
import redsync.residents
import torch
import triton
from models import batch
from ranks import on_ranks
from redsync.device.launch import Kernels
from test_device import assert_same, outcome
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_launching = threading.Lock()
"""The interpreter is not made for threads."""


class _OneAtATime(Kernels):
    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if not callable(found):
            return found

        def locked(*arguments, **named):
            with _launching:
                return found(*arguments, **named)

        return locked


def run(place: str, settings: dict):
    warnings.simplefilter("ignore", RuntimeWarning)
    launched = []

    def choose(device):
        launched.append(device)
        return _OneAtATime(), "interpreted"

    redsync.residents.choose = choose
    torch.manual_seed(5)
    group = lab_device.group() if place == "lab" else None
    net = nn.Sequential(nn.Linear(70, 50), nn.ReLU(), nn.Linear(50, 60)).to(place)
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attachment = redsync.attach(model, optimizer, warmup=0, density=0.02, dense_below=0, **settings)
    came = []
    for number in range(4):
        inputs, labels = (tensor.to(place) for tensor in batch(number, (8, 70), 60))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        came += [p.grad.to("cpu", copy=True) for p in model.parameters()]
        optimizer.step()
    assert len(launched) == (place == "lab")
    return outcome((model, optimizer, attachment), came)


def main() -> None:
    assert triton.knobs.runtime.interpret, "to be run with TRITON_INTERPRET=1"
    lab_device.load()
    for settings in ({}, {"method": "rgc"}, {"method": "rgc+2bit"}):
        for here, there in zip(on_ranks(2, run, "cpu", settings), on_ranks(2, run, "lab", settings)):
            assert_same(here, there)


if __name__ == "__main__":
    main()

"""Compression on a device, end to end, on the test device: ranks, DDP, torch's operations, and copies that are garbage until they
are waited for."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import Any

import lab_device
import pytest
import redsync
import torch
from models import VECTORS, batch, ddp, mlp
from ranks import on_ranks, outcomes
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    """Loaded once, before ranks are forked."""
    lab_device.load()


def setup(place: str, half: torch.dtype | None = None, optimizer: Any = torch.optim.SGD, **settings: Any) -> Any:
    """A model in a place, with everything that trains it."""
    group = lab_device.group() if place == "lab" else None
    model = ddp(mlp().to(place, half), settings.pop("bucket_cap_mb", 0.3), process_group=group)
    momentum = {"momentum": 0.9, "nesterov": settings.pop("nesterov", False)} if optimizer is torch.optim.SGD else {}
    optimizer = optimizer(model.parameters(), lr=0.1, **momentum)
    attachment = redsync.attach(model, optimizer, **{"warmup": 0, "density": 0.01, **settings})
    return model, optimizer, attachment


def train(parts: Any, numbers: Any) -> list[torch.Tensor]:
    """Some steps; what each of them brought: the sum of all messages, as gradients."""
    model, optimizer, _ = parts
    parameter = next(model.parameters())
    came = []
    for number in numbers:
        inputs, labels = batch(number, VECTORS, 128)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if number < 4 else 0.05  # what waits is rescaled
        optimizer.zero_grad()
        outputs = model(inputs.to(parameter.device, parameter.dtype)).float()
        nn.functional.cross_entropy(outputs, labels.to(parameter.device)).backward()
        came += [p.grad.to("cpu", copy=True) for p in model.parameters()]
        optimizer.step()
    return came


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32) for tensor in tensors]


def outcome(parts: Any, came: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Everything that must be equal: gradients, weights, u, v and what selectors remember."""
    model, _, attachment = parts
    return [*came, *(p.detach().cpu() for p in model.parameters())], attachment.state_dict()["layers"]


def assert_same(one: Any, other: Any) -> None:
    (tensors, layers), (tensors_2, layers_2) = one, other
    assert all(torch.equal(a, b) for a, b in zip(bits(tensors), bits(tensors_2)))
    assert layers.keys() == layers_2.keys()
    for name, layer in layers.items():
        assert layer.keys() == layers_2[name].keys()
        assert all(torch.equal(tensor, layers_2[name][key]) for key, tensor in layer.items()), name


SETTINGS = [
    {},
    {"method": "rgc", "nesterov": True},
    {"method": "rgc", "bf16": False, "masking": False},
    {"method": "rgc+2bit", "exchange": "owners"},
    {"exchange": "hosts", "ranks_per_host": 2},
    {"plan": "paper"},
    {"method": "rgc", "plan": dict.fromkeys(("0.weight", "2.weight", "4.weight"), "threshold")},
    {"warmup": ("ramp", 6)},
    {"warmup": 2, "clip": 0.5},
    {"half": torch.bfloat16},
    {"half": torch.float16},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_device_gives_the_bits_of_the_host(settings: dict[str, Any]) -> None:
    def run(place: str) -> Any:
        parts = setup(place, **settings)
        return outcome(parts, train(parts, range(8)))

    for here, there in zip(on_ranks(2, run, "cpu"), on_ranks(2, run, "lab")):
        assert_same(here, there)


@pytest.mark.parametrize("values", [(1.0,), (3.0, 5.0, 3.0)])
def test_more_equal_elements_than_can_be_handed_out_are_cut_as_on_the_host(values: tuple[float, ...]) -> None:
    def run(place: str) -> Any:
        net = nn.Linear(256, 256, bias=False)
        torch.nn.init.zeros_(net.weight)
        model = ddp(net.to(place), process_group=lab_device.group() if place == "lab" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = redsync.attach(model, optimizer, warmup=0, density=0.01, method="rgc")
        came = []
        for value in values:
            optimizer.zero_grad()
            model(torch.full((1, 256), value, device=place)).sum().backward()
            came.append(net.weight.grad.to("cpu", copy=True))
            optimizer.step()
        return came, attachment.state_dict()["layers"]["weight"]["v"]

    for (here, v), (there, w) in zip(on_ranks(2, run, "cpu"), on_ranks(2, run, "lab")):
        assert all(torch.equal(a, b) for a, b in zip([*here, v], [*there, w]))
        assert all(int(grad.count_nonzero()) > 0 for grad in here)


@pytest.mark.parametrize("path", [("cpu", "lab"), ("lab", "cpu"), ("lab", "lab")], ids="-".join)
def test_a_run_is_resumed_in_another_place(path: tuple[str, str]) -> None:
    def run(places: tuple[str, ...]) -> Any:
        came, state = [], None
        for part, place in enumerate(places):
            parts = setup(place, nesterov=True)
            if state is not None:
                weights, optimizer, kept = state
                parts[0].module.load_state_dict(weights)
                parts[1].load_state_dict(optimizer)
                parts[2].load_state_dict(kept)
            came += train(parts, range(5 * part, 5 * part + 5) if len(places) == 2 else range(10))
            weights = {name: tensor.cpu() for name, tensor in parts[0].module.state_dict().items()}
            state = weights, parts[1].state_dict(), parts[2].state_dict()
        return outcome(parts, came)

    for whole, resumed in zip(on_ranks(2, run, ("cpu",)), on_ranks(2, run, path)):
        assert_same(whole, resumed)


@pytest.mark.parametrize("method", ["rgc+asq", "rgc+2bit", "rgc"])
def test_at_most_twelve_bytes_cross_per_element_that_is_sent(method: str) -> None:
    """Of layers that stay on the device, once thresholds have settled; besides, 8 bytes per element of the averaged gradient go
    back, and the biases, which are sent whole, go to the host and back."""

    def run() -> tuple[int, int]:
        parts = model, _, attachment = setup("lab", method=method)
        train(parts, range(20))
        crossed = sent = 0
        for number in range(20, 36):
            inputs, labels = (tensor.to("lab") for tensor in batch(number, VECTORS, 128))
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            lab_device.traffic()
            loss.backward()
            to_host, to_device, *_ = lab_device.traffic()
            parts[1].step()
            weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
            update = sum(int(p.grad.count_nonzero()) for p in weights)
            crossed += to_host + to_device - 8 * update - 8 * sum(p.numel() for p in biases)
            sent += sum(layer.sent for layer in attachment.stats().layers if layer.name.endswith("weight"))
        return crossed, sent

    for crossed, sent in on_ranks(2, run):
        assert 8 * sent < crossed <= 12 * sent, crossed / sent


@pytest.mark.parametrize("cap", [0.01, 25.0])
def test_the_host_waits_once_for_a_bucket_and_never_in_the_backward_pass(cap: float) -> None:
    """The engine's threads wait, and again where more was found than the last time; the candidates of a bucket are one copy."""

    def run() -> tuple[int, list[tuple[int, int, int]]]:
        parts = model, optimizer, _ = setup("lab", method="rgc", bucket_cap_mb=cap)
        train(parts, range(20))
        told = []
        for number in range(20, 36):
            inputs, labels = (tensor.to("lab") for tensor in batch(number, VECTORS, 128))
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            lab_device.traffic()
            loss.backward()
            told.append(lab_device.traffic()[2:])
            optimizer.step()
        return len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")), told

    for buckets, told in on_ranks(2, run):
        assert buckets == (3 if cap < 1 else 1)
        copies, waits, elsewhere = zip(*told)
        assert not any(elsewhere), told
        # Three biases go to the host whole and come back; three weights come back, sparse; a part of the lists may follow.
        assert min(copies) == buckets + 9, copies
        assert min(waits) == buckets and max(waits) <= buckets + 3, waits


def test_the_log_says_where_layers_are_compressed_and_why() -> None:
    def run(place: str, optimizer: Any, settings: Any = MappingProxyType({})) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("redsync")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        setup(place, optimizer=optimizer, **settings)
        return lines

    assert on_ranks(1, run, "cpu", torch.optim.SGD) == [[]]
    why = "with torch operations (Triton has kernels for CUDA and ROCm only)"
    rest = "are copied to the host, which compresses what is sent whole, and Adam"
    assert on_ranks(1, run, "lab", torch.optim.SGD) == [[f"3 of 6 compressed layers stay on lab:0, {why}; 3 {rest}"]]
    assert on_ranks(1, run, "lab", torch.optim.AdamW) == [[f"0 of 6 compressed layers stay on lab:0, {why}; 6 {rest}"]]
    copied = "gradients on lab:0 are copied to the host and compressed there: ranks of a host sum gradients in its memory"
    hosts = {"exchange": "hosts", "ranks_per_host": 1}
    assert on_ranks(1, run, "lab", torch.optim.SGD, hosts) == [[copied]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_in_the_same_words(bad: float) -> None:
    def run(place: str) -> None:
        model, optimizer, _ = setup(place)
        train((model, optimizer, _), range(2))
        model.module[2].weight.register_hook(lambda gradient: torch.where(gradient == gradient.max(), bad, gradient))
        train((model, optimizer, _), range(2, 3))

    here, there = (outcomes(2, run, place) for place in ("cpu", "lab"))
    first = [[text.splitlines()[0] for _, text in found] for found in (here, there)]
    assert [kind for kind, _ in there] == [kind for kind, _ in here]
    assert "2.weight" in first[0][0] and first[0] == first[1]


def test_a_step_that_the_scaler_skips_is_taken_back_on_the_device() -> None:
    def run(place: str) -> Any:
        scaler = torch.amp.GradScaler(place, init_scale=256.0)
        parts = model, optimizer, _ = setup(place, method="rgc", scaler=scaler)
        came = []
        for number in range(6):
            inputs, labels = (tensor.to(place) for tensor in batch(number, VECTORS, 128))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            overflows = number == 3 and torch.distributed.get_rank() == 1
            scaler.scale(loss * float("inf") if overflows else loss).backward()
            came += [p.grad.to("cpu", copy=True) for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 128.0
        return outcome(parts, came)

    for here, there in zip(on_ranks(2, run, "cpu"), on_ranks(2, run, "lab")):
        assert_same(here, there)


def test_local_steps_of_a_device_give_the_bits_of_the_host() -> None:
    def run(place: str) -> Any:
        model = mlp().to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = lab_device.group() if place == "lab" else None
        attachment = redsync.attach(model, optimizer, every=2, warmup=0, process_group=group)
        return outcome((model, optimizer, attachment), train((model, optimizer, attachment), range(8)))

    for here, there in zip(on_ranks(2, run, "cpu"), on_ranks(2, run, "lab")):
        assert_same(here, there)

"""Local steps: any optimizer, no DDP; after an exchange all ranks have the same weights."""

from __future__ import annotations

import os
import signal

import pytest
import redsync
import torch
import torch.distributed as dist
from models import VECTORS, batch, ddp, mlp
from ranks import on_ranks, outcomes
from torch import nn

EXACT = {"density": 1.0, "method": "sgd", "warmup": 0}


def step(model, optimizer, number):
    inputs, labels = batch(number, VECTORS, 128)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def values(model):
    return [p.detach().clone() for p in model.parameters()]


OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=2e-3, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=1e-3),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"method": "rgc", "density": 0.05, "warmup": 0}, {"outer_rate": 0.7, "method": "sgd"}])
def test_replicas_are_bit_identical_after_an_exchange_and_learn(make, settings):
    def run():
        torch.manual_seed(dist.get_rank())  # begins with other weights on every rank
        model = mlp()
        optimizer = make(model.parameters())
        attachment = redsync.attach(model, optimizer, every=6, **settings)
        losses = [step(model, optimizer, number) for number in range(120)]
        attachment.check_replicas()
        apart = step(model, optimizer, 120) and values(model)
        attachment.agree()
        attachment.agree()  # nothing to agree on
        stats = attachment.stats()
        assert stats.steps == attachment.step == 121 and "121 steps" in str(stats)
        if "method" not in settings:
            # 21 exchanges; weights of another kind of run would have been sent 121 times.
            assert stats.traffic.ratio > 100
        return losses, apart, values(model)

    first, second = on_ranks(2, run)
    assert any(not torch.equal(a, b) for a, b in zip(first[1], second[1])), "between exchanges everybody goes alone"
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2]))
    assert sum(first[0][-20:]) < sum(first[0][:20])


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_not_compressed_is_averaged(ranks):
    def run():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        redsync.attach(model, optimizer, every=4, **EXACT)
        for number in range(3):
            step(model, optimizer, number)
        inputs, labels = batch(3, VECTORS, 128)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        own = [(p - 0.1 * p.grad).detach() for p in model.parameters()]
        optimizer.step()
        return own, values(model)

    found = on_ranks(ranks, run)
    for _, agreed in found:
        for at, tensor in enumerate(agreed):
            mean = sum(own[at] for own, _ in found) / ranks
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_half_precision_keeps_what_is_too_small_for_it():
    """Steps that are lost when they are rounded alone add up in the common weights."""

    def run():
        model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        attachment = redsync.attach(model, optimizer, every=1, outer_rate=0.125, **EXACT)
        for _ in range(8):
            model.weight.grad = torch.full_like(model.weight, 2.0**-7)  # the next number below 1 is 1 - 2^-8
            optimizer.step()
        assert torch.all(attachment.state_dict()["local"]["shared"]["weight"] == 1 - 2.0**-7)
        return values(model)

    (weight,) = on_ranks(2, run)[0]
    assert torch.all(weight == 1 - 2.0**-7)


@pytest.mark.parametrize("every, at", [(4, 7), (4, 9), (5, 9)])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, every, at):
    def run(kill):
        path = tmp_path / f"{dist.get_rank()}.pt"
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parts = (model, optimizer, redsync.attach(model, optimizer, every=every, density=0.02))
        begin = 0
        if path.exists():
            begin, *states = torch.load(path, weights_only=True)
            for part, state in zip(parts, states):
                part.load_state_dict(state)
            assert parts[2].step == begin
        for number in range(begin, 22):
            step(model, optimizer, number)
            if number == at:
                torch.save([number + 1, *(part.state_dict() for part in parts)], path)
            if kill and number == 14:
                os.kill(os.getpid(), signal.SIGKILL)
        return values(model), parts[2].state_dict()

    whole = on_ranks(2, run, False)
    for path in tmp_path.iterdir():
        path.unlink()
    assert outcomes(2, run, True) == [("dead", "SIGKILL")] * 2
    for (a, one), (b, other) in zip(whole, on_ranks(2, run, False)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        assert one["checksum"] == other["checksum"]


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    def save(steps):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        attachment = redsync.attach(model, optimizer, every=4)
        for number in range(steps):
            step(model, optimizer, number)
        return attachment.state_dict()

    def load(states):
        model = mlp()
        attachment = redsync.attach(model, torch.optim.AdamW(model.parameters()), every=4)
        attachment.load_state_dict(states)
        return attachment.step

    whole, between = on_ranks(2, save, 8), on_ranks(2, save, 9)
    assert on_ranks(3, load, whole) == [8, 8, 8]
    for kind, text in outcomes(3, load, between):
        assert kind == "UsageError" and "between two exchanges" in text, text
    damaged = [{**state, "local": {**state["local"], "since": state["local"]["since"] + 1}} for state in whole]
    for kind, text in outcomes(3, load, damaged):
        assert kind == "UsageError" and "checksum" in text, text


@pytest.mark.parametrize(
    "make, settings, says",
    [
        (lambda: ddp(mlp()), {}, "not wrapped by DistributedDataParallel"),
        (mlp, {"every": 0}, "every must be a whole number of steps from 1 on, got 0"),
        (mlp, {"keep": 1.5}, "keep must be above 0 and at most 1, got 1.5"),
        (mlp, {"outer_rate": -1.0}, "outer_rate must be a positive number, got -1.0"),
        (mlp, {"clip": 1.0}, "clip p.grad before optimizer.step()"),
        (mlp, {"plan": "measured"}, "local steps do not"),
        (mlp, {"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler leaves steps out on one rank and not on others"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(make, settings, says):
    def run():
        model = make()
        redsync.attach(model, torch.optim.AdamW(model.parameters()), **{"every": 4, **settings})

    for kind, text in outcomes(2, run):
        assert kind == "UsageError" and says in text, text


def test_ranks_that_count_differently_are_told():
    def run():
        model = mlp()
        redsync.attach(model, torch.optim.AdamW(model.parameters()), every=4 + dist.get_rank())

    for kind, text in outcomes(2, run):
        assert kind == "MismatchError" and "local steps" in text, text


def test_a_closed_attachment_lets_ranks_go_their_own_ways():
    def run():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        attachment = redsync.attach(model, optimizer, every=2)
        step(model, optimizer, 0)
        attachment.close()
        for number in range(1 + dist.get_rank()):  # would wait for each other otherwise
            step(model, optimizer, number)
        return True

    assert on_ranks(2, run) == [True, True]

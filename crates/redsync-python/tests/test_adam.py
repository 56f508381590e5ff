"""Adam and AdamW: the moments live in the compressor, and what comes out is what PyTorch's would have done."""

from __future__ import annotations

import os
import signal

import pytest
import redsync
import torch
import torch.distributed as dist
from models import LOSSLESS, VECTORS, batch, ddp, mlp, smooth, weights
from ranks import on_ranks, outcomes
from torch import nn


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, **options})


def equal_step(model, optimizer, number):
    """A step with the same batch on every rank."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(VECTORS, generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), inputs[:, :128].argmax(1)).backward()
    optimizer.step()


def own_step(model, optimizer, number):
    inputs, labels = batch(number, VECTORS, 128)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("make", [adamw, lambda m: torch.optim.Adam(m.parameters(), lr=1e-3)])
def test_density_one_with_equal_batches_is_the_optimizer_itself(ranks, make):
    def run(settings):
        model = ddp(smooth())
        optimizer = make(model)
        if settings is not None:
            # What other ranks told of their second moments is some steps old, even where all have the same.
            redsync.attach(model, optimizer, share_moments=0, **settings)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        for number in range(200):
            equal_step(model, optimizer, number)
            schedule.step()
        return weights(model)

    for theirs, ours in zip(on_ranks(ranks, run, None), on_ranks(ranks, run, LOSSLESS)):
        for a, b in zip(theirs, ours):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{"density": 0.01, "warmup": 0}, {"warmup": ("ramp", 100)}, {"method": "rgc", "warmup": 7}])
def test_replicas_are_bit_identical_and_learn(settings):
    def run():
        model = ddp(mlp())
        optimizer = adamw(model)
        attachment = redsync.attach(model, optimizer, **settings)
        losses = [own_step(model, optimizer, number) for number in range(300)]
        return losses, attachment.check_replicas()

    found = on_ranks(2, run)
    assert found[0][1] == found[1][1]
    assert sum(found[0][0][-50:]) < sum(found[0][0][:50])


def test_what_the_optimizer_has_gathered_moves_over():
    """A dense warm-up, then everything by the compressor: as if nothing had changed."""

    def run(warmup):
        model = ddp(smooth())
        optimizer = adamw(model)
        redsync.attach(model, optimizer, share_moments=0, **{**LOSSLESS, "warmup": warmup})
        for number in range(30):
            equal_step(model, optimizer, number)
        return weights(model), [len(optimizer.state[p]) for p in model.parameters() if p.dim() > 1]

    for (straight, _), (late, kept) in zip(on_ranks(2, run, 0), on_ranks(2, run, 12)):
        assert not any(kept), "the optimizer has nothing left of what is compressed"
        for a, b in zip(straight, late):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{"density": 0.01}, {"method": "rgc", "warmup": 12}, {"warmup": 0, "rest": "2bit"}])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, settings):
    def run(kill):
        path = tmp_path / f"{dist.get_rank()}.pt"
        model = ddp(mlp())
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        parts = (model.module, optimizer, schedule, redsync.attach(model, optimizer, **settings))
        begin = 0
        if path.exists():
            begin, *states = torch.load(path, weights_only=True)
            for part, state in zip(parts, states):
                part.load_state_dict(state)
        for number in range(begin, 24):
            own_step(model, optimizer, number)
            schedule.step()
            if number == 9:
                torch.save([number + 1, *(part.state_dict() for part in parts)], path)
            if kill and number == 14:
                os.kill(os.getpid(), signal.SIGKILL)
        return weights(model), parts[3].state_dict()

    whole = on_ranks(2, run, False)
    for path in tmp_path.iterdir():
        path.unlink()
    assert outcomes(2, run, True) == [("dead", "SIGKILL")] * 2
    for (a, one), (b, other) in zip(whole, on_ranks(2, run, False)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        for name, layer in one["layers"].items():
            assert {"second", "adam", "steps"} <= set(layer)
            assert all(torch.equal(tensor, other["layers"][name][key]) for key, tensor in layer.items())


class Slope(nn.Module):
    """Gradients that do not depend on the weights: what is applied late is what would have been applied."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))

    def forward(self, number):
        generator = torch.Generator().manual_seed(number)
        slopes = (torch.randn(64, 64, generator=generator), torch.randn(64, generator=generator))
        return (self.weight * slopes[0]).sum() + (self.bias * slopes[1]).sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.0),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.0, fused=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9, nesterov=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.02),
    ],
)
def test_what_was_gathered_is_handed_back_and_dense_training_goes_on(make):
    """Equal batches: compressed for some steps and then dense is what dense alone would have done."""

    def run(compressed):
        net = Slope()
        model = ddp(net)
        optimizer = make(model)
        attachment = None
        if compressed:
            exact = {"rest": "f32", "bf16": False, "masking": False, "lower_momentum": False}
            attachment = redsync.attach(model, optimizer, method="rgc", density=0.05, warmup=0, share_moments=0, **exact)
        for number in range(20):
            if attachment is not None and number == 12:
                attachment.close(hand_back=True)
                attachment, model = None, ddp(net)
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
        return weights(model), [sorted(optimizer.state[p]) for p in net.parameters()]

    dense, handed = on_ranks(2, run, False), on_ranks(2, run, True)
    assert all(torch.equal(a, b) for a, b in zip(handed[0][0], handed[1][0]))
    assert handed[0][1] == dense[0][1]
    for a, b in zip(dense[0][0], handed[0][0]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Halving(torch.optim.AdamW):
    """An optimizer whose step is not that of its kind."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda m: Halving(m.parameters()), "Halving, a kind of Adam, has a step() of its own"),
        (lambda m: adamw(m, amsgrad=True), "AdamW(amsgrad=True) is not supported; use AdamW(amsgrad=False)"),
        (lambda m: adamw(m, maximize=True), "AdamW(maximize=True)"),
        (lambda m: adamw(m, capturable=True), "AdamW(capturable=True)"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "use AdamW, which does not"),
        (lambda m: adamw(m, eps=0.0), "eps must be large enough to divide by in single precision"),
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop is not supported"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(make, says):
    def run():
        model = ddp(mlp())
        redsync.attach(model, make(model))

    for kind, text in outcomes(2, run):
        assert kind == "UsageError" and says in text, text


def test_an_optimizer_that_becomes_what_cannot_work_is_refused_at_the_next_step():
    def run(change):
        model = ddp(mlp())
        optimizer = adamw(model)
        redsync.attach(model, optimizer, warmup=0)
        own_step(model, optimizer, 0)
        optimizer.param_groups[0].update(change)
        own_step(model, optimizer, 1)

    for change, says in [({"amsgrad": True}, "AdamW(amsgrad=True)"), ({"eps": 0.0}, "eps must be large enough")]:
        for kind, text in outcomes(2, run, change):
            assert kind == "UsageError" and says in text, text


class Renamed(torch.optim.AdamW):
    """What only adds to an optimizer, but for its step, is one."""

    def describe(self):
        return "ours"


def test_a_subclass_with_the_usual_step_trains():
    def run():
        model = ddp(mlp())
        optimizer = Renamed(model.parameters())
        torch.optim.AdamW(mlp().parameters())  # PyTorch wraps the step of each class when an object is made of it
        attachment = redsync.attach(model, optimizer, warmup=0)
        for number in range(3):
            own_step(model, optimizer, number)
        return attachment.check_replicas()

    found = on_ranks(2, run)
    assert found[0] == found[1]

"""What DDP and its users do besides the plain loop: buckets that are rebuilt, accumulation, unused and frozen parameters,
scaled losses, half precision, other layouts of memory."""

from __future__ import annotations

import time
import warnings

import pytest
import redsync
import torch
from models import IMAGES, LOSSLESS, VECTORS, batch, cnn, ddp, mlp, step, weights
from ranks import on_ranks, outcomes
from torch import nn
from torch.utils.checkpoint import checkpoint


def assert_equal_runs(theirs, mine):
    for one, other in zip(theirs, mine):
        for a, b in zip(one, other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_buckets_are_exchanged_while_the_backward_pass_goes_on():
    """The first layer's backward waits until the last layer's bucket holds the average: without overlap it would wait in vain."""

    def run():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = redsync.attach(model, optimizer, density=0.1, warmup=0)  # frames that are large enough to go alone
        step(model, optimizer, 0, VECTORS, 128)  # DDP builds its buckets anew after this one
        came = []

        def wait(_):
            buffer = attachment._buckets[0][0]
            until = time.monotonic() + 30
            # Of the last layer's gradient a tenth is sent by each rank, and the rest of the average is zero.
            while (averaged := int(buffer.count_nonzero()) < buffer.numel() // 2) is False and time.monotonic() < until:
                time.sleep(0.001)
            came.append(averaged)

        model.module[0].weight.register_hook(wait)
        step(model, optimizer, 1, VECTORS, 128)
        return came

    assert on_ranks(2, run) == [[True]] * 2


def test_accumulation_without_sync_is_a_larger_batch():
    def run(attached):
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if attached:
            redsync.attach(model, optimizer, **LOSSLESS)
        for number in range(6):
            optimizer.zero_grad()
            with model.no_sync():
                inputs, labels = batch(2 * number, VECTORS, 128)
                nn.functional.cross_entropy(model(inputs), labels).backward()
            inputs, labels = batch(2 * number + 1, VECTORS, 128)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return weights(model)

    assert_equal_runs(on_ranks(2, run, False), on_ranks(2, run, True))


def test_accumulation_with_sync_warns():
    def run():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        redsync.attach(model, optimizer)
        inputs, labels = batch(0, VECTORS, 128)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                nn.functional.cross_entropy(model(inputs), labels).backward()
        return [str(each.message) for each in caught if "no_sync" in str(each.message)]

    for found in on_ranks(2, run):
        assert len(found) == 1


class Branches(nn.Module):
    """Two ways from input to output; one of them is taken."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right, self.out = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 128)

    def forward(self, inputs, way):
        return self.out(torch.relu(self.left(inputs) if way == "left" else self.right(inputs)))


def branch_step(model, optimizer, number, way, set_to_none=True):
    inputs, labels = batch(number, VECTORS, 128)
    optimizer.zero_grad(set_to_none=set_to_none)
    nn.functional.cross_entropy(model(inputs, way), labels).backward()
    optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_that_nobody_used_keeps_its_residual(set_to_none):
    def run():
        model = ddp(Branches(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attachment = redsync.attach(model, optimizer, method="rgc")
        branch_step(model, optimizer, 0, "left")
        branch_step(model, optimizer, 1, "right")
        before = attachment.state_dict()["layers"], weights(model)
        branch_step(model, optimizer, 2, "left", set_to_none)
        after = attachment.state_dict()["layers"], weights(model)
        attachment.check_replicas()
        names = [name for name, _ in model.module.named_parameters()]
        found = []
        for kind in ("weight", "bias"):
            left, right = f"left.{kind}", f"right.{kind}"
            kept = all(torch.equal(before[0][right][key], after[0][right][key]) for key in "uv")
            moved = not torch.equal(before[0][left]["v"], after[0][left]["v"])
            at = names.index(right)
            found.append((kept, moved, torch.equal(before[1][at], after[1][at])))
        return found

    assert on_ranks(2, run) == [[(True, True, True)] * 2] * 2


def test_a_layer_that_some_ranks_used_stays_equal_everywhere():
    def run():
        model = ddp(Branches(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attachment = redsync.attach(model, optimizer)
        for number in range(12):
            branch_step(model, optimizer, number, "left" if (number + torch.distributed.get_rank()) % 3 else "right")
        return attachment.check_replicas()

    assert len(set(on_ranks(3, run))) == 1


def test_a_parameter_without_gradient_is_named_by_ddp_at_once():
    """The backward pass ends without the last bucket; nobody may wait for it."""

    def run():
        model = ddp(Branches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        redsync.attach(model, optimizer, deadline=1000.0)
        try:
            for number in range(2):
                branch_step(model, optimizer, number, "left")
        except RuntimeError as error:
            return str(error)

    # Who waited for the bucket would wait for the deadline, far beyond the limit of the ranks.
    for text in on_ranks(2, run, limit=100):
        assert "find_unused_parameters" in text


class Checkpointed(nn.Module):
    """Its end computes its activations again, in a backward pass within the backward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.begin, self.end = nn.Linear(256, 256), nn.Sequential(nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128))

    def forward(self, inputs):
        return checkpoint(self.end, self.begin(inputs), use_reentrant=True)


def test_reentrant_checkpoints_of_activations_train():
    def run(attached):
        model = ddp(Checkpointed())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if attached:
            redsync.attach(model, optimizer, **LOSSLESS)
        for number in range(5):
            step(model, optimizer, number, VECTORS, 128)
        return weights(model)

    assert_equal_runs(on_ranks(2, run, False), on_ranks(2, run, True, limit=60))


def test_parameters_that_ddp_ignores_stay_with_the_optimizer():
    def run(attached):
        net = Branches()
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["left.weight"])
        net.right.requires_grad_(False)
        optimizer = torch.optim.SGD([net.left.weight], lr=0.05, momentum=0.9)
        model = ddp(net)
        if attached:
            redsync.attach(model, optimizer)
        for number in range(4):
            branch_step(model, optimizer, number, "left")
        return weights(model)

    for theirs, mine in zip(on_ranks(2, run, False), on_ranks(2, run, True)):
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine))


def test_a_parameter_frozen_after_ddp_took_it_is_refused():
    def run():
        net = mlp()
        model = ddp(net, find_unused_parameters=True)
        net[2].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        redsync.attach(model, optimizer)
        step(model, optimizer, 0, VECTORS, 128)

    for kind, text in outcomes(2, run):
        assert kind == "UsageError" and "set requires_grad before" in text, text


def test_a_static_graph_works():
    def run(attached):
        model = ddp(cnn(), static_graph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if attached:
            redsync.attach(model, optimizer, **LOSSLESS)
        for number in range(5):
            step(model, optimizer, number, IMAGES, 10)
        return weights(model)

    assert_equal_runs(on_ranks(2, run, False), on_ranks(2, run, True))


def test_frozen_parameters_are_left_alone():
    def run():
        net = mlp()
        net[0].weight.requires_grad_(False)
        model = ddp(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        attachment = redsync.attach(model, optimizer)
        before = net[0].weight.clone()
        for number in range(3):
            step(model, optimizer, number, VECTORS, 128)
        return torch.equal(before, net[0].weight), "0.weight" in attachment.state_dict()["layers"]

    assert on_ranks(2, run) == [(True, False)] * 2


def test_channels_last_is_the_same_network():
    def run(memory_format):
        model = ddp(cnn().to(memory_format=memory_format))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attachment = redsync.attach(model, optimizer, **{**LOSSLESS, "warmup": 2})
        for number in range(6):
            step(model, optimizer, number, IMAGES, 10)
        return weights(model), attachment.state_dict()["layers"]["4.weight"]["u"]

    plain, last = on_ranks(2, run, torch.contiguous_format), on_ranks(2, run, torch.channels_last)
    for (a, u), (b, w) in zip(plain, last):
        assert_equal_runs([a], [b])
        torch.testing.assert_close(u, w, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_train(dtype):
    def run():
        model = ddp(mlp().to(dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attachment = redsync.attach(model, optimizer, density=0.05, warmup=2)
        losses = []
        for number in range(60):
            inputs, labels = batch(number % 4, VECTORS, 128)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, attachment.check_replicas()

    (losses, one), (_, other) = on_ranks(2, run)
    assert one == other and sum(losses[-8:]) < 0.8 * sum(losses[:8])


def scaled_steps(model, optimizer, scaler, numbers, overflow_at=(), rank=0):
    for number in numbers:
        inputs, labels = batch(number, VECTORS, 128)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if number in overflow_at and torch.distributed.get_rank() == rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_scaled_loss_trains_like_an_unscaled_one():
    """The scale changes on the way; the residual must not notice."""

    def run(scaled):
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=scaled)
        redsync.attach(model, optimizer, density=0.01, method="rgc", scaler=scaler)
        scaled_steps(model, optimizer, scaler, range(10))
        return weights(model)

    for plain, scaled in zip(on_ranks(2, run, False), on_ranks(2, run, True)):
        assert all(torch.equal(a, b) for a, b in zip(plain, scaled))


@pytest.mark.parametrize(
    "where, settings",
    [
        ("everywhere", {}),
        ("bias", {}),
        ("bias", {"rest": "f32"}),  # summed by an allreduce, which shows it by itself
        ("bias", {"method": "sgd", "clip": 1.0}),
    ],
)
def test_a_step_that_the_scaler_skips_leaves_no_trace(where, settings):
    def run():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        attachment = redsync.attach(model, optimizer, **{"method": "rgc", **settings}, scaler=scaler)
        scaled_steps(model, optimizer, scaler, range(3))
        before, scale = (attachment.state_dict()["layers"], weights(model)), scaler.get_scale()
        if where == "bias" and torch.distributed.get_rank() == 1:
            # Only one layer of one rank overflows; every rank has to take its compressed layers back.
            handle = model.module[2].bias.register_hook(lambda g: torch.full_like(g, float("inf")))
            scaled_steps(model, optimizer, scaler, [3])
            handle.remove()
        else:
            scaled_steps(model, optimizer, scaler, [3], overflow_at=[3] if where == "everywhere" else [], rank=1)
        after = attachment.state_dict()["layers"], weights(model)
        same = all(torch.equal(before[0][name][key], after[0][name][key]) for name in before[0] for key in before[0][name])
        same = same and all(torch.equal(a, b) for a, b in zip(before[1], after[1]))
        scaled_steps(model, optimizer, scaler, range(4, 6))
        return same, scaler.get_scale() < scale, attachment.check_replicas()

    one, other = on_ranks(2, run)
    assert one == other and one[:2] == (True, True)


def test_one_rank_alone_trains():
    def run():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        redsync.attach(model, optimizer, **LOSSLESS)
        return [step(model, optimizer, number, VECTORS, 128) for number in range(3)]

    assert len(on_ranks(1, run)[0]) == 3


def test_a_gradient_of_zeros_sends_an_empty_message():
    def run():
        layer = nn.Linear(256, 256)
        model = ddp(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attachment = redsync.attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.zeros(2, 256)).sum().backward()
            optimizer.step()
        return attachment.stats().layers[0].sent

    assert on_ranks(2, run) == [0, 0]

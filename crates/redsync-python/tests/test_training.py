"""What training gives: the same as DDP where nothing is left out, and the same on every rank always."""

from __future__ import annotations

import pytest
import redsync
import torch
from models import IMAGES, LOSSLESS, VECTORS, batch, cnn, ddp, mlp, step, weights
from ranks import on_ranks


def train(steps, momentum, nesterov, settings, make=cnn, shape=IMAGES, classes=10, decay=0.0, **options):
    model = ddp(make(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    attachment = redsync.attach(model, optimizer, **settings) if settings is not None else None
    losses = [step(model, optimizer, number, shape, classes) for number in range(steps)]
    found = attachment.check_replicas() if attachment else None
    return losses, weights(model), found


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dense_below", [None, 0])
def test_density_one_is_ddp_with_sgd(momentum, nesterov, view, dense_below):
    settings = {**LOSSLESS, "dense_below": dense_below}
    dense = on_ranks(2, lambda: train(50, momentum, nesterov, None))
    ours = on_ranks(2, lambda: train(50, momentum, nesterov, settings, gradient_as_bucket_view=view))
    for (_, theirs, _), (_, mine, _) in zip(dense, ours):
        for a, b in zip(theirs, mine):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"warmup": 0}, {"warmup": 0, "method": "rgc"}, {"warmup": ("ramp", 200), "rest": "2bit"}]
)
def test_replicas_are_bit_identical_after_500_steps(settings):
    found = on_ranks(2, lambda: train(500, 0.9, True, settings, mlp, VECTORS, 128))
    assert found[0][2] == found[1][2]
    losses = found[0][0]
    assert sum(losses[-50:]) < sum(losses[:50])


def test_replicas_are_bit_identical_on_four_ranks():
    found = on_ranks(4, lambda: train(40, 0.9, False, {"density": 0.01, "warmup": 10}, decay=1e-3))
    assert len({hash for _, _, hash in found}) == 1


def test_momentum_is_applied_once():
    """A constant gradient of 1 and momentum m move a weight by lr * (1 - m^t) / (1 - m) at step t, and by no more."""

    def run():
        layer = torch.nn.Linear(256, 256, bias=False)
        with torch.no_grad():
            layer.weight.zero_()
        model = ddp(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        redsync.attach(model, optimizer, **LOSSLESS)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            found.append(float(layer.weight[3, 5].detach()))
        return found, [bool(state) for state in optimizer.state.values()]

    for found, state in on_ranks(2, run):
        assert found == [-1.0, -2.5, -4.25, -6.125]
        assert not any(state), "the optimizer keeps momentum of a compressed layer"


def test_weight_decay_is_as_strong_as_with_momentum():
    """Of a weight that is compressed, and of a bias that is sent in eight bits."""

    def run():
        layer = torch.nn.Linear(256, 256)
        with torch.no_grad():
            layer.weight.fill_(1.0)
            layer.bias.fill_(1.0)
        model = ddp(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        redsync.attach(model, optimizer, method="rgc")
        (0.0 * model(torch.zeros(1, 256))).sum().backward()
        optimizer.step()
        return float(layer.weight[0, 0].detach()), float(layer.bias[0].detach())

    expected = float(torch.tensor(1.0) * (1 - 0.1 * 0.01 / (1 - 0.9)))
    assert on_ranks(2, run) == [(expected, expected)] * 2


def linear_run(steps, nesterov, settings):
    """Gradients that do not depend on the weights, so that every way to exchange them sees the same ones."""
    torch.manual_seed(11)
    layer = torch.nn.Linear(64, 96)
    model = ddp(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    attachment = redsync.attach(model, optimizer, **settings) if settings is not None else None
    noise = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    for _ in range(steps):
        inputs, pull = torch.randn(8, 64, generator=noise), torch.randn(8, 96, generator=noise)
        optimizer.zero_grad()
        (model(inputs) * pull).sum().backward()
        optimizer.step()
    kept = {name: state["v"] for name, state in attachment.state_dict()["layers"].items()} if attachment else {}
    held = sorted(name for name, p in layer.named_parameters() if "momentum_buffer" in optimizer.state.get(p, {}))
    return dict(zip(("weight", "bias"), weights(layer))), kept, held


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("warmup", [0, 5, ("ramp", 20)])
@pytest.mark.parametrize("rest", ["8bit", "2bit"])
def test_what_was_applied_and_what_is_kept_are_dense_sgd_together(rest, warmup, nesterov):
    """Nothing is lost and the usual momentum acts once, whatever is left out, rounded or sent at another density."""
    settings = {"density": 0.01, "masking": False, "lower_momentum": False, "rest": rest, "warmup": warmup}
    dense = on_ranks(2, linear_run, 30, nesterov, None)
    ours = on_ranks(2, linear_run, 30, nesterov, settings)
    for name in ("weight", "bias"):
        kept = sum(kept[name].double() for _, kept, _ in ours)
        assert kept.abs().max() > 0
        for (theirs, _, _), (mine, _, held) in zip(dense, ours):
            assert not held, "the optimizer keeps momentum of a layer whose compressor has it"
            torch.testing.assert_close(mine[name].double() - 0.1 * kept, theirs[name].double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make, lowered",
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 0.2),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), 0.2),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), 0.6),
    ],
)
def test_momentum_is_less_where_elements_wait_and_the_optimizer_keeps_its_own(make, lowered):
    def run(settings):
        layer = torch.nn.Linear(64, 64)
        model = ddp(layer)
        optimizer = make(model)
        attachment = redsync.attach(model, optimizer, density=0.001, at_least=1, warmup=0, output="bias", **settings)
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
        (group,) = optimizer.param_groups
        saved = attachment.state_dict()["layers"]["weight"]
        coefficient = saved["adam" if "adam" in saved else "momentum"][0]
        return round(float(coefficient), 5), group["betas"][0] if "betas" in group else group["momentum"]

    for settings, expected in [({}, lowered), ({"lower_momentum": False}, 0.9)]:
        assert on_ranks(2, run, settings) == [(expected, 0.9)] * 2


def test_eight_bits_follow_dense_sgd_at_every_step():
    """What a bias lacks is never more than half of an eight bit step of each rank."""

    def biases(settings):
        return [linear_run(steps, False, settings)[0]["bias"] for steps in (1, 10, 40)]

    for theirs, mine in zip(on_ranks(2, biases, None), on_ranks(2, biases, {"warmup": 0})):
        for a, b in zip(theirs, mine):
            assert 0 < (a - b).abs().max() < 0.02 * a.abs().max()


def test_schedulers_keep_working_on_the_users_groups():
    def run():
        model = ddp(mlp())
        groups = [{"params": list(model.module[0].parameters()), "lr": 0.5}, {"params": list(model.module[2:].parameters())}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        before = [len(group["params"]) for group in optimizer.param_groups]
        redsync.attach(model, optimizer)
        for number in range(4):
            step(model, optimizer, number, VECTORS, 128)
            scheduler.step()
        return before == [len(group["params"]) for group in optimizer.param_groups], [g["lr"] for g in optimizer.param_groups]

    for same, rates in on_ranks(2, run):
        assert same and rates == pytest.approx([0.005, 0.001])


def test_groups_with_different_momentum_and_changing_momentum_follow_the_optimizer():
    def run(attached):
        model = ddp(mlp())
        groups = [
            {"params": list(model.module[0].parameters()), "momentum": 0.5},
            {"params": list(model.module[2].parameters()), "nesterov": True},
            {"params": list(model.module[4].parameters()), "momentum": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        if attached:
            redsync.attach(model, optimizer, **LOSSLESS)
        for number in range(12):
            if number == 6:
                for group in optimizer.param_groups:
                    group["momentum"] = max(0.1, group["momentum"] - 0.2)
            step(model, optimizer, number, VECTORS, 128)
        return weights(model)

    for theirs, mine in zip(on_ranks(2, run, False), on_ranks(2, run, True)):
        for a, b in zip(theirs, mine):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_dense_warm_up_is_ddp_and_hands_its_momentum_on(nesterov):
    """With density 1 after it, the whole run is that of DDP: nothing is lost or doubled where dense turns to compressed."""
    dense = on_ranks(2, lambda: train(30, 0.9, nesterov, None))
    ours = on_ranks(2, lambda: train(30, 0.9, nesterov, {**LOSSLESS, "warmup": 10}))
    for (_, theirs, _), (_, mine, _) in zip(dense, ours):
        for a, b in zip(theirs, mine):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at_least", [0, 96])
def test_a_ramp_sends_less_and_less(at_least):
    def run():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attachment = redsync.attach(model, optimizer, warmup=("ramp", 40), at_least=at_least)
        densities = []
        for number in range(42):
            step(model, optimizer, number, VECTORS, 128)
            densities.append(attachment.stats().layers[0].density)
        return densities, attachment.stats(), attachment.check_replicas()

    (densities, stats, one), (_, _, other) = on_ranks(2, run)
    assert one == other
    stages = [0.25] + 3 * [0.0625] + 9 * [0.015625] + 27 * [0.004] + 2 * [0.001]
    size = stats.layers[0].elements
    least = [min(n / size, 1 / 16) for n in 40 * [16 * at_least] + 2 * [at_least]]
    assert densities == pytest.approx([max(pair) for pair in zip(stages, least)], rel=0.02)
    # 40 steps of a ramp cost about 40/240 of a dense one; biases, and what small layers send beyond the density, come on top.
    assert 40 / 260 < stats.traffic.warm_up / stats.dense_bytes < (40 / 200 if at_least == 0 else 40 / 160)


@pytest.mark.parametrize("warmup", [0, 3])
def test_clipping_happens_before_accumulation(warmup):
    """Each rank brings the norm of its gradients, which carry 1/N, down to its share; a dense warm-up clips the average."""
    limit = 0.05

    def dense():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ranks = torch.distributed.get_world_size()
        for number in range(6):
            inputs, labels = batch(number, VECTORS, 128)
            optimizer.zero_grad()
            with model.no_sync():
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            gradients = [p.grad for p in model.parameters()]
            if number >= warmup:
                for gradient in gradients:
                    gradient.div_(ranks)
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit / ranks**0.75)
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
            if number < warmup:
                for gradient in gradients:
                    gradient.div_(ranks)
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        return weights(model)

    def ours():
        return train(6, 0.0, False, {**LOSSLESS, "clip": limit, "warmup": warmup}, mlp, VECTORS, 128)[1]

    for theirs, mine in zip(on_ranks(2, dense), on_ranks(2, ours)):
        for a, b in zip(theirs, mine):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_measured_plan_is_the_same_on_all_ranks_and_trains():
    def run():
        model = ddp(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attachment = redsync.attach(model, optimizer, plan="measured")
        for number in range(3):
            step(model, optimizer, number, VECTORS, 128)
        return [layer.choice for layer in attachment.stats().layers], attachment.check_replicas()

    one, other = on_ranks(2, run)
    assert one == other and set(one[0]) <= {"dense", "dense+8bit", "carried", "carried+asq"}

"""Checkpoints: to the bit, on the same number of ranks; to the sum, on another."""

from __future__ import annotations

import contextlib
import io
import os
import signal

import pytest
import redsync
import torch
import torch.distributed as dist
from models import IMAGES, VECTORS, cnn, ddp, mlp, step, weights
from ranks import on_ranks, outcomes


def setup(**settings):
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    return model, optimizer, scheduler, redsync.attach(model, optimizer, **settings)


def train(parts, numbers):
    model, optimizer, scheduler, _ = parts
    for number in numbers:
        step(model, optimizer, number, VECTORS, 128)
        scheduler.step()


def save(parts, path):
    model, optimizer, scheduler, attachment = parts
    state = [model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict(), attachment.state_dict()]
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def load(parts, path):
    model, optimizer, scheduler, attachment = parts
    net, sgd, schedule, ours = torch.load(path, weights_only=True)
    model.module.load_state_dict(net)
    optimizer.load_state_dict(sgd)
    scheduler.load_state_dict(schedule)
    attachment.load_state_dict(ours)
    return int(ours["step"])


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, {}),
        (3, {"method": "rgc", "warmup": 20}),  # killed while it is dense
        (3, {"density": 0.01, "warmup": 4}),
        (2, {"plan": "paper", "warmup": ("ramp", 12)}),
        (2, {"warmup": 0, "rest": "2bit"}),
        (3, {"exchange": "owners", "density": 0.02, "warmup": ("ramp", 12)}),
        (4, {"exchange": "hosts", "ranks_per_host": 2, "density": 0.02, "warmup": ("ramp", 12)}),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, ranks, settings):
    def run(kill):
        path = tmp_path / f"{dist.get_rank()}.pt"
        parts = setup(**settings)
        begin = load(parts, path) if path.exists() else 0
        for number in range(begin, 24):
            train(parts, [number])
            if number == 9:
                save(parts, path)
            if kill and number == 14:
                os.kill(os.getpid(), signal.SIGKILL)
        return weights(parts[0]), parts[3].state_dict()

    whole = on_ranks(ranks, run, False)
    for path in tmp_path.iterdir():
        path.unlink()
    assert outcomes(ranks, run, True) == [("dead", "SIGKILL")] * ranks
    resumed = on_ranks(ranks, run, False)
    for (a, one), (b, other) in zip(whole, resumed):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        for name, layer in one["layers"].items():
            assert all(torch.equal(tensor, other["layers"][name][key]) for key, tensor in layer.items())


def test_a_schedule_of_the_momentum_resumes_to_the_same_bits():
    """What is saved of Nesterov momentum is of the coefficient of its step, and the next step has another one."""

    def run(resumed):
        parts = setup(density=0.01)
        for number in range(12):
            if number == 6 and resumed:
                state = [part.state_dict() for part in (parts[0].module, parts[1], parts[3])]
                parts = setup(density=0.01)
                for part, saved in zip((parts[0].module, parts[1], parts[3]), state):
                    part.load_state_dict(saved)
            for group in parts[1].param_groups:
                group["momentum"] = 0.9 - 0.05 * number if number else 0.0
            step(parts[0], parts[1], number, VECTORS, 128)
        return weights(parts[0])

    for whole, resumed in zip(on_ranks(2, run, False), on_ranks(2, run, True)):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed))


def kept(states, name):
    """What all owners keep of a layer, each element at its place."""
    like = states[0][name]["v"]
    whole = torch.zeros(like.numel(), dtype=torch.float64)
    for rank, layers in enumerate(states):
        if "kept" in layers[name]:
            _, block, ranks, owners, first = layers[name]["cut"].tolist()
            place = torch.arange(len(layers[name]["kept"]))
            number = place // block * owners + (rank - first) % ranks
            whole[number * block + place % block] += layers[name]["kept"].double()
    return whole.view(like.shape)


@pytest.mark.parametrize("new, exchange", [(1, "gather"), (2, "gather"), (4, "gather"), (1, "owners"), (4, "owners")])
def test_another_number_of_ranks_keeps_the_sums(tmp_path, new, exchange):
    def first():
        parts = setup(method="rgc", exchange=exchange)
        train(parts, range(6))
        save(parts, tmp_path / f"{dist.get_rank()}.pt")
        return parts[3].state_dict()["layers"]

    def second():
        parts = setup(method="rgc", exchange=exchange)
        parts[3].load_state_dict([torch.load(tmp_path / f"{rank}.pt", weights_only=True)[3] for rank in range(3)])
        found = parts[3].state_dict()["layers"]
        train(parts, range(6, 8))
        parts[3].check_replicas()
        return found

    before, after = on_ranks(3, first), on_ranks(new, second)
    for name in before[0]:
        for key in "uv":
            old, found = (sum(layers[name][key].double() for layers in states) for states in (before, after))
            if key == "v":
                old, found = old + kept(before, name), found + kept(after, name)
            torch.testing.assert_close(found, old, rtol=0, atol=1e-7)
    assert any("kept" in layer for layer in before[0].values()) == (exchange == "owners")


@pytest.mark.parametrize("new, settings", [(3, {}), (4, {}), (2, {"exchange": "hosts", "ranks_per_host": 2})])
def test_what_ranks_of_a_host_have_in_parts_continues_elsewhere(new, settings):
    def first():
        parts = setup(method="rgc", exchange="hosts", ranks_per_host=2)
        train(parts, range(6))
        return parts[0].module.state_dict(), parts[1].state_dict(), parts[3].state_dict()

    def second(states):
        parts = setup(method="rgc", **settings)
        parts[0].module.load_state_dict(states[0][0])
        parts[1].load_state_dict(states[0][1])
        parts[3].load_state_dict([state for *_, state in states])
        found = parts[3].state_dict()["layers"]
        train(parts, range(6, 8))
        parts[3].check_replicas()
        return found

    states = on_ranks(4, first)
    before, after = [state["layers"] for *_, state in states], on_ranks(new, second, states)
    assert [state["seat"] for *_, state in states] == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]
    for name in before[0]:
        for key in "uv":
            of = [[layers[name].get(key, torch.empty(0)).double().reshape(-1) for layers in states] for states in (before, after)]
            (a, b, c, d), ranks = of
            old = torch.cat([a, b]) + torch.cat([c, d])
            found = torch.cat(ranks) if settings else sum(ranks)
            torch.testing.assert_close(found, old, rtol=0, atol=1e-7)


def test_a_state_is_plain_tensors():
    def run():
        parts = setup()
        train(parts, range(2))
        buffer = io.BytesIO()
        torch.save(parts[3].state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        shapes = {
            name: layer["v"].shape == dict(parts[0].module.named_parameters())[name].shape
            for name, layer in state["layers"].items()
        }
        return all(shapes.values()), sorted(shapes)

    names = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("bias", "weight")]
    assert on_ranks(2, run) == [(True, names)] * 2


def damaged(change, seal=True):
    """What is said of a state that was changed; with the checksum of the change, what else is wrong with it shows."""

    def run():
        parts = setup()
        train(parts, range(2))
        state = parts[3].state_dict()
        before = parts[3].state_dict()
        change(state)
        if seal:
            with contextlib.suppress(Exception):  # of what is no state there is no checksum
                state["checksum"] = redsync.state._checksum(state)
        try:
            parts[3].load_state_dict(state)
        except redsync.Error as error:
            after = parts[3].state_dict()
            same = all(torch.equal(before["layers"][n][k], after["layers"][n][k]) for n in before["layers"] for k in "uv")
            return type(error).__name__, str(error), same and parts[3].step == 2
        return None

    return run


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s.update(format="x"), "not a state of redsync"),
        (lambda s: s.update(rank=1 - s["rank"]), "each rank loads its own"),
        (lambda s: s.update(ranks=3), "pass the states of all 3 old ranks"),
        (lambda s: s["layers"].pop("0.weight"), "not in both: 0.weight"),
        (lambda s: s["layers"]["0.weight"].update(v=torch.zeros(3)), "0.weight: v of the state has another shape"),
        (lambda s: s["layers"]["0.weight"]["u"].fill_(float("nan")), "0.weight: u of the state is not of finite numbers"),
        (
            lambda s: s["layers"]["2.weight"]["remembering"].fill_(-1),
            "2.weight: the remembered thresholds in the state are damaged",
        ),
        (
            lambda s: s["layers"]["2.weight"]["remembering"].fill_(0x7FC00000),
            "2.weight: the remembered thresholds in the state are damaged",
        ),
        (
            lambda s: s["layers"]["2.weight"]["momentum"][1].fill_(0),
            "2.weight: momentum cannot change from plain momentum 0.9 to Nesterov momentum 0.9",
        ),
        (
            lambda s: s["layers"]["2.weight"].pop("u"),
            "2.weight: momentum cannot change from no momentum to Nesterov momentum 0.9",
        ),
        (lambda s: s["identity"][1].__setitem__(1, "0.5"), "density was 0.5, is 0.001"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, says):
    for kind, text, same in on_ranks(2, damaged(change)):
        assert kind == "UsageError" and says in text and same, text


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(step=3),
        lambda s: s["layers"]["0.weight"]["v"].view(-1)[7].add_(1e-3),
        lambda s: s["layers"]["0.weight"]["momentum"][0].fill_(0.5),
        lambda s: s["layers"]["2.weight"]["remembering"][1, 2].add_(1),
        lambda s: s["identity"].pop(),
        lambda s: s.pop("checksum"),
    ],
)
def test_a_state_that_was_damaged_is_refused_and_changes_nothing(change):
    for kind, text, same in on_ranks(2, damaged(change, seal=False)):
        assert kind == "UsageError" and "its checksum is wrong" in text and same, text


def test_a_state_does_not_depend_on_the_layout_of_memory():
    """Saved with channels last, loaded with channels first: the same numbers at the same places."""

    def run():
        found = []
        for memory_format in (torch.channels_last, torch.contiguous_format):
            model = ddp(cnn().to(memory_format=memory_format))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            attachment = redsync.attach(model, optimizer)
            if found:
                attachment.load_state_dict(found[0])
            else:
                step(model, optimizer, 0, IMAGES, 10)
            found.append(attachment.state_dict())
            attachment.close()
        first, second = (state["layers"]["4.weight"] for state in found)
        return [torch.equal(first[key], second[key]) for key in "uv"], found[0]["checksum"] == found[1]["checksum"]

    assert on_ranks(2, run) == [([True, True], True)] * 2


def test_one_rank_with_a_bad_state_stops_all():
    def run():
        parts = setup()
        state = parts[3].state_dict()
        if dist.get_rank() == 1:
            state["format"] = "x"
        parts[3].load_state_dict(state)

    (one, text), (other, _) = outcomes(2, run)
    assert (one, other) == ("MismatchError", "UsageError") and "rank 1" in text

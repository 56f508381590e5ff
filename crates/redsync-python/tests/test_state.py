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


@pytest.mark.parametrize("new", [1, 2, 4])
def test_another_number_of_ranks_keeps_the_sums(tmp_path, new):
    def first():
        parts = setup(method="rgc")
        train(parts, range(6))
        save(parts, tmp_path / f"{dist.get_rank()}.pt")
        return parts[3].state_dict()["layers"]

    def second():
        parts = setup(method="rgc")
        parts[3].load_state_dict([torch.load(tmp_path / f"{rank}.pt", weights_only=True)[3] for rank in range(3)])
        found = parts[3].state_dict()["layers"]
        train(parts, range(6, 8))
        parts[3].check_replicas()
        return found

    before, after = on_ranks(3, first), on_ranks(new, second)
    for name in before[0]:
        for key in "uv":
            old = sum(layers[name][key].double() for layers in before)
            torch.testing.assert_close(sum(layers[name][key].double() for layers in after), old, rtol=0, atol=1e-7)


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
        (lambda s: s["layers"]["2.weight"]["remembering"].fill_(-1), "2.weight: remembering of the state is none"),
        (lambda s: s["layers"]["2.weight"]["remembering"].fill_(0x7FC00000), "2.weight: remembering of the state is none"),
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

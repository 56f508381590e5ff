"""Wrong use: an exception with a sentence that helps, on every rank, and nothing half attached."""

from __future__ import annotations

import gc
import logging

import pytest
import redsync
import torch
import torch.distributed as dist
from models import VECTORS, batch, cnn, ddp, mlp, step
from ranks import on_ranks, outcomes
from redsync.settings import warm_up
from torch import nn


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def attach(make_model=lambda: ddp(mlp()), make_optimizer=sgd, **settings):
    model = make_model()
    return redsync.attach(model, make_optimizer(model), **settings)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"make_model": mlp}, "wrapped by DistributedDataParallel, not a Sequential"),
        ({"make_model": lambda: ddp(mlp().double())}, "0.weight is of float64"),
        ({"make_model": lambda: ddp(nn.Sequential(nn.Embedding(99, 9, sparse=True)))}, "make it with sparse=False"),
        (
            {"make_optimizer": lambda m: torch.optim.RMSprop(m.parameters())},
            "RMSprop is not supported: it would see rare, large values instead of gradients",
        ),
        ({"make_optimizer": lambda m: torch.optim.Adagrad(m.parameters())}, "use torch.optim.SGD"),
        ({"make_optimizer": lambda m: sgd(m, dampening=0.1)}, "dampening"),
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0"),
        ({"density": 1.5}, "density must be above 0 and at most 1, got 1.5"),
        ({"method": "topk"}, "choose one of sgd, rgc, rgc+2bit, rgc+asq, rgc-naive"),
        ({"plan": "best"}, "choose carried, measured, paper"),
        ({"plan": {"9.weight": "dense"}}, "9.weight, which the model does not have"),
        ({"plan": {"0.weight": "some"}}, "0.weight: choose dense, dense+8bit, dense+2bit, or one of exact"),
        ({"plan": {"4.weight": "carried+asq"}}, "4.weight is the output, which is never quantized"),
        ({"output": "9.weight"}, "no parameter of the model"),
        ({"warmup": ("slow", 3)}, "('slow', 3)"),
        ({"warmup": 0.5}, 'warmup must be a whole number of steps, or ("ramp", steps) or ("dense", steps); got 0.5'),
        ({"warmup": -1}, "got -1"),
        ({"warmup": ("ramp", 0.5)}, "got ('ramp', 0.5)"),
        ({"rest": "4bit"}, 'no rest "4bit": choose one of 8bit, 2bit, f32'),
        ({"dense_below": -1}, "dense_below"),
        ({"density": "some"}, "density"),
        ({"clip": -1.0}, "clip must be a positive norm, got -1"),
        ({"clip": "much"}, "clip"),
        ({"clip": 1.0, "clip_power": 2.0}, "clip-power must be from 0 to 1, got 2"),
        ({"deadline": 0}, "deadline"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(arguments, says):
    for kind, text in outcomes(2, lambda: attach(**arguments)):
        assert kind == "UsageError" and says in text.splitlines()[0], text


def test_attaching_twice_is_refused():
    def run():
        model = ddp(mlp())
        optimizer = sgd(model)
        redsync.attach(model, optimizer)
        try:
            redsync.attach(model, optimizer)
        except redsync.UsageError as error:
            text = str(error)
        step(model, optimizer, 0, VECTORS, 128)  # the first one still works
        return text

    for text in on_ranks(2, run):
        assert "attached to this model already" in text


def test_an_optimizer_outlives_the_model_that_was_attached():
    def run():
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = ddp(net)
        redsync.attach(model, optimizer)
        step(model, optimizer, 0, VECTORS, 128)
        other = ddp(net)
        try:
            redsync.attach(other, optimizer)
        except redsync.UsageError as error:
            text = str(error)
        del model
        gc.collect()
        step(other, optimizer, 1, VECTORS, 128)
        normal = all("momentum_buffer" in optimizer.state[p] for p in net.parameters())
        last = ddp(net)
        attachment = redsync.attach(last, optimizer)
        return text, normal, redsync.of() is attachment

    for text, normal, only in on_ranks(2, run):
        assert "close() that attachment first" in text and normal and only


def test_a_model_with_another_hook_is_refused_and_the_optimizer_left_alone():
    def run():
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model = ddp(mlp())
        optimizer = sgd(model)
        model.register_comm_hook(None, allreduce_hook)
        try:
            redsync.attach(model, optimizer)
        except redsync.UsageError as error:
            text = str(error)
        step(model, optimizer, 0, VECTORS, 128)
        return text, all("momentum_buffer" in optimizer.state[p] for p in model.parameters())

    for text, normal in on_ranks(2, run):
        assert "communication hook" in text and normal


def test_step_with_a_closure_is_refused():
    def run():
        model = ddp(mlp())
        optimizer = sgd(model)
        redsync.attach(model, optimizer)
        optimizer.step(lambda: 0.0)

    for kind, text in outcomes(2, run):
        assert kind == "UsageError" and "closure" in text


@pytest.mark.parametrize(
    "settings, says",
    [
        (lambda rank: {"density": 0.001 * (1 + rank)}, "density is 0.002 there, 0.001 here"),
        (lambda rank: {"method": ["rgc", "rgc+asq"][rank]}, "method is rgc+asq there, rgc here"),
        (lambda rank: {"warmup": rank}, "warm-up is 1 dense steps there, 0 dense steps here"),
        (lambda rank: {"warmup": [None, 0][rank]}, "warm-up is 0 dense steps there, a ramp of 2000 steps here"),
        (lambda rank: {"rest": ["8bit", "f32"][rank]}, "the choice for 0.bias is dense there, dense+8bit here"),
        (lambda rank: {"clip": [None, 0.5][rank]}, "clip is 0.5, to N^-0.75 of it on each rank there, none here"),
        (lambda rank: {"clip": 0.5, "clip_power": [1.0, 0.5][rank]}, "clip is 0.5 there, 0.5, to N^-1 of it on each rank here"),
        (
            lambda rank: {"plan": [{}, {"0.weight": "dense"}][rank]},
            "the choice for 0.weight is dense there, carried+asq here",
        ),
        (lambda rank: {"make_optimizer": lambda m: sgd(m, momentum=[0.9, 0.8][rank])}, "the momentum of 0.weight is"),
    ],
)
def test_ranks_that_run_different_settings_are_refused_everywhere(settings, says):
    found = outcomes(2, lambda: attach(**settings(dist.get_rank())))
    assert [kind for kind, _ in found] == ["MismatchError"] * 2
    assert f"rank 1 runs something else: {says}" in found[0][1]


def test_different_models_on_two_ranks_are_refused():
    """DDP compares shapes itself; names are up to us."""

    class Other(nn.Sequential):
        pass

    def other_names():
        net = mlp()
        return nn.ModuleDict({str(number + dist.get_rank()): layer for number, layer in enumerate(net)})

    found = outcomes(2, lambda: attach(lambda: ddp(other_names())))
    assert [kind for kind, _ in found] == ["MismatchError"] * 2 and "parameter 0" in found[0][1]
    found = outcomes(2, lambda: attach(lambda: ddp([mlp, cnn][dist.get_rank()]())))
    assert all(kind != "ok" for kind, _ in found)


def test_the_plan_treats_layers_as_ruled():
    def run():
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.body = nn.Embedding(256, 256), nn.Linear(256, 256)
                self.decoder = nn.Linear(256, 256, bias=False)
                self.decoder.weight = self.encoder.weight

            def forward(self, x):
                return self.decoder(self.body(self.encoder(x)))

        plain = attach(plan={"2.weight": "trimmed", "2.bias": "dense", "4.bias": "dense+2bit"})
        tied = attach(lambda: ddp(Tied()))
        # Weights of 1,728 bytes, 147 KB, 262 KB and 640 bytes.
        convolutions = attach(lambda: ddp(cnn()), rest="2bit")
        paper = attach(lambda: ddp(cnn()), plan="paper")
        all_choices = (each.stats().layers for each in (plain, tied, convolutions, paper))
        return [{layer.name: layer.choice for layer in layers} for layers in all_choices]

    for plain, tied, convolutions, paper in on_ranks(2, run):
        assert plain == {
            "0.weight": "carried+asq",
            "0.bias": "dense+8bit",
            "2.weight": "trimmed",
            "2.bias": "dense",
            "4.weight": "carried",
            "4.bias": "dense+2bit",
        }
        assert tied == {"encoder.weight": "carried", "body.weight": "carried+asq", "body.bias": "dense+8bit"}
        large = {"4.weight", "8.weight"}
        assert convolutions == {name: "carried+asq" if name in large else "dense+2bit" for name in paper}
        assert paper == {name: "trimmed+asq" if name in large else "dense" for name in paper}


def test_the_usual_warm_up_is_a_ramp_where_a_ramp_is_cheap():
    usual = {(method, plan): warm_up(None, method, plan) for method in ("rgc+asq", "rgc") for plan in ("carried", "measured")}
    assert set(usual.values()) == {("ramp", 2000)}
    none = [("rgc+asq", "paper"), ("rgc-naive", "carried"), ("sgd", "carried")]
    assert [warm_up(None, *each) for each in none] == [("dense", 0)] * 3
    assert [warm_up(given, "rgc", "paper") for given in (0, 7, ("ramp", 9))] == [("dense", 0), ("dense", 7), ("ramp", 9)]


def test_statistics_and_the_log_line_tell_what_was_sent():
    def run():
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("redsync").addHandler(handler)
        logging.getLogger("redsync").setLevel(logging.INFO)
        model = ddp(mlp())
        optimizer = sgd(model)
        redsync.attach(model, optimizer, warmup=0, log_every=2)
        before = str(redsync.stats())
        for number in range(4):
            step(model, optimizer, number, VECTORS, 128)
        return before, redsync.stats(), lines

    for before, stats, lines in on_ranks(2, run):
        first = stats.layers[0]
        assert (stats.step, first.name, first.elements, first.sent) == (3, "0.weight", 131072, 132)
        assert first.density == pytest.approx(0.001, rel=0.01)
        assert 132 < first.bytes < 300
        assert stats.bytes_sent < stats.dense_bytes / 400
        assert 3 * stats.bytes_sent < stats.total_bytes_sent < 5 * stats.bytes_sent
        assert before == "no step yet"
        assert len(lines) == 2 and lines[1].startswith("4 steps: sent 0.0") and "; last step 3: sent " in lines[1]


def test_where_the_bytes_went_adds_up_to_what_was_sent():
    def run(dtype, settings):
        model = ddp(mlp().to(dtype))
        optimizer = sgd(model)
        attachment = redsync.attach(model, optimizer, **settings)
        sent = []
        for number in range(5):
            inputs, labels = batch(number, VECTORS, 128)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels).backward()
            optimizer.step()
            sent.append(attachment.stats().bytes_sent)
        return sent, attachment.stats()

    weights, biases = 256 * 512 + 512 * 512 + 512 * 128, 512 + 512 + 128
    for warmup in (0, 2, ("ramp", 2)):
        for sent, stats in on_ranks(2, run, torch.float32, {"warmup": warmup}):
            traffic, warm = stats.traffic, 0 if warmup == 0 else 2
            assert (stats.steps, traffic.sent, stats.total_bytes_sent) == (5, sum(sent), sum(sent))
            assert traffic.warm_up == sum(sent[:warm])
            assert traffic.messages + traffic.rest + traffic.headers == sum(sent[warm:])
            # A byte for each element of the rest, and a scale for each bias.
            assert (5 - warm) * biases < traffic.rest < (5 - warm) * (biases + 3 * 8)
            assert traffic.messages > 0 and traffic.headers > 0
            assert traffic.dense == stats.total_dense_bytes == 5 * 4 * (weights + biases)
            assert traffic.ratio == traffic.dense / sum(sent)
    for sent, stats in on_ranks(2, run, torch.bfloat16, {"method": "sgd"}):
        # DDP sends two bytes of each, the engine's sums four.
        assert stats.traffic == redsync.Traffic(rest=sum(sent), dense=5 * 2 * (weights + biases))
        assert sum(sent) == 2 * stats.traffic.dense


def test_a_state_that_is_loaded_brings_no_bytes_along():
    def run():
        model = ddp(mlp())
        optimizer = sgd(model)
        first = redsync.attach(model, optimizer)
        step(model, optimizer, 0, VECTORS, 128)
        state = first.state_dict()
        first.close()
        model = ddp(model.module)
        second = redsync.attach(model, optimizer)
        second.load_state_dict(state)
        before = second.stats()
        step(model, optimizer, 1, VECTORS, 128)
        after = second.stats()
        assert after.total_bytes_sent == after.bytes_sent
        return before.steps, before.step, before.total_bytes_sent, after.steps, after.step

    assert on_ranks(2, run) == [(0, -1, 0, 1, 1)] * 2


def test_the_example_of_the_module_names_the_attachment():
    def run():
        try:
            redsync.stats()
        except redsync.UsageError as error:
            before = str(error)
        model = ddp(mlp())
        attachment = redsync.attach(model, sgd(model))
        return before, redsync.of() is attachment and redsync.of(model) is attachment

    for before, found in on_ranks(2, run):
        assert "attached to 0 models" in before and found


def test_a_rank_that_cannot_attach_does_not_let_the_others_wait():
    def optimizer(model):
        return sgd(model) if dist.get_rank() == 0 else torch.optim.RMSprop(model.parameters())

    (one, text), (other, _) = outcomes(2, lambda: attach(make_optimizer=optimizer))
    assert (one, other) == ("MismatchError", "UsageError")
    assert "rank 1 cannot attach: RMSprop is not supported" in text

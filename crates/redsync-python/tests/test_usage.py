"""Wrong use: an exception with a sentence that helps, on every rank, and nothing half attached."""

from __future__ import annotations

import gc
import logging

import pytest
import redsync
import torch
import torch.distributed as dist
from models import VECTORS, cnn, ddp, mlp, step
from ranks import on_ranks, outcomes
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
            {"make_optimizer": lambda m: torch.optim.Adam(m.parameters())},
            "Adam is not supported: momentum is corrected for SGD",
        ),
        ({"make_optimizer": lambda m: torch.optim.AdamW(m.parameters())}, "use torch.optim.SGD"),
        ({"make_optimizer": lambda m: sgd(m, dampening=0.1)}, "dampening"),
        ({"density": 0.0}, "density 0 is not above 0 and at most 1"),
        ({"density": 1.5}, "density 1.5"),
        ({"method": "topk"}, "choose one of sgd, rgc, rgc+asq, rgc-naive"),
        ({"plan": "best"}, "choose carried, measured, paper"),
        ({"plan": {"9.weight": "dense"}}, "9.weight, which the model does not have"),
        ({"plan": {"0.weight": "some"}}, "0.weight: choose dense, or one of exact"),
        ({"plan": {"4.weight": "carried+asq"}}, "4.weight is the output, which is never quantized"),
        ({"output": "9.weight"}, "no parameter of the model"),
        ({"warmup": ("slow", 3)}, "choose dense or ramp"),
        ({"warmup": 0.5}, "a warmup of 0.5 is none: give a number of steps"),
        ({"warmup": -1}, "a warmup of -1 is none"),
        ({"density": "some"}, "density"),
        ({"clip": -1.0}, "gradients cannot be clipped to the norm -1"),
        ({"clip": "much"}, "clip"),
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
        (lambda rank: {"clip": [None, 0.5][rank]}, "clip is 0.5 there, none here"),
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

        plain = attach(plan={"2.weight": "trimmed"})
        tied = attach(lambda: ddp(Tied()))
        return [{layer.name: layer.choice for layer in each.stats().layers} for each in (plain, tied)]

    for plain, tied in on_ranks(2, run):
        assert plain == {
            "0.weight": "carried+asq",
            "0.bias": "dense",
            "2.weight": "trimmed",
            "2.bias": "dense",
            "4.weight": "carried",
            "4.bias": "dense",
        }
        assert tied == {"encoder.weight": "carried", "body.weight": "carried+asq", "body.bias": "dense"}


def test_statistics_and_the_log_line_tell_what_was_sent():
    def run():
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("redsync").addHandler(handler)
        logging.getLogger("redsync").setLevel(logging.INFO)
        model = ddp(mlp())
        optimizer = sgd(model)
        redsync.attach(model, optimizer, log_every=2)
        for number in range(4):
            step(model, optimizer, number, VECTORS, 128)
        return redsync.stats(), lines

    for stats, lines in on_ranks(2, run):
        first = stats.layers[0]
        assert (stats.step, first.name, first.elements, first.sent) == (3, "0.weight", 131072, 132)
        assert first.density == pytest.approx(0.001, rel=0.01)
        assert 132 < first.bytes < 300
        assert stats.bytes_sent < stats.dense_bytes / 40
        assert 3 * stats.bytes_sent < stats.total_bytes_sent < 5 * stats.bytes_sent
        assert len(lines) == 2 and lines[1].startswith("step 3: sent ")


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
        return sgd(model) if dist.get_rank() == 0 else torch.optim.Adam(model.parameters())

    (one, text), (other, _) = outcomes(2, lambda: attach(make_optimizer=optimizer))
    assert (one, other) == ("MismatchError", "UsageError")
    assert "rank 1 cannot attach: Adam is not supported" in text

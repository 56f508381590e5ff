"""What breaks, and what every rank says then."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict

import pytest
import redsync
import torch
import torch.distributed as dist
from models import VECTORS, batch, ddp, mlp, step
from ranks import outcomes
from torch import nn

DEADLINE = 8.0


def setup(**settings):
    # Without buffers, DDP's own group is silent, and the exchange is the first to notice.
    model = ddp(mlp(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, redsync.attach(model, optimizer, **{"deadline": DEADLINE, **settings})


def train_until_it_breaks(victim, end):
    model, optimizer, _ = setup()
    for number in range(5):
        if number == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), end)
        try:
            step(model, optimizer, number, VECTORS, 128)
        except redsync.PeerError as error:
            return str(error), error.ranks
    return None


@pytest.mark.parametrize("ranks, victim", [(2, 1), (4, 2)])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_peer_is_named_by_every_survivor(ranks, victim, end):
    stopped = [victim] if end == signal.SIGSTOP else []
    found = outcomes(ranks, train_until_it_breaks, victim, end, limit=60, stopped=stopped)
    assert found.pop(victim) == ("dead", "SIGKILL")
    for kind, value in found:
        assert kind == "ok", value
        text, named = value
        assert named == (victim,), text
        assert f"rank {victim}" in text and "step 3" in text


def test_a_peer_that_leaves_early_is_named():
    def run():
        model, optimizer, _ = setup()
        for number in range(5):
            if number == 3 and dist.get_rank() == 1:
                return "left"
            step(model, optimizer, number, VECTORS, 128)

    (kind, text), (other, _) = outcomes(2, run)
    assert (kind, other) == ("PeerError", "ok") and "rank 1 left" in text


@pytest.mark.parametrize("value, word", [(float("nan"), "NaN"), (float("inf"), "inf")])
def test_a_gradient_that_is_not_finite_stops_all_ranks_with_its_place(value, word):
    def run():
        model, optimizer, _ = setup()
        for number in range(4):
            inputs, labels = batch(number, VECTORS, 128)
            if number == 2 and dist.get_rank() == 1:
                model.module[2].weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), value))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    found = outcomes(3, run)
    for rank, (kind, text) in enumerate(found):
        assert kind == "GradientError", text
        assert ("this rank" if rank == 1 else "rank 1") in text
        assert f"layer 2.weight, step 2: the gradient is {word} at element 1536" in text


def test_a_reason_arrives_whole_after_messages_that_were_empty():
    def run():
        name = "a_layer_with_a_name_that_is_longer_than_any_message_of_a_layer_without_gradient" * 2
        net = nn.Sequential(OrderedDict([(name, nn.Linear(256, 256, bias=False))]))
        model = ddp(net, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        redsync.attach(model, optimizer, deadline=DEADLINE)
        for number in range(60):
            optimizer.zero_grad()
            value = float("nan") if number == 59 and dist.get_rank() == 1 else 0.0
            model(torch.full((2, 256), value)).sum().backward()
            optimizer.step()

    for kind, text in outcomes(2, run):
        assert kind == "GradientError" and "step 59: the gradient is NaN at element 0" in text, text


def test_a_dead_peer_is_named_by_a_comparison_too():
    def run():
        model, optimizer, attachment = setup()
        step(model, optimizer, 0, VECTORS, 128)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            attachment.check_replicas()
        except redsync.PeerError as error:
            return error.ranks

    assert outcomes(2, run, limit=60)[0] == ("ok", (1,))


def test_after_a_failure_everything_says_the_same():
    def run():
        model, _, attachment = setup()
        inputs, labels = batch(0, VECTORS, 128)
        said = []
        for call in (
            lambda: (nn.functional.cross_entropy(model(inputs), labels) * float("nan")).backward(),
            attachment.state_dict,
            attachment.check_replicas,
        ):
            try:
                call()
            except redsync.Error as error:
                said.append(str(error))
        return said

    for kind, said in outcomes(2, run):
        assert kind == "ok" and len(said) == 3 and len(set(said)) == 1, said


class Damaging:
    """A process group that changes what it sends: rank 1 gets the bytes of every exchange that it starts."""

    def __init__(self, group, damage):
        self._group, self._damage = group, damage

    def __getattr__(self, name):
        return getattr(self._group, name)

    def alltoall_base(self, into, out, *splits):
        if dist.get_rank() == 1:
            self._damage(out)
        return self._group.alltoall_base(into, out, *splits)


def damaged(monkeypatch, damage, **settings):
    """Trains on a group whose bytes are damaged, and returns what is said of it."""

    def run():
        attachments = []
        new_group = dist.new_group
        monkeypatch.setattr(dist, "new_group", lambda *a, **k: Damaging(new_group(*a, **k), lambda out: damage(out, attachments)))
        model, optimizer, attachment = setup(**settings)
        attachments.append(attachment)
        said = None
        try:
            for number in range(4):
                step(model, optimizer, number, VECTORS, 128)
        except redsync.PeerError as error:
            said = str(error), error.ranks
        # Nobody leaves before all have their error: it must not come from a rank that is gone.
        dist.barrier()
        return said

    return outcomes(2, run)


HEADER = 48
"""Of the communicator: what stands in front of a frame."""


def test_damaged_bytes_are_refused_and_name_the_rank(monkeypatch):
    def flip(out, attachments):
        # Frames begin with their own magic, and go whole with the header.
        frame = bytes(out[HEADER : HEADER + 4].tolist()) == b"RSYN"
        if attachments and attachments[0].step == 2 and frame:
            out[HEADER + 40] ^= 1

    (kind, said), (other, text) = damaged(monkeypatch, flip)
    assert (kind, other) == ("ok", "ok"), (said, text)
    assert "frame of rank 1" in said[0] and "checksum" in said[0] and said[1] == (1,), said
    assert "frame of rank 1" in text[0], "who sent them hears it from the other"


def lie(out, attachments):
    """Claims a length that no memory has."""
    if attachments and attachments[0].step == 1:
        # Length, part, and the longest message of this rank.
        out[24:HEADER].view(torch.int64).fill_(1 << 60)


def test_a_message_of_an_absurd_length_is_refused_before_memory_is_taken(monkeypatch):
    """The first exchange of the step is one of frames, whose lengths differ. An error of the communicator says who it was in its
    text only."""
    (kind, said), (other, _) = damaged(monkeypatch, lie)
    assert (kind, other) == ("ok", "ok"), said
    assert "rank 1 sends 1152921504606846976 bytes, for which there is no memory" in said[0], said


def test_a_sum_of_an_absurd_length_is_refused_and_names_the_rank(monkeypatch):
    """With biases as they are, the first exchange of the step is their sum, whose length all ranks know."""
    (kind, said), (other, _) = damaged(monkeypatch, lie, rest="f32", warmup=0)
    assert (kind, other) == ("ok", "ok"), said
    assert "rank 1" in said[0] and said[1] == (1,), said

"""The metrics file of a run: lines in the format of `redsync train`, from rank 0, and never those of another run taken away."""

from __future__ import annotations

import json
import pathlib

import redsync
import torch
from models import VECTORS, batch, ddp, mlp
from ranks import on_ranks, outcomes


def train(path, steps, resumed=None, **settings):
    """Trains with a metrics file; returns what all steps sent, and the state."""
    model = ddp(mlp()) if "every" not in settings else mlp()
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attachment = redsync.attach(model, optimizer, warmup=0, log=path, **settings)
    if resumed is not None:
        attachment.load_state_dict(resumed)
    for number in range(attachment.step, attachment.step + steps):
        inputs, labels = batch(number, VECTORS, 64)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        attachment.log_loss(loss)
    attachment.log_epoch(test_loss=0.5, metric=0.75)
    state, stats = attachment.state_dict(), attachment.stats()
    attachment.close()
    return stats.total_bytes_sent, state


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_told_step_by_step_and_its_bytes_add_up(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    sent = on_ranks(2, lambda: train(path, 7, log_every=3)[0])[0]
    told = lines(path)
    assert [line["kind"] for line in told] == ["run", "step", "step", "step", "epoch", "final"]
    run, steps, epoch, final = told[0], told[1:4], told[4], told[5]
    assert (run["model"], run["method"], run["workers"], run["step"], run["seed"]) == ("Sequential", "rgc+asq", 2, 0, 5)
    assert run["every"] == 1
    assert [step["step"] for step in steps] == [3, 6, 7]
    assert all(step["loss"] > 0 and step["ms"]["total"] > 0 for step in steps)
    counts = [3, 3, 1]
    assert abs(sum(count * step["bytes_sent"] for count, step in zip(counts, steps)) - sent) < 7
    assert (epoch["epoch"], epoch["metric"], epoch["metric_name"], epoch["bytes_sent"]) == (1, 0.75, "accuracy", sent)
    weighted = sum(count * step["loss"] for count, step in zip(counts, steps)) / 7
    assert abs(epoch["train_loss"] - weighted) < 1e-9
    assert final["bytes_sent"] == sent == sum(final["traffic"].values()) - final["traffic"]["dense"]


def test_a_resumed_run_says_where_it_goes_on_and_takes_nothing_away(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def run():
        _, state = train(path, 3, log_every=1)
        train(path, 2, resumed=state, log_every=1)

    on_ranks(2, run)
    told = lines(path)
    assert [line["step"] for line in told if line["kind"] == "run"] == [0, 3]
    assert [line["step"] for line in told if line["kind"] == "step"] == [1, 2, 3, 4, 5]


def test_local_steps_are_told_by_exchanges(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sent = on_ranks(2, lambda: train(path, 8, every=4, log_every=4)[0])[0]
    told = lines(path)
    steps = [line for line in told if line["kind"] == "step"]
    assert (told[0]["kind"], told[0]["every"]) == ("run", 4)
    assert [step["step"] for step in steps] == [4, 8]
    assert abs(4 * sum(step["bytes_sent"] for step in steps) - sent) < 8


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    found = outcomes(2, lambda: train(tmp_path, 1))
    assert found[0][0] == "UsageError" and "log cannot be written to" in found[0][1], found
    assert found[1][0] != "ok", "the other rank does not train alone"

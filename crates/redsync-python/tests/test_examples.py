"""The examples run under torchrun as their first lines say, on tiny data, and log runs that `redsync report` takes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def torchrun(directory: pathlib.Path, program: str, *arguments: object) -> str:
    """What rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / program]
    done = subprocess.run(
        [*map(str, command), *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cifar10_trains_and_tells_what_it_sent(tmp_path):
    generator = torch.Generator().manual_seed(1)
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        labels = torch.arange(16) % 10
        images = torch.randint(256, (16, 3072), generator=generator)
        (tmp_path / name).write_bytes(bytes(torch.cat([labels[:, None], images], 1).flatten().tolist()))
    said = torchrun(tmp_path, "cifar10.py", tmp_path, "--epochs", 2, "--batch", 8)
    assert "epoch 2: " in said and "10 steps: sent " in said, said
    told = lines(tmp_path / "rgc+asq.jsonl")
    assert [line["kind"] for line in told] == ["run", "step", "epoch", "step", "epoch", "final"]
    assert told[-1]["bytes_sent"] < told[-1]["dense_bytes"] / 4, "even during the ramp"


def test_the_language_model_learns_and_sends_less(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"all work and no play makes a dull day. " * 40)
    tiny = ("--steps", 40, "--width", 32, "--window", 16, "--batch", 4)
    losses, sent = {}, {}
    for method in ("sgd", "rgc+2bit"):
        said = torchrun(tmp_path, "language.py", "text.txt", "--method", method, "--metrics", f"{method}.jsonl", *tiny)
        assert said.splitlines()[-1].startswith("step 40: loss "), said
        told = lines(tmp_path / f"{method}.jsonl")
        losses[method] = [line["loss"] for line in told if line["kind"] == "step"]
        sent[method] = told[-1]["bytes_sent"]
    assert all(last < first for first, last in losses.values()), losses
    assert sent["rgc+2bit"] < sent["sgd"] / 10, sent

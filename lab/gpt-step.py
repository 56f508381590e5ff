#!/usr/bin/env python3
"""One training step of gpt-small on one thread: ours and PyTorch's, in turn.

Usage: gpt-step.py REDSYNC DATA_DIR [ROUNDS]. The same sizes (width 384, 6 layers, 6 heads, 256 bytes, tied embedding, 2 windows of
128 bytes), AdamW, dense. Prints medians of milliseconds per step, and their ratio.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from rivals import BYTES, gpt_small
from torch import nn

BATCH, WINDOW = 2, 128
STEPS = 20


def torch_step() -> float:
    torch.set_num_threads(1)
    model = gpt_small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    times = []
    for _ in range(STEPS):
        text = torch.randint(BYTES, (BATCH, WINDOW + 1))
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def our_step(redsync: str, data: str) -> float:
    with tempfile.TemporaryDirectory() as out:
        command = [
            redsync,
            "train",
            "--model",
            "gpt-small",
            "--method",
            "sgd",
            "--workers",
            "1",
            "--threads",
            "1",
            "--data-dir",
            data,
        ]
        command += ["--stop-after", str(STEPS), "--log-every", "1", "--out", f"{out}/run"]
        subprocess.run(command, capture_output=True, check=False)  # ends as if interrupted
        lines = (json.loads(line) for line in pathlib.Path(out, "run", "metrics.jsonl").read_text().splitlines())
        times = [line["ms"]["total"] for line in lines if line["kind"] == "step"]
    return statistics.median(times[3:])


def main() -> None:
    redsync, data = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    pairs = [(our_step(redsync, data), torch_step()) for _ in range(rounds)]
    for ours, theirs in pairs:
        print(f"ours {ours:.0f} ms, PyTorch {torch.__version__} {theirs:.0f} ms: {ours / theirs:.2f}")
    print(f"median ratio {statistics.median(ours / theirs for ours, theirs in pairs):.2f}")


assert math.isclose(sum(p.numel() for p in gpt_small().parameters()), 10.84e6, rel_tol=0.01)
main()

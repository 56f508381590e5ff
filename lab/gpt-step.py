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
from torch import nn

WIDTH, LAYERS, HEADS, BYTES, LONGEST, BATCH, WINDOW = 384, 6, 6, 256, 256, 2, 128
STEPS = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (BATCH, WINDOW, HEADS, WIDTH // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(BATCH, WINDOW, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(x) + self.places.weight[:WINDOW]
        logits = self.norm(self.blocks(hidden)) @ self.bytes.weight.T
        return nn.functional.cross_entropy(logits.view(-1, BYTES), y.reshape(-1))


def torch_step() -> float:
    torch.set_num_threads(1)
    model = Gpt()
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


assert math.isclose(sum(p.numel() for p in Gpt().parameters()), 10.84e6, rel_tol=0.01)
main()

"""One rank of `lab/language-torch`: what `lab/language` trains, under DDP, dense or by PowerSGD.

Comes in: a method, a rate, a seed, the text. Goes out, from rank 0: a JSON document like that of `redsync train --json`. What
must hold: model, windows, rates, decay, clipping and test are those of `lab/language`; only the numbers that weights begin with
are others.
"""

import argparse
import json
import math
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, BYTES, CONTEXT = 128, 5, 4, 256, 128
STREAMS, WINDOW, STEPS = 4, 64, 6000
GROWS = 0.1
"""The part of the steps in which the rate grows; then it falls by a cosine to nothing."""
DENSE = 10
"""Steps with which PowerSGD begins dense."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream is smaller the more often that happens.
                often = math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / often)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.norm(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]])) @ self.bytes.weight.T
        return nn.functional.cross_entropy(logits.view(-1, BYTES), y.reshape(-1))


class Counted:
    """Counts the bytes that a rank gives to collectives."""

    def __init__(self) -> None:
        self.bytes = 0


def power_sgd(model: DistributedDataParallel, counted: Counted) -> None:
    # The hook starts collectives from callbacks, whose order differs among ranks: over gloo every bucket needs its own group.
    states = {}

    def hook(_, bucket):
        index = bucket.index()
        if index not in states:
            states[index] = powerSGD_hook.PowerSGDState(dist.new_group(), matrix_approximation_rank=4, start_powerSGD_iter=DENSE)
        state = states[index]
        if state.iter < DENSE:
            counted.bytes += 4 * bucket.buffer().numel()
        else:
            # As the hook has it: two factors of every matrix for which that is less, all others as they are.
            for gradient in bucket.gradients():
                rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
                factors = min(4, rows, columns) * (rows + columns)
                small = gradient.dim() > 1 and factors * state.min_compression_rate < gradient.numel()
                counted.bytes += 4 * (factors if small else gradient.numel())
        if not bucket.is_last():  # the hook counts steps by last buckets, and a state of its own would never see one
            state.iter += 1
        return powerSGD_hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(None, hook)


def rate(step: int, peak: float) -> float:
    grows = GROWS * STEPS
    if step < grows:
        return peak * (step + 1) / grows
    return peak * 0.5 * (1 + math.cos(math.pi * (step - grows) / (STEPS - grows)))


def read(path: pathlib.Path, limit: int | None = None) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()[:limit]), dtype=torch.uint8)


def windows(text: torch.Tensor, streams: list[int], of: int, step: int) -> torch.Tensor:
    length = len(text) // of
    begin = step * WINDOW
    return torch.stack([text[s * length + begin : s * length + begin + WINDOW + 1] for s in streams]).long()


@torch.no_grad()
def test(model: Gpt, text: torch.Tensor) -> float:
    count = (len(text) - 1) // WINDOW
    total = 0.0
    for at in range(0, count, 64):
        some = torch.stack([text[w * WINDOW : w * WINDOW + WINDOW + 1] for w in range(at, min(at + 64, count))]).long()
        total += len(some) * model(some[:, :-1], some[:, 1:]).item()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=("torch-dense", "torch-powersgd-4"), required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    net, counted = Gpt(), Counted()
    model = DistributedDataParallel(net, init_sync=False)
    decayed = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95))
    dense = 4 * sum(p.numel() for p in net.parameters()) * STEPS
    if arguments.method == "torch-dense":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        counted.bytes = dense
    else:
        power_sgd(model, counted)
    text = read(arguments.data / "wiki.train.tokens", STREAMS * ranks * (STEPS * WINDOW + 1))
    streams = list(range(rank * STREAMS, (rank + 1) * STREAMS))
    recent = 0.0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, arguments.lr)
        some = windows(text, streams, STREAMS * ranks, step)
        optimizer.zero_grad()
        loss = model(some[:, :-1], some[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        recent += loss.item()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: {recent / 100:.4f}", file=sys.stderr, flush=True)
            recent = 0.0
    if rank == 0:
        final = test(net, read(arguments.data / "wiki.test.tokens"))
        told = {"model": "gpt-tiny", "data": "wikitext-2", "method": arguments.method, "workers": ranks, "seed": arguments.seed}
        sums = {"bytes_sent": counted.bytes, "dense_bytes": dense, "steps": STEPS}
        print(json.dumps({**told, "final": {"loss": final, "metric": math.exp(final)}, **sums}))
    dist.barrier()


main()

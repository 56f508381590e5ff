"""One rank of `lab/language-torch`: what `lab/language` trains, under DDP, dense or by PowerSGD.

Comes in: a method, a rate, a seed, the text. Goes out, from rank 0: a JSON document like that of `redsync train --json`. What
must hold: model, text, rates, decay, clipping and test are those of `lab/language`; only the numbers that weights begin with and
the order of the windows are others.
"""

import argparse
import json
import math
import pathlib
import sys

import torch
import torch.distributed as dist
from rivals import Gpt, gpt_tiny, power_sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WINDOWS, WINDOW, STEPS = 4, 64, 6000
GROWS = 0.1
"""The part of the steps in which the rate grows; then it falls by a cosine to nothing."""
RANK, DENSE = 4, 10
"""Of PowerSGD, and the steps with which it begins dense."""


class Counted:
    """Counts the bytes that a rank gives to collectives."""

    def __init__(self) -> None:
        self.bytes = 0

    def bucket(self, bucket: dist.GradBucket, state: powerSGD_hook.PowerSGDState) -> None:
        if state.iter < state.start_powerSGD_iter:
            self.bytes += 4 * bucket.buffer().numel()
            return
        # As the hook has it: two factors of every matrix for which that is less, all others as they are.
        for gradient in bucket.gradients():
            rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
            factors = min(RANK, rows, columns) * (rows + columns)
            small = gradient.dim() > 1 and factors * state.min_compression_rate < gradient.numel()
            self.bytes += 4 * (factors if small else gradient.numel())


def rate(step: int, peak: float) -> float:
    grows = GROWS * STEPS
    if step < grows:
        return peak * (step + 1) / grows
    return peak * 0.5 * (1 + math.cos(math.pi * (step - grows) / (STEPS - grows)))


def read(path: pathlib.Path, limit: int | None = None) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()[:limit]), dtype=torch.uint8)


def windows(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.stack([text[place * WINDOW : (place + 1) * WINDOW + 1] for place in places.tolist()]).long()


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
    net, counted = gpt_tiny(), Counted()
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
        power_sgd(model, RANK, DENSE, counted.bucket)
    text = read(arguments.data / "wiki.train.tokens", WINDOWS * ranks * STEPS * WINDOW + 1)
    order = torch.randperm(WINDOWS * ranks * STEPS, generator=torch.Generator().manual_seed(arguments.seed))
    order = order.view(STEPS, ranks, WINDOWS)
    recent = 0.0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, arguments.lr)
        some = windows(text, order[step, rank])
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

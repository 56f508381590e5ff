"""One rank of `lab/wall-clock`: trains gpt-small by AdamW with one way to exchange, and keeps loss and time of every step.

Comes in: a method, a text, the process group's environment. Goes out, from rank 0: a JSON file. What must hold: all methods see
the same model, text, windows, rate and clipping; nothing but what the method sends crosses the network during the measured steps,
and bytes are those of the network device, headers of TCP included.
"""

import argparse
import itertools
import json
import pathlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, BYTES, BATCH, WINDOW = 384, 6, 6, 256, 2, 128
RATE, GROWS, CLIP = 1e-3, 40, 1.0
"""The rate grows for so many steps and then stays."""
METHODS = ("dense", "fp16", "powersgd-4", "redsync-1%", "redsync-0.1%", "average-8", "every-8")


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
    """10.8M parameters; the embedding of bytes is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.norm(self.blocks(self.bytes(x) + self.places.weight)) @ self.bytes.weight.T
        return nn.functional.cross_entropy(logits.view(-1, BYTES), y.reshape(-1))


def power_sgd(model: DistributedDataParallel) -> None:
    # The hook starts collectives from callbacks, whose order differs among ranks: over gloo every bucket needs its own group.
    states = {}

    def hook(_, bucket):
        index = bucket.index()
        if index not in states:
            states[index] = powerSGD_hook.PowerSGDState(dist.new_group(), matrix_approximation_rank=4, start_powerSGD_iter=10)
        if not bucket.is_last():  # the hook counts steps by last buckets, and a state of its own would never see one
            states[index].iter += 1
        return powerSGD_hook.powerSGD_hook(states[index], bucket)

    model.register_comm_hook(None, hook)


def prepare(method: str, net: Gpt, ramp: int):
    """The model as it is trained, its optimizer, and whether gradients are the averaged ones after the backward pass."""
    import redsync

    local = method.endswith("-8")
    model = net if local else DistributedDataParallel(net, init_sync=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    match method:
        case "dense":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        case "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "powersgd-4":
            power_sgd(model)
        case "average-8":
            redsync.attach(model, optimizer, every=8, method="sgd", deadline=600)
        case "every-8":
            redsync.attach(model, optimizer, every=8, deadline=600)
        case _:
            density = float(method.removeprefix("redsync-").removesuffix("%")) / 100
            redsync.attach(model, optimizer, density=density, warmup=("ramp", ramp), clip=CLIP, deadline=600)
    return model, optimizer, not method.startswith("redsync")


def sent() -> int:
    return int(pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ramp", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--link", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    model, optimizer, clips = prepare(arguments.method, Gpt(), arguments.ramp)
    text = torch.frombuffer(bytearray(arguments.text.read_bytes()), dtype=torch.uint8)
    # The same windows for every method; others for every rank.
    places = torch.Generator().manual_seed(1000 * arguments.seed + rank)
    seconds, losses, before = [], [], 0
    dist.barrier()
    before, begin = sent(), time.perf_counter()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / GROWS)
        starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=places).tolist()
        windows = torch.stack([text[at : at + WINDOW + 1] for at in starts]).long()
        optimizer.zero_grad()
        loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    traffic = sent() - before
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        steps = [later - earlier for earlier, later in itertools.pairwise([0.0, *seconds])]
        told = {name: getattr(arguments, name) for name in ("method", "link", "seed", "ramp")}
        rounded = {"seconds": [round(s, 4) for s in steps], "loss": [round(x, 4) for x in (mean / ranks).tolist()]}
        found = {**told, "hosts": ranks, "bytes": traffic, **rounded}
        arguments.out.write_text(json.dumps(found) + "\n")
    dist.barrier()


main()

"""One rank of `lab/peers`: trains a model under DDP with each communication hook in turn, and measures the steps.

Comes in: a model, hooks, the process group's environment. Goes out, from rank 0: a table and a JSON file. What must hold: all
hooks see the same model, data, optimizer and link; bytes are those of the network device, headers of TCP included.
"""

import argparse
import functools
import gc
import itertools
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from rivals import power_sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

BATCH = 8
SETTLE = 4
"""Steps before the measured ones: DDP builds its buckets anew, PowerSGD begins with dense steps."""
SECONDS = 15.0
"""About how long one hook is measured, if its steps are slow."""
SLOW_MS = 1500
"""Slower steps than this are measured in one round only. All ranks know the same mean, so they agree."""


def mlp() -> nn.Module:
    """15.0M parameters."""
    sizes = [3072, 2048, 2048, 2048, 128, 10]
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def vgg16() -> nn.Module:
    """VGG16 for images of 32 x 32, with normalization: 14.7M parameters."""
    layers, channels = [], 3
    for width in [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def nothing(_, bucket):
    """No communication at all: what a step costs by itself."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def top_k(model: DistributedDataParallel, density: float = 0.001) -> None:
    """The 0.1% largest of a residual, made of torch's own operations: indices and values in one allgather per bucket."""
    residuals = {}

    def hook(_, bucket):
        size, ranks = bucket.buffer().numel(), dist.get_world_size()
        key = (bucket.index(), size)
        residual = residuals.setdefault(key, torch.zeros(size))
        residual.add_(bucket.buffer(), alpha=1 / ranks)
        _, chosen = torch.topk(residual.abs(), max(1, int(size * density)), sorted=False)
        message = torch.cat([chosen.int(), residual[chosen].view(torch.int32)])
        residual[chosen] = 0
        gathered = [torch.empty_like(message) for _ in range(ranks)]

        def average(_):
            bucket.buffer().zero_()
            for each in gathered:
                indices, values = each.chunk(2)
                bucket.buffer().index_add_(0, indices.long(), values.view(torch.float32))
            return bucket.buffer()

        return dist.all_gather(gathered, message, async_op=True).get_future().then(average)

    model.register_comm_hook(None, hook)


def redsync_hook(model: DistributedDataParallel, optimizer: torch.optim.SGD) -> None:
    import redsync

    redsync.attach(model, optimizer, warmup=0)


def install(name: str, model: DistributedDataParallel, optimizer: torch.optim.SGD) -> None:
    ways = {
        "none": lambda: model.register_comm_hook(None, nothing),
        "dense": lambda: model.register_comm_hook(None, default_hooks.allreduce_hook),
        "fp16": lambda: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "powersgd-1": lambda: power_sgd(model, rank=1, dense=2),
        "powersgd-4": lambda: power_sgd(model, rank=4, dense=2),
        "topk": lambda: top_k(model),
        "redsync": lambda: redsync_hook(model, optimizer),
    }
    ways[name]()


def sent() -> int:
    return int(pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure(name: str, make, most: int) -> dict:
    torch.manual_seed(1)
    model = DistributedDataParallel(make(), init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    install(name, model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (BATCH,), generator=generator)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - begin)

    slow = [step() for _ in range(SETTLE)][-1]
    # As many steps as rank 0 says, since all have to take the same.
    count = torch.tensor([max(3, min(most, int(SECONDS * 1e3 / slow)))])
    dist.broadcast(count, 0)
    bytes_before, cpu_before = sent(), time.process_time()
    times = [step() for _ in range(int(count))]
    cpu, traffic = time.process_time() - cpu_before, sent() - bytes_before
    found = torch.tensor([statistics.median(times), traffic / len(times), 1e3 * cpu / len(times)], dtype=torch.float64)
    dist.all_reduce(found)
    step_ms, step_bytes, cpu_ms = (found / dist.get_world_size()).tolist()
    return {"steps": int(count), "step_ms": step_ms, "min_ms": min(times), "bytes": round(step_bytes), "cpu_ms": cpu_ms}


def together(name: str, rounds: list[dict]) -> dict:
    """One row from the rounds of a hook."""
    middle = {key: statistics.median(r[key] for r in rounds) for key in ("step_ms", "cpu_ms")}
    return {
        "hook": name,
        "steps": sum(r["steps"] for r in rounds),
        **middle,
        "min_ms": min(r["min_ms"] for r in rounds),
        "bytes": rounds[-1]["bytes"],
        "rounds_ms": [r["step_ms"] for r in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--rate", "--hooks", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    make = {"mlp": mlp, "vgg16": vgg16}[arguments.model]
    first = dist.get_rank() == 0
    show = functools.partial(print, file=sys.stderr, flush=True) if first else lambda *_: None
    parameters = sum(p.numel() for p in make().parameters())
    show(f"\n{arguments.model}, {parameters:,} parameters, {dist.get_world_size()} hosts, {arguments.rate}")
    measured: dict[str, list[dict]] = {name: [] for name in arguments.hooks.split()}
    for _ in range(arguments.rounds):
        for name, rounds in measured.items():
            # All hooks in turn, since the machine is not always equally fast. A slow one is bound by its link: once is enough.
            if rounds and rounds[0]["step_ms"] > SLOW_MS:
                continue
            dist.barrier()
            rounds.append(measure(name, make, arguments.steps))
            gc.collect()  # the model is in cycles with its hook
    rows = [together(name, rounds) for name, rounds in measured.items()]
    base = next((r["step_ms"] for r in rows if r["hook"] == "none"), float("nan"))
    show(f"{'hook':<12}{'step ms':>10}{'least':>10}{'x none':>8}{'KB sent':>12}{'CPU ms':>10}{'steps':>7}")
    for row in rows:
        show(
            f"{row['hook']:<12}{row['step_ms']:>10.1f}{row['min_ms']:>10.1f}{row['step_ms'] / base:>8.2f}"
            f"{row['bytes'] / 1e3:>12.1f}{row['cpu_ms']:>10.1f}{row['steps']:>7}"
        )
    if first:
        about = {"model": arguments.model, "parameters": parameters, "hosts": dist.get_world_size(), "rate": arguments.rate}
        pathlib.Path(arguments.out).write_text(json.dumps({**about, "batch": BATCH, "rows": rows}))
    dist.barrier()


main()

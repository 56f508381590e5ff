"""One rank of `lab/wall-clock`: trains gpt-small by AdamW with one way to exchange.

Comes in: a method, a text, the process group's environment. Goes out, from rank 0: a JSON file with time and bytes of every step,
and the loss on text that is held back. What must hold: all methods see the same model, text, windows, rate and clipping, and are
judged by the same windows; nothing but what the method sends crosses the network during the measured steps, and bytes are those of
the network device, headers of TCP included. Judging does not count as time.
"""

import argparse
import itertools
import json
import pathlib
import time

import torch
import torch.distributed as dist
from rivals import Gpt, gpt_small, power_sgd
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

BATCH, WINDOW = 2, 128
JUDGED_EVERY, JUDGED = 8, 8
"""Steps between two judgements, after which ranks have equal weights with every method, and windows of each rank in one."""
RATE, GROWS, CLIP = 1e-3, 40, 1.0
"""The rate grows for so many steps and then stays."""
METHODS = ("dense", "fp16", "powersgd-4", "redsync-1%", "redsync-0.1%", "average-8", "every-8")


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
            power_sgd(model, rank=4, dense=10)
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


def take(text: torch.Tensor, starts: list[int]) -> torch.Tensor:
    return torch.stack([text[at : at + WINDOW + 1] for at in starts]).long()


def judge(net: Gpt, windows: torch.Tensor) -> float:
    with torch.no_grad():
        return net(windows[:, :-1], windows[:, 1:]).item()


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
    net = gpt_small()
    model, optimizer, clips = prepare(arguments.method, net, arguments.ramp)
    text = torch.frombuffer(bytearray(arguments.text.read_bytes()), dtype=torch.uint8)
    text, held = text[: -len(text) // 100], text[-len(text) // 100 :]
    # The same windows for every number of ranks, divided among them.
    judged = torch.randint(len(held) - WINDOW - 1, (8, JUDGED), generator=torch.Generator().manual_seed(7))
    judged = take(held, judged[rank].tolist())
    # The same windows for every method; others for every rank.
    places = torch.Generator().manual_seed(1000 * arguments.seed + rank)
    seconds, losses, traffic, judging = [], [], [], 0.0
    dist.barrier()
    before, begin = sent(), time.perf_counter()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / GROWS)
        starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=places).tolist()
        windows = take(text, starts)
        optimizer.zero_grad()
        loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        seconds.append(time.perf_counter() - begin - judging)
        traffic.append(sent() - before)
        if (step + 1) % JUDGED_EVERY == 0:
            since = time.perf_counter()
            losses.append(judge(net, judged))
            judging += time.perf_counter() - since
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        steps = [later - earlier for earlier, later in itertools.pairwise([0.0, *seconds])]
        told = {name: getattr(arguments, name) for name in ("method", "link", "seed", "ramp")}
        rounded = {"seconds": [round(s, 4) for s in steps], "loss": [round(x, 4) for x in (mean / ranks).tolist()]}
        told["every"] = JUDGED_EVERY
        found = {**told, "hosts": ranks, "bytes": traffic, **rounded}
        arguments.out.write_text(json.dumps(found) + "\n")
    dist.barrier()


main()

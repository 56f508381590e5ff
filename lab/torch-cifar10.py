"""CIFAR-10 dense and compressed, for comparisons; `examples/cifar10.py` is the short program. Comes in: the binary version of
CIFAR-10 (data_batch_1.bin .. test_batch.bin). Goes out: a trained network, one line per epoch or one JSON document, and what all
steps sent.

    torchrun --nproc-per-node 2 lab/torch-cifar10.py --data DIRECTORY
    torchrun --nproc-per-node 2 lab/torch-cifar10.py --data DIRECTORY --method dense        # DDP as it is
    torchrun --nproc-per-node 2 lab/torch-cifar10.py --data DIRECTORY --checkpoints runs    # go on where it stopped

The only lines that are redsync's are `redsync.attach` and, for checkpoints, `state_dict` and `load_state_dict`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

import redsync
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def read(path: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as bytes, and labels."""
    data = path.read_bytes()
    if len(data) != 10_000 * 3073:
        raise SystemExit(f"{path} is not a batch of CIFAR-10's binary version")
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(10_000, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def as_input(images: torch.Tensor) -> torch.Tensor:
    return images.float().div_(127.5).sub_(1.0)


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Flipped at random, and cut at random out of the image with a margin of four."""
    count = len(images)
    flip = torch.rand(count, generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, count), generator=generator)
    rows, columns = top[:, None] + torch.arange(32), left[:, None] + torch.arange(32)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def slim_vgg() -> nn.Module:
    """Six convolutions and two dense layers, 2.9M parameters: what `redsync train` calls vgg-small."""
    layers, channels = [], 3
    for width, pool in ((16, True), (32, True), (64, False), (64, True), (128, False), (128, False)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if pool else []
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1280), nn.ReLU(inplace=True), nn.Linear(1280, 10))


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """In percent; every rank tests its share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model.eval()
    right = torch.zeros(1)
    with torch.inference_mode():
        for mine in torch.arange(rank, len(images), ranks).split(250):
            right += (model(as_input(images[mine])).argmax(1) == labels[mine]).sum()
    model.train()
    dist.all_reduce(right)
    return 100.0 * right.item() / len(images)


class Checkpoint:
    """The newest state of a run, one file per rank: written beside the old one, then put in its place."""

    def __init__(self, directory: pathlib.Path | None, parts: dict) -> None:
        self._path = directory / f"rank-{dist.get_rank()}.pt" if directory else None
        self._parts = parts

    def save(self, epoch: int) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in self._parts.items()}}, fresh)
        dist.barrier()  # all have written, or nobody puts the new one in its place
        os.replace(fresh, self._path)

    def load(self) -> int:
        """Returns the epoch to begin with. All ranks have to find the same one."""
        state = torch.load(self._path, weights_only=True) if self._path and self._path.exists() else {"epoch": 0}
        epochs = [None] * dist.get_world_size()
        dist.all_gather_object(epochs, state["epoch"])
        if len(set(epochs)) > 1:
            raise SystemExit(f"the checkpoints of the ranks are of different epochs: {epochs}")
        if state["epoch"]:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
        return state["epoch"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR-10 with compressed gradients; start it with torchrun")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="directory of CIFAR-10's binary version")
    parser.add_argument("--method", default="rgc+asq", help="rgc+asq, rgc, or dense for DDP without redsync")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--images", type=int, default=50_000, help="training images; fewer for a quick look")
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--warmup-epochs", type=float, default=5.0, help="epochs of a ramp of densities, at most 5/6 of all; 0 for none"
    )
    parser.add_argument("--lr-warmup-epochs", type=float, default=1.0, help="epochs of a growing rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--checkpoints", type=pathlib.Path)
    parser.add_argument("--json", action="store_true", help="one JSON document at the end; epochs go to standard error")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    batches = [read(chosen.data / f"data_batch_{number}.bin") for number in range(1, 6)]
    images, labels = (torch.cat(parts)[: chosen.images] for parts in zip(*batches))
    test_images, test_labels = read(chosen.data / "test_batch.bin")

    model = DistributedDataParallel(slim_vgg())
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = len(images) // (chosen.batch_size * ranks)
    ramp = round(min(chosen.warmup_epochs, chosen.epochs * 5 / 6) * steps)
    warm = max(1, round(chosen.lr_warmup_epochs * steps))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, chosen.epochs * steps - warm)),
        ],
        [warm],
    )
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    attachment = None
    if chosen.method != "dense":
        attachment = redsync.attach(model, optimizer, density=chosen.density, method=chosen.method, warmup=("ramp", ramp))
        parts["redsync"] = attachment
    checkpoint = Checkpoint(chosen.checkpoints, parts)

    history = []
    for epoch in range(checkpoint.load(), chosen.epochs):
        begin, total = time.perf_counter(), 0.0
        # The same order on every rank, of which each takes its part; a resumed run draws the same.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * chosen.seed + epoch))
        noise = torch.Generator().manual_seed(1_000_000 * chosen.seed + 1000 * epoch + rank)
        for mine in order[rank::ranks].split(chosen.batch_size)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(as_input(augment(images[mine], noise))), labels[mine])
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        checkpoint.save(epoch + 1)
        percent = accuracy(model.module, test_images, test_labels)
        history.append({"epoch": epoch + 1, "loss": total / steps, "accuracy": percent})
        if rank == 0:
            took, lines = time.perf_counter() - begin, sys.stderr if chosen.json else sys.stdout
            print(f"epoch {epoch + 1}: loss {total / steps:.4f}, accuracy {percent:.2f}%, {took:.0f} s", file=lines, flush=True)
            if attachment is not None and not chosen.json:
                print(f"  {attachment.stats()}", flush=True)
    report = {"method": chosen.method, "ranks": ranks, "seed": chosen.seed, "epochs": history}
    if attachment is not None:
        stats = attachment.stats()
        report |= {"bytes_sent": stats.total_bytes_sent, "dense_bytes": stats.total_dense_bytes}
        report["traffic"] = dataclasses.asdict(stats.traffic)
        report["replica_hash"] = f"{attachment.check_replicas():016x}"
    if rank == 0 and chosen.json:
        print(json.dumps(report))
    elif rank == 0 and attachment is not None:
        print(f"{stats.steps:,} steps: {stats.traffic}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

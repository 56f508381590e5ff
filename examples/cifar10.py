"""CIFAR-10 with PyTorch and compressed gradients, on some processes or machines.

    torchrun --nproc-per-node 2 examples/cifar10.py DIRECTORY                      # data_batch_1.bin .. 5, test_batch.bin
    torchrun --nproc-per-node 2 examples/cifar10.py DIRECTORY --method sgd         # the same, dense
    redsync report sgd.jsonl rgc+asq.jsonl                                         # both on one page

DIRECTORY has the binary version of CIFAR-10. Without redsync, the lines with `attachment` go, and nothing else changes.
"""

import argparse
import pathlib

import redsync
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", type=pathlib.Path, help="directory of CIFAR-10's binary version")
parser.add_argument("--method", default="rgc+asq", help="sgd: dense")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="images of each process in a step")
parser.add_argument("--metrics", type=pathlib.Path, help="where to log [default: METHOD.jsonl]")


def read(paths) -> tuple[torch.Tensor, torch.Tensor]:
    """Images from -1 to 1, and labels: a record is a label and 3 x 32 x 32 bytes."""
    records = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32) / 127.5 - 1, records[:, 0].long()


def network() -> nn.Module:
    """A slim VGG of 2.9 million parameters."""
    layers, channels = [], 3
    for width, pool in ((16, True), (32, True), (64, False), (64, True), (128, False), (128, False)):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1280), nn.ReLU(), nn.Linear(1280, 10))


def main() -> None:
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    images, labels = read([chosen.data / f"data_batch_{number}.bin" for number in range(1, 6)])
    test_images, test_labels = read([chosen.data / "test_batch.bin"])
    steps = chosen.epochs * (len(images) // (chosen.batch * ranks))

    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    log, ramp = chosen.metrics or f"{chosen.method}.jsonl", ("ramp", steps // 2)
    attachment = redsync.attach(model, optimizer, method=chosen.method, warmup=ramp, log=log)
    for epoch in range(chosen.epochs):
        order = torch.randperm(len(images))  # the same on every rank, which takes its part
        for mine in order[rank::ranks].split(chosen.batch)[: steps // chosen.epochs]:
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            schedule.step()
            attachment.log_loss(loss)
        model.eval()
        with torch.inference_mode():
            right = torch.cat([model.module(part).argmax(1) for part in test_images.split(500)]) == test_labels
        model.train()
        attachment.log_epoch(metric=right.float().mean().item())
        if rank == 0:
            print(f"epoch {epoch + 1}: {100 * right.float().mean():.2f}% right; {attachment.stats()}", flush=True)
    attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of `lab/torch-bytes`: attaches to three models with the defaults, but without a warm-up, and counts what steps send.

Comes in: the process group's environment. Goes out, from rank 0: a table. What must hold: gradients are those of a real backward
pass, on small inputs that are made up, since they decide how many bytes the indices take; every byte is counted, once by the
engine (frames with their headers), and once where the messages are handed to gloo (with what the communicator puts around them).
"""

from collections import OrderedDict

import redsync
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SETTLE, STEPS = 4, 10
"""Steps before the counted ones, and those. An even number, because signs alternate."""
TARGET = 200
"""At most this part of dense."""


def convolution(channels: int, width: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride, size // 2, groups=groups, bias=False)


class Inverted(nn.Module):
    """A block of MobileNetV2: wide inside, narrow at both ends, the middle by channel."""

    def __init__(self, channels: int, width: int, stride: int, factor: int) -> None:
        super().__init__()
        inner = channels * factor
        widen = [convolution(channels, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6()] if factor > 1 else []
        middle = [convolution(inner, inner, 3, stride, inner), nn.BatchNorm2d(inner), nn.ReLU6()]
        self.path = nn.Sequential(*widen, *middle, convolution(inner, width, 1), nn.BatchNorm2d(width))
        self.adds = stride == 1 and channels == width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.path(x) if self.adds else self.path(x)


def mobilenet_v2() -> nn.Module:
    """3,504,872 parameters, for 1000 classes."""
    layers: list[nn.Module] = [convolution(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU6()]
    channels = 32
    for factor, width, blocks, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(blocks):
            layers.append(Inverted(channels, width, stride if block == 0 else 1, factor))
            channels = width
    layers += [convolution(channels, 1280, 1), nn.BatchNorm2d(1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


class Growing(nn.Module):
    """A layer of DenseNet: 32 channels more, made of all before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = [nn.BatchNorm2d(channels), nn.ReLU(), convolution(channels, 128, 1)]
        self.path = nn.Sequential(*narrow, nn.BatchNorm2d(128), nn.ReLU(), convolution(128, 32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.path(x)], 1)


def densenet121() -> nn.Module:
    """7,978,856 parameters, for 1000 classes."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for blocks in (6, 12, 24, 16):
        if channels > 64:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), convolution(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        layers += [Growing(channels + 32 * block) for block in range(blocks)]
        channels += 32 * blocks
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Attention to what came before, then two dense layers, both added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.look, self.join = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.look(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(x)


class Gpt(nn.Module):
    """Six blocks of width 320 between a vocabulary of 8192 that serves both ends: 10.06M parameters."""

    def __init__(self, vocabulary: int = 8192, length: int = 128, width: int = 320, heads: int = 5, blocks: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.tokens.weight
        for weight in (self.tokens.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.out(self.norm(self.blocks(x)))


def image_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    images, labels = torch.randn(8, 3, 64, 64, generator=generator), torch.randint(0, 1000, (8,), generator=generator)
    return nn.functional.cross_entropy(model(images), labels)


def word_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(0, 8192, (2, 65), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Counting:
    """A process group that counts the bytes that leave this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.bytes = group, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def alltoall_base(self, into, out, *splits):
        self.bytes += out.nbytes
        return self._group.alltoall_base(into, out, *splits)

    def allreduce(self, tensors, *options):
        self.bytes += sum(tensor.nbytes for tensor in tensors)
        return self._group.allreduce(tensors, *options)


def count(make, loss) -> tuple[redsync.Stats, redsync.Traffic, float]:
    """What a step sends by the engine's count, in all and by part, and by gloo's, averages over the counted steps."""
    torch.manual_seed(1)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    groups, new_group = [], dist.new_group
    dist.new_group = lambda *a, **k: groups.append(Counting(new_group(*a, **k))) or groups[-1]
    try:
        attachment = redsync.attach(model, optimizer, warmup=0, deadline=600.0)
    finally:
        dist.new_group = new_group
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for number in range(SETTLE + STEPS):
        if number == SETTLE:
            before, handed = attachment.stats().traffic, groups[0].bytes
        optimizer.zero_grad()
        loss(model, generator).backward()
        optimizer.step()
    attachment.check_replicas()
    stats, sent = attachment.stats(), (groups[0].bytes - handed) / STEPS
    parts = ("messages", "rest", "headers", "warm_up", "dense")
    traffic = redsync.Traffic(**{part: (getattr(stats.traffic, part) - getattr(before, part)) // STEPS for part in parts})
    attachment.close()
    return stats, traffic, sent


def describe(stats: redsync.Stats) -> str:
    """Layers and their elements by how they are sent."""
    kinds: OrderedDict[str, list[int]] = OrderedDict()
    for layer in stats.layers:
        kinds.setdefault(layer.choice, []).append(layer.elements)
    return ", ".join(f"{choice}: {len(sizes)} tensors of {sum(sizes):,}" for choice, sizes in kinds.items())


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    if first:
        print(f"bytes that rank 0 of {dist.get_world_size()} sends at a step after the warm-up, mean of {STEPS} steps; defaults")
        print(f"redsync {redsync.__version__}, torch {torch.__version__}, gloo\n")
        print(f"{'model':<14}{'parameters':>11}{'dense':>12}{'sent':>8}{'ratio':>7}{'to gloo':>9}{'ratio':>7}", end="")
        print(f"{'messages':>10}{'rest':>8}{'headers':>9}")
    about = []
    models = (("MobileNetV2", mobilenet_v2, image_loss), ("DenseNet121", densenet121, image_loss), ("GPT", Gpt, word_loss))
    for name, make, loss in models:
        stats, traffic, handed = count(make, loss)
        parameters = sum(layer.elements for layer in stats.layers)
        if first:
            print(f"{name:<14}{parameters:>11,}{traffic.dense:>12,}{traffic.sent:>8,}", end="")
            print(f"{f'1/{traffic.ratio:.0f}':>7}{handed:>9,.0f}{f'1/{traffic.dense / handed:.0f}':>7}", end="")
            print(f"{traffic.messages:>10,}{traffic.rest:>8,}{traffic.headers:>9,}", flush=True)
        about.append(f"{name}: {'at most' if traffic.dense / handed >= TARGET else 'MORE than'} 1/{TARGET}; {describe(stats)}")
    if first:
        print("", *about, sep="\n")
    dist.barrier()
    dist.destroy_process_group()


main()

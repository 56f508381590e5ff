"""Small models and made-up data, the same on every run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def cnn() -> nn.Module:
    """Two convolutions, normalization, two dense layers; the two large ones are above 128 KB."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 256, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(4096, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def mlp() -> nn.Module:
    """Three dense layers, all of them above 128 KB."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))


def smooth() -> nn.Module:
    """As mlp, without kinks. Adam gives the first gradient that an element ever has a whole step, so a unit of ReLU that is on or
    off by a rounding makes all of the difference."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 128))


def ddp(model: nn.Module, bucket_cap_mb: float = 0.3, **options: object) -> DistributedDataParallel:
    """Wrapped, with several small buckets unless larger ones are asked for, so that there is an order to keep."""
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)


def batch(step: int, shape: tuple[int, ...], classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of this rank at a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(shape, generator=generator)
    return inputs, inputs.flatten(1)[:, :classes].argmax(1)  # something that can be learned


LOSSLESS = {"density": 1.0, "method": "rgc", "masking": False, "bf16": False, "rest": "f32", "warmup": 0, "dense_below": 0}
"""Settings with which nothing is left out or rounded: what DDP gives, by way of the compressor."""

IMAGES = (4, 3, 8, 8)
VECTORS = (8, 256)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, shape: tuple[int, ...], classes: int) -> float:
    """One step of training."""
    inputs, labels = batch(number, shape, classes)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]

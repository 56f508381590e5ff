"""What several programs of the lab train and compare under PyTorch: the transformer of `redsync train`, and PowerSGD over gloo."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

BYTES = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A language model of bytes; their embedding is the output layer, too. Gives the loss."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream is smaller the more often that happens.
                often = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / often)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.norm(self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]])) @ self.bytes.weight.T
        return nn.functional.cross_entropy(logits.view(-1, BYTES), y.reshape(-1))


def gpt_tiny() -> Gpt:
    return Gpt(width=128, layers=5, heads=4, context=128)


def gpt_small() -> Gpt:
    return Gpt(width=384, layers=6, heads=6, context=256)


def power_sgd(
    model: DistributedDataParallel,
    rank: int,
    dense: int,
    sends: Callable[[dist.GradBucket, powerSGD_hook.PowerSGDState], None] | None = None,
) -> None:
    """PowerSGD of a rank behind so many dense steps; `sends` hears of every bucket before it is sent."""
    # The hook starts collectives from callbacks, whose order differs among ranks: over gloo every bucket needs its own group.
    states = {}

    def hook(_, bucket):
        index = bucket.index()
        if index not in states:
            states[index] = powerSGD_hook.PowerSGDState(
                dist.new_group(), matrix_approximation_rank=rank, start_powerSGD_iter=dense
            )
        if sends is not None:
            sends(bucket, states[index])
        if not bucket.is_last():  # the hook counts steps by last buckets, and a state of its own would never see one
            states[index].iter += 1
        return powerSGD_hook.powerSGD_hook(states[index], bucket)

    model.register_comm_hook(None, hook)

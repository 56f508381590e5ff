"""A small language model of bytes with PyTorch, AdamW and compressed gradients, on some processes or machines.

    torchrun --nproc-per-node 2 examples/language.py                               # learns this repository's own documents
    torchrun --nproc-per-node 2 examples/language.py my-text.txt --steps 2000      # any file
    torchrun --nproc-per-node 2 examples/language.py --method sgd                  # the same, dense

AdamW needs more than SGD: by default 1% of the gradient is sent, in two bits per value, and some of its second moments.
"""

import argparse
import pathlib

import redsync
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

HERE = pathlib.Path(__file__).resolve().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", nargs="*", type=pathlib.Path, help="files to learn [default: the documents of this repository]")
parser.add_argument("--method", default="rgc+2bit", help="sgd sends everything")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--window", type=int, default=64, help="bytes that are seen at once")
parser.add_argument("--batch", type=int, default=16, help="windows of each process in a step")
parser.add_argument("--metrics", type=pathlib.Path, help="where to log [default: language-METHOD.jsonl]")


class Language(nn.Module):
    """Four transformer blocks over bytes; each position predicts the next byte."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(window, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.next = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.next(self.blocks(self.bytes(text) + self.places(places), mask=mask, is_causal=True))


def main() -> None:
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    files = chosen.text or sorted([*HERE.glob("*.md"), *HERE.glob("docs/*.md")])
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()

    model = DistributedDataParallel(Language(chosen.width, chosen.window))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = chosen.metrics or f"language-{chosen.method}.jsonl"
    attachment = redsync.attach(model, optimizer, method=chosen.method, warmup=("ramp", chosen.steps // 2), log=log)

    random = torch.Generator().manual_seed(rank)  # every rank reads other parts
    for step in range(1, chosen.steps + 1):
        begins = torch.randint(len(text) - chosen.window, (chosen.batch,), generator=random)
        windows = text[begins[:, None] + torch.arange(chosen.window + 1)]
        optimizer.zero_grad()
        loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        attachment.log_loss(loss)
        if rank == 0 and step % max(1, chosen.steps // 10) == 0:
            print(f"step {step}: loss {loss:.3f}; {attachment.stats().traffic}", flush=True)
    attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

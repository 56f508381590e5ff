"""Run by `test_kernels.py` in a process of its own, because Triton reads TRITON_INTERPRET once: the kernels in Triton's
interpreter against torch's operations, to the bit."""

from __future__ import annotations

import itertools
import warnings

import torch
from redsync.device.launch import Kernels
from redsync.device.operations import Digit, Operations, Pass, Sent

SIZES = (0, 1, 5, 1023, 1024, 1025, 5000)
PHASES = ("both", "positive", "negative")
kernels, operations = Kernels(), Operations()


def values(n: int, seed: int) -> torch.Tensor:
    """Ties, zeros of both signs, subnormals and large numbers among ordinary ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    x[::7] = x[::7].round()
    x[3::11] *= 1e-39
    x[5::13] = -0.0
    x[6::17] *= 1e30
    return x


def words(found: torch.Tensor) -> tuple[int, int, list[int]]:
    hits, bad = found[:1].view(torch.int32).tolist()
    return hits, bad, sorted(found[1 : 1 + min(hits, found.numel() - 1)].tolist())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_accumulate(n: int, form: str, dtype: torch.dtype, phase: str, bad: float | None = None) -> None:
    gradient = values(n, 1).clamp(-6e4, 6e4).to(dtype)
    if bad is not None:
        gradient[n // 2] = bad
    third, most, part, floor = (torch.tensor(number).item() for number in (1 / 3, 0.9, 0.7, 0.5))
    does = Pass("momentum" if form == "momentum" else "nesterov", most, third, part)
    results = []
    for passes in (kernels, operations):
        u, v = values(n, 2), values(n, 3)
        saved = (torch.zeros(n), torch.zeros(n)) if n % 2 else None
        # A view that starts anywhere, as in DDP's bucket.
        flat = torch.cat([torch.zeros(3, dtype=dtype), gradient])[3:]
        found = torch.full((n + 1,), -1)
        passes.accumulate(flat, None if form == "plain" else u, v, saved, does, phase, floor, found)
        assert saved is None or (same(saved[1], values(n, 3)) and (form == "plain" or same(saved[0], values(n, 2))))
        results.append((u, v, words(found)))
    (u, v, found), (u_2, v_2, found_2) = results
    assert same(u, u_2) and found == found_2, (n, form, dtype, phase, bad)
    # A NaN is a NaN: which one, an operation may choose.
    assert same(v.nan_to_num(1.5), v_2.nan_to_num(1.5)) and torch.equal(v.isnan(), v_2.isnan()), (n, form, dtype, phase, bad)
    assert bad is None or found[1] > 0


def check_room() -> None:
    """Where more is found than there is room for, the count goes on and what is there is of what was found."""
    v = values(5000, 4)
    for room in (0, 1, 100):
        found = torch.full((room + 1,), -1)
        kernels.compact(v, "both", 0.25, found)
        every = torch.full((5001,), -1)
        operations.compact(v, "both", 0.25, every)
        hits, _, some = words(found)
        assert hits == words(every)[0] and len(set(some)) == room and set(some) <= set(words(every)[2])


def check_passes(n: int, phase: str) -> None:
    v = values(n, 5)
    for floor in (0.0, 0.75, float("inf")):
        found, found_2 = torch.full((n + 1,), -1), torch.full((n + 1,), -1)
        kernels.compact(v, phase, floor, found)
        operations.compact(v, phase, floor, found_2)
        assert words(found) == words(found_2)
    prefix = int(operations.histogram(v, phase, Digit(20, 11, 0)).argmax())
    for digit in (Digit(20, 11, 0), Digit(9, 11, prefix), Digit(0, 9, prefix << 11)):
        bins, other = (passes.histogram(v, phase, digit) for passes in (operations, kernels))
        assert torch.equal(bins, other)
        for above, wanted in itertools.product((0, 3), (4, 5, 300, n + 4)):
            check_edge(bins, above, wanted)
    thresholds = torch.tensor([0.0, 0.25, 0.5, 1.0, 2.0])
    one, other = (passes.count_above(v, thresholds, phase) for passes in (kernels, operations))
    assert torch.equal(one, other)


def check_edge(bins: torch.Tensor, above: int, wanted: int) -> None:
    """By going through the bins from the highest on."""
    count, before, at = above, above, bins.numel()
    for many in reversed(bins.tolist()):
        if count >= wanted:
            break
        at, before, count = at - 1, count, count + many
    for passes in (operations, kernels):
        assert passes.edge(bins, above, wanted).tolist() == [at, before, count]


def check_statistics(n: int, phase: str) -> None:
    v = values(n, 6)
    for one, other in zip(kernels.statistics(v, phase), operations.statistics(v, phase)):
        assert same(one, other)


def check_elements(n: int, clear: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    indices = torch.randperm(n, generator=generator)[: n // 3].to(torch.int32)
    results = []
    for passes in (kernels, operations):
        u, v = values(n, 9), values(n, 10)
        passes.put(u if clear else None, v, indices, values(indices.numel(), 8))
        passes.add(v, indices, values(indices.numel(), 11))
        results.append((u, v))
    assert all(same(one, other) for one, other in zip(*results))


def check_take_out(n: int, phase: str, how: str) -> None:
    """With the least in the middle of a tie, of which the smaller indices are taken."""
    before = values(n, 10)
    before[1] = torch.finfo(torch.float32).max  # would be rounded to infinity
    found = torch.full((n + 1,), -1)
    operations.compact(before, phase, 0.25, found)
    many = words(found)[0]
    tied = (before.abs() == 1.0).nonzero().view(-1).tolist()
    sent = Sent(torch.tensor(1.0).view(torch.int32).item(), tied[len(tied) // 2], how, torch.tensor(0.3).item())
    which = torch.randint(200, (many,), generator=torch.Generator().manual_seed(7)).to(torch.uint8)
    listed = (values(200, 12), which) if how == "listed" else None
    results = []
    for passes in (kernels, operations):
        u, v = values(n, 9), before.clone()
        passes.take_out(u if n % 2 else None, v, found, many, sent, listed)
        results.append((u, v))
    assert all(same(one, other) for one, other in zip(*results))
    (u, v), _ = results
    assert v.isfinite().all() and not same(v, before)


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of sums that overflow on purpose
    forms, types = ("plain", "momentum", "nesterov"), (torch.float32, torch.float16, torch.bfloat16)
    for n, form, dtype in itertools.product((5, 1025, 5000), forms, types):
        check_accumulate(n, form, dtype, PHASES[n % 3])
    for n, phase in itertools.product(SIZES, PHASES):
        check_accumulate(n, "nesterov", torch.float32, phase)
        check_passes(n, phase)
    for bad in (float("nan"), float("inf"), -float("inf")):
        check_accumulate(1500, "momentum", torch.float32, "both", bad)
    check_statistics(40_000, "negative")
    for n, clear in ((3, True), (700, False), (701, True)):
        check_elements(n, clear)
    for phase, how in itertools.product(PHASES, ("whole", "same", "rounded", "listed")):
        check_take_out(1500 + (how == "listed"), phase, how)
    check_room()


if __name__ == "__main__":
    main()

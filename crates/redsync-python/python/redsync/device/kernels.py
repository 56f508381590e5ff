"""The passes over a layer, as Triton kernels for CUDA and ROCm.

Comes in: memory of a GPU. Goes out: the next u and v, and of them what the host asks for. What must hold: the bits are those of
the host's loops, so nothing is fused that the host rounds twice (`UNFUSED` goes with every launch); a block that is full is loaded
and stored without a mask, because with one no vector instructions are made.

What is found is one word of 64 bits per element: the bits of its value above, its index below; in no order.
"""

# Triton has no types of its own, and reads the source of what is marked.
# mypy: ignore-errors

import triton
import triton.language as tl

UNFUSED = {"enable_fp_fusion": False}
"""Launch option: a product is rounded before it is added, as on the host."""

PLAIN, MOMENTUM, NESTEROV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
WHOLE, SAME, ROUNDED, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CHUNK, LANES = tl.constexpr(32768), tl.constexpr(8)
"""In which order the host sums up: a chunk at a time, its elements dealt out to lanes."""


@triton.jit
def _load(at, i, n, FULL: tl.constexpr):
    if FULL:
        x = tl.load(at + i)
    else:
        x = tl.load(at + i, mask=i < n, other=0)
    return x


@triton.jit
def _store(at, i, n, x, FULL: tl.constexpr):
    if FULL:
        tl.store(at + i, x)
    else:
        tl.store(at + i, x, mask=i < n)


@triton.jit
def _see(x, keep, flip):
    """The size of x as a phase sees it; at most zero when it does not compete."""
    return ((x.to(tl.int32, bitcast=True) & keep) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def _emit(found, x, i, hit, bad, capacity):
    """Appends what was hit, up to a capacity. The first word counts, beyond it too: hits below, what is not finite above."""
    both = tl.sum(hit.to(tl.int32) + (bad.to(tl.int32) << 16), 0)
    if both > 0:
        counts = found.to(tl.pointer_type(tl.int32))
        first = tl.atomic_add(counts, both & 0xFFFF, sem="relaxed")
        tl.atomic_add(counts + 1, both >> 16, sem="relaxed")
        slot = first + tl.cumsum(hit.to(tl.int32), 0) - 1
        word = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | i.to(tl.int64)
        tl.store(found + 1 + slot, word, mask=hit & (slot < capacity))


@triton.jit
def _advance(
    g, u, v, saved_u, saved_v, i, n, m, scale, carry,
    FORM: tl.constexpr, HALVES: tl.constexpr, SAVE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The rule of the residual for a block; the next v."""
    gg = _load(g, i, n, FULL)
    if HALVES:  # bfloat16, whose bits are the upper ones of a float
        gg = (gg.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    gg = gg.to(tl.float32) * scale
    old = _load(v, i, n, FULL)
    if SAVE:
        _store(saved_v, i, n, old, FULL)
    old = old * carry
    if FORM == PLAIN:
        new = old + gg
    else:
        uu = _load(u, i, n, FULL)
        if SAVE:
            _store(saved_u, i, n, uu, FULL)
        if FORM == MOMENTUM:
            uu = m * uu + gg
            new = old + uu
        else:
            uu = m * (uu + gg)
            new = old + (uu + gg)
        _store(u, i, n, uu, FULL)
    _store(v, i, n, new, FULL)
    return new


@triton.jit(do_not_specialize=["n", "keep", "flip", "capacity"])
def accumulate(
    g, u, v, saved_u, saved_v, found,
    n: tl.int32, m: tl.float32, scale: tl.float32, carry: tl.float32, keep: tl.int32, flip: tl.int32, floor: tl.float32,
    capacity: tl.int32, FORM: tl.constexpr, HALVES: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u and v of the next step, and what of v is greater than the floor."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= n:
        x = _advance(g, u, v, saved_u, saved_v, i, n, m, scale, carry, FORM, HALVES, SAVE, True)
    else:
        x = _advance(g, u, v, saved_u, saved_v, i, n, m, scale, carry, FORM, HALVES, SAVE, False)
    hit = (_see(x, keep, flip) > floor) & (i < n)
    _emit(found, x, i, hit, ~(tl.abs(x) < float("inf")) & (i < n), capacity)


@triton.jit(do_not_specialize=["n", "keep", "flip", "capacity"])
def compact(
    v, found, n: tl.int32, keep: tl.int32, flip: tl.int32, floor: tl.float32, capacity: tl.int32, BLOCK: tl.constexpr
):  # fmt: skip
    """What of v is greater than the floor: the paper's stream compaction."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= n:
        x = _load(v, i, n, True)
    else:
        x = _load(v, i, n, False)
    hit = (_see(x, keep, flip) > floor) & (i < n)
    _emit(found, x, i, hit, hit & False, capacity)


@triton.jit(do_not_specialize=["n", "keep", "flip", "prefix", "shift", "width"])
def histogram(
    v, bins, n: tl.int32, keep: tl.int32, flip: tl.int32, prefix: tl.int32, shift: tl.int32, width: tl.int32,
    BLOCK: tl.constexpr, TURNS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """How many elements that compete have which `width` bits from `shift` on, among those whose higher bits are the prefix."""
    counts = tl.zeros([BINS], tl.int32)
    for turn in range(TURNS):
        block = tl.program_id(0) * TURNS + turn
        i = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= n:
            x = _load(v, i, n, True)
        else:
            x = _load(v, i, n, False)
        bits = _see(x, keep, flip).to(tl.int32, bitcast=True)
        inside = (bits > 0) & ((bits >> shift) >> width == prefix)  # a number that is not positive does not compete
        counts += tl.histogram((bits >> shift) & ((1 << width) - 1), BINS, mask=inside)
    at = tl.arange(0, BINS)
    tl.atomic_add(bins + at, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["above", "wanted"])
def edge(bins, where, above: tl.int32, wanted: tl.int32, BINS: tl.constexpr):
    """The highest bin with which there are as many as wanted, or the lowest; how many are above it, and with it. One program."""
    at = tl.arange(0, BINS)
    counts = tl.load(bins + at)
    sums = above + tl.cumsum(counts, 0, reverse=True)
    bin = tl.max(tl.where(sums >= wanted, at, 0), 0)
    own = tl.sum(tl.where(at == bin, counts, 0), 0)
    count = tl.sum(tl.where(at == bin, sums, 0), 0)
    tl.store(where, bin)
    tl.store(where + 1, count - own)
    tl.store(where + 2, count)


@triton.jit(do_not_specialize=["n", "keep", "flip"])
def count_above(
    v, thresholds, counts, n: tl.int32, keep: tl.int32, flip: tl.int32, MANY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many elements are greater than each of several thresholds, in one pass."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= n:
        seen = _see(_load(v, i, n, True), keep, flip)
    else:
        seen = _see(_load(v, i, n, False), keep, flip)
    for which in tl.static_range(MANY):
        above = (seen > tl.load(thresholds + which)) & (i < n)
        tl.atomic_add(counts + which, tl.sum(above.to(tl.int32), 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "keep", "flip"])
def statistics(
    v, sums, tops, counts, n: tl.int32, keep: tl.int32, flip: tl.int32, CHUNKS: tl.constexpr
):  # fmt: skip
    """Sum, maximum and number of what competes, for each lane of each chunk: the paper's mean and maximum."""
    lane = tl.arange(0, CHUNKS * LANES)
    begin = (tl.program_id(0) * CHUNKS + lane // LANES) * CHUNK + lane % LANES
    total = tl.zeros([CHUNKS * LANES], tl.float32)
    top = tl.zeros([CHUNKS * LANES], tl.float32)
    count = tl.zeros([CHUNKS * LANES], tl.int32)
    for turn in range(CHUNK // LANES):
        i = begin + turn * LANES
        seen = _see(tl.load(v + i, mask=i < n, other=0.0), keep, flip)
        seen = tl.where(seen > 0, seen, 0.0)
        total += seen
        top = tl.where(seen > top, seen, top)
        count += (seen > 0).to(tl.int32)
    at = tl.program_id(0) * CHUNKS * LANES + lane
    within = begin - lane % LANES < n
    tl.store(sums + at, total, mask=within)
    tl.store(tops + at, top, mask=within)
    tl.store(counts + at, count, mask=within)


@triton.jit(do_not_specialize=["many", "least", "last"])
def take_out(
    u, v, found, values, which, many: tl.int32, least: tl.int32, last: tl.int32, same: tl.float32,
    HOW: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of what was found, takes out what has a larger magnitude than `least`, or the same at an index that is not beyond `last`.
    v minus what was sent stays."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(found + 1 + j, mask=j < many, other=0)
    bits, i = (word >> 32).to(tl.int32), (word & 0xFFFFFFFF).to(tl.int32)
    size = bits & 0x7FFFFFFF
    taken = ((size > least) | ((size == least) & (i <= last))) & (j < many)
    value = bits.to(tl.float32, bitcast=True)
    if HOW == WHOLE:
        rest = tl.zeros([BLOCK], tl.float32)
    elif HOW == SAME:
        rest = value - same
    elif HOW == ROUNDED:  # with integers, because Triton's interpreter rounds otherwise
        near = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) & -0x10000, 0x7F7F0000)
        rest = value - (near | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        rest = value - tl.load(values + tl.load(which + j, mask=j < many, other=0).to(tl.int32))
    tl.store(v + i, rest, mask=taken)
    if CLEAR:
        tl.store(u + i, tl.zeros([BLOCK], tl.float32), mask=taken)


@triton.jit(do_not_specialize=["many"])
def put(u, v, indices, values, many: tl.int32, CLEAR: tl.constexpr, BLOCK: tl.constexpr):
    """Replaces elements of v, each index once, and clears u there if asked to."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(indices + j, mask=j < many, other=0)
    tl.store(v + i, tl.load(values + j, mask=j < many, other=0.0), mask=j < many)
    if CLEAR:
        tl.store(u + i, tl.zeros([BLOCK], tl.float32), mask=j < many)


@triton.jit(do_not_specialize=["many"])
def add(v, indices, values, many: tl.int32, BLOCK: tl.constexpr):
    """Adds to elements of v, each index once."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(indices + j, mask=j < many, other=0)
    x = tl.load(v + i, mask=j < many, other=0.0) + tl.load(values + j, mask=j < many, other=0.0)
    tl.store(v + i, x, mask=j < many)

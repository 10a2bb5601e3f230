"""What the kernels of a layer should answer, in float64 and one query at a time, and inputs to ask them with."""

import random
from typing import Any

import torch
from torch import Tensor

# Of the largest answer. Triton's interpreter cuts bfloat16 off where a GPU rounds to the nearest.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2.0**-6}


def attention(q, k: Any, v: Any, slots, positions, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Output in float64 and the slots afterwards, by the words of `block_attention`."""
    batch, width = positions.shape
    rows, heads = q.shape[1], q.shape[2]
    share = len(q) // batch
    columns = slots[0].shape[1]
    kv_heads = slots[0].shape[2]
    scale = q.shape[3] ** -0.5 if options.get("scale") is None else options["scale"]
    out = torch.zeros(q.shape, dtype=torch.float64)
    after = [s.clone() for s in slots]
    for n in range(len(q)):
        b = n // share
        begin = 0 if (low := options.get("begin")) is None else int(low[b])
        limit = columns - 1 if (high := options.get("limit")) is None else int(high[b])
        own = [int(p) for p in positions[b]]
        for r in range(rows):
            at = own[r % width]
            if at == columns - 1:
                continue

            def sees(column: int, at: int = at, r: int = r, b: int = b, begin: int = begin, limit: int = limit) -> bool:
                if not begin <= column < min(limit, columns - 1):
                    return False
                grid = options.get("grid")
                if grid is not None and (column - begin) // grid > max(at - begin, 0) // grid:
                    return False
                mask = options.get("mask")
                return mask is None or bool(mask.expand(batch, width, columns)[b, r % width, column])

            keys, values = [], []
            for column in range(columns) if options.get("stored", True) else ():
                if sees(column) and (k is None or column not in own):
                    keys.append(slots[0][b, column])
                    values.append(slots[1][b, column])
            if k is not None:
                tree = options.get("tree")
                own_tree = None if tree is None else tree.expand(batch, rows, rows)[b, r]
                for j in range(rows):
                    if sees(own[j % width]) and (own_tree is None or own_tree[j]):
                        keys.append(k[n, j])
                        values.append(v[n, j])
            if keys:
                key, value = (torch.stack(x).double().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
                scores = torch.einsum("hd,shd->hs", q[n, r].double(), key) * scale
                out[n, r] = torch.einsum("hs,shd->hd", scores.softmax(-1), value)
        if k is not None and n % share == 0:
            for j, column in enumerate(own):
                if column < columns - 1:
                    after[0][b, column], after[1][b, column] = k[n, j].to(after[0].dtype), v[n, j].to(after[1].dtype)
    return out, after


def case(
    seed,
    dtype=torch.float32,
    *,
    batch=2,
    width=3,
    heads=4,
    kv_heads=2,
    size=16,
    length=20,
    share=1,
    copies=1,
    **fixed: Any,
):
    """Arguments of one call: ragged ranges, fillers, and no number in any slot that no query may see."""
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(dtype)

    rows, kv_rows = batch * share, width * copies
    q, k, v = (normal(rows, kv_rows, h, size) for h in (heads, kv_heads, kv_heads))
    slots = [normal(batch, length + 1, kv_heads, size) for _ in range(2)]
    begin = torch.tensor([draw.randrange(length // 3 + 1) for _ in range(batch)])
    limit = torch.tensor([draw.randrange(int(low) + 1, length + 1) for low in begin])
    positions = torch.full((batch, width), length)
    for b in range(batch):
        free = range(int(begin[b]), int(limit[b]))
        own = sorted(draw.sample(free, min(len(free), draw.randrange(width + 1))))
        positions[b, : len(own)] = torch.tensor(own, dtype=torch.long)
        for s in slots:
            s[b, : begin[b]] = s[b, limit[b] :] = torch.nan
            if fixed.get("fresh", True):
                s[b, own] = torch.nan
    fixed.pop("fresh", None)
    options = {"begin": begin, "limit": limit, **fixed}
    given: Any = (q, k, v, tuple(slots), positions)
    return given, options

"""What the kernels of a layer should answer, in float64 and one query at a time, and inputs to ask them with."""

import random
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

# Of the largest answer. Triton's interpreter cuts bfloat16 off where a GPU rounds to the nearest.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2.0**-6}


def attention(q, k: Any, v: Any, slots: Any, bounds, columns, **options: Any) -> Tensor:
    """Output in float64, by the words of `packed_attention`."""
    heads, size = q.shape[1:]
    at, until = columns.tolist(), None if (given := options.get("until")) is None else given.tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, (first, after) in enumerate(pairwise(bounds.tolist())):
        end = 10**6 if (given := options.get("end")) is None else int(given[b])
        end = end if slots is None else min(end, slots[0].shape[1] - 1)
        hidden = [] if (over := options.get("unread")) is None else over[b].nonzero().flatten().tolist()
        drafts = None if (own := options.get("segment")) is None else own.tolist()
        for t in range(first, after):
            past = end if until is None else min(end, until[t])
            old: list[int] = []
            if slots is not None:
                old = [column for column in range(past) if column not in hidden]
            new = [j for j in range(first, after) if at[j] < past] if k is not None else []
            new = [j for j in new if drafts is None or drafts[j] == drafts[t]]
            if old or new:
                parts = [(slots[0][b, old], slots[1][b, old])] if slots is not None and old else []
                parts += [(k[new], v[new])] if k is not None and new else []
                key, value = (torch.cat(x).double() for x in zip(*parts, strict=True))
                key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
                scores = torch.einsum("hd,shd->hs", q[t].double(), key) * size**-0.5
                out[t] = torch.einsum("hs,shd->hd", scores.softmax(-1), value)
    return out


def pack(
    seed,
    dtype=torch.float32,
    *,
    counts=(3, 0, 5),
    fillers=2,
    candidates=1,
    heads=4,
    kv_heads=2,
    size=16,
    length=20,
    keys="stored",
    grid: int | None = None,
    **fixed: Any,
):
    """Arguments of one call, and NaN wherever no kernel may look: unseen slots, the rows of fillers.

    counts: columns computed in each row, by each of its `candidates`
    keys: "stored" ones; "fresh" ones; "both", the fresh ones in place of the stored ones of their columns
    grid: length of the blocks of block-causal attention; None: no blocks
    """
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(dtype)

    batch, entries = len(counts), sum(counts) * candidates + fillers
    q, k, v = (normal(entries, h, size) for h in (heads, kv_heads, kv_heads))
    slots = [normal(batch, length + 1, kv_heads, size) for _ in range(2)]
    end, columns, segment = [], [], []
    unread = torch.zeros(batch, length + 1, dtype=torch.bool)
    for b, count in enumerate(counts):
        end.append(draw.randrange(max(count, 1), length + 1))
        own = sorted(draw.sample(range(end[b]), count))
        hidden = draw.sample(range(end[b]), end[b] // 4)
        unread[b, own if keys == "both" else []] = True
        unread[b, hidden] = True
        columns += own * candidates
        segment += [candidate for candidate in range(candidates) for _ in own]
        for s in slots:
            s[b, end[b] :] = torch.nan
            s[b, unread[b]] = torch.nan
            if not count:
                s[b] = torch.nan
    bounds = torch.tensor([0, *accumulate(count * candidates for count in counts)])
    for x in (q, k, v):
        x[entries - fillers :] = torch.nan
    options: dict[str, Any] = {"end": torch.tensor(end)}
    options |= {"segment": torch.tensor(segment + [0] * fillers)} if candidates > 1 else {}
    if grid is not None:
        ends = [end[b] for b, count in enumerate(counts) for _ in range(count * candidates)] + [length] * fillers
        past = [(column // grid + 1) * grid for column in columns + [length] * fillers]
        options["until"] = torch.tensor([min(pair) for pair in zip(past, ends, strict=True)])
    options |= {} if keys == "fresh" else {"unread": unread}
    fresh = (None, None) if keys == "stored" else (k, v)
    given: Any = (
        q,
        *fresh,
        None if keys == "fresh" else tuple(slots),
        bounds,
        torch.tensor(columns + [length] * fillers),
    )
    return given, options | fixed

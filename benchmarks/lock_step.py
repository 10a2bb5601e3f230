"""The batch loop that packed batches are measured against: rows of a rectangle that wait for one another.

Our own code, in the manner of Fast-dLLM's batch code (arXiv 2505.22618). Prompts are padded on the left to one length,
so that blocks lie at the same columns in every row. Every forward computes the same columns of every row, also of those
whose block is full, and the head answers for all of them. The next block begins when no row has a mask left in this
one.

The rule is that of `scheduler=threshold` with `cache` none, prefix or dual and `stop=none`: a row that waits does not
change, the forward that opens the next block refreshes what it stored, padding is never seen and rotary positions count
from the row's first token. So each row gets the tokens that our sampler gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from dllm_sampler.models.transformer import Layer, Transformer

CACHES = ("none", "prefix", "dual")


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    block: int,
    threshold: float,
    mask_id: int,
    cache: str,
) -> Tensor:
    """Answers `[B, new_tokens]` to prompts of any lengths; `cache` is one of `CACHES`."""
    origin = max(len(row) for row in prompts)
    begin = torch.tensor([origin - len(row) for row in prompts])
    ids = torch.tensor([[mask_id] * (origin - len(row)) + [*row] + [mask_id] * new_tokens for row in prompts])  # [B, L]
    columns = torch.arange(ids.shape[1])
    positions = columns - begin[:, None]  # [B, L]
    mask = (positions >= 0)[:, None, None] if bool(begin.any()) else None  # [B, 1, 1, L] all keys but the padding
    for start in range(origin, len(columns), block):
        stop = min(start + block, len(columns))
        stored: list[tuple[Tensor, Tensor]] = []
        while bool((ids[:, start:stop] == mask_id).any()):  # every row waits for the slowest, and the host for them all
            end = stop if stored and cache == "dual" else len(columns)
            window = slice(start if stored else 0, end)
            logits = forward(model, ids[:, window], positions[:, window], stored, window, mask)
            if cache == "none":
                stored.clear()
            inside = (columns[window] >= start) & (columns[window] < stop)
            commit(ids[:, window], logits, inside, threshold, mask_id)
    return ids[:, origin:]


def forward(
    model: Transformer,
    ids: Tensor,
    positions: Tensor,
    stored: list[tuple[Tensor, Tensor]],
    window: slice,
    mask: Tensor | None,
) -> Tensor:
    """Logits `[B, M, V]` of `ids [B, M]`, the columns `window`, all of them where nothing is `stored` yet.

    Their keys and values replace those stored for these columns; every stored one that the mask shows is attended to.
    """
    hidden = model.embed(ids)  # [B, M, D]
    rope = model.rope(positions, hidden.dtype)
    for index, layer in enumerate(cast(Iterable[Layer], model.layers)):
        q, k, v = layer.qkv(hidden, rope)  # [B, H, M, Dh]
        if len(stored) == index:
            stored.append((k, v))
        else:
            keys, values = stored[index]  # [B, Hkv, L, Dh]
            keys[:, :, window], values[:, :, window] = k, v
        hidden = hidden + layer.attend(q, *stored[index], mask)
        hidden = hidden + layer.mlp(hidden)
    return model.head(model.norm(hidden))


def commit(ids: Tensor, logits: Tensor, inside: Tensor, threshold: float, mask_id: int) -> None:
    """Write into `ids [B, M]` every mask of the block `inside [M]` that is sure enough, and the surest one of a row."""
    masked = (ids == mask_id) & inside
    logits[..., mask_id] = -torch.inf  # [B, M, V]
    tokens = logits.argmax(-1)
    sure = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
    sure = sure.where(masked, -torch.inf)
    surest = torch.zeros_like(masked).scatter_(1, sure.argmax(1, keepdim=True), True)
    ids.copy_(tokens.where(masked & ((sure >= threshold) | surest), ids))

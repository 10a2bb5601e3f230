"""The plain sampler that speed-ups are measured against: a loop written the way published ones are.

Our own code, not anybody's; it keeps what makes such loops slow and nothing else. Every forward answers for each
computed row with the whole vocabulary; probabilities are a softmax over all of them, in the dtype of the logits as
LLaDA's code has it today (its first versions, and Fast-dLLM, take float64, which is slower); positions are chosen
in a Python loop over the batch, whose counts are read from the device. The body is the very `Transformer` that our
sampler runs, with the same fused attention, and the dual cache writes keys and values in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_sampler.models.transformer import Layer, Rope, Transformer


@torch.no_grad()
def generate(
    model: Transformer, prompts: Tensor, new_tokens: int, block: int, steps: int, mask_id: int, dual: bool
) -> tuple[Tensor, int]:
    """Answers `[B, new_tokens]` to `prompts [B, P]`, and the number of forwards; `steps` for the whole generation."""
    noise = prompts.new_full((prompts.shape[0], new_tokens), mask_id)
    ids, begin = torch.cat((prompts, noise), 1), prompts.shape[1]
    blocks, forwards = new_tokens // block, 0
    for index in range(blocks):
        start, stop = begin + index * block, begin + (index + 1) * block
        counts = transfer_counts(ids[:, start:stop] == mask_id, steps // blocks)  # [B, steps // blocks]
        cache: list[tuple[Tensor, Tensor]] | None = None
        for step in range(steps // blocks):
            if dual and cache is not None:
                window = slice(start, stop)
                logits = cached(model, ids[:, window], cache, window)
            elif dual:
                window, cache = slice(0, ids.shape[1]), []
                logits = cached(model, ids, cache, window)
            else:
                window = slice(0, ids.shape[1])
                logits = model(ids)  # [B, M, V]
            forwards += 1
            seen = ids[:, window]
            chosen, tokens = transfer(logits, seen == mask_id, counts[:, step], stop - window.start, mask_id)
            ids[:, window] = torch.where(chosen, tokens, seen)
            if (ids[:, start:stop] == mask_id).sum() == 0:  # a host sync in every step
                break
    return ids[:, begin:], forwards


def transfer_counts(masked: Tensor, steps: int) -> Tensor:
    """`[B, steps]` how many of the masks `[B, block]` each step commits: an even share, the first steps one more."""
    total = masked.sum(1, keepdim=True)
    counts = (total // steps).repeat(1, steps)
    for row in range(masked.shape[0]):
        counts[row, : total[row] % steps] += 1
    return counts


def transfer(logits: Tensor, masked: Tensor, counts: Tensor, limit: int, mask_id: int) -> tuple[Tensor, Tensor]:
    """`[B, M] bool` the positions to commit, the surest masks before `limit`, and the tokens to write there."""
    logits[..., mask_id] = -torch.inf
    tokens = logits.argmax(-1)  # [B, M]
    probability = logits.softmax(-1)
    sure = probability.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    sure[:, limit:] = -torch.inf
    sure = torch.where(masked, sure, -torch.inf)
    chosen = torch.zeros_like(masked)
    for row in range(masked.shape[0]):
        best = torch.topk(sure[row], k=int(counts[row])).indices
        chosen[row, best] = True
    return chosen, tokens


def cached(model: Transformer, ids: Tensor, cache: list[tuple[Tensor, Tensor]], window: slice) -> Tensor:
    """Logits `[B, M, V]` of the columns `window`, which an empty `cache` of keys and values must cover all of.

    Later calls replace the window's keys and values and attend to every stored one.
    """

    def drive(index: int, layer: Layer, hidden: Tensor, rope: Rope, rows: Tensor | None) -> Tensor:
        q, k, v = layer.qkv(hidden, rope)  # [B, H, M, Dh]
        if len(cache) == index:
            cache.append((k, v))
        else:
            keys, values = cache[index]
            keys[:, :, window], values[:, :, window] = k, v
        hidden = hidden + layer.attend(q, *cache[index])
        return hidden + layer.mlp(hidden)

    positions = torch.arange(window.start, window.stop, device=ids.device)[None]
    return model.head(model(ids, positions=positions, drive=drive))

"""Soft inputs: mixtures of embeddings in place of those of tokens (`Query.mixture`)."""

from functools import partial

import torch
from torch import Tensor, nn

from dllm_sampler.core.packing import Pack
from dllm_sampler.core.values import Canvas, Mixture, Query
from dllm_sampler.models.transformer import Inputs

TINY = 1e-6  # added to the norm of a mixture before its division


def soft_inputs(pack: Pack, canvas: Canvas, query: Query, mask_id: int | None) -> Inputs | None:
    """Return a function that mixes the inputs of a pack, or None if all inputs are tokens."""
    if query.mixture is None:
        return None
    assert mask_id is not None  # schedulers with `SoftInputs` are refused without one
    return partial(mixed, query.mixture, pack.mixed(canvas, query), mask_id)


def mixed(mixture: Mixture, places: Tensor, mask_id: int, hidden: Tensor, embed: nn.Module) -> Tensor:
    """Return the inputs `[1, T, D]` of a pack with its mixtures.

    It calls `embed` once for each token of a mixture, and does not read its weight. So the table may be sharded,
    quantised or adapted.

    Args:
        places: `[T]` index of each entry's mixture, see `Pack.mixed`.
        hidden: `[1, T, D]` the tokens' embeddings.
        embed: returns the embeddings `[..., D]` of tokens `[...]`.
    """
    precise = torch.promote_types(hidden.dtype, torch.float32)
    mask = embed(torch.full_like(mixture.ids[0, 0, :1], mask_id))[0].to(precise)  # [D]
    rest = torch.ones_like(places[:1], dtype=precise).expand(mixture.where.numel())  # [N]
    total, norm = torch.zeros_like(mask).expand(len(rest), -1), torch.zeros_like(rest)  # [N, D], [N]
    for ids, weight in zip(mixture.ids.flatten(0, 1).unbind(1), mixture.weights.flatten(0, 1).unbind(1), strict=True):
        one, weight = embed(ids).to(precise), weight.to(precise)
        total, rest = total + weight[:, None] * one, rest - weight
        if mixture.keep_norm:
            norm = norm + weight * one.norm(dim=-1)
    total = total + rest[:, None] * mask
    if mixture.keep_norm:
        total = total * ((norm + rest * mask.norm()) / (total.norm(dim=-1) + TINY))[:, None]
    soft = total.to(hidden.dtype).index_select(0, places.clamp(max=len(total) - 1))
    return torch.where((places < len(total))[:, None], soft, hidden)

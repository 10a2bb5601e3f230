"""The kernels `readout`, `head` and `attention` in torch, on any device and dtype, without triton."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.core import select, statistics
from dllm_sampler.core.noise import token_noise
from dllm_sampler.core.statistics import tempered
from dllm_sampler.core.values import Readout
from dllm_sampler.core.visibility import fresh_seen, stored_seen
from dllm_sampler.kernels.sampling import GREEDY, Sampling

Slots = tuple[Tensor, Tensor]  # keys and values [B, L+1, Hkv, Dh], the last one empty

ENDLESS = 1 << 30  # columns where nothing is stored
NEEDS = frozenset({"margin", "gap", "entropy", "logsumexp"})


def readout(logits: Tensor, sampling: Sampling = GREEDY) -> Readout:
    """Compute `kernels.readout.readout` in torch. It takes memory for a copy of the logits."""
    sampling.check(logits, logits.shape[1])
    logits = logits.clone()
    if sampling.mask_id is not None:
        logits[:, sampling.mask_id] = -torch.inf
    scaled = tempered(logits, sampling.temperature) if sampling.draws else logits
    if sampling.draws and sampling.keys is not None:
        precise = scaled.to(torch.promote_types(scaled.dtype, torch.float32))
        token = statistics.argmax(precise + token_noise(sampling.keys, logits.shape[1]).to(precise.dtype))
    else:
        token = statistics.argmax(scaled)
    needs, current = (NEEDS, token) if sampling.current is None else (NEEDS | {"current"}, sampling.current)
    found = statistics.measure(scaled if sampling.measured else logits, token, current, needs)
    void = torch.where(found.confidence.isnan(), torch.nan, 0.0).to(found.confidence.dtype)
    return replace(found, **{name: getattr(found, name) + void for name in ("confidence", *needs)})


def head(hidden: Tensor, weight: Tensor, sampling: Sampling = GREEDY) -> Readout:
    """Compute `kernels.head.head` in torch. It takes memory for the logits."""
    sampling.check(hidden, weight.shape[0])
    return readout(F.linear(hidden, weight), sampling)


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Slots | None,
    bounds: Tensor,
    columns: Tensor,
    *,
    end: Tensor | None = None,
    until: Tensor | None = None,
    segment: Tensor | None = None,
    unread: Tensor | None = None,
    longest: int | None = None,
    splits: int | None = None,
    unseen: Tensor | None = None,
) -> Tensor:
    """Compute `kernels.attention.packed_attention`, padded to the longest row. `splits` changes nothing.

    It reads every slot, so a slot that no entry sees must contain finite numbers.

    Args:
        unseen: `[T]` the column of the canvas that a shadow does not see, see `Pack`. The others are as in the kernel.
    """
    entries, batch = len(q), len(bounds) - 1
    if not q.numel():
        return torch.empty_like(q)
    length = ENDLESS if slots is None else slots[0].shape[1]
    index = select.arange(entries, q.device)
    at = bounds[:-1, None] + index[: longest or entries]  # [B, M]
    real = at < bounds[1:, None]
    at = at.clamp(max=entries - 1)
    end = bounds.new_full((batch,), length - 1) if end is None else end.clamp(max=length - 1)
    bound = (end[:, None].expand_as(at) if until is None else until[at]) * real  # padding sees nothing
    keys, values, visible = [], [], []
    if slots is not None:
        keys.append(slots[0].to(q.dtype))
        values.append(slots[1].to(q.dtype))
        visible.append(stored_seen(bound, length, unread))
    if k is not None and v is not None:
        keys.append(k[at])  # [B, M, Hkv, Dh]
        values.append(v[at])
        own = columns[at].masked_fill(~real, ENDLESS)
        segments, blind = (None if one is None else one[at] for one in (segment, unseen))
        visible.append(fresh_seen(bound, own, segments, blind))
    seen = torch.cat(visible, -1)  # [B, M, S]
    nothing = ~seen.any(-1)[..., None]
    mask = (seen | nothing)[:, None]  # so that no NaN arises
    every = (torch.cat(parts, 1).transpose(1, 2) for parts in (keys, values))
    grouped = keys[0].shape[2] != q.shape[1]
    out = F.scaled_dot_product_attention(q[at].transpose(1, 2), *every, attn_mask=mask, enable_gqa=grouped)
    out = out.transpose(1, 2).masked_fill(nothing[..., None], 0)  # [B, M, H, Dh]
    row = torch.searchsorted(bounds[1:], index, right=True)
    place = index - bounds[row]
    filler = (row == batch)[:, None, None]
    return out[row.clamp(max=batch - 1), place.clamp(max=out.shape[1] - 1)].masked_fill(filler, 0)

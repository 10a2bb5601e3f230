"""The kernels in torch: the same signatures, on any device and dtype, and without triton."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dllm_sampler.core import statistics
from dllm_sampler.core.noise import token_noise
from dllm_sampler.core.statistics import tempered
from dllm_sampler.core.values import Readout
from dllm_sampler.kernels.arguments import check

NEEDS = frozenset({"margin", "gap", "entropy", "logsumexp"})


def readout(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    temperature: float = 0.0,
    measured: bool = False,
    keys: Tensor | None = None,
    current: Tensor | None = None,
) -> Readout:
    """See `kernels.readout.readout`. Materialises what the kernel does not."""
    check(logits, logits.shape[1], mask_id, temperature, keys)
    scaled, seen = _scale(logits, mask_id, temperature, measured)
    if temperature and keys is not None:
        precise = scaled.to(torch.promote_types(scaled.dtype, torch.float32))
        token = statistics.argmax(precise + token_noise(keys, logits.shape[1]).to(precise.dtype))
    else:
        token = statistics.argmax(scaled)
    needs = NEEDS if current is None else NEEDS | {"current"}
    named = token if current is None else current
    found = statistics.measure(seen, token, named, needs, None)
    void = torch.where(found.confidence.isnan(), torch.nan, 0.0).to(found.confidence.dtype)
    return replace(found, **{name: getattr(found, name) + void for name in ("confidence", *needs)})


def head(
    hidden: Tensor,
    weight: Tensor,
    *,
    index: Tensor | None = None,
    mask_id: int | None = None,
    temperature: float = 0.0,
    measured: bool = False,
    keys: Tensor | None = None,
    current: Tensor | None = None,
) -> Readout:
    """See `kernels.head.head`. Materialises the logits."""
    check(hidden, weight.shape[0], mask_id, temperature, keys)
    rows = hidden if index is None else hidden.index_select(0, index)
    return readout(
        torch.nn.functional.linear(rows, weight),
        mask_id=mask_id,
        temperature=temperature,
        measured=measured,
        keys=keys,
        current=current,
    )


def _scale(logits: Tensor, mask_id: int | None, temperature: float, measured: bool) -> tuple[Tensor, Tensor]:
    """What the token is drawn from and what is measured, neither the argument itself."""
    logits = logits.clone()
    if mask_id is not None:
        logits[:, mask_id] = -torch.inf
    scaled = tempered(logits, temperature) if temperature else logits
    return scaled, scaled if measured else logits

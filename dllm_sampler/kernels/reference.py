"""The kernels `readout` and `head` in torch, on any device and dtype, without triton."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dllm_sampler.core import statistics
from dllm_sampler.core.noise import token_noise
from dllm_sampler.core.statistics import tempered
from dllm_sampler.core.values import Readout
from dllm_sampler.kernels.sampling import GREEDY, Sampling

NEEDS = frozenset({"margin", "gap", "entropy", "logsumexp"})


def readout(logits: Tensor, sampling: Sampling = GREEDY) -> Readout:
    """What `kernels.readout.readout` computes; it stores a tempered copy of the logits."""
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
    found = statistics.measure(scaled if sampling.measured else logits, token, current, needs, None)
    void = torch.where(found.confidence.isnan(), torch.nan, 0.0).to(found.confidence.dtype)
    return replace(found, **{name: getattr(found, name) + void for name in ("confidence", *needs)})


def head(hidden: Tensor, weight: Tensor, sampling: Sampling = GREEDY, *, index: Tensor | None = None) -> Readout:
    """What `kernels.head.head` computes; it stores the logits."""
    sampling.check(hidden, weight.shape[0])
    rows = hidden if index is None else hidden.index_select(0, index)
    return readout(torch.nn.functional.linear(rows, weight), sampling)

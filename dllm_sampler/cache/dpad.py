"""DPad: the farther a mask is after the block, the less likely the block sees it."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import exp, floor, pi, sqrt
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.suffix import SuffixCache
from dllm_sampler.core import select
from dllm_sampler.core.checks import check_choice, check_count, check_number
from dllm_sampler.core.values import Canvas

Dropout = Literal["gaussian", "even", "uniform"]


@dataclass
class DPadCache(SuffixCache):
    """A wrapper that shows a block only a few masks after it, chosen by distance when the block opens.

    Source: DPad, arXiv 2508.14148. A mask at distance d after the block stays with probability
    scale / sqrt(2 pi) * exp(-x^2 / 2), where x = sigma * d / (window - 1). At a distance of `window` or more none
    stays. In the paper `sigma`, `scale` and `window` are 4, 2, 256 (GSM8K, MATH), 3, 2.3, 512 (HumanEval) or 3, 2.3,
    128 (MBPP). Its early termination is `stop=block`.

    The paper calls its choice deterministic. Its code draws it (`gaussian`), from a generator that all draws share.
    Here a draw depends on the row's seed and the block. The code wants a `window` no longer than the answer. Here it
    may be longer. Block-causal models, models that compute whole rows, and `stop=prophet` are refused.

    Args:
        inner: the cache for the columns that stay: none, exact, prefix, dual, periodic_prefix, periodic_dual,
            vicinity, sparse, trailing, dkv, d2f or delayed_prefix. With none, every forward computes all columns that
            the block sees.
        dropout: how masks are chosen. `gaussian` draws. `even` keeps a mask if the sum of probabilities up to it
            reaches the next whole number. `uniform` draws `number` of them.
        window: number of columns after the block from which masks are chosen.
        sigma: speed at which the probability falls with the distance.
        scale: factor of the probability.
        number: number of columns that `uniform` keeps of the first `window`, each as likely as any other. If no more
            than `number` are after the block, it keeps all of them.
    """

    dropout: Dropout = "gaussian"
    window: int = 256
    sigma: float = 4.0
    scale: float = 2.0
    number: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("cache.dropout", self.dropout, Dropout)
        check_count("cache.window", self.window)
        check_count("cache.number", self.number, 0)
        for name in ("sigma", "scale"):
            check_number(f"cache.{name}", getattr(self, name), finite=True)

    @override
    def keeps(self, canvas: Canvas) -> Tensor:
        columns = canvas.columns().expand_as(canvas.ids)
        distance = columns - canvas.stop[:, None]
        near = min(self.window, canvas.layout.longest)  # the largest distance of a mask from the block
        odds = _odds(near, self.window, self.sigma, self.scale, self.dropout == "even", canvas.ids.device)
        odds = odds[distance.clamp(0, near)]  # [B, L+1]
        if self.dropout == "even":
            return odds > 0
        # A block draws as a step with a negative number, which no step has.
        drawn = replace(canvas, step=canvas.layout.first - canvas.start - 1)
        if self.dropout == "gaussian":
            return drawn.uniform(columns) < odds
        behind = canvas.end - canvas.stop  # [B]
        every = behind <= self.number
        count = behind.clamp(max=min(self.number, self.window)).masked_fill(every, 0)
        among = (distance >= 0) & (distance < self.window) & canvas.seen()
        order = canvas.layout.noise.order(drawn, columns.masked_fill(~among, canvas.length), count)
        return select.top(order, among, count) | every[:, None]


@cache  # never freed: a recorded step (`engine/graphs.py`) reads the tensor at its address
def _odds(near: int, window: int, sigma: float, scale: float, even: bool, device: torch.device) -> Tensor:
    """Return `[near + 1] float64` probabilities to stay by distance. The last is 0. With `even` all are 0 or 1."""
    rate = sigma / max(window - 1, 1)
    odds = [scale / sqrt(2 * pi) * exp(-((rate * d) ** 2) / 2) for d in range(near)]
    if even:
        sums = [0.0]
        for one in odds:
            sums.append(sums[-1] + min(one, 1.0))
        odds = [float(floor(after) > floor(before)) for before, after in pairwise(sums)]
    with torch.inference_mode(False):
        return torch.tensor([*odds, 0.0], dtype=torch.float64, device=device)

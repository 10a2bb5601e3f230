"""d3LLM's cache: finished columns are stored some forwards later, and refreshed now and then."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass
class DelayedPrefix(BaseCache):
    """d3LLM's cache: columns before the active block are stored some forwards after they are finished.

        computes   all columns that are not stored, and all while finished ones wait
        reuses     columns before the block, `delay` forwards after they finished
        refreshes  all, every `refresh_every` forwards

    Source: d3LLM, arXiv 2601.07568. The forward in which columns are due stores them, and later ones serve them. While
    finished columns wait, and in every `refresh_every`-th forward, the whole row is computed and the slots are renewed.
    The forward that stores columns is never such a refresh. A refresh commits like any other forward, so it costs no
    extra one. The prompt counts as finished before the first forward.

    On models with a logit shift (Dream) the row that predicts the first position is computed, too. Published code
    leaves it out, so that this position reads the row that predicts its successor.

    Args:
        delay: forwards from the one that finds columns finished to the one that stores them. 0 and 1 store the prompt
            in the first forward. The published evaluation has 1 (Dream) and 2 (LLaDA).
        refresh_every: forwards from one refresh to the next. By default (null) rows are refreshed only while columns
            wait. The published evaluation has 3 for LLaDA.
    """

    keeps_noise: ClassVar[bool] = False

    delay: int = 1
    refresh_every: int | None = None
    since: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] see `found`
    edge: Tensor = field(init=False, repr=False, compare=False)  # [B] columns before it are stored

    def __post_init__(self) -> None:
        check_count("cache.delay", self.delay, 0)
        check_count("cache.refresh_every", self.refresh_every, optional=True)

    @override
    def begin(self, canvas: Canvas) -> None:
        prompt = canvas.columns() < canvas.layout.first[:, None]
        self.since, self.edge = torch.where(prompt, 0, -1), torch.zeros_like(canvas.start)

    @property
    def back(self) -> int:
        """Number of stored columns that are computed again, too."""
        return int(self.spec.shift)

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        due, number = self._due(canvas, self.found(canvas)), canvas.step + 1
        whole = canvas.start > due
        if self.refresh_every is not None:
            whole = whole | (number % self.refresh_every == 0)
        whole = whole & (due == self.edge)
        return (canvas.columns() >= (self.edge - self.back)[:, None]) | whole[:, None]

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.since = self.found(canvas)
        self.edge = self._due(canvas, self.since)

    def found(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1]` the number of the forward that found each column finished, the next one included, or -1."""
        fresh = (self.since < 0) & (canvas.columns() < canvas.start[:, None])
        return torch.where(fresh, canvas.step[:, None] + 1, self.since)

    def _due(self, canvas: Canvas, since: Tensor) -> Tensor:
        """Return `[B]` the end of the columns that the next forward stores. They were found from left to right."""
        waited = canvas.step[:, None] + 1 - since
        return ((since >= 0) & (waited >= self.delay)).sum(1)

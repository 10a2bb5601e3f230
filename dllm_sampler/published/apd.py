"""The target, the temperature and the stop of APD's published code."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.ends import is_end
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.guides import Temperature
from dllm_sampler.schedulers.apd import ParallelDecoding
from dllm_sampler.stops.end_tokens import BlockStop, with_finish


@dataclass(frozen=True)
class PublishedParallelDecoding(ParallelDecoding):
    """APD whose target is the mixture's likeliest token at any temperature, and whose drafts apply it twice.

    Source: APD, arXiv 2506.00413. The published loop ends by `EndsAnywhere`.
    """

    @override
    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        again = [Temperature(guide.value) for guide in given if isinstance(guide, Temperature)]
        return (*super().guides(given), *again)

    @override
    def target(self, readout: Readout, mixed: Tensor) -> Tensor:
        return argmax(mixed)


@dataclass(frozen=True)
class EndsAnywhere(BlockStop):
    """A stop that ends a row with an end-of-text token at any position, even in the prompt. The other masks stay masks.

    Source: APD's loop, with or without a verifier, arXiv 2506.00413.
    """

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        finish = (is_end(after.ids, self.end_ids) & ~after.masked & after.seen()).any(1)
        return with_finish(edit, finish)

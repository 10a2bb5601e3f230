"""No cache: every forward computes the whole row."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dllm_sampler.cache.base import Cache
from dllm_sampler.canvas import Canvas, Query
from dllm_sampler.packing import answerable, computable, measure, read, request
from dllm_sampler.protocols import ModelSpec, Plan


def once(canvas: Canvas, query: Query, spec: ModelSpec) -> tuple[Canvas, Plan]:
    """The canvas and the plan for one forward that computes everything; the host waits for the device to size it."""
    computed = computable(canvas, query, None)
    wanted = request(query, computed, answerable(canvas, computed, spec))
    found = read(measure(canvas, wanted, torch.zeros_like(canvas.start)).tolist())
    canvas = replace(canvas, sizes=found.sizes)
    return canvas, NoCache().init(canvas, spec).plan(canvas, wanted)


@dataclass
class NoCache(Cache):
    """Compute every position in every step: exact, and the baseline of every speed-up."""

    stores: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = False

    @property
    def steady(self) -> bool:
        """See `Cache.steady`."""
        return True

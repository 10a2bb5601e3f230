"""No cache: every forward computes the whole row."""

from dataclasses import dataclass
from typing import ClassVar

from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.packing import forward_request, with_exact_sizes
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query


def once(canvas: Canvas, query: Query, spec: ModelSpec) -> Plan:
    """Return the plan for one forward that computes everything. The host waits for the device to size it."""
    wanted = with_exact_sizes(canvas, forward_request(canvas, query, None, spec))
    return NoCache().init(canvas, spec).plan(canvas, wanted)


@dataclass
class NoCache(BaseCache):
    """No cache: every step computes every position. Speed-ups of caches are relative to this one."""

    stores: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = False
    steady: ClassVar[bool] = True

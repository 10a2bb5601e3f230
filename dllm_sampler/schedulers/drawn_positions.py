"""The base of rules that may draw the position to commit in place of the surest one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class DrawnPositions(Scheduler, ABC):
    """Positions ranked by confidence, or drawn in proportion to confidence ** (1 / position_temperature).

    Source: tempered remasking, arXiv 2604.09921. A rule that always takes the surest draw prefers easy tokens: an
    unlikely token waits, and is drawn again. Positions that are sure enough by themselves are committed as usual.
    `alg_temp` of `scheduler=fixed` is Dream's: it draws every position, in proportion to exp(confidence / alg_temp).

    Args:
        position_temperature: 0 takes the surest position, 1 draws in proportion to confidence.
    """

    position_temperature: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_number("scheduler.position_temperature", self.position_temperature, finite=True)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(draws_order=self.position_temperature > 0)

    @override
    @abstractmethod
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]: ...

    def chosen_or_one(self, canvas: Canvas, query: Query, chosen: Tensor, sure: Tensor, eligible: Tensor) -> Tensor:
        """Return `[B, Q] bool` the eligible among `chosen`, or one eligible position if none is chosen."""
        if not self.position_temperature:
            return at_least_one(chosen, sure, eligible)
        drawn = at_least_one(torch.zeros_like(eligible), self.order(canvas, query, sure), eligible)
        chosen = chosen & eligible
        return torch.where(chosen.any(1, keepdim=True), chosen, drawn)

    def order(self, canvas: Canvas, query: Query, sure: Tensor) -> Tensor:
        """Return `[B, Q]` numbers that rank the queried positions, higher first, for confidences `sure [B, Q]`."""
        if not self.position_temperature:
            return sure
        noise = canvas.layout.noise.order(canvas, query.positions, canvas.noise_left())
        return sure.log() / self.position_temperature + noise

"""Hierarchical decoding: every run of masks is split at its surest position."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.select import rank, top
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError


@dataclass(frozen=True)
class Hierarchical(Scheduler):
    """Hierarchical decoding: the surest position of every run of masks is committed, and splits the run.

        while masks remain in the block:
            token, confidence = model(canvas)
            free = the masks, and committed tokens with confidence < remask
            chosen = the surest of each run of free, if its confidence > low
            add the surest of free, and all of free with confidence > threshold
            add the surest others until chosen outnumbers the committed ones of free
            commit chosen, and remask the rest of free that was committed

    Source: hierarchical decoding in dInfer, arXiv 2510.08666. Comparisons are strict, as published.

    Args:
        low: confidence that the best of a run must exceed. The surest of `free` is chosen in any case.
        threshold: confidence above which masks are committed wherever they are. With None this rule is off.
        remask: confidence below which a committed position of the block counts as a mask. It is either chosen again or
            becomes noise. None remasks nothing.
    """

    low: float = 0.4
    threshold: float | None = None
    remask: float | None = None

    def __post_init__(self) -> None:
        check_number("scheduler.low", self.low, "a probability")
        for name in ("threshold", "remask"):
            check_number(f"scheduler.{name}", getattr(self, name), "a probability", optional=True)

    @override
    def bind(self, context: Context) -> Self:
        if self.remask is not None and context.spec.mask_id is None:
            said = f"scheduler.remask={self.remask} needs a model with a mask token"
            raise UserError("mask-token-missing", f"{said}. Set scheduler.remask=null.")
        return self

    @property
    @override
    def traits(self) -> Traits:
        return Traits(asks="window", revises=self.remask is not None)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        token, sure = readout.token[:, 0], readout.confidence[:, 0]  # [B, Q]
        eligible = canvas.eligible(query.positions)
        doubtful = self._doubtful(canvas, query.positions, eligible, sure)
        free = eligible if doubtful is None else eligible | doubtful
        place = rank(sure, free)
        chosen = self._nominees(canvas, query, place, free) & ((sure > self.low) | (place == 0))
        if self.threshold is not None:
            chosen |= free & (sure > self.threshold)
        if doubtful is None:
            return Edit(token, chosen), carry
        missing = doubtful.sum(1) + 1 - chosen.sum(1)
        chosen = chosen | top(sure, free & ~chosen, missing)
        return Edit(token, chosen & free, remask=doubtful & ~chosen), carry

    def _doubtful(self, canvas: Canvas, at: Tensor, eligible: Tensor, sure: Tensor) -> Tensor | None:
        """Return `[B, Q] bool` committed positions to decide again while masks are left. None without `remask`."""
        if self.remask is None:
            return None
        return (canvas.inside(at) ^ eligible) & (sure < self.remask) & eligible.any(1, keepdim=True)

    @staticmethod
    def _nominees(canvas: Canvas, query: Query, place: Tensor, free: Tensor) -> Tensor:
        """Return `[B, Q] bool`, True at the best-ranked free position of each run of the canvas.

        Runs include masks that the query does not have. `place [B, Q]` is the rank, and 0 is best.
        """
        # Runs of the canvas: a cache may choose which of a run's masks are queried, so there may be more runs than
        # queried masks. Padding is never free, nor is what a finished row left.
        row = (canvas.masked & canvas.in_block() & ~canvas.done[:, None]).scatter(1, query.positions, free)
        run = (row & ~row.roll(1, 1)).cumsum(1).gather(1, query.positions)  # [B, Q], from 1 where it is free
        worst = place.shape[1]
        best = place.new_full((len(place), canvas.layout.width + 1), worst).scatter_reduce(1, run, place, "amin")
        return free & (place == best.gather(1, run))

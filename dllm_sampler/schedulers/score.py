"""Scores that rank masks: one number per queried position, higher first."""

from typing import Literal

from torch import Tensor

from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError

Score = Literal["confidence", "margin", "entropy", "random", "position"]


def check_factors(name: Score) -> None:
    """Refuse scores that are negative numbers, for a rule that multiplies the score of each mask by a weight."""
    if name in ("entropy", "position"):
        raise UserError(
            "options-conflict",
            f"scheduler.score={name} ranks masks by negative numbers, and a larger weight would lower their rank. Set"
            " scheduler.score to confidence, margin or random.",
        )


def score_needs(name: Score) -> frozenset[str]:
    """Return the fields of `Readout` that a score needs."""
    return frozenset({name} & {"margin", "entropy"})


def rate(name: Score, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
    """Return `[B, Q]` confidence, margin, negative entropy, a random number, or minus the position."""
    if name == "position":
        return -query.positions.double()
    if name == "random":
        return canvas.uniform(query.positions)
    value = getattr(readout, name)[:, 0]
    return -value if name == "entropy" else value

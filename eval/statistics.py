"""Intervals and rank correlations."""

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # of a normal distribution, for 95 %
DRAWS = 2000  # of the bootstrap


Estimate = tuple[float, float, float]  # a mean, and the two ends of its 95 % interval


def wilson(right: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927). `right` may be a sum of `count` scores from 0 to 1."""
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, Z * Z / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(above: Sequence[float], below: Sequence[float] | None = None) -> tuple[float, float]:
    """Return the 95 % percentile interval of `sum(above) / sum(below)` over resampled pairs.

    Without `below` it is the interval of the mean of `above`. Returns NaN twice for empty lists.
    """
    high = np.asarray(above, float)
    low = np.ones_like(high) if below is None else np.asarray(below, float)
    if len(high) == 0:
        return math.nan, math.nan
    chosen = np.random.default_rng(0).integers(len(high), size=(DRAWS, len(high)))
    sums = np.maximum(low[chosen].sum(1), 1e-12)
    least, most = np.quantile(high[chosen].sum(1) / sums, [0.025, 0.975])
    return float(least), float(most)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of scores from 0 to 1.

    It is Wilson's if all scores are 0 or 1. It is also Wilson's if all scores are equal, since resampling equal scores
    gives no width. Of all scores with the same mean, 0 and 1 have the largest variance, so that interval is too wide
    rather than too narrow. Otherwise it is the bootstrap's.
    """
    if all(score in (0, 1) for score in scores) or len(set(scores)) == 1:
        return wilson(sum(scores), len(scores))
    return bootstrap(scores)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Return `one` minus `other` with its 95 % interval, computed from the two intervals.

    The method is MOVER, which for two shares is Newcombe's interval. It takes the two as independent. Answers to the
    same prompts rarely are, and the interval is then too wide.
    """
    (mean, low, high), (its, least, most) = one, other
    return (
        mean - its,
        mean - its - math.hypot(mean - low, most - its),
        mean - its + math.hypot(high - mean, its - least),
    )


def kendall(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Return Kendall's tau-b, which allows for ties, or None if one side never varies."""
    x, y = (np.sign(np.subtract.outer(side, side)) for side in map(np.asarray, (one, two)))
    scale = float(np.abs(x).sum()) * float(np.abs(y).sum())
    return float((x * y).sum()) / math.sqrt(scale) if scale else None


def spearman(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Return Spearman's rho, ties at their mean rank, or None if one side never varies."""
    x, y = (_ranks(np.asarray(side, float)) for side in (one, two))
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / scale if scale else None


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.less.outer(values, values).sum(0) + (np.equal.outer(values, values).sum(0) + 1) / 2

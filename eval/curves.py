"""Measures of a curve: one method at several settings, each a point of speed and score.

A point is (rate, score): tokens per forward, and a mean score between 0 and 1.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

Point = tuple[float, float]


def aup(points: Sequence[Point], best: float) -> float:
    """Return accuracy under parallelism (AUP, d3LLM): the area under the curve of weighted score (%) over rate.

    The weight of a score falls with its distance from `best`. The part below the slowest point's rate is unweighted, so
    a single point at rate 1 has its own score as area. Points more than 5 percentage points of score below the slowest
    point are dropped, as in d3LLM's definition. d3LLM's code raises an error instead.

    `best` is the highest score, between 0 and 1, that any method has on the task. The unit is % × tokens per forward.
    """
    ordered = sorted(points)
    kept = [(rate, 100 * score) for rate, score in ordered if 100 * (ordered[0][1] - score) <= 5 + 1e-9]

    def weighted(score: float) -> float:
        return score * min(1.0, math.exp(-3 * (1 - score / (100 * best)))) if best > 0 else 0.0

    (rate, score), *_ = kept
    area = sum((b[0] - a[0]) * (weighted(a[1]) + weighted(b[1])) / 2 for a, b in pairwise(kept))
    return rate * score + area


def pbx(points: Sequence[Point], least: float, *, interpolate: bool) -> float:
    """Return ParallelBench's PBx: the highest rate with a score of at least `least`, or 0 if none has it.

    `least` is a score between 0 and 1 (0.8 for PB80). `interpolate` also counts rates between neighbouring points, on
    the straight line that joins them.
    """
    ordered = sorted(points)
    least -= 1e-9  # a mean of exactly that may come out a bit below
    found = [rate for rate, score in ordered if score >= least]
    if interpolate:
        for (rate, score), (next_rate, next_score) in pairwise(ordered):
            if score >= least > next_score:
                found.append(rate + (score - least) / (score - next_score) * (next_rate - rate))
    return max(found, default=0.0)


def parallelizability(scores: Mapping[float, float]) -> float:
    """Return ParallelBench's centre of mass over tokens per step k: `sum k * score / sum score` (0 if all fail)."""
    total = sum(scores.values())
    return sum(k * score for k, score in scores.items()) / total if total else 0.0


def adaptive_oracle(runs: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return ParallelBench's oracle: for each sample the fewest forwards that reach its best score.

    There is one run per setting of a method: a pair (forwards, score) per sample, in the same order. Returns the mean
    forwards and the mean score.
    """
    chosen = [min(tries, key=lambda found: (-found[1], found[0])) for tries in zip(*runs, strict=True)]
    return sum(nfe for nfe, _ in chosen) / len(chosen), sum(score for _, score in chosen) / len(chosen)


def front(points: Mapping[str, Point]) -> set[str]:
    """Return the names of the points that no other point beats: better in one value, and not worse in the other."""

    def beats(one: Point, other: Point) -> bool:
        return one != other and one[0] >= other[0] and one[1] >= other[1]

    return {name for name, point in points.items() if not any(beats(other, point) for other in points.values())}

"""Measures of several samples for each prompt: pass@k, pass@NFE and distinct correct answers."""

from collections.abc import Sequence
from math import comb, gcd, prod
from statistics import fmean

import numpy as np

from dllm_sampler.eval.records import Record
from dllm_sampler.eval.statistics import interval

BOUNDS = ("low", "high")  # endings of the names of an interval's ends
DISTINCT = "distinct_correct"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is correct (Chen et al., arXiv 2107.03374).

    The k samples are drawn without replacement from a pool of `samples`, at least k, which makes the estimate unbiased.
    `correct` is the number of correct ones in the pool.
    """
    return 1 - prod(max(0.0, 1 - k / i) for i in range(samples - correct + 1, samples + 1))


def pass_at_nfe(costs: Sequence[int], correct: Sequence[bool], budgets: Sequence[int]) -> list[float]:
    """Return, for each budget of forwards, the probability that the samples it pays for include a correct one.

    Samples are drawn in random order until the next one would exceed the budget. The result is the exact mean over
    all orders. With equal costs c it is pass@k for k = budget // c.

    `costs` are the forwards of each sample in the pool, and `correct` is True for each that solves the prompt.
    """
    unit = gcd(*costs) or 1
    right = [cost // unit for cost, solves in zip(costs, correct, strict=True) if solves]
    wrong = [cost // unit for cost, solves in zip(costs, correct, strict=True) if not solves]
    most = [budget // unit for budget in budgets]
    # shares[j, s]: share of all sets of j wrong samples that cost s.
    shares = np.zeros((len(wrong) + 1, max(most, default=0) + 1))
    shares[0, 0] = 1
    for count, cost in enumerate(wrong):
        for size in range(count + 1, 0, -1):  # downwards: the row above is still without this sample
            shares[size] *= (count + 1 - size) / (count + 1)
            if cost < shares.shape[1]:
                shares[size, cost:] += size / (count + 1) * shares[size - 1, : shares.shape[1] - cost]
    affordable = shares.cumsum(1)
    # An order solves the prompt if its first correct sample and the wrong ones before it are within the budget.
    pool = len(costs)
    weights = np.array([comb(len(wrong), j) / comb(pool, j) / (pool - j) for j in range(len(wrong) + 1) if j < pool])
    solved = (
        sum(weights @ affordable[: len(weights), left] for cost in right if (left := budget - cost) >= 0)
        for budget in most
    )
    return [round(float(share), 12) for share in solved]  # a sum of shares that is 1 may come out beside it


def distinct(records: Sequence[Record], score: str) -> int:
    """Return the number of different correct answers. Their texts are compared, or their tokens without a tokenizer."""
    right = [record for record in records if record.scores[score] >= 1]
    return len({tuple(record.graded.ids) if record.text is None else record.text.strip() for record in right})


def passes(prompts: Sequence[Sequence[Record]], score: str) -> dict[str, float]:
    """Return the measures of a run with several samples for each prompt, each with the ends of its 95 % interval.

    Intervals are over prompts. An answer is correct if its score is 1. k and the budgets are powers of two. The
    budgets lie between the cost of the cheapest sample and the smallest total cost of a prompt's samples.

    `score` is the name of the grade that counts. All prompts have equally many samples.
    """
    samples = len(prompts[0])
    right = [[record.scores[score] >= 1 for record in records] for records in prompts]
    costs = [[record.nfe for record in records] for records in prompts]
    found: dict[str, float] = {}

    def add(name: str, values: Sequence[float], most: int = 1) -> None:
        """Add the mean of values from 0 to `most`, and its interval."""
        bounds = (most * bound for bound in interval([value / most for value in values]))
        found.update({name: fmean(values)} | {f"{name}_{end}": b for end, b in zip(BOUNDS, bounds, strict=True)})

    for k in _powers(1, samples):
        add(f"pass_at_{k}", [pass_at_k(samples, sum(one), k) for one in right])
    budgets = _powers(min(map(min, costs)), min(map(sum, costs)))
    each = [pass_at_nfe(*one, budgets) for one in zip(costs, right, strict=True)]
    for budget, values in zip(budgets, zip(*each, strict=True), strict=True):
        add(f"pass_at_nfe_{budget}", values)
    add(DISTINCT, [distinct(records, score) for records in prompts], samples)
    return found


def title(name: str) -> str:
    """Return the title of a measure in tables, for example `pass@8` for `pass_at_8`."""
    *_, number = name.split("_")
    if name.startswith("pass_at_nfe_"):
        return f"pass@{number} NFE"
    return f"pass@{number}" if name.startswith("pass_at_") else name.replace("_", " ")


def about(name: str) -> str:
    """Return a description of a measure in one line."""
    if name.startswith("pass_at_nfe_"):
        return "share of prompts that are solved by samples that cost at most this many forwards together"
    if name.startswith("pass_at_"):
        return "share of prompts that are solved by one of this many samples"
    return "different correct answers to a prompt, mean over prompts"


def _powers(least: int, most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length()) if least <= 1 << bit <= most]

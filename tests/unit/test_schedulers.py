"""What each scheduler's counts are, against the published formulas."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dllm_sampler import Edit, Query, Readout, Scheduler, Traits
from dllm_sampler.errors import as_typed
from dllm_sampler.schedulers.budget import (
    even_rest,
    rounded_share,
    timestep,
    timestep_odds,
    timestep_share,
    uniform_share,
)
from dllm_sampler.schedulers.budgeted import BudgetedThreshold
from dllm_sampler.schedulers.factor import Factor
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.origin import Origin
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each


def test_transfer_counts_of_llada():
    for masks in range(1, 40):
        for steps in range(1, 45):
            age, n = torch.arange(steps), torch.full((steps,), masks)
            base, remainder = divmod(masks, steps)
            expected = [base + (i < remainder) for i in range(steps)]
            assert uniform_share(n, torch.full((steps,), steps), age).tolist() == expected


@each("eps", [1e-3, 0.01, 0.5])
def test_timestep_counts_of_dream(eps):
    """`int(masks * (1 - s / t))` on torch's own linspace in float32, bit for bit."""
    for steps in range(1, 65):
        times = torch.linspace(1, eps, steps + 1)
        age = torch.arange(steps + 1)
        assert torch.equal(timestep(torch.full_like(age, steps), age, eps), times), steps
        masks, age = torch.meshgrid(torch.arange(1, 65), torch.arange(steps), indexing="xy")  # [steps, 64]
        t, s = times[:-1], times[1:]
        expected = (masks.float() * (1 - s / t)[:, None]).long()  # cut off, as int() does
        expected[-1] = masks[-1]
        found = timestep_share(masks.flatten(), torch.full((masks.numel(),), steps), age.flatten(), eps)
        assert torch.equal(found.view_as(masks), expected), steps
        odds = timestep_odds(torch.full((steps,), steps), torch.arange(steps), eps)
        assert odds.tolist() == [*(1 - s / t)[:-1].tolist(), 1.0]


def test_what_stays_under_rnd1():
    """`(masks * (step / steps)).long()` of a tensor of whole numbers and a number, for `step` from `steps - 1` on."""
    for steps in range(1, 45):
        masks, done = torch.arange(1, 40)[:, None], torch.arange(1, steps + 1)[None]
        expected = torch.cat([(masks * ((steps - at) / steps)).long() for at in done[0].tolist()], 1)
        assert torch.equal(even_rest(masks, torch.full_like(done, steps), done), expected), steps


def _dllm_counts(masks: int, steps: int, cosine: bool) -> list[int]:
    """The published loop over times, in float32, which drops what it rounds to 0."""
    found = []
    for at in range(steps, 0, -1):
        t, s = (np.float32(time / steps) for time in (at, at - 1))
        alpha = [1 - np.cos(np.float32(math.pi / 2) * (1 - time)) if cosine else 1 - time for time in (t, s)]
        share = 1 - float((1 - alpha[1]) / (1 - alpha[0]))
        found.append(min(round(masks * share), masks))  # Python rounds half to even
        masks -= found[-1]
    return [count for count in found if count]


def _counts(cosine: bool, *pairs: tuple[int, int]) -> list[list[int]]:
    """The counts of blocks with these masks and steps, all at once."""
    left, steps = torch.tensor(pairs).T
    done, found = torch.zeros_like(left), list[list[int]]()
    while left.any():
        count, done = rounded_share(left, steps, done, int(steps.max()), cosine=cosine)
        left = left - count
        found.append(count.tolist())
    return [[count for count in row if count] for row in zip(*found, strict=True)]


@pytest.mark.parametrize("cosine", [False, True])
def test_rounded_counts_of_dllm(cosine: bool):
    pairs = [(masks, steps) for masks in range(1, 33, 3) for steps in range(1, 41, 3)]
    assert _counts(cosine, *pairs) == [_dllm_counts(masks, steps, cosine) for masks, steps in pairs]


def test_rounded_counts_are_those_of_recorded_runs():
    assert _counts(False, (32, 20), (16, 5), (8, 7)) == [
        [2, 2, 2, 2, 2, 1, 2, 1, 2, 1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 1],
        [3, 3, 3, 4, 3],
        [1, 1, 1, 1, 1, 2, 1],
    ]
    assert _counts(True, (32, 24)) == [[1] * 8 + [2] * 12]


@pytest.mark.parametrize("grid", [False, True])
def test_each_block_gets_as_many_rounded_steps(grid: bool):
    """ceil(20 / 3), also for the last block of 4; with a grid the first block begins inside the prompt."""
    model = toys.sampler("causal" if grid else "llada", scheduler={"name": "fixed", "schedule": "rounded", "steps": 20},
        blocks={"name": "fixed", "length": 8}, stop="none")  # fmt: skip
    trace = model.generate([[5, 6, 7, 8, 9]], max_new_tokens=19 if grid else 20).trace
    counts = [len(step) for step in trace.steps() if step]
    parts = (3, 8, 8) if grid else (8, 8, 4)
    assert counts == [count for block in _counts(False, *((masks, 7) for masks in parts)) for count in block]


def told(scheduler: Scheduler, sure: list[list[float]], carry: Any = None, age: int = 0) -> tuple[Edit, Any]:
    """What a scheduler does with these confidences, all of them of masks in one block."""
    confidence = torch.tensor(sure, dtype=torch.float64)
    canvas = toys.canvas(torch.ones_like(confidence, dtype=torch.bool))
    canvas = replace(canvas, age=canvas.age + age)
    readout = Readout(torch.zeros_like(confidence, dtype=torch.long)[:, None], confidence[:, None])
    return scheduler.tell(canvas, Query.masks(canvas), readout, carry or scheduler.init(canvas))


def test_budgeted_threshold():
    """Two planned steps of two; what the first one rejects widens the second, and then the carry alone drives."""
    scheduler = BudgetedThreshold(0.8, steps=2)
    edit, carry = told(scheduler, [[0.9, 0.1, 0.85, 0.2]])
    assert edit.commit.tolist() == [[True, False, True, False]]
    edit, carry = told(scheduler, [[0.5, 0.3, 0.4, 0.6]])
    assert edit.commit.tolist() == [[False, False, False, True]], "the best one in any case"
    quota, rejected, steps = carry
    assert (quota.tolist(), rejected.tolist(), steps.tolist()) == ([2], [1], [2])
    edit, carry = told(scheduler, [[0.9, 0.9, 0.9, 0.1]], carry, age=1)
    assert edit.commit.tolist() == [[True, True, True, False]], "quota 2 and a carry of 1"
    edit, carry = told(scheduler, [[0.9, 0.1, 0.1, 0.1]], (quota, rejected, steps), age=1)
    assert [part.tolist() for part in carry[:2]] == [[0], [2]], "the plan is over: the carry alone drives what follows"
    edit, carry = told(scheduler, [[0.9, 0.9, 0.9, 0.9]], carry, age=2)
    assert edit.commit.tolist() == [[True, True, False, False]], "no quota, a carry of 2"
    edit, carry = told(scheduler, [[0.9, 0.9, 0.9, 0.9]], carry, age=3)
    assert edit.commit.tolist() == [[True, False, False, False]], "neither, yet one in any case"


@each("score", ["confidence", "margin", "entropy"])
def test_fixed_steps_rank_by_their_score(score):
    canvas = toys.canvas(torch.ones(1, 4, dtype=torch.bool))
    ranked = {"confidence": [0.1, 0.9, 0.5, 0.9], "margin": [0.3, 0.0, 0.2, 0.1], "entropy": [2.0, 1.0, 0.5, 3.0]}
    values = {name: torch.tensor([[found]], dtype=torch.float64) for name, found in ranked.items()}
    scheduler = FixedSteps(steps=2, score=score)
    assert scheduler.needs == {score} - {"confidence"}
    readout = replace(Readout(torch.zeros(1, 1, 4, dtype=torch.long), values["confidence"]), **values)
    edit, _ = scheduler.tell(canvas, Query.masks(canvas), readout, scheduler.init(canvas))
    expected = {"confidence": [1, 3], "margin": [0, 2], "entropy": [1, 2]}[score]
    assert edit.commit[0].nonzero()[:, 0].tolist() == expected


@each(
    ("steps", "length", "tokens", "expected"),
    [
        (None, 4, 8, [1] * 8),
        (4, 4, 8, [2] * 4),
        (5, 4, 8, [2, 2, 2, 1, 1]),
        (6, 16, 16, [3, 3, 3, 3, 2, 2]),
        (3, 5, 12, [5, 5, 2]),
        (1, 4, 8, [4, 4]),  # a block is a step at least
        (99, 4, 8, [1] * 8),  # no step is spent on a finished block
    ],
)
def test_steps_are_shared_among_blocks(steps, length, tokens, expected):
    sampler = toys.sampler(scheduler={"name": "fixed", "steps": steps}, blocks={"name": "fixed", "length": length})
    trace = sampler.generate([3, 4, 5], max_new_tokens=tokens).trace
    assert [len(step) for step in trace.steps()] == expected


def test_order_by_chance_goes_by_the_score():
    """At alg_temp 0.5, of two masks the surer opens first with odds exp(difference / 0.5)."""
    many = 4000
    sure = torch.tensor([[0.2, 0.9]], dtype=torch.float64).expand(many, 2)
    canvas = toys.changed(toys.canvas(torch.ones(many, 2, dtype=torch.bool)), seeds=torch.arange(many))
    readout = Readout(torch.zeros(many, 1, 2, dtype=torch.long), sure[:, None])
    scheduler = FixedSteps(alg_temp=0.5)
    edit, _ = scheduler.tell(canvas, Query.masks(canvas), readout, scheduler.init(canvas))
    assert edit.commit.sum(1).tolist() == [1] * many
    odds = 2.718281828459045 ** (0.7 / 0.5)
    p = odds / (1 + odds)
    assert float(edit.commit[:, 1].double().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / many) ** 0.5)


def test_origin_opens_at_the_rate_of_the_process():
    many, steps = 400, 5
    canvas = toys.changed(toys.canvas(torch.ones(many, 20, dtype=torch.bool)), seeds=torch.arange(many))
    scheduler = Origin(steps=steps)
    opened = torch.full_like(canvas.start, steps)  # what `tell` hands on
    for age in range(steps):
        query = scheduler.ask(replace(canvas, age=canvas.age + age), opened)
        share = float((query.positions < 20).double().mean())
        t, s = 1 - age * 0.999 / steps, 1 - (age + 1) * 0.999 / steps
        p = 1 - s / t if age < steps - 1 else 1.0
        assert share == pytest.approx(p, abs=4 * (p * (1 - p) / (many * 20)) ** 0.5 + 1e-9)
        assert (query.positions.diff(dim=1) >= 0).all()
        assert query.keeps_positions


@each(
    ("kind", "fields"),
    [
        (Threshold, {"threshold": -0.1}),
        (Threshold, {"threshold": float("nan")}),
        (Threshold, {"threshold": "0.9"}),
        (Threshold, {"threshold": True}),
        (Threshold, {"threshold": None}),
        (Factor, {"factor": -1}),
        (Factor, {"factor": float("nan")}),
        (Factor, {"factor": "1"}),
        (BudgetedThreshold, {"threshold": -1.0}),
        (BudgetedThreshold, {"steps": 0}),
        (FixedSteps, {"steps": 0}),
        (FixedSteps, {"steps": -3}),
        (FixedSteps, {"steps": 2.5}),
        (FixedSteps, {"score": "best"}),
        (FixedSteps, {"schedule": "sine"}),
        (FixedSteps, {"eps": 0}),
        (FixedSteps, {"eps": 1}),
        (FixedSteps, {"eps": float("nan")}),
        (FixedSteps, {"alg_temp": -1}),
        (FixedSteps, {"alg_temp": float("nan")}),
        (Origin, {"steps": 0}),
        (Origin, {"eps": 1.5}),
    ],
)
def test_bad_settings(kind, fields):
    (name, value), *_ = fields.items()
    code = "choice-unknown" if value in ("best", "sine") else "option-range"
    with refused(f"{code}: scheduler.{name}, {as_typed(value)}"):
        kind(**fields)


class TakesBack(Scheduler):
    """Commits one token per step, and takes the first one back once. It writes predicted tokens everywhere."""

    @property
    def traits(self):
        return Traits(asks="window", revises=True, ranks_by_confidence=False)

    def tell(self, canvas, query, readout, carry):
        eligible = canvas.eligible(query.positions)
        first = torch.zeros_like(eligible)
        first[:, 0] = True
        back = first & ~eligible & (canvas.step == 2)[:, None]
        return Edit(readout.token[:, 0], eligible & (eligible.cumsum(1) == 1), remask=back), carry

    def bound(self, tokens):
        return 2 * tokens


def test_a_remasked_position_holds_the_mask_token():
    sampler = toys.sampler(scheduler=TakesBack(), blocks={"name": "fixed", "length": 8})
    steps = list(sampler.stream([[1, 2, 3]], max_new_tokens=8))
    assert steps[2].masked[0, 0] and not steps[1].masked[0, 0]
    assert all((step.tokens[step.masked] == toys.MASK).all() for step in steps)

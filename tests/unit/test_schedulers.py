"""What each scheduler's counts are, against the published formulas."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_sampler import Edit, Query, Readout, Scheduler, UserError
from dllm_sampler.schedulers.budget import timestep, timestep_odds, timestep_share, uniform_share
from dllm_sampler.schedulers.budgeted import BudgetedThreshold
from dllm_sampler.schedulers.factor import Factor
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.origin import Origin
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
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
        assert query.needs_every_position


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
        (FixedSteps, {"schedule": "cosine"}),
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
    with pytest.raises(UserError, match=rf"^scheduler\.{name} must .* not {value!r}$"):
        kind(**fields)

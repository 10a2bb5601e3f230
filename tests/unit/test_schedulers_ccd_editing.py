"""Certainty prior, CCD, token editing and remasking; bad values of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dllm_sampler import Canvas, CounterNoise, Edit, Query, Readout, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.core.density import bell
from dllm_sampler.core.protocols import Scheduler, Stop
from dllm_sampler.engine import layout
from dllm_sampler.result import Result
from dllm_sampler.schedulers.ccd import Coherent
from dllm_sampler.schedulers.ccd_marginal import CoherentMarginal
from dllm_sampler.schedulers.certainty import CertaintyPrior
from dllm_sampler.schedulers.credit import Credit
from dllm_sampler.schedulers.dinfer import DInferThreshold
from dllm_sampler.schedulers.editing import TokenEditing
from dllm_sampler.schedulers.entropy import EntropyThreshold
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.hierarchical import Hierarchical
from dllm_sampler.schedulers.learn2pd import LearnedFilter
from dllm_sampler.schedulers.pc import PositionCalibrated
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_of_text import EndOfText
from tests import toys
from tests.refusals import refused
from tests.sampling import each
from tests.scripted import BLOCK, PROMPTS, TOKENS, Script, constant, history, play, run, same
from tests.toys import MASK

# Certainty prior


@each("sigma", [0.4, 3.0, 50.0])
def test_density_is_the_published_sum(sigma: float) -> None:
    """Every term written out: a wide Gaussian misses what lies beyond, a narrow one is not cut where it counts."""
    spec, tokens, prompt = constant([0.5] * 9).spec, 9, 2
    canvas = layout.canvas([[0] * prompt, [0]], tokens, [0, 0], spec, FullBlock(), CounterNoise(), False)
    stands = [{0, 1, 4}, {2, 5, 8}]
    masked = canvas.masked.clone()
    for row, places in enumerate(stands):
        masked[row, [int(canvas.layout.first[row]) + place for place in places]] = False
    found = CertaintyPrior(sigma=sigma).density(replace(canvas, masked=masked), canvas.requested())

    def weight(offset: int) -> float:
        return math.exp(-(offset**2) / (2 * sigma**2))

    total = sum(weight(offset) for offset in range(-3 * tokens, 3 * tokens))
    for row, places in enumerate(stands):
        right = {*range(tokens, 2 * tokens)} if tokens - 1 in places else set()
        there = {*range(-tokens, 0)} | places | right
        want = [sum(weight(other - place) for other in there) / total for place in range(tokens)]
        assert found[row].tolist() == pytest.approx(want, rel=1e-12)


def test_a_bell_stays_where_it_is() -> None:
    """A recorded step reads it at its address, whatever generations of other lengths come between."""
    with torch.inference_mode():
        first = bell(10.0, 1, torch.device("cpu"))
    assert not any(one.is_inference() for one in first), "other steps run without it"
    for reach in range(2, 40):
        bell(10.0, reach, torch.device("cpu"))
    assert bell(10.0, 1, torch.device("cpu")) is first


# CCD


def full(scheduler: Scheduler) -> Result:
    return run(scheduler, blocks=FullBlock())


@pytest.mark.slow
def test_ccd_at_its_ends() -> None:
    baseline = full(FixedSteps(score="entropy"))
    assert same(full(Coherent(expand=0.0)), baseline)
    assert same(full(Coherent(warmup=TOKENS)), baseline)
    sampler = Sampler(toys.denoiser(), scheduler=Coherent(steps=4), blocks=FullBlock(), stop="none")
    fixed = Sampler(toys.denoiser(), scheduler=FixedSteps(4, "entropy"), blocks=FullBlock(), stop="none")
    assert same(sampler.generate(PROMPTS, max_new_tokens=16), fixed.generate(PROMPTS, max_new_tokens=16))


def test_ccd_commits_its_share() -> None:
    """With a fixed budget the forwards are those of the baseline, the order is not."""
    result, baseline = full(Coherent(dynamic=False, warmup=2)), full(FixedSteps(score="entropy"))
    assert torch.equal(result.nfe, baseline.nfe)
    assert all(len(step) == 1 for row in range(len(PROMPTS)) for step in result.trace.steps(row))
    two = Sampler(
        toys.denoiser(), scheduler=Coherent(dynamic=False, steps=8, warmup=2), blocks=FullBlock(), stop="none"
    )
    trace = two.generate(PROMPTS, max_new_tokens=16).trace
    assert all(len(step) == 2 for row in range(len(PROMPTS)) for step in trace.steps(row))
    assert not same(result, baseline)


def test_ccd_on_a_model_that_never_changes_its_mind() -> None:
    """The line grows by one per step from the warm-up's last on; what is verified are the ones it had a step before."""
    sizes = [len(step) for step in play(constant([0.9 - 0.01 * i for i in range(42)]), Coherent(), 42)]
    assert sizes[:10] == [1, 1, 1, 1, 1, 2, 3, 4, 5, 5]
    assert sizes[10:] == [5, 5, 5, 2, 1]  # a tenth of 42 is late: a line of two


def test_ccd_on_a_model_that_always_changes_its_mind() -> None:
    tables = [constant([0.9 - 0.01 * i for i in range(24)], [token] * 24) for token in (1, 2)]
    model = Script(lambda canvas: tables[int(canvas.step[0]) % 2].says(canvas))
    assert play(model, Coherent(), 24) == play(model, FixedSteps(score="entropy"), 24)


@pytest.mark.slow
def test_marginal_of_one_step_is_the_entropy() -> None:
    assert same(full(CoherentMarginal(dynamic=False, depth=1)), full(FixedSteps(score="entropy")))
    assert same(full(CoherentMarginal(depth=1, buffer=TOKENS, epsilon=0.9)), full(EntropyThreshold(0.9)))


def test_marginal_by_hand() -> None:
    """Position 0 is sure of another token each time, position 1 is less sure but stays; 2 is never in the buffer."""
    flip = [constant([0.9, 0.8, 0.2], [token, 3, 4]) for token in (1, 2)]
    model = Script(lambda canvas: flip[int(canvas.age[0]) % 2].says(canvas))
    rule = CoherentMarginal(dynamic=False, depth=2, buffer=2)
    # No history: the lowest entropy. Then position 0 would be gone; so let it be noise again by asking for a block.
    assert play(model, rule, 3)[0] == [0]

    class Late(CoherentMarginal):
        """Commits nothing in the first step, only remembers."""

        def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> tuple[Edit, Any]:
            edit, carry = super().tell(canvas, query, readout, carry)
            return replace(edit, commit=edit.commit & (canvas.age > 0)[:, None]), carry

    sampler = Sampler(model, scheduler=Late(False, None, 2, 2), blocks=FullBlock(), stop="none", max_steps=4)
    assert sampler.generate([[0]], max_new_tokens=3).trace.steps(0)[:2] == [[], [1]]
    sampler = Sampler(model, scheduler=FixedSteps(score="entropy"), blocks=FullBlock(), stop="none")
    assert sampler.generate([[0]], max_new_tokens=3).trace.steps(0)[0] == [0]


@pytest.mark.slow
def test_marginal_fires() -> None:
    dynamic = full(CoherentMarginal(epsilon=2.0))
    assert (dynamic.nfe < TOKENS).any()
    fixed = full(CoherentMarginal(dynamic=False))
    assert (fixed.nfe == TOKENS).all()
    assert not same(fixed, full(FixedSteps(score="entropy")))


# Token editing


def test_without_edits_it_is_the_threshold() -> None:
    assert same(run(TokenEditing(0.6, 1.0)), run(Threshold(0.6)))


def test_editing_by_hand() -> None:
    """Position 0 reads 1 alone and 2 once position 1 stands: one edit, one step that changes nothing."""
    first, later = constant([0.8, 0.6], [1, 3]), constant([0.9, 0.6], [2, 3])
    model = Script(
        lambda canvas: torch.where(canvas.masked[:, 2][:, None, None], first.says(canvas), later.says(canvas))
    )
    sampler = Sampler(model, scheduler=TokenEditing(0.7, 0.5), blocks=FullBlock(), stop="none")
    seen = [commits.tokens[0].tolist() for commits in sampler.stream([[0]], max_new_tokens=2)]
    assert seen == [[1, 7], [1, 3], [2, 3], [2, 3]]
    keen = Sampler(model, scheduler=TokenEditing(0.7, 0.95), blocks=FullBlock(), stop="none")
    assert [commits.tokens[0].tolist() for commits in keen.stream([[0]], max_new_tokens=2)] == [[1, 7], [1, 3], [1, 3]]
    quota = Sampler(model, scheduler=TokenEditing(0.7, 0.5, quota=2), blocks=FullBlock(), stop="none")
    assert [commits.tokens[0].tolist() for commits in quota.stream([[0]], max_new_tokens=2)] == [[1, 3], [2, 3], [2, 3]]


@each(("extra", "forwards"), [(16, 17), (2, 3), (0, 1)])
def test_editing_ends(extra: int, forwards: int) -> None:
    """A model that changes its mind for ever."""
    tables = [constant([0.9] * 4, [token] * 4) for token in (1, 2)]
    model = Script(lambda canvas: tables[int(canvas.step[0]) % 2].says(canvas))
    assert len(play(model, TokenEditing(extra=extra), 4)) == forwards


@pytest.mark.slow
def test_editing_fires_and_leaves_the_prompt() -> None:
    edits = 0
    sampler = Sampler(toys.denoiser(), scheduler=TokenEditing(0.6, 0.3), blocks=FixedBlocks(BLOCK), stop="none")
    for prompt in PROMPTS:
        before, left = torch.full((TOKENS,), MASK), torch.ones(TOKENS, dtype=torch.bool)
        for commits in sampler.stream([prompt], max_new_tokens=TOKENS):
            edits += int(((commits.tokens[0] != before) & ~left).sum())
            before, left = commits.tokens[0], commits.masked[0]
        assert not left.any()
    assert edits > 0


def test_editing_is_over_before_prefix_stops() -> None:
    """The end token at position 0 stands from the first step on, and what stands there is edited in the third."""
    first, later = constant([0.8, 0.6], [6, 3]), constant([0.9, 0.6], [2, 3])
    model = Script(lambda canvas: torch.where(canvas.masked[:, 2, None, None], first.says(canvas), later.says(canvas)))
    result = Sampler(model, scheduler=TokenEditing(), blocks=FullBlock()).generate([[0]], max_new_tokens=2)
    assert result.tokens[0].tolist() == [2, 3]


# Token editing that masks again


def changes(*says: list[tuple[float, int]]) -> Script:
    """Confidence and token of each position at each forward. The last one repeats."""
    tables = [constant(*map(list, zip(*line, strict=True))) for line in says]  # pyright: ignore
    return Script(lambda canvas: tables[min(int(canvas.step[0]), len(tables) - 1)].says(canvas), length=len(says[0]))


def test_an_unlikely_token_becomes_a_mask_again() -> None:
    """Position 0 gets 1 at once, which is unlikely beside the 3: a mask, then a 2."""
    model = changes([(0.9, 1), (0.6, 3)], [(0.9, 2), (0.6, 3)])
    opened, taken = model.history(TokenEditing(0.7, remask="low_prob", remask_threshold=0.3))
    assert (opened, taken) == ([[0], [1], [0], []], [[], [0], [], []])
    # What a step commits is judged by the next one only, and the probability must be below the bound.
    bound = 0.1 / 6
    opened, taken = model.history(TokenEditing(0.7, remask="low_prob", remask_threshold=bound - 1e-9))
    assert (opened, taken) == ([[0], [1], []], [[], [], []])


def test_another_token_must_be_surer_than_the_bound() -> None:
    model = changes([(0.9, 1), (0.6, 3)], [(0.89, 2), (0.6, 3)], [(0.89, 2), (0.95, 4)])
    assert model.history(TokenEditing(0.7, remask="t2t_remask"))[1] == [[], [], [1], [], []]
    rule = TokenEditing(0.7, remask="t2t_remask", remask_threshold=0.8, remask_share=1.0)
    assert model.history(rule)[1] == [[], [0], [1], [], []]


def test_a_fall_is_seen_from_the_third_forward_on() -> None:
    """Position 0 falls at the second forward, which has nothing to compare with, and at the third."""
    model = changes([(0.9, 1), (0.6, 3)], [(0.5, 1), (0.6, 3)], [(0.15, 1), (0.6, 3)], [(0.9, 2), (0.6, 3)])
    rule = TokenEditing(0.7, remask="logit_diff")
    assert model.history(rule)[1] == [[], [], [0], [], []]
    assert model.history(replace(rule, remask_threshold=0.36))[1][2] == []
    # Position 1 is committed by the second forward, the first one that has a token to look at.
    fallen = changes([(0.9, 1), (0.6, 3)], [(0.9, 1), (0.6, 3)], [(0.9, 1), (0.2, 3)])
    assert fallen.history(rule)[1][2] == [1]


def test_the_most_suspect_come_first() -> None:
    """Four tokens, three of them suspect: a quarter of four is one, of which the least likely is taken."""
    line = [(0.2, 1), (0.1, 1), (0.2, 1), (0.9, 1)]
    model = changes([(0.9, 1)] * 4, line, [(0.9, 1)] * 4)
    rule = TokenEditing(0.7, remask="low_prob", remask_threshold=0.3)
    assert model.history(rule)[1][1] == [1]
    assert model.history(replace(rule, remask_share=0.6))[1][1] == [0, 1]  # floor, and ties by position
    assert model.history(replace(rule, remask_share=0.0))[1][1] == [1]  # at least one
    assert model.history(replace(rule, remask_share=1.0))[1][1] == [0, 1, 2]


@each("trigger", ["low_prob", "t2t_remask", "logit_diff"])
def test_every_position_is_taken_back_at_most_so_often(trigger: Any) -> None:
    """Never one that the same step commits, never the prompt, and the block ends within its bound."""
    bound = {"low_prob": 0.9, "t2t_remask": 0.1, "logit_diff": 0.0}[trigger]
    rule = TokenEditing(0.6, remask=trigger, remask_threshold=bound, remask_limit=3, remask_share=1.0, extra=2)
    most = 0
    for prompt in PROMPTS[:2]:
        opened, taken = history(rule, prompt, blocks=FixedBlocks(BLOCK), stop="none")
        counts = [sum(at in step for step in taken) for at in range(TOKENS)]
        most = max(most, *counts)
        assert not any(set(one) & set(other) for one, other in zip(opened, taken, strict=True))
        assert len(opened) <= rule.bound(TOKENS)
    assert most == 3


@each("trigger", [("low_prob", 0.0), ("t2t_remask", 1.0), ("logit_diff", 1.0), ("low_prob", 0.9)])
def test_without_suspects_it_looks_once_at_each_block(trigger: tuple[Any, float]) -> None:
    name, bound = trigger
    limit = 0 if bound == 0.9 else 5
    found = run(TokenEditing(0.6, remask=name, remask_threshold=bound, remask_limit=limit))
    plain = run(TokenEditing(0.6, 1.0))
    assert torch.equal(found.tokens, plain.tokens)
    blocks = torch.tensor([len(set(range(TOKENS)[::BLOCK])) for _ in PROMPTS])
    assert torch.equal(found.nfe, plain.nfe + blocks)


def test_what_a_stop_writes_has_no_history() -> None:
    """The end token that a stop writes was not predicted there, so nothing has fallen."""

    @dataclass(frozen=True)
    class Writes(Stop):
        def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
            second = (canvas.step == 1)[:, None] & (query.positions == 2)
            return replace(edit, ids=edit.ids.masked_fill(second, 6), commit=edit.commit | second)

    model = changes([(0.9, 1), (0.6, 3)], [(0.9, 1), (0.95, 3)], [(0.9, 1), (0.95, 3)])
    assert model.history(TokenEditing(0.7, remask="logit_diff"), stop=Writes())[1] == [[], [], []]


# Bad values

WRONG: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (LearnedFilter, {"threshold": 1.5}, "scheduler.threshold"),
    (LearnedFilter, {"steps": 0}, "scheduler.steps"),
    (EndOfText, {"mode": "guessed"}, "stop.mode"),
    (EndOfText, {"min_conf": -1.0}, "stop.min_conf"),
    (DInferThreshold, {"slack": -1.0}, "scheduler.slack"),
    (DInferThreshold, {"threshold": -0.1}, "scheduler.threshold"),
    (Hierarchical, {"low": -0.1}, "scheduler.low"),
    (Hierarchical, {"threshold": float("nan")}, "scheduler.threshold"),
    (Hierarchical, {"remask": -0.1}, "scheduler.remask"),
    (Credit, {"alpha": -1.0}, "scheduler.alpha"),
    (Credit, {"decay": 1.1}, "scheduler.decay"),
    (Credit, {"memory": 0}, "scheduler.memory"),
    (Credit, {"memory": 10**9}, "scheduler.memory, 1024"),
    (CertaintyPrior, {"sigma": 0.0}, "scheduler.sigma"),
    (CertaintyPrior, {"score": "entropy"}, "scheduler.score"),
    (PositionCalibrated, {"score": "position"}, "scheduler.score"),
    (Coherent, {"warmup": 0}, "scheduler.warmup"),
    (Coherent, {"expand": -1.0}, "scheduler.expand"),
    (Coherent, {"late": 2.0}, "scheduler.late"),
    (CoherentMarginal, {"depth": 0}, "scheduler.depth"),
    (CoherentMarginal, {"epsilon": float("nan")}, "scheduler.epsilon"),
    (TokenEditing, {"edit": -0.5}, "scheduler.edit"),
    (TokenEditing, {"extra": -1}, "scheduler.extra"),
    (TokenEditing, {"remask": "often"}, "scheduler.remask='often' is invalid. Set low_prob, t2t_remask or logit_diff"),
    (TokenEditing, {"remask_threshold": -0.1}, "scheduler.remask_threshold"),
    (TokenEditing, {"remask_limit": -1}, "scheduler.remask_limit"),
    (TokenEditing, {"remask_share": 1.1}, "scheduler.remask_share"),
]


@each(("cls", "fields", "name"), WRONG)
def test_bad_values(cls: Callable[..., object], fields: dict[str, Any], name: str) -> None:
    word = isinstance(next(iter(fields.values())), str)
    code = "options-conflict" if name == "scheduler.score" else "choice-unknown" if word else "option-range"
    with refused(f"{code}: {name}"):
        cls(**fields)

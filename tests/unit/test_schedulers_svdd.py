"""SVDD (arXiv 2408.08252): the law of the choice, the scheduler inside at its ends, and what a reward may say."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Query, Result, Sampler
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Edit, Readout
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import UNKNOWN
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.svdd import SoftValueGuided
from tests import sampling, toys
from tests.enumerated import Enumerated, Joint, Probabilities, Value, divergence
from tests.refusals import refused
from tests.sampling import crossed, each, few

Settings = dict[str, Any]
LAW = Joint()
# By steps; in two the first commits two positions together, so that the sampler's law is not the data's.
TOY = {2: Enumerated(LAW, ((3, 2), (1, 1))), 3: Enumerated(LAW, ((3, 1), (2, 1), (1, 1)))}
ROWS = 20_000


def valued(value: str, steps: int, alpha: float) -> Value:
    """The exact soft value of a candidate with masks, or the reward of its best filling."""
    toy = TOY[steps]
    return (lambda state: toy.soft(state, alpha)) if value == "masked" else lambda state: LAW.reward(LAW.fill(state))


@cache
def sampled(value: str, candidates: int, alpha: float, steps: int = 2) -> Probabilities:
    """The shares of outcomes in many answers."""
    function = valued(value, steps, alpha)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        states = [tuple(UNKNOWN if one > 1 else one for one in ids) for ids in completion_ids]
        known = {state: function(state) for state in set(states)}
        return [known[state] for state in states]

    inner = {"name": "fixed", "score": "random", "steps": steps}
    rule = {"name": "svdd", "inner": inner, "reward": reward, "candidates": candidates, "alpha": alpha, "value": value}
    sampler = Sampler(LawDenoiser(LAW), scheduler=rule, blocks="full", stop="none", cache="none", temperature=1.0)
    found = sampler.generate([[0]] * ROWS, max_new_tokens=LAW.length, seed=candidates * ROWS)
    assert set(found.nfe.tolist()) == {steps}
    counts = Counter(map(tuple, found.tokens.tolist()))
    return {state: counts[state] / ROWS for state in LAW.outcomes}


def chi_square(found: Probabilities, law: Probabilities) -> float:
    """Of 7 degrees of freedom: above 29.9 once in 10,000 times."""
    return ROWS * sum((found[state] - law[state]) ** 2 / law[state] for state in law)


@each("alpha", [1.0, 0.3])
@each("steps", TOY)
def test_the_enumerated_law(steps: int, alpha: float) -> None:
    """Its limits are known, and more candidates come closer to the target."""
    toy, soft, fill = TOY[steps], valued("masked", steps, alpha), valued("fill", steps, alpha)
    target, base = toy.target(alpha), toy.base()
    assert sum(base.values()) == pytest.approx(1, abs=1e-12)
    assert divergence(toy.guided(soft, alpha, None), target) == pytest.approx(0, abs=1e-12)
    assert divergence(toy.guided(soft, alpha, 1), base) == pytest.approx(0, abs=1e-12)
    laws = [toy.guided(soft, alpha, candidates) for candidates in (1, 2, 3, 4)]
    far = [divergence(law, target) for law in laws]
    assert far == sorted(far, reverse=True) and far[0] > 2 * far[2] > 0
    rewards = [sum(chance * LAW.reward(state) for state, chance in law.items()) for law in laws]
    assert rewards == sorted(rewards)
    assert divergence(toy.guided(fill, alpha, None), target) > 1e-4, "another value has another limit"


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "candidates", "alpha", "steps"),
    [
        pytest.param("fill", 3, 1.0, 3, marks=slow),
        ("fill", 2, 0.0, 2),
        pytest.param("masked", 2, 1.0, 3, marks=slow),
        pytest.param("fill", 4, 0.2, 2, marks=slow),
    ],
)
def test_answers_follow_the_law_of_finitely_many_candidates(
    value: str, candidates: int, alpha: float, steps: int
) -> None:
    found, toy = sampled(value, candidates, alpha, steps), TOY[steps]
    assert chi_square(found, toy.guided(valued(value, steps, alpha), alpha, candidates)) < 29.9
    assert chi_square(found, toy.base()) > 300


@pytest.mark.slow
def test_more_candidates_come_closer_to_the_target() -> None:
    """Those of four, whose value is that of a candidate with masks, have the law of four."""
    target, found = TOY[2].target(0.3), [sampled("masked", candidates, 0.3) for candidates in (1, 2, 4)]
    far = [divergence(law, target) for law in found]
    assert far == sorted(far, reverse=True) and far[0] > 3 * far[2]
    assert chi_square(found[0], TOY[2].base()) < 29.9, "one candidate"
    assert chi_square(found[2], TOY[2].guided(valued("masked", 2, 0.3), 0.3, 4)) < 29.9 < chi_square(found[1], target)


@slow
@each("value", ["fill", "masked"])
def test_a_choice_at_infinite_temperature_is_none(value: str) -> None:
    assert chi_square(sampled(value, 3, 1e12), TOY[2].base()) < 29.9


INNER: dict[str, Settings] = {
    "fixed": {"name": "fixed", "steps": 7},
    "random": {"name": "fixed", "score": "random", "steps": 9},
    "threshold": {"name": "threshold", "threshold": 0.5},
    "ccd": {"name": "ccd", "warmup": 1},
    "klass": {"name": "klass", "threshold": 0.3, "divergence": 1.0},
    "editing": {"name": "editing", "threshold": 0.5, "edit": 1.0},  # looks at a full block once more
}
# Only the choice at once takes these: they take tokens back, or their queries are no blocks.
FREE: dict[str, Settings] = {
    "remdm": {"name": "remdm", "tokens": 2},
    "random_order": {"name": "random_order", "steps": 7},
    "wino": {"name": "wino", "threshold": 0.4, "back": 0.5, "least": 2},
    "leftright": {"name": "leftright", "tokens_per_step": 2},
    "edits": {"name": "editing", "threshold": 0.5, "edit": 0.3, "extra": 3},
}


def same_for_all(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def run(scheduler: Settings, toy: str = "llada", **plugins: Any) -> Result:
    given = {"temperature": 0.9, **plugins}
    return toys.sampler(toy, scheduler=scheduler, **given).generate(toys.PROMPTS, max_new_tokens=17, seed=toys.SEEDS)


def guided(inner: Settings, **settings: Any) -> Settings:
    return {"name": "svdd", "inner": inner, "reward": toys.reward, **settings}


@pytest.mark.parametrize(("inner", "value"), crossed([*INNER, *FREE], ["fill", "masked"], together=0))
def test_one_candidate_is_the_scheduler_inside(inner: str, value: str) -> None:
    rule = (INNER | FREE)[inner]
    one, alone = run(guided(rule, candidates=1, value=value)), run(rule)
    for name in ("ids", "step_map", "logprob", "nfe", "rows"):
        assert torch.equal(getattr(one.trace, name), getattr(alone.trace, name)), name


@pytest.mark.slow
@pytest.mark.parametrize(("toy", "inner"), crossed([*toys.TOYS, "causal"], list(INNER), together=0))
def test_where_all_are_worth_the_same_the_first_candidate_is_the_scheduler_inside(toy: str, inner: str) -> None:
    turn = list(INNER).index(inner)
    plugins: Settings = {"cache": ("none", "prefix", "dual")[turn % 3]}
    if toy == "causal":
        store = ("separate", "ride")[turn % 2]
        plugins = {"cache": {"name": "block_causal", "store_pass": store}, "blocks": {"name": "fixed", "length": 5}}
    alone = run(INNER[inner], toy, **plugins)
    found = run(guided(INNER[inner], reward=same_for_all, candidates=3), toy, **plugins)
    assert torch.equal(found.tokens, alone.tokens)
    assert torch.allclose(found.trace.logprob, alone.trace.logprob, rtol=0, atol=1e-9)
    even = INNER[inner]["name"] == "fixed"  # all candidates fill a block in the same step
    blocks = -(-17 // 5) + 1
    assert torch.equal(found.nfe, alone.nfe) if even else bool((found.nfe <= alone.nfe + blocks).all())
    assert (found.nfe >= alone.nfe).all()


@pytest.mark.slow
@few("inner", sampling.sampled([*INNER, *FREE], lambda inner: [inner in INNER]))
def test_a_choice_at_once_takes_any_step(inner: str) -> None:
    rule = (INNER | FREE)[inner]
    plugins: Settings = {"cache": "dkv" if inner in INNER else "none", "stop": "truncate"}
    alone = run(rule, **plugins)
    found = run(guided(rule, reward=same_for_all, candidates=3, value="masked"), **plugins)
    for name in ("ids", "step_map", "logprob", "nfe", "rows"):
        assert torch.equal(getattr(found.trace, name), getattr(alone.trace, name)), name
    chosen = run(guided(rule, value="masked", reward=lambda completion_ids, **_: map(sum, completion_ids)), **plugins)
    assert not torch.equal(chosen.tokens, alone.tokens)


@pytest.mark.slow
@few("alpha", [0.0, 0.5])
def test_minus_infinity_is_never_chosen(alpha: float) -> None:
    def without_seven(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-inf if 7 in ids else 0.0 for ids in completion_ids]

    rule = guided(INNER["random"], reward=without_seven, candidates=8, alpha=alpha)
    plain, found = (run(one, temperature=1.5, guide="end_tokens") for one in (INNER["random"], rule))
    assert (plain.tokens == 7).any() and not (found.tokens == 7).any()
    hopeless = run(guided(INNER["random"], reward=lambda completion_ids, **_: [-inf] * len(completion_ids)))
    assert torch.equal(hopeless.tokens, run(INNER["random"]).tokens), "the first one, as on any tie"


@pytest.mark.slow
@few("scheduler", ["random", "threshold"])
def test_every_candidate_has_the_form(scheduler: str) -> None:
    """A guide on the answer's form vouches for all of them, filled too."""
    seen: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(text.count("b")) for text in completions]

    pattern = "([a-j]{1,3}[0-9])+|[a-j]"
    found = run(guided(INNER[scheduler], reward=reward), guide={"name": "regex", "pattern": pattern}, blocks="full")
    assert found.texts is not None and len(seen) > 50
    assert all(re.fullmatch(pattern, text) for text in (*found.texts, *seen))


TAKEN = "scheduler-incompatible: scheduler=svdd"
REFUSED: dict[str, tuple[Settings, Settings, str]] = {
    "no reward": (guided(INNER["random"], reward=None), {}, "option-missing: scheduler.reward=package.module:function"),
    "no module": (
        guided(INNER["random"], reward="nowhere.at:all"),
        {},
        "function-missing: scheduler.reward, nowhere.at:all",
    ),
    "no function": (guided(INNER["random"], reward="tests.toys:MASK"), {}, "function-invalid: scheduler.reward, int"),
    "a number": (guided(INNER["random"], reward=3), {}, "function-invalid: scheduler.reward, 3"),
    "greedy": (guided(INNER["fixed"]), {"temperature": None}, "candidates-identical: fixed, temperature=1"),
    "candidates": (guided(INNER["random"], candidates=0), {}, "option-range: scheduler.candidates, 0"),
    "alpha": (guided(INNER["random"], alpha=-1.0), {}, "option-range: scheduler.alpha=-1"),
    "value": (guided(INNER["random"], value="soft"), {}, "choice-unknown: scheduler.value='soft', fill, masked"),
    "drafts": (guided({"name": "freedave"}), {}, f"{TAKEN}, freedave"),
    "another model": (guided({"name": "apd", "verifier": toys.verifier()}, value="masked"), {}, f"{TAKEN}, apd"),
    "takes back": (guided(FREE["remdm"]), {}, f"{TAKEN}, remdm"),
    "chooses": (guided(FREE["random_order"]), {}, f"{TAKEN}, random_order, scheduler.value=masked"),
    "drafted": ({"name": "freedave", "inner": guided(INNER["random"])}, {}, "scheduler-incompatible: freedave, svdd"),
    "noise": (guided(INNER["random"]), {"noise": ReplayNoise(0, "dream")}, "scheduler-incompatible: svdd, ReplayNoise"),
    "cache": (guided(INNER["random"]), {"cache": "elastic"}, "cache-incompatible: svdd, cache=elastic"),
    "stop": (guided(INNER["random"]), {"stop": "truncate"}, "plugins-incompatible: svdd, stop=truncate"),
}


@each("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    rule, plugins, reason = REFUSED[name]
    with refused(reason) as refusal:
        run(rule, **plugins)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_other_blocks_keep_the_reward() -> None:
    it = toys.sampler(scheduler=guided(INNER["random"]))
    found = [it.generate(toys.PROMPTS, max_new_tokens=12, block_length=length).tokens for length in (6, 4, 6)]
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_an_order_drawn_before_is_no_choice() -> None:
    """`random_order` knows its order before the first step: without a temperature its candidates are one."""
    with refused("candidates-identical: random_order"):
        run(guided(FREE["random_order"], value="masked"), temperature=None)
    stop = {"name": "end_of_text", "mode": "predicted", "min_conf": 1.0}  # joins positions to the query
    kept = run(guided(FREE["random_order"], value="masked"), cache="dkv_greedy", stop=stop, guide="end_tokens")
    assert torch.equal(kept.trace.generated, run(FREE["random_order"]).trace.generated)


@dataclass(frozen=True)
class Counting(FixedSteps):
    """Its carry is the number of steps that it took, and must be that of the canvas."""

    def init(self, canvas: Canvas) -> Carry:
        return torch.zeros_like(canvas.step), super().init(canvas)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert torch.equal(carry[0][~canvas.done], canvas.step[~canvas.done])
        edit, inner = super().tell(canvas, query, readout, carry[1])
        few = query.positions[:, :1] % 2 == 0  # a step of its own length for every candidate
        late = (edit.ids % 3 == 0) & few & (canvas.noise_left()[:, None] > 2)
        return replace(edit, commit=edit.commit & ~late), (carry[0] + 1, inner)


@pytest.mark.slow
@each("blocks", [5, 17])
def test_the_scheduler_inside_counts_its_own_steps(blocks: int) -> None:
    """Steps of several lengths: some candidates fill a block when others do not, which takes a forward more."""
    spy, picks, pick = toys.Spy(toys.denoiser()), list[tuple[int, int]](), SoftValueGuided.pick

    def noted(it: SoftValueGuided, canvas: Canvas, step: Tensor, ids: Tensor, judged: Tensor) -> Tensor:
        picks.extend((row, int(step[row])) for row in range(len(step)) if judged[row])
        return pick(it, canvas, step, ids, judged)

    rule = SoftValueGuided(Counting(steps=5), reward=toys.reward, candidates=3, alpha=1.0)
    plugins: Settings = {"blocks": {"name": "fixed", "length": blocks}, "stop": "none", "temperature": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoftValueGuided, "pick", noted)
        result = Sampler(spy, scheduler=rule, **plugins).generate(toys.PROMPTS, max_new_tokens=17)
    assert len(picks) == len(set(picks)), "each choice has noise of its own"
    steps = Counter(row for row, _ in picks)
    assert all(steps[row] <= int(result.nfe[row]) for row in steps) and result.complete.all()
    for canvas, query, _ in spy.calls:
        assert query.candidates.live is not None
        block = (query.positions >= canvas.start[:, None]) & (query.positions < canvas.stop[:, None])
        masks = ((query.ids == toys.MASK) & block[:, None]).any(2)  # [B, K]
        assert (masks | ~query.candidates.live)[~canvas.done].all(), "what is full needs no forward"
        assert query.candidates.live.any(1)[~canvas.done].all()
    waiting = [
        query.candidates.live[canvas.age > 0] for canvas, query, _ in spy.calls if query.candidates.live is not None
    ]
    assert blocks == 17 or any((~live).any() for live in waiting), "some were full"


@each("value", ["fill", "masked"])
def test_the_trace_has_the_models_probability_of_what_was_taken(value: str) -> None:
    """One position a step: the chain rule gives that of the whole answer, in any order."""
    inner = {"name": "fixed", "score": "random"}
    sampler = Sampler(
        LawDenoiser(LAW),
        scheduler=guided(inner, value=value),
        blocks="full",
        stop="none",
        cache="none",
        temperature=1.0,
    )
    found = sampler.generate([[0]] * 50, max_new_tokens=3)
    chances = LAW.weights[torch.tensor([LAW.outcomes.index(tuple(row)) for row in found.tokens.tolist()])]
    assert torch.allclose(found.trace.logprob.sum(1), chances.log(), rtol=0, atol=1e-5)


def test_a_chosen_mask_token_is_still_noise() -> None:
    spy = toys.Spy(toys.denoiser(), raise_mask=50.0)
    for value in ("fill", "masked"):
        sampler = Sampler(
            spy, scheduler=guided(INNER["random"], value=value), compat=True, stop="none", temperature=1.0
        )
        result = sampler.generate(toys.PROMPTS, max_new_tokens=9)
        assert (result.trace.generated == -1).all() and not result.complete.any()

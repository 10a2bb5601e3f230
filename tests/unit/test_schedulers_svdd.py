"""SVDD (arXiv 2408.08252): the law of the choice, the scheduler inside at its ends, and what a reward may say."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Result, Sampler, UserError
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.engine.loop import Engine
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import UNKNOWN
from tests import toys
from tests.enumerated import Enumerated, Joint, Probabilities, Value, divergence
from tests.sampling import crossed

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


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("steps", TOY)
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


@pytest.mark.parametrize(
    ("value", "candidates", "alpha", "steps"),
    [
        ("masked", 4, 0.3, 2),
        ("fill", 3, 1.0, 3),
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


def test_more_candidates_come_closer_to_the_target() -> None:
    target, found = TOY[2].target(0.3), [sampled("masked", candidates, 0.3) for candidates in (1, 2, 4)]
    far = [divergence(law, target) for law in found]
    assert far == sorted(far, reverse=True) and far[0] > 3 * far[2]
    assert chi_square(found[0], TOY[2].base()) < 29.9, "one candidate"


@pytest.mark.parametrize("value", ["fill", pytest.param("masked", marks=slow)])
def test_a_choice_at_infinite_temperature_is_none(value: str) -> None:
    assert chi_square(sampled(value, 3, 1e12), TOY[2].base()) < 29.9


INNER: dict[str, Settings] = {
    "fixed": {"name": "fixed", "steps": 7},
    "random": {"name": "fixed", "score": "random", "steps": 9},
    "threshold": {"name": "threshold", "threshold": 0.5},
    "ccd": {"name": "ccd", "warmup": 1},
    "klass": {"name": "klass", "threshold": 0.3, "divergence": 1.0},
}
# Only the choice at once takes these: they take tokens back, or their queries are no blocks.
FREE: dict[str, Settings] = {
    "remdm": {"name": "remdm", "tokens": 2},
    "random_order": {"name": "random_order", "steps": 7},
    "wino": {"name": "wino", "threshold": 0.4, "back": 0.5, "least": 2},
    "leftright": {"name": "leftright", "tokens_per_step": 2},
    "editing": {"name": "editing", "threshold": 0.5, "edit": 0.3, "extra": 3},
}


def same_for_all(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def run(scheduler: Settings, toy: str = "llada", **plugins: Any) -> Result:
    given = {"temperature": 0.9, **plugins}
    return toys.sampler(toy, scheduler=scheduler, **given).generate(toys.PROMPTS, max_new_tokens=17, seed=toys.SEEDS)


def guided(inner: Settings, **settings: Any) -> Settings:
    return {"name": "svdd", "inner": inner, "reward": toys.reward, **settings}


@pytest.mark.parametrize("value", ["fill", "masked"])
@pytest.mark.parametrize("inner", [*INNER, *FREE])
def test_one_candidate_is_the_scheduler_inside(inner: str, value: str) -> None:
    rule = (INNER | FREE)[inner]
    one, alone = run(guided(rule, candidates=1, value=value)), run(rule)
    for name in ("ids", "step_map", "logprob", "nfe", "rows"):
        assert torch.equal(getattr(one.trace, name), getattr(alone.trace, name)), name


@pytest.mark.parametrize(("toy", "inner"), crossed([*toys.TOYS, "causal"], list(INNER)))
def test_where_all_are_worth_the_same_the_first_candidate_is_the_scheduler_inside(toy: str, inner: str) -> None:
    turn = list(INNER).index(inner)
    plugins: Settings = {"cache": ("none", "prefix", "dual")[turn % 3]}
    if toy == "causal":
        store = ("ride", "separate")[turn % 2]
        plugins = {"cache": {"name": "block_causal", "store_pass": store}, "blocks": {"name": "fixed", "length": 5}}
    alone = run(INNER[inner], toy, **plugins)
    found = run(guided(INNER[inner], reward=same_for_all, candidates=3), toy, **plugins)
    assert torch.equal(found.tokens, alone.tokens)
    assert torch.allclose(found.trace.logprob, alone.trace.logprob, rtol=0, atol=1e-9)
    even = INNER[inner]["name"] == "fixed"  # all candidates fill a block in the same step
    blocks = -(-17 // 5) + 1
    assert torch.equal(found.nfe, alone.nfe) if even else bool((found.nfe <= alone.nfe + blocks).all())
    assert (found.nfe >= alone.nfe).all()


@pytest.mark.parametrize("inner", [*INNER, *FREE])
def test_a_choice_at_once_takes_any_step(inner: str) -> None:
    rule = (INNER | FREE)[inner]
    plugins: Settings = {"cache": "dkv" if inner in INNER else "none", "stop": "truncate"}
    alone = run(rule, **plugins)
    found = run(guided(rule, reward=same_for_all, candidates=3, value="masked"), **plugins)
    for name in ("ids", "step_map", "logprob", "nfe", "rows"):
        assert torch.equal(getattr(found.trace, name), getattr(alone.trace, name)), name
    chosen = run(guided(rule, value="masked", reward=lambda completion_ids, **_: map(sum, completion_ids)), **plugins)
    assert not torch.equal(chosen.tokens, alone.tokens)


@pytest.mark.parametrize("inner", ["fixed", "threshold"])
def test_a_reward_sees_what_stands_and_what_the_block_may_become(inner: str) -> None:
    """Whole blocks and no later ones, tokens of earlier blocks unchanged, once per step."""
    calls: list[list[list[int]]] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(completion_ids)
        assert completions == toys.tokenizer().batch_decode(completion_ids, skip_special_tokens=True)
        assert prompts == [toys.tokenizer().decode(toys.PROMPTS[1])] * len(completions)
        return [float(len(set(ids))) for ids in completion_ids]

    sampler = toys.sampler(
        scheduler=guided(INNER[inner], reward=reward, candidates=3), temperature=1.0, guide="end_tokens"
    )
    *_, last = sampler.stream([toys.PROMPTS[1]], max_new_tokens=17, seed=1)
    assert last.result is not None
    (tokens,), steps = last.tokens.tolist(), int(last.result.nfe)
    ends = [len(ids) for call in calls for ids in call]
    assert set(ends) == {6, 12, 17} and ends == sorted(ends)
    assert all(
        ids[: len(ids) - (len(ids) % 6 or 6)] == tokens[: len(ids) - (len(ids) % 6 or 6)] for c in calls for ids in c
    )
    assert all(len(call) == 3 for call in calls)
    assert tokens in calls[-1], "the last one is full: its value is its reward"
    assert len(calls) == steps if inner == "fixed" else steps - 3 <= len(calls) <= steps
    assert max(toys.reward(calls[-1])) == toys.reward([tokens])[0]


def test_a_value_sees_the_masks() -> None:
    calls: list[list[list[int]]] = []

    def value(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(completion_ids)
        return [0.0] * len(completion_ids)

    result = run(guided(INNER["fixed"], reward=value, value="masked"), guide="end_tokens")
    assert len(calls) == int(result.nfe.max())
    assert all(len(ids) == 17 for call in calls for ids in call)
    masks = [max(ids.count(toys.MASK) for ids in call) for call in calls]
    assert masks == sorted(masks, reverse=True) and masks[-1] == 0 and masks[0] >= 14
    assert [len(call) for call in calls] == [4 * int((result.nfe > step).sum()) for step in range(len(calls))]


def test_the_device_is_read_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, calls, step, tolist = Counter[str](), [0], Engine.step, Tensor.tolist

    def reward(**given: Any) -> list[float]:
        calls[0] += 1
        return toys.reward(**given)

    def watched(engine: Engine, state: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", lambda it: (reads.update(["tolist"]), tolist(it))[1])
            for name in ("item", "__bool__", "__int__", "cpu", "nonzero"):
                patch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(name))
            step(engine, state)

    monkeypatch.setattr(Engine, "step", watched)
    nfe = run(guided(INNER["fixed"], reward=reward)).nfe
    # Twice a step, before a choice and where a block may be full, whether there is a choice or not.
    assert reads["tolist"] == 2 * int(nfe.max()) >= calls[0] > 0


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_minus_infinity_is_never_chosen(alpha: float) -> None:
    def without_seven(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-inf if 7 in ids else 0.0 for ids in completion_ids]

    rule = guided(INNER["random"], reward=without_seven, candidates=8, alpha=alpha)
    plain, found = (run(one, temperature=1.5, guide="end_tokens") for one in (INNER["random"], rule))
    assert (plain.tokens == 7).any() and not (found.tokens == 7).any()
    hopeless = run(guided(INNER["random"], reward=lambda completion_ids, **_: [-inf] * len(completion_ids)))
    assert torch.equal(hopeless.tokens, run(INNER["random"]).tokens), "the first one, as on any tie"


@pytest.mark.parametrize("scheduler", ["random", "threshold"])
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


def failing(kind: str) -> Any:
    """A reward that fails for the prompt that begins with token 4."""

    def reward(prompt_ids: list[list[int]], **_: Any) -> Any:
        bad = [ids[0] == 4 for ids in prompt_ids]
        if kind == "raise" and any(bad):
            raise ZeroDivisionError("no\nluck")
        odd = {"nan": nan, "inf": inf, "none": None, "text": "high"}
        return [odd.get(kind, 1.0) if one else 1.0 for one in bad][: -1 if kind == "short" else None]

    return reward


WRONG = {
    "raise": r"failed for prompt 4 \(ZeroDivisionError: no luck\)",
    "nan": "returned nan for prompt 4: it must",
    "inf": "returned inf for prompt 4: it must",
    "none": "returned None for prompt 4: it must",
    "text": "returned 'high' for prompt 4: it must",
    "short": r"returned 19 numbers for the 20 answers of prompts 1, 2, 3, 4, 5: it must return one for each",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_reward_must_not_do_is_one_sentence_with_the_prompts_number(kind: str) -> None:
    rule = guided(INNER["random"], reward=failing(kind))
    with pytest.raises(UserError, match=f"^scheduler.reward=reward {WRONG[kind]}[^\\n]*$"):
        run(rule)


@pytest.mark.parametrize("batching", ["in_flight", "static"])
def test_the_number_is_that_of_the_prompt_wherever_its_row_is(batching: Any) -> None:
    sampler = toys.sampler(scheduler=guided(INNER["random"], reward=failing("raise")))
    prompts = [[5, 1], [6], [7, 7, 7], [8], [9, 3], [4, 2], [10]]
    with pytest.raises(UserError, match="failed for prompt 6 "):
        list(sampler.generate_many(prompts, batch_size=3, max_new_tokens=[6, 9, 12, 9, 6, 9, 6], batching=batching))
    with pytest.raises(UserError, match="failed for prompt 2 "):
        sampler.generate([[5], [4], [6]], max_new_tokens=8, samples=2)


TAKEN = "cannot draft for"
REFUSED: dict[str, tuple[Settings, Settings, str]] = {
    "no reward": (guided(INNER["random"], reward=None), {}, "needs a reward: scheduler.reward=package.module:function"),
    "no module": (guided(INNER["random"], reward="nowhere.at:all"), {}, "scheduler.reward: nowhere.at:all cannot be"),
    "no function": (guided(INNER["random"], reward="tests.toys:MASK"), {}, "is no function but a int"),
    "a number": (guided(INNER["random"], reward=3), {}, "scheduler.reward must be a function, or package.module"),
    "greedy": (guided(INNER["fixed"]), {"temperature": None}, "FixedSteps draws nothing.* use temperature=1"),
    "candidates": (guided(INNER["random"], candidates=0), {}, "scheduler.candidates must be a whole number"),
    "alpha": (guided(INNER["random"], alpha=-1.0), {}, "scheduler.alpha must be a number of at least 0"),
    "value": (guided(INNER["random"], value="soft"), {}, "value should be 'fill' or 'masked'"),
    "drafts": (guided({"name": "freedave"}), {}, f"{TAKEN} FreeDave, a scheduler that drafts"),
    "another model": (guided({"name": "apd", "verifier": toys.verifier()}, value="masked"), {}, f"{TAKEN} Parallel"),
    "takes back": (guided(FREE["remdm"]), {}, f"{TAKEN} Remdm, .* takes tokens back"),
    "chooses": (guided(FREE["random_order"]), {}, f"{TAKEN} RandomOrder, .* chooses what to ask"),
    "drafted": ({"name": "freedave", "inner": guided(INNER["random"])}, {}, "cannot speed up SoftValueGuided"),
    "noise": (guided(INNER["random"]), {"noise": ReplayNoise(0, "dream")}, "ReplayNoise draws in the order of steps"),
    "cache": (guided(INNER["random"]), {"cache": "elastic"}, "may not come true, and what ElasticCache|cache=Elastic"),
    "stop": (guided(INNER["random"]), {"stop": "truncate"}, "has drafted what comes next"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    rule, plugins, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason) as refusal:
        run(rule, **plugins)
    assert "\n" not in str(refusal.value)


def test_an_order_drawn_before_is_no_choice() -> None:
    """`random_order` knows its order before the first step: without a temperature its candidates are one."""
    with pytest.raises(UserError, match="RandomOrder draws nothing"):
        run(guided(FREE["random_order"], value="masked"), temperature=None)
    kept = run(guided(FREE["random_order"], value="masked"), cache="dkv_greedy")
    assert torch.equal(kept.trace.generated, run(FREE["random_order"]).trace.generated)

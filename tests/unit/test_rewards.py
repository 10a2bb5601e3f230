"""Rewards inside a generation: what they see, how often they are asked, and what they must not do."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Result, Sampler
from dllm_sampler.engine.loop import Engine
from dllm_sampler.errors import NotFiniteError
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few

Settings = dict[str, Any]
INNER: dict[str, Settings] = {
    "fixed": {"name": "fixed", "steps": 7},
    "random": {"name": "fixed", "score": "random", "steps": 9},
    "threshold": {"name": "threshold", "threshold": 0.5},
}


def run(scheduler: Settings, **plugins: Any) -> Result:
    sampler = toys.sampler(scheduler=scheduler, temperature=0.9, **plugins)
    return sampler.generate(toys.PROMPTS, max_new_tokens=17, seed=toys.SEEDS)


def guided(inner: Settings, **settings: Any) -> Settings:
    return {"name": "svdd", "inner": inner, **settings}


@few("inner", ["fixed", "threshold"])
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


def test_a_reward_may_learn_and_keep_tensors() -> None:
    """Steps run without gradients, and in torch's inference mode; a function of yours may do without both."""
    weight = torch.ones(1, requires_grad=True)
    kept: list[Tensor] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> Tensor:
        assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        kept.append(torch.tensor([float(sum(ids)) for ids in completion_ids]))
        with torch.enable_grad():
            (weight * kept[-1]).sum().backward()
        return kept[-1]

    run(guided(INNER["fixed"], reward=reward, candidates=2))
    assert len(kept) > 1 and weight.grad is not None and float(weight.grad) == float(sum(one.sum() for one in kept))
    (weight * kept[0]).sum().backward()


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


def failing(kind: str) -> Any:
    """A reward that fails for the prompt that begins with token 4."""

    def reward(prompt_ids: list[list[int]], **_: Any) -> Any:
        bad = [ids[0] == 4 for ids in prompt_ids]
        if kind == "raise" and any(bad):
            raise ZeroDivisionError("no\nluck")
        odd = {"nan": nan, "inf": inf, "none": None, "text": "high"}
        return [odd.get(kind, 1.0) if one else 1.0 for one in bad][: -1 if kind == "short" else None]

    def narrow(prompt_ids: list[list[int]]) -> Any: ...

    others = {
        "nothing": lambda **_: None,
        "keyword": narrow,
        "mapping": lambda completion_ids, **_: dict.fromkeys(range(len(completion_ids)), 0.0),
        "leaves": lambda **_: exit(0),
    }
    return others.get(kind, reward)


WRONG = {
    "raise": "function-failed: prompt 4, ZeroDivisionError: no luck",
    "nan": "function-result: nan, prompt 4",
    "inf": "function-result: inf, prompt 4",
    "none": "function-result: None, prompt 4",
    "text": "function-result: 'high', prompt 4",
    "nothing": "function-result: None, prompts 1, 2, 3, 4, 5",
    "keyword": "function-failed: prompt 1, TypeError, 'completion_ids', **_",
    "mapping": "function-failed: prompt 1, TypeError, dict",
    "leaves": "function-failed: prompt 1, SystemExit: 0",
    "short": "function-result: 19, 20, prompts 1, 2, 3, 4, 5",
}


@each("kind", WRONG)
def test_what_a_reward_must_not_do_is_refused_with_the_prompts_number(kind: str) -> None:
    rule = guided(INNER["random"], reward=failing(kind))
    with refused(f"{WRONG[kind]}, scheduler.reward=") as refusal:
        run(rule)
    assert "\n" not in str(refusal.value)


@few("batching", ["in_flight", "static"])
def test_the_number_is_that_of_the_prompt_wherever_its_row_is(batching: Any) -> None:
    sampler = toys.sampler(scheduler=guided(INNER["random"], reward=failing("raise")))
    prompts = [[5, 1], [6], [7, 7, 7], [8], [9, 3], [4, 2], [10]]
    with refused("function-failed: prompt 6"):
        list(sampler.generate_many(prompts, batch_size=3, max_new_tokens=[6, 9, 12, 9, 6, 9, 6], batching=batching))
    with refused("function-failed: prompt 2"):
        sampler.generate([[5], [4], [6]], max_new_tokens=8, samples=2)


def test_a_reward_is_not_asked_about_what_a_failing_model_said() -> None:
    class Failing(toys.Spy):
        def head(self, hidden: Tensor) -> Tensor:
            logits = super().head(hidden)
            return logits * nan if len(self.calls) > 2 else logits

    calls = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(len(completion_ids))
        return [0.0] * len(completion_ids)

    rule = guided(INNER["fixed"], reward=reward, candidates=3)
    with pytest.raises(NotFiniteError, match="at step 3 for prompt 1"):
        Sampler(Failing(toys.denoiser()), scheduler=rule, temperature=1.0).generate([[5, 6]], max_new_tokens=17)
    assert calls == [3]

"""Recorded steps, replayed, are the steps of the loop: the same tokens, forwards and history.

A CUDA graph repeats launches, not Python. Here a tape stands in for it: every torch operation of a step is written down
with the tensors it worked on, and a replay repeats those operations on the state as it then is. A number that the host
took from the first run, or a tensor that moved, shows as a wrong token. What is refused: tests/unit/test_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch

from dllm_sampler import Result, Sampler
from dllm_sampler.engine import graphs
from dllm_sampler.errors import NotFiniteError
from tests import toys
from tests.contract.cases import CASES, Case, thinned
from tests.sampling import sampled
from tests.taped import on_tape, pair


def same(found: Result, expected: Result) -> None:
    for name in ("ids", "step_map", "nfe", "rows", "end"):
        assert torch.equal(getattr(found.trace, name), getattr(expected.trace, name)), name
    for name in ("tokens", "lengths", "complete"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    # Sizes are rounded up, so that sums are made in another order.
    assert torch.allclose(found.trace.logprob, expected.trace.logprob, rtol=0, atol=1e-12)


STATIC = [case for case in CASES if case.facts["static"]]


@pytest.mark.parametrize("case", thinned(STATIC, "cache", "traits"))
def test_replayed_steps_are_the_steps(case: Case) -> None:
    plain, it, engine = pair(case.toy, **case.plugins)
    prompts, seeds = [toys.PROMPTS[0], toys.PROMPTS[4]], [toys.SEEDS[0], toys.SEEDS[4]]
    same(*(one.generate(prompts, max_new_tokens=8, seed=seeds) for one in (it, plain)))
    assert engine.record is not None


@pytest.mark.parametrize(
    "plugins",
    sampled(
        [
            {"cache": "none"},
            {"cache": "prefix", "scheduler": {"name": "klass", "threshold": 0.3, "divergence": 1.0}},
            {"cache": "dual", "scheduler": {"name": "freedave", "draft": 3}},
        ]
    ),
)
def test_one_generation_after_another(plugins: dict[str, Any]) -> None:
    """It finds the recordings of those before it, whatever stands in the buffers."""
    plain, it, engine = pair(**plugins)
    first, second = ([[5, 11, 3], [16]], 0), ([[7, 1, 30], [2]], 5)
    for prompts, seed in (first, second, second, ([[4, 4, 28, 13, 33], [12, 6]], 1)):
        same(*(one.generate(prompts, max_new_tokens=11, seed=seed) for one in (it, plain)))
    assert engine.replays > 0


def test_recordings_hold_for_weights_where_they_are() -> None:
    """New values are seen, new addresses make new recordings."""
    model = toys.transformer(kv_heads=2)
    plain, it = (Sampler(toys.wrapped(model), cache="dual") for _ in range(2))
    engine, weight, buffers = on_tape(it), model.layers[0].get_parameter("q_proj.weight"), []
    for change in (lambda: None, lambda: weight.mul_(2), lambda: setattr(weight, "data", weight.data / 3)):
        with torch.no_grad():
            change()
        found = [it.generate(toys.PROMPTS[:2], max_new_tokens=9) for _ in range(2)][-1]
        buffers.append(*engine.free)
        same(found, plain.generate(toys.PROMPTS[:2], max_new_tokens=9))
    assert buffers[0] is buffers[1] is not buffers[2]


class Switched(torch.nn.Module):
    """A part of a network with a switch, as adapters have one."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.off, self.scales = inner, False, {"first": 1.0}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * (0.0 if self.off else self.scales["first"])


def test_recordings_hold_for_the_settings_of_modules() -> None:
    network = toys.transformer(kv_heads=2)
    part = network.layers[0].ffn = Switched(cast(Any, network.layers[0].ffn))
    plain, it = (Sampler(toys.wrapped(network), cache="dual") for _ in range(2))
    engine = on_tape(it)
    for change in (
        lambda: None,
        lambda: setattr(part, "off", True),
        lambda: vars(part).update(off=False, scales={"first": 0.5}),
    ):
        change()
        replays = engine.replays
        found = [it.generate(toys.PROMPTS[:2], max_new_tokens=9) for _ in range(2)][-1]
        assert engine.replays > replays
        same(found, plain.generate(toys.PROMPTS[:2], max_new_tokens=9))


def test_generations_that_overlap() -> None:
    plain, it, engine = pair(cache="dual", scheduler={"name": "threshold", "threshold": 0.3})
    one = other = None
    for one, other in zip(*(it.stream(toys.PROMPTS[0], max_new_tokens=12) for _ in range(2)), strict=True):
        assert torch.equal(one.tokens, other.tokens)
    expected = plain.generate(toys.PROMPTS[0], max_new_tokens=12)
    for last in (one, other):
        assert last is not None and last.result is not None
        same(last.result, expected)
    assert len(engine.free) == 2


class Letters:
    """A tokenizer for which a token is a letter."""

    pad_token_id = None
    init_kwargs: ClassVar[dict[str, object]] = {}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(ord("a") + one) for one in ids)

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return [self.decode(row) for row in rows]


def test_a_row_that_a_string_ends() -> None:
    """The host changes `done` between two steps and asks again, and the next step sees it."""
    plain, it, engine = pair(cache="dual", scheduler={"name": "threshold", "threshold": 0.6}, stop="none")
    plain.tokenizer = it.tokenizer = cast(Any, Letters())
    full = [it.generate(toys.PROMPTS[:2], max_new_tokens=18) for _ in range(2)][-1]
    assert full.texts is not None
    shorter, replays = 0, engine.replays
    for place in range(0, 9, 2):
        given: dict[str, Any] = {"max_new_tokens": 18, "stop_strings": full.texts[0][place : place + 2]}
        found = it.generate(toys.PROMPTS[:2], **given)
        same(found, plain.generate(toys.PROMPTS[:2], **given))
        shorter += int(found.nfe[0] < full.nfe[0])
    assert shorter > 1 and engine.replays > replays


@pytest.mark.parametrize(("cache", "after"), [("none", 0), ("dual", 2)])
def test_a_model_that_is_not_finite(cache: str, after: int) -> None:
    model = toys.transformer()
    it = Sampler(toys.wrapped(model), cache=cache, stop="none", blocks={"name": "fixed", "length": 6})
    engine = on_tape(it)
    for _ in range(2):
        it.generate(toys.PROMPTS[:2], max_new_tokens=12)
    steps, replays = it.stream(toys.PROMPTS[:2], max_new_tokens=12), engine.replays
    for _ in range(after):
        next(steps)
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(NotFiniteError) as caught:
        next(steps)
    assert caught.value.step == after + 1 and caught.value.rows == [1, 2]
    assert caught.value.result is not None and caught.value.result.trace.nfe.tolist() == [after + 1] * 2
    assert engine.replays - replays == after + 1


def test_a_step_that_cannot_be_recorded_runs_without() -> None:
    def fails(run: Callable[[], None]) -> Callable[[], None]:
        run()  # and what it did to the state's objects must be undone
        raise RuntimeError("operation not permitted")

    plain, it, _ = pair(scheduler={"name": "klass", "threshold": 0.3, "divergence": 1.0})
    engine = on_tape(it, fails)
    with pytest.warns(RuntimeWarning, match="operation not permitted"):
        found = it.generate(toys.PROMPTS[:2], max_new_tokens=12)
    same(found, plain.generate(toys.PROMPTS[:2], max_new_tokens=12))
    assert engine.record is None


def test_large_steps_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that open a block hold whole rows; behind each the state goes on in its buffers."""
    plain, it, engine = pair(cache="dual")
    monkeypatch.setattr(graphs, "MOST", sum(len(prompt) + 18 for prompt in toys.PROMPTS[:2]) - 1)
    for _ in range(3):
        same(*(one.generate(toys.PROMPTS[:2], max_new_tokens=18) for one in (it, plain)))
    assert engine.replays > 0

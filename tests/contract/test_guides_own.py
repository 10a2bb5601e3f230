"""Guides of one's own: what they may not bring back, and what they may not return."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Infill, NotFiniteError
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.values import FREE, Canvas
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.guides import Choices, EndTokens, Temperature, TopK, TopP
from dllm_sampler.guides.annealing import LinearTemperature
from dllm_sampler.models.mixture import KnownTokens
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed


@dataclass(frozen=True)
class Makes(Guide):
    """Returns what a function makes of the logits."""

    function: Callable[[Tensor], Any]
    measured: bool = False
    chosen: bool = True

    @property
    def measures(self) -> bool:
        return self.measured

    @property
    def chooses(self) -> bool:
        return self.chosen

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Any:
        return self.function(logits)


def raised(token: int, value: float = 50.0) -> Callable[[Tensor], Tensor]:
    """Logits with that of a token set to a value."""
    return lambda logits: logits.index_fill(-1, torch.tensor([token]), value)


def in_place(logits: Tensor) -> Tensor:
    logits[..., toys.MASK] = 50.0
    return logits


@pytest.mark.parametrize(
    ("function", "how", "more"),
    crossed(
        {"raised": raised(toys.MASK), "in_place": in_place, "finite": lambda x: x.nan_to_num(neginf=50.0)},
        [{}, {"measured": True}, {"measured": True, "chosen": False}],
        [[], [Temperature(0.7), TopK(2)]],
    ),
)
def test_the_mask_is_excluded_again(function: Any, how: dict[str, bool], more: list[Guide]) -> None:
    wanted = toys.sampler(guide=more).generate(toys.PROMPTS, max_new_tokens=14)
    found = toys.sampler(guide=[Makes(function, **how), *more]).generate(toys.PROMPTS, max_new_tokens=14)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.nfe, wanted.nfe)
    assert not (found.tokens == toys.MASK).any() and bool(found.complete.all())


def test_the_mask_is_excluded_from_what_a_target_says_too() -> None:
    plain, bad = ([], [Makes(raised(toys.MASK))])
    found = [
        SpeculativeSampler(toys.sampler(guide=guide), toys.verifier(), draft_length=3).generate(
            toys.PROMPTS[:2], max_new_tokens=6
        )
        for guide in (plain, bad)
    ]
    assert torch.equal(found[0].tokens, found[1].tokens)


def test_published_code_may_choose_the_mask() -> None:
    sampler = toys.sampler(guide=Makes(raised(toys.MASK)), compat=True, max_steps=3)
    assert not sampler.generate(toys.PROMPTS, max_new_tokens=14).complete.any()


def test_nothing_but_the_mask_is_nothing() -> None:
    only = Makes(lambda logits: torch.full_like(logits, -math.inf).index_fill(-1, torch.tensor([toys.MASK]), 1.0))
    with pytest.raises(NotFiniteError, match="at step 1 for prompts 1, 2"):
        toys.sampler(guide=only).generate(toys.PROMPTS[:2], max_new_tokens=6)


def test_no_end_token_comes_before_a_given_one() -> None:
    answer = Infill([FREE, FREE, FREE, 7, FREE, FREE], [3, 4, 5])
    found = toys.sampler(guide=Makes(raised(toys.EOS))).generate(answer).tokens[0].tolist()
    assert toys.EOS not in found[:3] and found[3:] == [7, toys.EOS, toys.EOS]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits: None, "plugin-result: guide=Makes"),
        (lambda logits: logits.argmax(-1), "plugin-result: guide=Makes, torch.int64"),
        (lambda logits: logits[0], "plugin-result: guide=Makes, [40]"),
        (lambda logits: logits[None], "plugin-result: guide=Makes, [1, 40]"),
        (lambda logits: logits.to("meta"), "plugin-result: guide=Makes, 40]"),
    ],
)
@pytest.mark.parametrize("how", [{}, {"measured": True, "chosen": False}])
def test_what_is_no_logits_is_refused(function: Any, message: str, how: dict[str, bool]) -> None:
    with refused(message):
        toys.sampler(guide=Makes(function, **how)).generate(toys.PROMPTS, max_new_tokens=6)


def test_a_joint_guide_chooses_a_token_for_each_answer() -> None:
    class Half(Choices):
        def choose(self, *args: Any, **named: Any) -> Any:
            return super().choose(*args, **named)[:1]

    with refused("plugin-result: guide=Half"):
        toys.sampler(guide=Half(("a", "b"))).generate(toys.PROMPTS, max_new_tokens=6)


def test_guides_that_keep_what_is_excluded_do() -> None:
    """Those shipped; the mask is not excluded again after them."""
    form = toys.sampler(guide={"name": "regex", "pattern": ".{0,9}", "posterior": True})
    canvas: Any = form.plugins.context.blocks  # they do not look at it
    logits = torch.randn(5, toys.VOCAB, dtype=torch.float64)
    logits[:, toys.MASK] = -math.inf
    plain = [Temperature(0.1), TopK(3), TopP(0.5), EndTokens("ban", (3,)), EndTokens("defer", (3,)), KnownTokens(30)]
    for guide in plain:
        assert guide.keeps_excluded and guide(logits, canvas, canvas)[:, toys.MASK].isneginf().all()
    seen = []

    def watched(kind: Any) -> Any:
        def call(self: Any, logits: Tensor, *given: Any) -> Tensor:
            found = kind.__call__(self, logits, *given)
            seen.append(bool(found[..., toys.MASK].isneginf().all()))
            return found

        return type(kind.__name__, (kind,), {"__call__": call})

    falling = watched(LinearTemperature)(0.0, 1.0, 4)
    regex = watched(type(form.plugins.guides[0]))(".{0,9}", posterior=True)
    for guide in (falling, regex):
        assert guide.keeps_excluded
        toys.sampler(guide=guide).generate(toys.PROMPTS[:2], max_new_tokens=6)
    assert all(seen) and len(seen) > 8

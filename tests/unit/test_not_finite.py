"""Numbers that leave a model or a guide: extreme temperatures stay finite, and a guide's NaN or infinity is told."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Guide, NotFiniteError, Query, Sampler
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.guides import Regex, Temperature, TopP
from dllm_sampler.guides.annealing import LinearTemperature
from tests import toys
from tests.sampling import crossed, each, few

NOBODY: Any = None  # these guides look at the logits only
HALF = [torch.float16, torch.bfloat16]


@each("dtype", [*HALF, torch.float32, torch.float64])
@each("value", [5e-324, 1e-40, 1e-5, 1.0, 1e5, 1.7e308])
def test_a_temperature_leaves_finite_logits_and_the_excluded_ones(dtype: torch.dtype, value: float):
    logits = torch.tensor([[30.0, 29.0, -math.inf, -30.0]], dtype=dtype)
    hot = Temperature(value)(logits, NOBODY, NOBODY)
    assert hot.dtype == torch.promote_types(dtype, torch.float32)
    assert hot.isfinite().tolist() == [[True, True, False, True]]
    assert (hot[0, 2], int(hot.argmax())) == (-math.inf, 0)
    if 1e-5 <= value <= 1e5:
        torch.testing.assert_close(hot, (logits.double() / value).to(hot.dtype))
    if value < 1:
        assert hot[0, 0] - hot[0, 1] > 100, "a draw is the greedy choice"


@few("dtype", [*HALF, torch.float32])
@few("value", [1e-5, 1e-40])
def test_a_draw_at_a_small_temperature_is_the_greedy_choice(dtype: torch.dtype, value: float):
    """Quotients of infinity used to tie, and ties go to the lowest token."""
    model = toys.wrapped(toys.transformer().to(dtype))
    greedy, cold = (
        Sampler(model, scheduler="fixed", stop="none", temperature=heat).generate(toys.PROMPTS, max_new_tokens=8)
        for heat in (0, value)
    )
    assert torch.equal(greedy.tokens, cold.tokens)


def test_no_mask_token_is_drawn_at_a_large_temperature():
    model = toys.wrapped(toys.transformer().float())
    drawn = Sampler(model, scheduler="fixed", stop="none", temperature=1e300).generate(toys.PROMPTS, max_new_tokens=16)
    assert not (drawn.tokens == toys.MASK).any()
    assert len(drawn.tokens.unique()) > 20, "all tokens are equally likely"


def test_a_falling_temperature_is_applied_in_float32():
    canvas = toys.canvas(torch.ones(1, 6, dtype=torch.bool))
    head_rows = toys.planned(canvas, Query.masks(canvas), toys.denoiser().spec).head_rows
    logits = torch.full((len(head_rows.row), 2), 30.0, dtype=torch.float16)
    cold = LinearTemperature(low=0.0, high=1e-4, steps=4)(logits, canvas, head_rows)
    assert cold.dtype == torch.float32
    torch.testing.assert_close(cold, torch.full_like(cold, 3e5))
    over = replace(canvas, age=canvas.age + 9)  # the temperature has come down to 0
    assert LinearTemperature(low=0.0, high=1e-4, steps=4)(logits, over, head_rows).isfinite().all()


@each("dtype", HALF)
def test_a_nucleus_is_summed_in_float32(dtype: torch.dtype):
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = TopP(0.97)(logits, NOBODY, NOBODY).isfinite()
    assert torch.equal(kept, TopP(0.97)(logits.float(), NOBODY, NOBODY).isfinite())


@dataclass(frozen=True)
class Spoils(Guide):
    """Returns a bad number for the second row from step 2 on."""

    value: float
    measured: bool = False
    chosen: bool = True

    @property
    def chooses(self) -> bool:
        return self.chosen

    @property
    def measures(self) -> bool:
        return self.measured

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        bad = (head_rows.row == 1) & (canvas.step[head_rows.row] > 1)
        every = bad[:, None] if self.value == -math.inf else bad[:, None] & (torch.arange(logits.shape[1]) == 7)
        return logits.masked_fill(every, self.value)


@pytest.mark.parametrize(
    ("value", "how", "others"),
    crossed(
        [math.nan, math.inf, -math.inf],
        [{}, {"measured": True}, {"measured": True, "chosen": False}],
        [[], [Temperature(1.0)], [Temperature(0.7, measured=True), TopP(0.9)]],
    ),
)
def test_a_guide_that_is_not_finite_is_told(value: float, how: dict[str, bool], others: list[Guide]):
    guides = [*others[:1], Spoils(value, **how), *others[1:]]
    whole = Sampler(toys.denoiser(), scheduler="fixed", stop="none", guide=others)
    spoilt = Sampler(toys.denoiser(), scheduler="fixed", stop="none", guide=guides)
    full = whole.generate(toys.PROMPTS[:3], max_new_tokens=6)
    with pytest.raises(
        NotFiniteError, match=r"a guide returned NaN or infinite logits at step 3 for prompt 2:"
    ) as told:
        spoilt.generate(toys.PROMPTS[:3], max_new_tokens=6)
    done = told.value.result
    assert done is not None and not done.complete[1]
    kept = done.trace.generated[1] >= 0
    assert int(kept.sum()) == 2, "what was committed before stays"
    assert torch.equal(done.tokens[1][kept], full.tokens[1][kept])
    answers = list(spoilt.generate_many(toys.PROMPTS[:3], max_new_tokens=6, batch_size=3))
    reasons = {answer.index: answer.finish_reason for answer in answers}
    assert reasons[1] == "not_finite"
    assert all(torch.equal(one.tokens, full.tokens[one.index]) for one in answers if one.index != 1)
    with pytest.raises(NotFiniteError, match="at step 3 for prompt 1:"):  # in its second sample
        spoilt.generate(toys.PROMPTS[:2], max_new_tokens=6, samples=2)


class Cuts(Spoils):
    """The same as a guide that keeps the likeliest tokens: a form may do without it where it leaves nothing."""

    truncates: ClassVar[bool] = True


@each("spoils", [*map(Spoils, (math.nan, math.inf, -math.inf)), *map(Cuts, (math.nan, math.inf))])
def test_a_guide_before_a_form_that_is_not_finite_is_told(spoils: Guide):
    guides = [Temperature(1.0), spoils, Regex("(?s).*")]
    sampler = Sampler(toys.denoiser(), tokenizer=toys.tokenizer(), scheduler="fixed", stop="none", guide=guides)
    with pytest.raises(NotFiniteError, match="at step 3 for prompt 2"):
        sampler.generate(toys.PROMPTS[:3], max_new_tokens=6)

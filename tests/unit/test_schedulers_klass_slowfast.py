"""KLASS and SlowFast, and what holds for all that look back or take back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from dllm_sampler import Canvas, Edit, Query, Readout, UserError
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Scheduler, Stop
from dllm_sampler.schedulers.dilated import Dilated
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.klass import Klass
from dllm_sampler.schedulers.rcr import RunningConfidence
from dllm_sampler.schedulers.remdm import Remdm
from dllm_sampler.schedulers.slowfast import SlowFast
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.schedulers.wino import Wino
from dllm_sampler.stops.prophet import Prophet
from tests import toys
from tests.refusals import check_refusal, refused
from tests.sampling import each, few
from tests.scripted import INF, PROMPTS, TOKENS, history, run, same_answers, sampler, written
from tests.toys import MASK


def test_filling_every_mask_takes_nothing_back() -> None:
    """Prophet fires in the very step in which WINO takes a token back: the token stays."""
    early = Prophet(None, early=0.0, mid=0.0, late=0.0)
    for scheduler in (Wino(0.3, 1.0), RunningConfidence(9), Remdm(9, 2, 2)):
        for after in (0, 1):
            stop = replace(early, early=INF) if after else early
            result = run(scheduler, stop=stop)
            assert result.complete.all()
            assert (result.tokens != MASK).all()
            assert (result.trace.generated >= 0).all()


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (Klass, {"threshold": -0.1}),
        (Klass, {"divergence": "small"}),
        (Klass, {"history": 0}),
        (Klass, {"take": "any"}),
        (Klass, {"steps": 0}),
        (Wino, {"threshold": -1}),
        (Wino, {"back": None}),
        (Wino, {"least": 0}),
        (Wino, {"least": 8, "most": 7}),
        (SlowFast, {"threshold": -1.0}),
        (SlowFast, {"glimpse": -1.0}),
        (SlowFast, {"slow": -1}),
        (SlowFast, {"window": 0}),
        (SlowFast, {"sigma": float("nan")}),
        (RunningConfidence, {"steps": 0}),
        (Remdm, {"revisions": -1}),
        (Remdm, {"tokens": 0}),
        (Dilated, {"base": 1}),
        (Dilated, {"base": True}),
        (Dilated, {"skip": -0.5}),
    ],
)
def test_bad_values(cls: Callable[..., Scheduler], values: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        cls(**values)
    check_refusal(error.value, f"{error.value.code}: scheduler.{list(values)[-1]}")
    assert error.value.code in ("option-range", "option-type", "choice-unknown", "options-conflict")


@pytest.mark.slow
@few("cache", ["prefix", "dual"])
@few("scheduler", [Wino(), Eoser(Wino())])
def test_whole_canvases_and_stored_parts_do_not_go_together(scheduler: Scheduler, cache: str) -> None:
    with refused(f"cache-incompatible: scheduler={named(scheduler)}, cache={cache}, cache=none"):
        sampler(scheduler, cache=cache)
    for clean in (Klass(), RunningConfidence(), Remdm(), SlowFast(), Dilated()):
        assert run(clean, cache=cache).complete.all()


class TestKlass:
    @each("steps", [None, 9, 4])
    def test_without_divergence_it_is_the_fixed_schedule(self, steps: int | None) -> None:
        assert same_answers(run(Klass(steps, divergence=0.0, threshold=0.0)), run(FixedSteps(steps)))

    def test_with_any_divergence_it_is_a_threshold_from_the_second_forward_on(self) -> None:
        """By hand: the first forward has no history; 0.9 then moves, so 0.8 goes first although 0.9 is surer."""
        script = written([[0.8, 0.3, 0.5, 0.95], [0.8, 0.9, 0.5, 0.95]])
        assert script.history(Klass(divergence=0.01, history=1))[0] == [[3], [0], [1], [2]]
        assert script.history(Klass(divergence=INF, history=1))[0] == [[3], [0, 1], [2]]
        assert script.history(Klass(divergence=INF, history=2))[0] == [[3], [1], [0], [2]]
        assert script.history(FixedSteps())[0] == [[3], [1], [0], [2]]

    def test_history_begins_with_the_block(self) -> None:
        script = written([[0.9] * 8])
        scheduler = Klass(threshold=0.5, history=1)
        blocks = FixedBlocks(4)
        assert script.history(scheduler, blocks=blocks)[0] == [[0], [1, 2, 3], [4], [5, 6, 7]]

    def test_a_last_step_commits_all_that_is_left(self) -> None:
        script = written([[0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.3, 0.3]])
        scheduler = Klass(2, threshold=0.5, history=1, take="surest")
        assert script.history(scheduler)[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_the_last_step_is_that_of_the_block_as_it_was_opened(self) -> None:
        """Of six; the half that a stop leaves would have had three, and is not over in the third."""
        scheduler = Klass(6, threshold=0.0, divergence=INF, history=1, take="surest")
        result = sampler(scheduler, blocks=FullBlock(), stop=Halving()).generate([[5, 11, 3]], max_new_tokens=TOKENS)
        steps = result.trace.generated[0].tolist()
        assert [steps.count(step) for step in range(4)] == [3, 1, 1, 1]


@dataclass(frozen=True)
class Halving(Stop):
    """Cuts the canvas to a half in the second forward."""

    cuts: ClassVar[bool] = True

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        half = canvas.layout.answer_end // 2
        return replace(edit, end=torch.where(canvas.step == 1, half, canvas.end))


class TestSlowFast:
    SURE = ([0.5, 0.95, 0.16, 0.35, 0.2, 0.1, 0.25, 0.1],)

    def test_by_hand(self) -> None:
        script = written([*self.SURE])
        # Two slow forwards see the farthest 0.3 at position 3: the edge is 4. Fast forwards fill [0, 4), worse tokens
        # first than those beyond; only the second one leaves out what is beyond. Then edges follow one another.
        assert script.history(SlowFast())[0] == [[1], [0], [3], [2], [6], [4], [5], [7]]
        assert script.limits == [9, 9, 9, 5, 9, 9, 9, 9]
        script.limits.clear()
        assert script.history(SlowFast(truncate=False))[0] == [[1], [0], [3], [2], [6], [4], [5], [7]]
        assert script.limits == [None] * 8
        assert script.history(Threshold())[0] == [[1], [0], [3], [6], [4], [2], [5], [7]]

    def test_unstable_estimates_are_averaged(self) -> None:
        # Estimates 4 and 1, rounded down 2: position 0 goes before the surer 4.
        script = written([[0.05, 0.25, 0.1, 0.5, 0.2, 0.1]])
        assert script.history(SlowFast(slow=2))[0] == [[3], [1], [0], [4], [2], [5]]
        assert script.history(Threshold())[0][:3] == [[3], [1], [4]]

    @pytest.mark.slow
    def test_above_one_it_commits_one_per_forward(self) -> None:
        for prompt in PROMPTS:
            assert {len(step) for step in history(SlowFast(1.01), prompt)[0]} == {1}

    @pytest.mark.slow
    @each("bar", [0.3, 0.9])
    def test_without_a_slow_phase_it_is_the_threshold(self, bar: float) -> None:
        assert same_answers(run(SlowFast(bar, slow=0), blocks="full"), run(Threshold(bar), blocks="full"))
        assert same_answers(run(SlowFast(bar, slow=0, truncate=False)), run(Threshold(bar)))


@pytest.mark.slow
def test_predictions_that_did_not_move_are_not_ranked_by_rounding() -> None:
    """Under a cache that shows nothing of the block they stay as they are: the first of them is taken, in any batch."""
    plugins = {"scheduler": {"name": "klass", "take": "steadiest"}, "cache": {"name": "trailing", "window": 0}}
    own = toys.sampler(**plugins, blocks="fixed")
    batch = own.generate([[33], [24]], max_new_tokens=24, seed=[0, 7])
    alone = own.generate([[33]], max_new_tokens=24, seed=[0])
    assert torch.equal(batch.tokens[0], alone.tokens[0]) and torch.equal(batch.step_map[0], alone.step_map[0])

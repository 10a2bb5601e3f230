"""KLASS and SlowFast, and what holds for all that look back or take back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Edit, Query, Readout, UserError
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.core.protocols import Carry, Scheduler, Stop
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
from tests.contract.test_reference import probabilities
from tests.sampling import crossed
from tests.scripted import BLOCK, INF, NEVER, PROMPTS, TOKENS, history, run, same_answers, sampler, written
from tests.toys import MASK

ALL: list[Scheduler] = [
    Klass(threshold=0.2, divergence=0.5, history=1),
    Klass(9, threshold=0.2, divergence=0.5, take="steadiest"),
    Wino(0.3, least=2, most=4),
    SlowFast(0.6, slow=3),
    RunningConfidence(9),
    Remdm(9, revisions=2, tokens=2),
    Dilated(),
    Dilated(3, 0.6),
]


@pytest.mark.parametrize(("scheduler", "kind"), crossed(ALL, ["llada", "dream", "cfg"]))
def test_a_row_in_a_batch_is_the_row_alone(scheduler: Scheduler, kind: str) -> None:
    batch = run(scheduler, kind=kind)
    assert batch.complete.all()
    for row, prompt in enumerate(PROMPTS):
        alone = run(scheduler, [prompt], kind)
        assert torch.equal(batch.tokens[row], alone.tokens[0])
        assert torch.equal(batch.trace.generated[row], alone.trace.generated[0])
        assert batch.nfe[row] == alone.nfe[0]
        assert batch.trace.rows[row] == alone.trace.rows[0]


@pytest.mark.parametrize("scheduler", ALL, ids=repr)
def test_a_wider_query_changes_nothing(scheduler: Scheduler) -> None:
    assert same_answers(run(scheduler, stop=NEVER), run(scheduler))


@pytest.mark.parametrize("scheduler", [Wino(0.3, least=2, most=4), RunningConfidence(9), Remdm(9, 2, 2)], ids=repr)
def test_stopping_waits_for_what_may_be_taken_back(scheduler: Scheduler) -> None:
    """An end token ends a row with its block; nothing before it is other than without the stop."""
    full, cut, fired = run(scheduler), run(scheduler, stop="prefix"), 0
    for row in range(len(PROMPTS)):
        length = int(cut.lengths[row])
        assert cut.lengths[row] == full.lengths[row]
        assert torch.equal(cut.tokens[row, :length], full.tokens[row, :length])
        fired += int(cut.nfe[row] < full.nfe[row])
    assert fired > 0


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


@pytest.mark.parametrize("cls", [Klass, Wino, SlowFast, RunningConfidence, Remdm, Dilated])
def test_one_position_and_short_last_blocks(cls: type[Scheduler]) -> None:
    for tokens, length in ((1, 6), (7, 3), (5, 1)):
        result = sampler(cls(), blocks=FixedBlocks(length)).generate(PROMPTS, max_new_tokens=tokens)
        assert result.complete.all()
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
    with pytest.raises(UserError, match=rf"scheduler\.{list(values)[-1]}"):
        cls(**values)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("scheduler", [Wino(), Eoser(Wino())], ids=repr)
def test_whole_canvases_and_stored_parts_do_not_go_together(scheduler: Scheduler, cache: str) -> None:
    message = rf"scheduler={type(scheduler).__name__} .* cache={cache.title()}Cache .* use cache=none"
    with pytest.raises(UserError, match=message):
        sampler(scheduler, cache=cache)
    for clean in (Klass(), RunningConfidence(), Remdm(), SlowFast(), Dilated()):
        assert run(clean, cache=cache).complete.all()


class TestKlass:
    @staticmethod
    def reference(prompt: list[int], bar: float, bound: float, length: int, take: str) -> tuple[list[int], list[int]]:
        """The spec in plain Python."""
        ids, step_map, step = [*prompt, *[MASK] * TOKENS], [-1] * TOKENS, 0
        for start in range(0, TOKENS, BLOCK):
            before: Tensor | None = None
            moves: dict[int, list[float]] = {i: [] for i in range(start, start + BLOCK)}
            while masks := [i for i in range(start, start + BLOCK) if step_map[i] < 0]:
                p = probabilities("llada", tuple(ids), len(prompt))[len(prompt) :]
                sure = {i: float(p[i].max()) for i in masks}
                if before is not None:
                    for i in moves:
                        moves[i].append(float((p[i] * ((p[i] + 1e-12).log() - (before[i] + 1e-12).log())).sum()))
                ready = [i for i in masks if sure[i] > bar and len(moves[i]) >= length]
                ready = [i for i in ready if all(m < bound for m in moves[i][-length:])]
                if take == "surest":
                    ready = sorted(ready, key=lambda i: -sure[i])[:1]
                if take == "steadiest":
                    ready = sorted(ready, key=lambda i: moves[i][-1])[:1]
                for i in ready or [max(masks, key=lambda i: sure[i])]:
                    ids[len(prompt) + i], step_map[i] = int(p[i].argmax()), step
                before, step = p, step + 1
        return ids[len(prompt) :], step_map

    @pytest.mark.parametrize("take", ["all", "surest", "steadiest"])
    @pytest.mark.parametrize(("bar", "bound", "length"), [(0.2, 0.5, 1), (0.2, 1.0, 2), (0.0, INF, 2), (0.4, INF, 1)])
    def test_is_its_spec(self, bar: float, bound: float, length: int, take: Any) -> None:
        result = run(Klass(threshold=bar, divergence=bound, history=length, take=take))
        for row, prompt in enumerate(PROMPTS):
            tokens, step_map = self.reference(prompt, bar, bound, length, take)
            assert result.tokens[row].tolist() == tokens
            assert result.trace.generated[row].tolist() == step_map
        if take == "all" and bar == 0:
            assert (result.nfe < TOKENS).all(), "nothing was ready"

    @pytest.mark.parametrize("steps", [None, 9, 4])
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
        half = canvas.first + canvas.new_tokens // 2
        return replace(edit, end=torch.where(canvas.step == 1, half, canvas.end))


@dataclass(frozen=True)
class Watched(SlowFast):
    """Keeps the left border and the masks before it, after each forward."""

    seen: list[tuple[int, int]] = field(default_factory=list)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        after = canvas.apply(query.positions, edit)
        left = int(carry[0])
        self.seen.append((left, int(after.masked[:, :left].sum())))
        return edit, carry


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

    def test_above_one_it_commits_one_per_forward(self) -> None:
        for prompt in PROMPTS:
            assert {len(step) for step in history(SlowFast(1.01), prompt)[0]} == {1}

    @pytest.mark.parametrize("bar", [0.3, 0.9])
    def test_without_a_slow_phase_it_is_the_threshold(self, bar: float) -> None:
        assert same_answers(run(SlowFast(bar, slow=0), blocks="full"), run(Threshold(bar), blocks="full"))
        assert same_answers(run(SlowFast(bar, slow=0, truncate=False)), run(Threshold(bar)))

    @pytest.mark.parametrize("blocks", [FullBlock(), FixedBlocks(BLOCK)])
    def test_borders_move_on_and_leave_no_mask_behind(self, blocks: Any) -> None:
        windows = set()
        for prompt in PROMPTS:
            watched = Watched(0.7, glimpse=0.9, slow=2)
            history(watched, prompt, blocks=blocks)
            lefts = [left for left, _ in watched.seen]
            assert lefts == sorted(lefts)
            assert all(masks == 0 for _, masks in watched.seen)
            windows |= {(tuple(prompt), left) for left in lefts}
        assert len(windows) > 2 * len(PROMPTS)

    def test_hidden_columns_are_not_computed(self) -> None:
        exact, cut = (run(SlowFast(1.01, slow=2, truncate=value), blocks="full") for value in (False, True))
        length = torch.tensor([len(prompt) + TOKENS for prompt in PROMPTS])
        assert torch.equal(exact.trace.rows, exact.nfe * length)
        assert (cut.trace.rows < cut.nfe * length).any()

"""Quirks of published code, by hand; that each loop as a whole is the published one is what the traces say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Canvas, Sampler, UserError, config
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.eval.conformance.published import (
    AnyBlock,
    EndsAnywhere,
    ForcedFirst,
    PublishedCredit,
    PublishedDInferThreshold,
    PublishedEndOfText,
    PublishedFactor,
    PublishedFixedSteps,
    PublishedFreeDave,
    PublishedKlass,
    PublishedLocalLeap,
    PublishedOrigin,
    PublishedParallelDecoding,
    PublishedPositionCalibrated,
    PublishedRunningConfidence,
    PublishedSlowFast,
    PublishedWino,
    Unrolled,
)
from dllm_sampler.schedulers.apd import ParallelDecoding
from dllm_sampler.schedulers.dinfer import DInferThreshold
from dllm_sampler.schedulers.factor import Factor
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.freedave import FreeDave
from dllm_sampler.schedulers.klass import Klass
from dllm_sampler.schedulers.learn2pd import LearnedFilter
from dllm_sampler.schedulers.leftright import LeftToRight
from dllm_sampler.schedulers.localleap import LocalLeap
from dllm_sampler.schedulers.origin import Origin
from dllm_sampler.schedulers.rcr import RunningConfidence
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.schedulers.wino import Wino
from dllm_sampler.stops.end_of_text import EndOfText
from tests import scripted, toys
from tests.sampling import crossed
from tests.scripted import BLOCK, INF, NEVER, PROMPTS, TOKENS, history, run, same, sampler, written
from tests.unit.test_schedulers import committed
from tests.unit.test_schedulers_apd import paired, table
from tests.unit.test_schedulers_learn2pd import filter_file

ALL: list[Scheduler] = [
    ForcedFirst(Threshold(0.6)),
    Unrolled(Threshold(0.6), tpf=2, maximum=3),
    Unrolled(Threshold(0.6), tpf=2, maximum=3, cached=True, every=2),
    PublishedDInferThreshold(0.6),
    PublishedCredit(0.6),
    PublishedWino(0.3),
    PublishedSlowFast(0.6, slow=3, sigma=3.0),
    PublishedLocalLeap(0.6, 0.3),
    PublishedParallelDecoding(verifier=toys.verifier()),
    PublishedRunningConfidence(9),
    PublishedFreeDave(Threshold(0.6), match="subset"),
    PublishedFixedSteps(30, "margin"),
    PublishedFactor(0.7),
    PublishedKlass(9, threshold=0.2, divergence=0.5),
    PublishedPositionCalibrated(9),
]


@pytest.mark.parametrize(("scheduler", "kind"), crossed(ALL, ["llada", "dream", "cfg"]))
def test_a_row_in_a_batch_is_the_row_alone(scheduler: Scheduler, kind: str) -> None:
    batch = run(scheduler, kind=kind)
    assert batch.complete.all()
    assert int(batch.nfe.max()) <= sampler(scheduler, kind).plugins.scheduler.bound(TOKENS)
    for row, prompt in enumerate(PROMPTS):
        alone = run(scheduler, [prompt], kind)
        assert torch.equal(batch.tokens[row], alone.tokens[0])
        assert torch.equal(batch.trace.generated[row], alone.trace.generated[0])
        assert batch.nfe[row] == alone.nfe[0]
        assert batch.trace.rows[row] == alone.trace.rows[0]


@pytest.mark.parametrize("scheduler", [rule for rule in ALL if not rule.traits.drafts], ids=repr)
def test_a_wider_query_changes_nothing(scheduler: Scheduler) -> None:
    assert same(run(scheduler, stop=NEVER), run(scheduler))


def test_forced_first_commits_the_first_position_of_a_block_alone() -> None:
    script = written([[0.2, 0.9, 0.9, 0.2, 0.9, 0.9]])
    blocks = {"name": "fixed", "length": 3}
    assert script.history(ForcedFirst(Threshold(0.5)), blocks=blocks)[0] == [[0], [1, 2], [3], [4, 5]]
    assert ForcedFirst(FixedSteps(score="margin")).needs == {"margin"}


def test_unrolling_wastes_forwards() -> None:
    model = scripted.constant([0.9 - 0.01 * i for i in range(8)])
    # Eight masks and two tokens expected per forward: four forwards, three of them for nothing.
    assert scripted.play(model, Unrolled(Threshold(0.8), tpf=2, maximum=4), 8) == [list(range(8)), [], [], []]
    assert scripted.play(model, Unrolled(Threshold(0.8), tpf=2, maximum=3), 8) == [list(range(8)), [], []]
    assert scripted.play(model, Unrolled(Threshold(2.0), tpf=2, maximum=3), 8) == [[i] for i in range(8)]
    assert scripted.play(model, Unrolled(Threshold(0.8), tpf=8, maximum=4), 8) == [list(range(8))]


def test_unrolling_changes_no_token() -> None:
    """Every wasted forward aside, the same tokens at the same forwards of their block."""
    plain, unrolled = run(Threshold(0.6)), run(Unrolled(Threshold(0.6), tpf=1, maximum=4))
    assert torch.equal(plain.trace.ids, unrolled.trace.ids)
    assert (unrolled.nfe > plain.nfe).any()
    for row in range(len(PROMPTS)):
        assert [step for step in unrolled.trace.steps(row) if step] == plain.trace.steps(row)
    assert same(run(Unrolled(Threshold(0.6), maximum=1)), run(Threshold(0.6)))


@pytest.mark.parametrize("name", ["tpf", "maximum"])
def test_unrolling_by_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"scheduler\.{name} must be a whole number of at least 1, not 0"):
        Unrolled(Threshold(), **{name: 0})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rule", [PublishedDInferThreshold(0.9), PublishedCredit(0.9)])
def test_dinfer_passes_over_mask_candidates(rule: Scheduler) -> None:
    """Position 1 wants the mask token until its neighbour is there."""
    table = scripted.constant([0.8, 0.7], [1, 2])

    def says(canvas: Canvas) -> torch.Tensor:
        logits = table.says(canvas).clone()
        logits[:, 2, 7] = torch.where(canvas.masked[:, 1], 5.0, -5.0)
        return logits

    assert scripted.play(scripted.Script(says), rule, 2, compat=True) == [[0], [1]]
    # Counted as the best one, it would keep all else from being committed.
    assert scripted.play(scripted.Script(says), DInferThreshold(0.9), 2, compat=True, max_steps=3) == [[], [], []]


def test_wino_is_bounded_by_the_step_before() -> None:
    script = written(
        says=[[0.9, 0.8, 0.7, 0.2, 0.3, 0.1], [0.5, 0.5, 0.5, 0.6, 0.55, 0.1], [0.9, 0.9, 0.9, 0.9, 0.9, 0.6]],
        shadows=[[0.0] * 6, [0.95, 0.6, 0.7, 0.0, 0.0, 0.0], [0.95, 0.0, 0.7, 0.99, 0.99, 0.0]],
    )
    # Forward 2 commits two and doubts two. The clean bound of 2 - 1 spares one, that of the step before, 3 - 1, none.
    assert script.history(Wino(0.5, 0.8)) == ([[0, 1, 2], [3, 4], [1, 5], [2]], [[], [1], [2], []])
    assert script.history(PublishedWino(0.5, 0.8)) == ([[0, 1, 2], [3, 4], [1, 2, 5]], [[], [1, 2], []])


def test_localleap_near_an_anchor_asks_for_the_relaxed_threshold_alone() -> None:
    row = [0.6, 0.8, 0.95, 0.2, 0.8, 0.97]
    for bar, clean, published in [(0.75, [1, 2, 4, 5], [1, 2, 4, 5]), (0.96, [2, 5], [5])]:
        assert committed(LocalLeap(0.9, bar, 1), row) == [clean]
        assert committed(PublishedLocalLeap(0.9, bar, 1), row) == [published]


def test_slow_forwards_are_made_for_nothing() -> None:
    """Three are three, and the first stable edge is kept."""
    script = written([[0.5, 0.95, 0.16, 0.35, 0.2, 0.1, 0.25, 0.1]])
    found = script.history(PublishedSlowFast(slow=3))[0]
    assert found == [[1], [0], [3], [2], [6], [4], [5], [7], [], []]
    assert script.limits == [9] * 10


def test_apd_judges_by_the_best_token() -> None:
    """At a temperature the draft is random and the published target is not."""
    denoiser, judge = paired(*[table([{1: 0.3, 6: 0.0}] * 40)] * 2)  # 6 ends a text
    clean, published = (
        kind(verifier=judge, mixture_weight=0.5) for kind in (ParallelDecoding, PublishedParallelDecoding)
    )
    assert len(scripted.play(denoiser, clean, 40, temperature=1.0)) == 1
    assert len(scripted.play(denoiser, published, 40, temperature=1.0)) > 10


def test_apd_tempers_twice() -> None:
    given: dict[str, Any] = {"verifier": toys.verifier(), "max_lookahead": None, "mixture_weight": 1.0}
    sampled = toys.sampler(scheduler=PublishedParallelDecoding(**given), temperature=0.5, top_p=0.9)
    assert [type(guide).__name__ for guide in sampled.plugins.guides] == ["Temperature", "TopP", "Temperature"]
    # argmax(z / T + T G) is argmax(z / T^2 + G)
    twice, drafts = (
        toys.sampler("dream", scheduler=kind(**given), temperature=heat, blocks="full").generate(
            toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS
        )
        for kind, heat in ((PublishedParallelDecoding, 0.5), (ParallelDecoding, 0.25))
    )
    first = twice.trace.generated == 0
    assert first.any() and torch.equal(twice.tokens[first], drafts.tokens[first])


@pytest.mark.parametrize("rule", [PublishedParallelDecoding(verifier=toys.verifier()), LeftToRight()])
def test_apd_ends_at_an_end_token_anywhere(rule: Scheduler) -> None:
    prompts = [[toys.EOS, 3, 5], [4, 4, 2]]
    *_, last = toys.sampler("dream", scheduler=rule, blocks="full", stop=EndsAnywhere()).stream(
        prompts, max_new_tokens=TOKENS
    )
    assert last.nfe[0] == 1 and last.masked[0].any()
    assert toys.sampler("dream", scheduler=rule).generate(prompts[:1], max_new_tokens=TOKENS).complete.all()


def test_freedave_writes_a_certain_step_with_the_forward_that_verifies_it() -> None:
    """The same tokens, one per step inside; the forward that opens a block writes nothing yet."""
    inner = FixedSteps()
    alone, clean, published = (run(rule) for rule in (inner, FreeDave(inner), PublishedFreeDave(inner)))
    assert torch.equal(alone.tokens, published.tokens)
    assert (published.nfe < alone.nfe).all()
    for row in range(len(PROMPTS)):
        assert len(clean.trace.steps(row)[0]) == 1 and not published.trace.steps(row)[0]
    with pytest.raises(UserError, match=r"scheduler\.eager is exact"):
        PublishedFreeDave(inner, eager=True)


class TestRunningConfidence:
    def test_it_goes_back_to_earlier_blocks(self) -> None:
        script = written([[0.2, 0.3, 0.0, 0.0], [0.9, 0.3, 0.0, 0.0], [0.0, 0.0, 0.8, 0.7], [0.6, 0.6, 0.6, 0.6]])
        blocks = {"name": "fixed", "length": 2}
        assert script.history(RunningConfidence(4), blocks=blocks) == ([[1], [0], [2], [3]], [[]] * 4)
        # Of 0.9, 0.3, 0.8 and 0.7 the 0.3 goes back, although its block is closed.
        found = script.history(PublishedRunningConfidence(4), blocks=blocks)
        assert found == ([[1], [0], [2, 3], [1]], [[], [], [1], []])
        fired = 0
        for prompt in PROMPTS:
            opened, taken = history(PublishedRunningConfidence(9), prompt)
            assert len(opened) == 9
            fired += sum(place // BLOCK < step // 3 for step, back in enumerate(taken) for place in back)
        assert fired > 0

    def test_it_writes_again_what_a_stop_would_keep(self) -> None:
        full, cut = (run(PublishedRunningConfidence(9), stop=stop) for stop in ("none", "prefix"))
        assert not torch.equal(cut.lengths, full.lengths)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("rule", [PublishedKlass(), PublishedRunningConfidence(), AnyBlock()])
def test_what_works_on_all_blocks_needs_every_row(rule: Scheduler, cache: str) -> None:
    with pytest.raises(UserError, match=rf"scheduler={type(rule).__name__} .* use cache=none"):
        sampler(rule, cache=cache)


def test_klass_keeps_its_history_from_block_to_block() -> None:
    script, blocks = written([[0.9] * 8]), {"name": "fixed", "length": 4}
    clean, published = (kind(threshold=0.5, history=1) for kind in (Klass, PublishedKlass))
    assert script.history(clean, blocks=blocks)[0] == [[0], [1, 2, 3], [4], [5, 6, 7]]
    # Only the run's first forward has none.
    assert script.history(published, blocks=blocks)[0] == [[0], [1, 2, 3], [4, 5, 6, 7]]
    assert "probabilities" in published.needs


def test_klass_leaves_a_block_after_its_steps() -> None:
    """Two steps per block of six, in each of which one position is ready: four of each block are never written."""
    rule = PublishedKlass(4, threshold=0.0, divergence=INF, history=1, take="surest")
    result = sampler(rule).generate(PROMPTS[:1], max_new_tokens=2 * BLOCK)
    assert result.trace.generated[0].tolist().count(-1) == 8 and int(result.nfe) == 4


def test_fixed_schedules_make_every_step() -> None:
    for steps, expected in ((6, [1, 1, 1, 1, 0, 0]), (4, [1, 1, 1, 1]), (3, [2, 1, 1])):
        sampled = toys.sampler(scheduler=PublishedFixedSteps(steps), blocks="full")
        trace = sampled.generate([3, 4, 5], max_new_tokens=4).trace
        assert [len(step) for step in trace.steps()] == expected


def test_a_timestep_schedule_counts_the_mean_of_a_batch() -> None:
    """Rows with eight and two masks left, at half the time: of their own, or of five."""
    canvas = toys.canvas(torch.tensor([[True] * 8, [True] * 2 + [False] * 6]))
    masks, steps = torch.tensor([8, 8]), torch.tensor([2, 2])
    rules = [kind(schedule="timestep") for kind in (FixedSteps, PublishedFixedSteps)]
    counts = [rule.share(canvas, masks, steps, canvas.noise_left()).tolist() for rule in rules]
    assert counts == [[3, 1], [2, 2]]


@pytest.mark.parametrize(
    ("sure", "clean", "published"),
    [([0.9, 0.8, 0.1], [0, 1], [0, 1, 2]), ([0.9, 0.2, 0.1], [0], [0]), ([0.9, 0.1], [0], [0, 1]), ([0.3], [0], [0])],
)
def test_factor_takes_the_last_mask_along(sure: list[float], clean: list[int], published: list[int]) -> None:
    assert committed(Factor(1.0), sure) == [clean]
    assert committed(PublishedFactor(1.0), sure) == [published]


def test_origin_makes_steps_after_the_last_mask() -> None:
    clean, published = (run(kind(40), PROMPTS[:1], blocks="full") for kind in (Origin, PublishedOrigin))
    assert torch.equal(clean.trace.generated, published.trace.generated)
    assert int(clean.nfe) < int(published.nfe) == 40


def test_end_of_text_asks_who_committed(tmp_path: Path) -> None:
    """Two end tokens that only the fallback committed: the clean rule cuts at the first, published code guesses."""
    path = filter_file(tmp_path, (torch.zeros(4, 4), torch.full((4,), -50.0)))
    model = scripted.constant([0.6, 0.5, 0.9, 0.3], [6, 1, 6, 3])
    for stop, end in ((EndOfText("predicted", 0.0), 1), (PublishedEndOfText(), 3)):
        rule = LearnedFilter(path, steps=2)
        sampled = Sampler(model, scheduler=rule, blocks={"name": "fixed", "length": 4}, stop=stop)
        assert int(sampled.generate([[0]], max_new_tokens=4).trace.end[0]) - 1 == end


@pytest.mark.parametrize("group", ["scheduler", "blocks", "stop", "cache", "guide"])
def test_a_quirk_is_no_option(group: str) -> None:
    for name in config.names(group):
        with pytest.raises(UserError, match=rf"^unknown field of {group}={name} 'compat'"):
            config.build(group, {"name": name, "compat": True})

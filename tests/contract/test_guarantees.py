"""What holds for every combination: what is written, when it ends, and that the host may look as rarely as it likes."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch

from dllm_sampler import Canvas, Edit, Query, Readout, Sampler, Scheduler, Traits, config
from dllm_sampler.check.promises import check_commits, check_end, check_prompts
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Foresees
from dllm_sampler.core.spec import ChangingLength, PlannedCommits
from dllm_sampler.engine import layout
from dllm_sampler.engine.loop import Engine
from dllm_sampler.published import PublishedFixedSteps
from tests import toys
from tests.contract import cases
from tests.contract.cases import CASES, TOKENS, Case, thinned
from tests.sampling import crossed, sampled_rows


def test_what_runs_by_default_covers_every_plug_in_and_trait() -> None:
    """Each guarantee on `thinned(CASES)` meets them; those on fewer groups meet what any of their cases does."""
    groups = [group for group in config.GROUPS if group not in ("model", "particles")]  # those that act in a step
    everything = {(group, name) for group in groups for name in config.names(group)}
    met = {(group, one["name"]) for case in cases.SHARED for group, one in case.plugins.items()}
    assert met == everything and {case.toy for case in cases.SHARED} == {case.toy for case in CASES}
    for chosen, groups in ((CASES, ("guide", "traits")), (cases.SILENT, ())):
        default = [one.values[0] for one in thinned(chosen, *groups) if not one.marks]
        every, few = ({it for case in some for it in cases.met(case, groups)} for some in (chosen, default))
        assert few == every and len(default) < len(chosen) / 3


every_case = pytest.mark.parametrize("case", thinned(CASES))


def test_everything_in_conf_is_covered() -> None:
    for group in ("scheduler", "cache", "blocks", "stop", "guide"):
        chosen = [getattr(case, group) for case in CASES]
        assert all(setting in chosen for setting in cases.settings(group)), group


@every_case
def test_the_step_map_says_when(case: Case) -> None:
    check_commits(case)
    if case.facts["revises"]:
        check_revised(case)
    elif not case.facts["moves"]:  # of others columns move: see test_lengths
        check_committed_once(case)


def check_revised(case: Case) -> None:
    """Check that the step map says what is noise now, and which forward wrote the rest last."""
    before = None
    for commits in case.stream():
        if not case.sampler.plugins.stop.cuts:
            assert torch.equal(commits.masked, commits.step_map < 0)
        assert case.toy == "uniform" or (commits.tokens[commits.masked] == toys.MASK).all()
        if before is not None and not case.sampler.plugins.stop.cuts:  # a cut may hide what was just taken back
            written = ~before.masked & ~commits.masked & (before.tokens != commits.tokens)
            assert (commits.step_map[written] == commits.step - 1).all()
        before = commits


def check_committed_once(case: Case) -> None:
    """Check that the step map has the one forward that commits each position."""
    steps, result = case.stream(), case.result
    committed = torch.full_like(result.tokens, -1)
    for commits in steps:
        committed[~commits.masked & (committed < 0)] = commits.step - 1
        if not case.sampler.plugins.stop.cuts:  # what is cut off is no noise any more, yet nothing was committed
            assert torch.equal(commits.masked, committed < 0), "a committed position is noise again"
        assert not ((commits.step_map >= 0) & (committed < 0)).any()
    written = result.trace.generated >= 0
    assert torch.equal(result.trace.generated[written], committed[written])


@every_case
def test_progress_and_termination(case: Case) -> None:
    check_end(case)
    steps, result, stuck, scheduler = case.stream(), case.result, case.stuck, case.scheduling
    generated = result.trace.generated
    # A scheduler that edits what is committed looks at a full block again, and may find nothing to change. A stop may
    # cut off what the last forward has committed in place of a token that was taken back.
    stores_apart = case.cache.get("store_pass") == "separate"
    if (
        not stores_apart
        and not scheduler.traits.has(ChangingLength)
        and not (scheduler.traits.revises and (scheduler.bound(1) > 1 or case.sampler.plugins.stop.cuts))
    ):
        assert torch.equal((generated.amax(1) + 1)[~stuck], result.nfe[~stuck]), "a row's last forward commits"
    if case.stop["name"] == "none":
        there = torch.arange(TOKENS) < (result.trace.end - result.trace.origin)[:, None]
        whole = ~stuck
        if case.blocks["name"] == "pipeline":  # it opens no more blocks after an end-of-text token
            whole &= torch.tensor([reason != "end" for reason in result.finish_reason])
        assert (generated[whole] >= 0)[there[whole]].all()
        assert not steps[-1].masked[whole].any()
    for row, (tokens, length) in enumerate(zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)):
        if stuck[row]:
            continue
        assert toys.EOS not in tokens[: max(0, length - 1)]
        # Where a prediction cut the canvas, the last position may still become another token.
        sized = case.stop.get("mode") == "predicted" or scheduler.traits.has(ChangingLength)
        room = int(result.trace.end[row]) - result.trace.origin if sized else TOKENS
        ends = length == room or tokens[length - 1] == toys.EOS
        assert ends


TAKERS = [{"name": "rcr"}, *({"name": "remdm", "revisions": revisions} for revisions in (0, 1, 3))]


@pytest.mark.parametrize(("method", "steps"), crossed({cases.label(one): one for one in TAKERS}, [None, 3, 3 * TOKENS]))
def test_bounds_of_whoever_takes_back_are_reached(method: dict[str, Any], steps: int | None) -> None:
    """By blocks of one position, however many steps were asked for; longer blocks need fewer."""
    tokens = 7
    for length in (1, 4, tokens):
        blocks = {"name": "fixed", "length": length}
        sampler = toys.sampler(scheduler=method | {"steps": steps}, blocks=blocks)
        bound = sampler.plugins.scheduler.bound(tokens)
        assert bound == tokens * (1 + method.get("revisions", 0))
        found = sampler.generate(toys.PROMPTS, max_new_tokens=tokens)
        assert found.complete.all()
        assert (found.nfe == bound).all() if length == 1 else (found.nfe <= bound).all()


@every_case
def test_prompts_padding_and_finished_rows_stay(case: Case) -> None:
    check_prompts(case)


@pytest.mark.parametrize("case", thinned(CASES, "stop", "cache"))
def test_max_steps_gives_up(case: Case) -> None:
    full, steps = case.stream()[-1].result, case.stream()
    assert full is not None
    if (full.nfe <= 2).all():
        return  # nothing to give up: this stop ends these rows at once
    cut = case.generate(list(range(len(toys.PROMPTS))), max_steps=2)
    seen = steps[1]
    over = full.nfe <= 2
    assert torch.equal(cut.complete, over & full.complete)
    assert torch.equal(cut.nfe, full.nfe.clamp(max=2))
    assert torch.equal(cut.trace.generated, seen.step_map)
    open_ = seen.masked & ~over[:, None]
    assert open_.any() or case.sampler.plugins.scheduler.traits.revises, "one that revises goes on without a mask"
    assert (cut.tokens[open_] == toys.EOS).all()  # these toys pad with the end token


CACHES = cases.settings("cache")


def runs_to_the_end(case: Case) -> bool:
    return case.stop["name"] == "none"


@pytest.mark.parametrize("case", thinned(CASES, "guide", "traits", first=runs_to_the_end))
def test_stopping_early_changes_nothing_before_the_end_token(case: Case) -> None:
    full = replace(case, stop={"name": "none"}).record
    blocks = case.sampler.plugins.blocks
    moving = blocks.several or blocks.slides
    early = ("prefix", "block")[len(case.id) % 2 and not moving]
    result = cases.by_row(replace(case, stop={"name": early}).generate())
    for row, length in enumerate(full["lengths"]):
        assert result["lengths"][row] == length
        assert result["forwards"][row] <= full["forwards"][row]
        for name in ("tokens", "steps"):
            assert result[name][row][:length] == full[name][row][:length]


@dataclass(frozen=True)
class Vandal(Scheduler):
    """Asks for every column and writes, remasks, cuts and finishes at random, wherever it likes."""

    cuts: bool = False
    traits: ClassVar[Traits] = Traits(asks_block=False, rare=(PlannedCommits(),))  # pyright: ignore - so that no cache refuses it

    def ahead(self, canvas: Canvas, carry: Any) -> torch.Tensor:
        return torch.zeros_like(canvas.ids)

    def ask(self, canvas: Canvas, carry: Any) -> Query:
        everything = canvas.columns()[:, :-1].expand(canvas.ids.shape[0], -1)
        return Query.at(canvas, everything.contiguous(), keeps_positions=True)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> tuple[Edit, Any]:
        chance = torch.rand(4, *query.positions.shape)
        edit = Edit(
            torch.randint_like(query.positions, toys.VOCAB - 1),
            commit=chance[0] < 0.5,
            remask=chance[1] < 0.1,
            finish=chance[2, :, 0] < 0.15,
            end=canvas.layout.first - 2 if self.cuts else None,
        )
        return edit, carry


@pytest.mark.parametrize(
    ("cache", "cuts"), sampled_rows(list(product(CACHES, [False, True])), lambda row: [row[0]["name"], row[1]])
)
def test_nothing_writes_into_prompts_padding_or_finished_rows(cache: dict[str, Any], cuts: bool) -> None:
    torch.manual_seed(0)
    spy = toys.Spy(toys.denoiser(cases.toy_of(cache)))
    sampler = Sampler(spy, scheduler=Vandal(cuts), cache=cache, blocks={"name": "fixed", "length": 5}, stop="truncate")
    start = layout.canvas(toys.PROMPTS, TOKENS, toys.SEEDS, spy.spec, sampler.plugins.blocks, CounterNoise(), True)
    before, changed = start, torch.zeros_like(start.ids, dtype=torch.bool)
    resting = 0
    for state in Engine(spy, sampler.plugins).run(start, 12):
        after = state.canvas
        assert torch.equal(after.ids[start.layout.frozen], start.ids[start.layout.frozen])
        assert torch.equal(after.layout.frozen, start.layout.frozen)
        assert not (after.masked & start.layout.frozen).any()
        assert not (state.recorder.step_map[start.layout.frozen] >= 0).any()
        done = before.done
        for name in ("ids", "masked", "end", "start", "stop", "age", "step", "done"):
            assert torch.equal(getattr(after, name)[done], getattr(before, name)[done]), name
        resting += int(done.sum())
        changed |= after.ids != before.ids
        before = after
    assert changed.any()
    assert cuts or resting > 0


class TestMaskToken:
    """The mask token is no answer, unless published behaviour is asked for."""

    @staticmethod
    def sampler(raise_mask: float, toy: str = "llada", **plugins: Any) -> Sampler:
        spy = toys.Spy(toys.denoiser(toy), raise_mask)
        return Sampler(spy, blocks={"name": "fixed", "length": 6}, stop="none", **plugins)

    @pytest.mark.parametrize("scheduler", cases.one_of_each_kind())
    def test_never_by_default(self, scheduler: dict[str, Any]) -> None:
        toy = cases.toy_for(scheduler)
        if toy == "uniform":
            pytest.skip("there is no mask token")
        sampler = self.sampler(50.0, toy, scheduler=scheduler, temperature=1.0)
        result = sampler.generate(toys.PROMPTS, max_new_tokens=7)
        assert not (result.tokens == toys.MASK).any()
        assert result.complete.all()
        plain = self.sampler(0.0, toy, scheduler=scheduler, temperature=1.0)
        assert torch.equal(result.tokens, plain.generate(toys.PROMPTS, max_new_tokens=7).tokens)

    @pytest.mark.parametrize("cache", cases.one_each("cache"))
    def test_chosen_under_compat_it_stays_noise(self, cache: dict[str, Any]) -> None:
        scheduler = "random_order" if isinstance(config.build("cache", cache), Foresees) else "threshold"
        sampler = self.sampler(50.0, cases.toy_of(cache), cache=cache, scheduler=scheduler, compat=True)
        result = sampler.generate(toys.PROMPTS, max_new_tokens=7)
        assert (result.trace.generated == -1).all()
        assert not result.complete.any()
        assert result.nfe.tolist() == [sampler.plugins.scheduler.bound(7)] * 5
        assert (result.tokens == toys.EOS).all()

    def test_a_few_masks_under_compat(self) -> None:
        sampler = self.sampler(4.0, scheduler=PublishedFixedSteps(6), compat=True)
        *_, last = sampler.stream(toys.PROMPTS, max_new_tokens=TOKENS)
        assert last.result is not None
        assert 0 < int(last.masked.sum()) < last.masked.numel()
        assert torch.equal(last.masked, last.tokens == toys.MASK)
        assert torch.equal(last.masked, last.step_map == -1)
        assert not (last.result.tokens == toys.MASK).any()


@pytest.mark.parametrize("scheduler", cases.one_of_each_kind())
def test_the_names_of_tokens_do_not_matter(scheduler: dict[str, Any]) -> None:
    """Fast-dLLM's invariant 7, for whatever is greedy: permuting vocabulary ids permutes the answers."""
    if "verifier" in scheduler:
        pytest.skip("a second model knows the tokens by their names")
    renamed = torch.randperm(toys.VOCAB, generator=torch.Generator().manual_seed(0))
    kind = cases.toy_for(scheduler)
    if kind == "uniform":
        pytest.skip("noise is drawn by the names of tokens")
    model, other = (toys.causal_transformer() if kind == "causal" else toys.transformer() for _ in range(2))
    with torch.no_grad():
        other.embed.weight[renamed] = model.embed.weight
        other.lm_head.weight[renamed] = model.lm_head.weight
    cache = "dual" if cases.legal(kind=cases.toy_for(scheduler), scheduler=scheduler, cache="dual") else "none"
    plugins = {"scheduler": scheduler, "cache": cache, "blocks": {"name": "fixed", "length": 6}}
    spec = toys.denoiser(kind).spec
    made = replace(toys.wrapped(model), attention=spec.attention, seeds=spec.seeds)
    twin = replace(
        made, model=other, mask_id=int(renamed[toys.MASK]), eos_id=int(renamed[toys.EOS]), eot_id=None, pad_id=None
    )
    sampler = Sampler(made, **plugins)
    if any(guide.draws for guide in sampler.plugins.guides):
        pytest.skip("samples at a temperature of its own")
    one = sampler.generate(toys.PROMPTS, max_new_tokens=7)
    prompts = [renamed[torch.tensor(prompt)] for prompt in toys.PROMPTS]
    two = Sampler(twin, **plugins).generate(prompts, max_new_tokens=7)
    assert torch.equal(renamed[one.tokens], two.tokens)
    assert torch.equal(one.trace.generated, two.trace.generated)
    assert torch.equal(one.nfe, two.nfe)

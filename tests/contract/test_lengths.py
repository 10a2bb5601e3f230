"""Answers that change in length: each canvas is the last one and the step's edit."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from dllm_sampler import Canvas, Edit, Query, Readout, Sampler, UserError
from dllm_sampler.cache.none import NoCache
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.recorder import aligned
from dllm_sampler.core.resize import effect_on
from dllm_sampler.core.spec import ChangingLength
from dllm_sampler.core.values import FREE, Resize
from dllm_sampler.engine import layout
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.schedulers.rho_eos import RhoEos
from tests import toys
from tests.contract.cases import Settings, kinds, label, settings
from tests.sampling import crossed, sampled

TOKENS, WIDTH = 13, 5
BLOCKS = {"name": "fixed", "length": WIDTH}
THRESHOLD = {"name": "threshold", "threshold": 0.6}
DAEDAL = {"name": "daedal", "inner": THRESHOLD, "initial": 4, "expand": 3, "eos_tokens": 2, "grow": 0.2, "unsure": 0.6}
RHO = {"name": "rho_eos", "inner": THRESHOLD, "initial": 6, "expand": 2, "eos_tokens": 1, "low": 0.1, "high": 0.4}
METHODS: dict[str, Settings] = {
    "daedal": DAEDAL,
    "rho_eos": RHO,
    "density": RHO | {"signal_of": "density", "low": 0.01},
}


@dataclass
class Noted(NoCache):
    """Keeps every canvas that a forward saw, and what the step did."""

    steps: list[Any] = field(default_factory=list, repr=False, compare=False)

    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.steps.append((canvas, query, edit, readout))


def noted(scheduler: Settings, tokens: int = TOKENS, **plugins: Any) -> tuple[Any, list[Any]]:
    cache = Noted()
    sampler = toys.sampler(scheduler=scheduler, cache=cache, **{"blocks": BLOCKS, **plugins})
    return sampler.generate(toys.PROMPTS, max_new_tokens=tokens, seed=toys.SEEDS), cache.steps


def following(canvas: Canvas, query: Query, edit: Edit, row: int, tokens: int) -> list[int]:
    """The answer of a row after a step, spelled out in lists: -1 for noise."""
    assert edit.resize is not None
    first, end = int(canvas.layout.first[row]), int(canvas.end[row])
    answer = [
        -1 if noise else token
        for token, noise in zip(canvas.ids[row].tolist(), canvas.masked[row].tolist(), strict=True)
    ]
    for at, token, wrote in zip(
        query.positions[row].tolist(), edit.ids[row].tolist(), edit.commit[row].tolist(), strict=True
    ):
        if wrote:
            assert answer[at] == -1, "a committed token is not written again"
            answer[at] = token
    answer = answer[first:end]
    if edit.resize.behind is not None and edit.resize.count is not None:
        at = int(edit.resize.behind[row]) - first + 1
        answer[at:at] = [-1] * int(edit.resize.count[row])
    wanted = int(edit.resize.end[row]) - first
    answer += [-1 if edit.resize.masked[row] else int(edit.resize.ids[row])] * max(0, wanted - len(answer))
    return answer[: max(0, min(wanted, tokens))]


@pytest.mark.parametrize(("method", "plugins"), crossed(list(METHODS), [{}, {"blocks": "full"}, {"temperature": 1.0}]))
def test_each_canvas_is_the_one_before_and_the_edit(method: str, plugins: dict[str, Any]) -> None:
    result, steps = noted(METHODS[method], **plugins)
    grew = shrank = 0
    for (canvas, query, edit, _), (after, *_) in pairwise(steps):
        for row in (~canvas.done).nonzero()[:, 0].tolist():
            first, end = int(after.layout.first[row]), int(after.end[row])
            ids, masked = after.ids[row, first:end].tolist(), after.masked[row, first:end].tolist()
            now = [-1 if noise else token for token, noise in zip(ids, masked, strict=True)]
            assert now == following(canvas, query, edit, row, TOKENS)
            assert [token for token, noise in zip(ids, masked, strict=True) if noise] == [toys.MASK] * sum(masked)
            assert not after.masked[row, end:].any()
            assert torch.equal(after.ids[row, :first], canvas.ids[row, :first]), "the prompt"
            grew, shrank = grew + (end > int(canvas.end[row])), shrank + (end < int(canvas.end[row]))
            if not after.done[row]:
                width = TOKENS if plugins.get("blocks") == "full" else WIDTH
                assert int(after.stop[row]) == min(int(after.start[row]) + width, end) > int(after.start[row])
    assert result.complete.all() and grew and (shrank or method != "rho_eos" or plugins)
    last = result.trace.end - result.trace.origin
    assert bool((last <= TOKENS).all()) and ((result.lengths > 0) == (last > 0)).all()


@pytest.mark.parametrize("method", METHODS)
def test_the_trace_has_every_state_in_its_own_columns(method: str) -> None:
    """Of rows that lost nothing; the others say so."""
    result, steps = noted(METHODS[method])
    trace, exact = result.trace, 0
    for canvas, *_ in steps:
        rows = ~canvas.done & ~trace.revised
        seen = trace.seen(canvas.step)
        assert torch.equal(seen[rows], aligned(canvas, canvas.seen(), False)[rows])
        shown = torch.where(seen, aligned(canvas, canvas.ids, 0), trace.pad_id)
        assert torch.equal(torch.where(seen, trace.state(canvas.step), trace.pad_id)[rows], shown[rows])
        exact += int(rows.sum())
    assert exact > 10
    lost = torch.zeros_like(trace.revised)
    for (canvas, _, edit, _), (after, *_) in pairwise(steps):
        assert edit.resize is not None
        count = torch.zeros_like(canvas.end) if edit.resize.count is None else edit.resize.count
        lost |= ~canvas.done & (after.end < canvas.end + count)
    assert torch.equal(trace.revised, lost)


PLUGINS: list[dict[str, Any]] = [
    {},
    {"cache": "prefix"},
    {"cache": {"name": "periodic_prefix", "every": 2}},
    {"stop": "prefix"},
]


@pytest.mark.parametrize(
    ("method", "toy", "plugins"), crossed(list(METHODS), ["llada", "dream", "cfg", "gqa"], PLUGINS)
)
def test_rows_of_a_batch_are_rows_alone(method: str, toy: str, plugins: dict[str, Any]) -> None:
    sampler = toys.sampler(toy, scheduler=METHODS[method], blocks=BLOCKS, **plugins)
    batch = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
    assert batch.complete.all()
    for row in (1, 3):
        alone = sampler.generate([toys.PROMPTS[row]], max_new_tokens=TOKENS, seed=[toys.SEEDS[row]])
        check_row(batch, row, alone)
        assert batch.trace.end[row] - batch.trace.origin == alone.trace.end[0] - alone.trace.origin


INSIDE = sampled(
    list(product([DAEDAL, RHO], settings("scheduler"))),
    lambda pair: kinds(pair[1]),
    lambda pair: f"{pair[0]['name']}-{label(pair[1])}",
)


@pytest.mark.parametrize("pair", INSIDE)
def test_every_scheduler_inside(pair: tuple[Settings, Settings]) -> None:
    """It runs, and its rows are independent, or it is refused by name."""
    method, inner = pair
    try:
        sampler = toys.sampler(scheduler=method | {"inner": inner}, temperature=0.8)
    except UserError as error:
        if error.code == "scheduler-incompatible" and inner["name"] in str(error):
            return
        raise
    batch = sampler.generate(toys.PROMPTS[:3], max_new_tokens=TOKENS, seed=toys.SEEDS[:3])
    assert batch.complete.all()
    for row in (0, 1):
        check_row(batch, row, sampler.generate([toys.PROMPTS[row]], max_new_tokens=TOKENS, seed=[toys.SEEDS[row]]))


def test_a_length_that_cannot_change_is_the_inner_schedulers() -> None:
    """With bounds that nothing passes, an answer of the initial length, and for DAEDAL one more forward."""
    plain = toys.sampler(scheduler=THRESHOLD, blocks=BLOCKS).generate(toys.PROMPTS, max_new_tokens=11)
    still = {"initial": 11, "eos_tokens": 1, "inner": THRESHOLD}
    for scheduler, more in (
        ({"name": "daedal", "grow": 0.0, "unsure": 0.0} | still, 1),
        ({"name": "rho_eos", "low": 0.0, "high": 1.0} | still, 0),
    ):
        found = toys.sampler(scheduler=scheduler, blocks=BLOCKS).generate(toys.PROMPTS, max_new_tokens=30)
        assert torch.equal(found.tokens[:, :11], plain.tokens) and torch.equal(found.nfe, plain.nfe + more)
        assert torch.equal(found.trace.generated[:, :11], plain.trace.generated + more)
        assert (found.trace.end - found.trace.origin == 11).all()


def test_daedal_commits_nothing_until_it_sees_an_end() -> None:
    _, steps = noted(DAEDAL | {"insert": 0.0})
    for row in range(len(toys.PROMPTS)):
        own = [(canvas, edit) for canvas, _, edit, _ in steps if not canvas.done[row]]
        early = [bool(edit.resize.reopen[row]) for _, edit in own]  # pyright: ignore[reportOptionalMemberAccess]
        first = early.index(False)
        assert 0 < first < len(own) and not any(early[first:])
        assert not any(edit.commit[row].any() for _, edit in own[:first])
        canvas = own[first][0]
        held = canvas.ids[row, canvas.layout.first[row] : canvas.end[row]].tolist()
        masks = held.count(toys.MASK)
        assert held == [toys.MASK] * masks + [toys.EOS] * min(1, TOKENS - masks), "masks, then half of eos_tokens"
        assert int(canvas.age[row]) == 0, "the block opens again"
        assert all(torch.equal(canvas.end[row], own[first][0].end[row]) for canvas, _ in own[first:]), "no insertion"


def test_a_chosen_mask_token_is_still_noise() -> None:
    """`compat` lets the model choose it: no row is complete then."""
    spy, inner = toys.Spy(toys.denoiser(), raise_mask=2.0), {"name": "threshold", "threshold": 0.5}
    options: dict[str, Any] = {
        "scheduler": {"name": "daedal", "initial": 6, "expand": 3, "eos_tokens": 2, "inner": inner}
    }
    sampler = Sampler(spy, **options, blocks={"name": "fixed", "length": 4}, stop="none", compat=True)
    found = sampler.generate(toys.PROMPTS, max_new_tokens=14, seed=toys.SEEDS)
    masks = (found.trace.ids == toys.MASK).any(1)
    assert masks.any() and not (masks & found.complete).any()


def test_rho_eos_counts_in_float32_and_settles() -> None:
    def columns(share: float, **options: Any) -> int:
        return int(RhoEos(**options)._columns(torch.tensor([share]))[0])

    assert [columns(0.0, low=low) for low in (0.2, 0.3, 0.4)] == [16, 32, 64]  # 2, 3, 4 segments
    assert [columns(1.0, high=high) for high in (0.6, 0.7, 0.8)] == [-64, -32, -16]
    assert [columns(0.0, low=low, high=0.9, scale="linear") for low in (0.35, 0.9)] == [32, 64]
    assert [columns(share, scale="const") for share in (0.4, 0.6, 0.39, 0.61)] == [0, 0, 8, -8]
    result, steps = noted(
        RHO | {"initial": 3, "expand": 1, "scale": "const", "low": 1.0, "high": 1.0}, tokens=9, blocks="full"
    )
    for canvas, _, edit, _ in steps:
        assert edit.resize is not None
        change = edit.resize.end - canvas.end
        assert bool(((change.abs() <= 1) | canvas.done).all())
        assert bool((change[canvas.end == canvas.layout.first + 9] == 0).all()), "final at the bound"
    assert (result.trace.end - result.trace.origin == 9).all()


def test_a_guard_keeps_what_is_said() -> None:
    cut, _ = noted(RHO)
    kept, steps = noted(RHO | {"min_length": 4})
    least, guarded = (int((found.trace.end - found.trace.origin).min()) for found in (cut, kept))
    assert least < 4 <= guarded
    for (canvas, *_), (after, *_) in pairwise(steps):
        text = ~canvas.masked & ~canvas.layout.frozen & (canvas.ids != toys.EOS) & canvas.seen() & ~canvas.done[:, None]
        assert torch.equal(after.ids[text], canvas.ids[text])


def test_columns_that_come_back_hold_nothing_of_before() -> None:
    """Cut to its third column and grown again, in tokens, masks, and what the trace knows."""
    spec, blocks = toys.denoiser().spec, toys.sampler(blocks=BLOCKS).plugins.blocks
    canvas = layout.canvas([[3, 4], [5]], 8, [0, 0], spec, blocks, CounterNoise(), False, changing=ChangingLength(6))
    assert canvas.end.tolist() == [8, 7] and canvas.masked.sum(1).tolist() == [6, 6]
    at = canvas.columns().expand(2, -1)
    everywhere = canvas.masked.clone()
    full = canvas.apply(at, Edit(torch.full_like(canvas.ids, 7), everywhere))
    ids, noise = torch.full_like(canvas.end, toys.MASK), torch.ones_like(canvas.done)
    live = torch.tensor([True, False])
    cut = effect_on(full, Resize(canvas.layout.first + 2, ids, noise), live).applied(full)
    assert cut.end.tolist() == [4, 7] and cut.start.tolist() == [2, 1] and torch.equal(cut.ids[1], full.ids[1])
    assert cut.ids[0].tolist() == [3, 4, 7, 7] + [toys.EOS] * 7
    grown = effect_on(cut, Resize(cut.layout.first + 20, ids, noise), live).applied(cut)
    assert grown.end.tolist() == [10, 7] and grown.ids[0].tolist() == [3, 4, 7, 7] + [toys.MASK] * 6 + [toys.EOS]
    assert grown.masked[0].tolist() == [False] * 4 + [True] * 6 + [False]
    gone = effect_on(full, Resize(canvas.layout.first - 5, ids, noise), live).applied(full)
    assert gone.end.tolist() == [2, 7] and gone.done.tolist() == [True, False]


def test_the_signal_counts_end_tokens_from_the_right() -> None:
    """The last two of three, over two; with a drawn token, what would have been chosen."""
    sampler = toys.sampler(scheduler=RHO | {"eos_tokens": 2})
    rule = sampler.plugins.scheduler
    assert isinstance(rule, RhoEos)
    canvas = layout.canvas(
        [[3]], 8, [0], sampler.denoiser.spec, sampler.plugins.blocks, CounterNoise(), False, changing=ChangingLength(6)
    )
    query = rule.ask(canvas, rule.init(canvas))
    assert query.positions[0, :6].tolist() == [1, 2, 3, 4, 5, 6] and (query.positions[0, 6:] == canvas.length).all()
    token = torch.full_like(query.ids, toys.EOS)
    token[0, 0, [1, 3, 4]] = 9
    sure = torch.tensor([[[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.3]]]).double()
    assert float(rule.signal(canvas, query, Readout(token, sure))) == pytest.approx((0.7 + 0.4) / 2)
    density = toys.sampler(scheduler=RHO | {"signal_of": "density"}).plugins.scheduler
    assert isinstance(density, RhoEos)
    density = density._share(canvas, query, Readout(token, sure))
    assert float(density) == pytest.approx(3 / 6)
    law = torch.zeros(1, 1, 8, toys.VOCAB)
    law[0, 0, :, 9], law[0, 0, [0, 5], 9], law[0, 0, [0, 5], toys.EOS] = 0.6, 0.1, 0.8
    assert float(rule.signal(canvas, query, Readout(token, sure, probabilities=law))) == pytest.approx(0.8)


def test_a_stream_shows_canvases_of_their_own_lengths() -> None:
    """And progress counts the columns that there are."""
    sampler = toys.sampler(scheduler=RHO, blocks=BLOCKS)
    told: list[tuple[int, int, int]] = []
    sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, progress=lambda *numbers: told.append(numbers))
    seen, sizes = [], set[int]()
    for commits in sampler.stream(toys.PROMPTS, max_new_tokens=TOKENS):
        rows = list(commits.rows())
        assert [len(tokens) for tokens, _, _ in rows] == commits.there.sum(1).tolist()
        for _, masked, steps in rows:
            assert masked == [step < 0 for step in steps]
            sizes.add(len(masked))
        seen.append((commits.step, sum(m.count(False) for _, m, _ in rows), sum(len(m) for _, m, _ in rows)))
    assert told == seen and min(sizes) < 6 < max(sizes)
    many: list[tuple[int, int, int]] = []
    list(
        sampler.generate_many(toys.PROMPTS, max_new_tokens=TOKENS, batch_size=2, progress=lambda *one: many.append(one))
    )
    assert all(0 <= done <= wanted for _, done, wanted in many) and many[0][1] < TOKENS
    assert many[-1][1:] == (TOKENS * 5,) * 2


@pytest.mark.parametrize(("method", "toy", "cache"), crossed(list(METHODS), ["llada", "dream"], ["none", "prefix"]))
def test_a_beginning_that_is_given_is_as_good_as_in_the_prompt(method: str, toy: str, cache: str) -> None:
    """Also where it is longer than what answers begin with, and where one of the batch has none."""
    sampler = toys.sampler(toy, scheduler=METHODS[method], blocks=BLOCKS, cache=cache)
    starts: list[list[int]] = [[8, 20, 3], [], [7] * 9, [11]]
    asks = [Infill([*start, *[FREE] * (TOKENS - len(start))], toys.PROMPTS[at]) for at, start in enumerate(starts)]
    options: dict[str, Any] = {"seed": toys.SEEDS[:4], "max_new_tokens": TOKENS}
    found = sampler.generate(asks, **options)
    flown = sampler.generate_many(asks, batch_size=2, order="given", **options)
    for row, (answer, start) in enumerate(zip(flown, starts, strict=True)):
        wanted = sampler.generate([toys.PROMPTS[row] + start], max_new_tokens=TOKENS - len(start), seed=toys.SEEDS[row])
        assert int(found.nfe[row]) == int(wanted.nfe) == answer.nfe
        assert int(found.lengths[row]) == int(wanted.lengths) + len(start) == answer.length
        tokens = start + wanted.tokens[0, : int(wanted.lengths)].tolist()
        assert found.tokens[row, : len(tokens)].tolist() == tokens == answer.tokens[: len(tokens)].tolist()


def test_the_prefix_cache_spares_what_stands_before_the_block() -> None:
    runs = [
        toys.sampler(scheduler=RHO | {"min_length": 12}, blocks=BLOCKS, cache=cache).generate(
            toys.PROMPTS, max_new_tokens=TOKENS
        )
        for cache in ("none", "prefix")
    ]
    each = [found.trace.rows / found.nfe for found in runs]
    assert bool((each[1] < each[0]).all())

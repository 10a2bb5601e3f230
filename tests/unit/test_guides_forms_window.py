"""The decided beginning of an answer, and its end that nothing is asked about, are not gone through place by place."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dllm_sampler.core.packing import HeadRows, stretch
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.engine.readout import read
from dllm_sampler.guides.forms import window
from tests import toys
from tests.forms import LENGTH, MASK, VOCAB, laid_out, ruled, strings
from tests.sampling import crossed

LISTED = ("(ab|c)*", "a?b{2}c?", "(a|b|c){3,}")
COLUMNS = torch.arange(LENGTH + 1)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the windows that are made."""
    found, of = [], window.Window.of

    def noted(*args: object) -> window.Window:
        made = of(*args)  # pyright: ignore[reportArgumentType]
        found.append(made.width)
        return made

    monkeypatch.setattr(window.Window, "of", noted)
    return found


def question(canvas: Canvas, generator: torch.Generator) -> Query:
    """Some of the masks up to a random column, under two hypotheses: what stands, and tokens without a text."""
    last = torch.randint(LENGTH, (4, 1), generator=generator)
    asked = canvas.masked & (last >= COLUMNS) & (torch.rand(4, LENGTH + 1, generator=generator) < 0.8)
    query = Query.at(canvas, torch.where(asked, COLUMNS, LENGTH).sort(1).values)
    other = torch.where(torch.rand(query.positions.shape, generator=generator) < 0.3, 4, query.ids[:, 0])
    return replace(query, ids=torch.stack([query.ids[:, 0], torch.where(query.positions < LENGTH, other, MASK)], 1))


def answered(
    rule: object, logits: Tensor, canvas: Canvas, query: Query, stretch: int | None = None
) -> tuple[Tensor, Tensor]:
    head_rows = replace(HeadRows.every(query), stretch=stretch)
    found = read(logits.clone(), canvas, head_rows, rule)  # pyright: ignore[reportArgumentType]
    there = (query.positions < LENGTH)[:, None].expand_as(query.ids)
    assert found.logits is not None
    return found.token[there], found.logits[there]


def situations(given: bool) -> Iterator[tuple[Canvas, Query, Tensor]]:
    """Several forms, rows that end early, masks that nothing is asked about; logits of which some are equal."""
    generator = torch.Generator().manual_seed(3)
    for number in range(20):
        forms, first = torch.randint(3, (4,), generator=generator), torch.randint(LENGTH, (4, 1), generator=generator)
        legal = [[one for one in strings(LISTED[form]) if one[3] == 4] for form in forms]
        free = (COLUMNS[:-1] >= first) | (torch.rand(4, LENGTH, generator=generator) < 0.2)
        canvas = laid_out(free.tolist(), [one[int(torch.randint(len(one), (), generator=generator))] for one in legal])
        end = torch.randint(3, LENGTH + 1, (4,), generator=generator)
        canvas = toys.changed(canvas, form=forms, end=end, masked=canvas.masked & (end[:, None] > COLUMNS))
        canvas = toys.changed(canvas, given=(~free[:, 0]).long() if given else None)
        query, logits = question(canvas, generator), torch.randn(8 * (LENGTH + 1), VOCAB, generator=generator).double()
        yield canvas, query, logits.round() if number % 2 else logits


def told(canvas: Canvas, query: Query) -> int:
    """How wide the window must be."""
    begin, over = stretch(canvas, query.positions)
    return max(1, int((over - begin).max()))


@pytest.mark.parametrize(("draws", "given"), crossed([False, True], [False, True], together=0))
def test_a_window_changes_no_bit(draws: bool, given: bool, widths: list[int]) -> None:
    rule = ruled(LISTED, draws, posterior=True)._replace(needs=frozenset({"logits"}))
    for canvas, query, logits in situations(given):
        found = answered(rule, logits, canvas, query, told(canvas, query))
        for one, other in zip(answered(rule, logits, canvas, query), found, strict=True):
            assert torch.equal(one, other)
    assert set(widths) == {1, 2, 3, LENGTH}


def test_a_generation_goes_through_one_block_at_a_time(widths: list[int]) -> None:
    it = toys.sampler(scheduler={"name": "fixed", "steps": 8}, guide="regex", stop="none")
    it.generate(toys.PROMPTS, max_new_tokens=32, block_length=8)
    assert len(widths) == 8 and max(widths) == 8

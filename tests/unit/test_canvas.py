"""`Canvas.apply`, `vouch` and `advance`: the guarantees that every plug-in may rely on."""

import copy
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import Canvas, Choice, Edit, Query
from dllm_sampler.errors import UserError
from tests import toys

LENGTH = 8


@st.composite
def situations(draw: st.DrawFn) -> tuple[Canvas, torch.Tensor, Edit]:
    """Any canvas and any edit, at sorted distinct positions padded with the empty slot."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    batch, width = draw(st.integers(1, 3)), draw(st.integers(1, LENGTH))

    def flip(*shape: int, p: float = 0.5) -> torch.Tensor:
        return torch.rand(shape, generator=generator) < p

    frozen = torch.cat([flip(batch, LENGTH, p=0.3), torch.ones(batch, 1, dtype=torch.bool)], 1)
    masked = flip(batch, LENGTH + 1) & ~frozen
    canvas = replace(
        toys.canvas(masked[:, :-1]),
        frozen=frozen,
        ids=torch.randint(0, 30, (batch, LENGTH + 1), generator=generator),
        done=flip(batch),
    )
    chosen = torch.rand(batch, LENGTH, generator=generator).argsort(1)[:, :width].sort(1).values
    positions = torch.where(flip(batch, width, p=0.8), chosen, LENGTH).sort(1).values
    some = draw(st.booleans())
    edit = Edit(
        ids=torch.randint(30, 40, (batch, width), generator=generator),
        commit=flip(batch, width),
        remask=flip(batch, width, p=0.3) if draw(st.booleans()) else None,
        end=torch.randint(0, LENGTH + 2, (batch,), generator=generator) if some else None,
    )
    return canvas, positions, edit


@settings(max_examples=300, deadline=None, derandomize=True)
@given(situations())
def test_apply(situation):
    canvas, positions, edit = situation
    after = canvas.apply(positions, edit)
    for row in range(len(canvas.ids)):
        ids, masked, end = canvas.ids[row].tolist(), canvas.masked[row].tolist(), int(canvas.end[row])
        if not canvas.done[row]:
            for place, column in enumerate(positions[row].tolist()):
                if canvas.frozen[row, column]:
                    continue
                if edit.commit[row, place]:
                    ids[column], masked[column] = int(edit.ids[row, place]), False
                if edit.remask is not None and edit.remask[row, place]:
                    ids[column], masked[column] = int(edit.ids[row, place]), True
            if edit.end is not None:
                end = min(end, int(edit.end[row]))
                masked = [noise and column < end for column, noise in enumerate(masked)]
        assert after.ids[row].tolist() == ids
        assert after.masked[row].tolist() == masked
        assert int(after.end[row]) == end
        assert int(after.stop[row]) == min(int(canvas.stop[row]), end)
    untouched = {field.name for field in fields(Canvas)} - {"ids", "masked", "end", "stop"}
    assert all(getattr(after, name) is getattr(canvas, name) for name in untouched)


def choices(canvas: Canvas, positions: torch.Tensor) -> list[Choice]:
    """One by each rule."""
    score = torch.rand(positions.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    count = torch.arange(len(positions))
    return [
        Choice(canvas, positions, score, threshold=0.4),
        Choice(canvas, positions, score, wanted=score < 0.3),
        Choice(canvas, positions, score, count=count),
        Choice(canvas, positions, score, count=count, among=canvas.eligible(positions) & (score < 0.7)),
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(situations(), st.booleans(), st.sampled_from([None, 33]))
def test_an_open_choice_is_committed_as_a_made_one(situation, failing, forbidden):
    canvas, positions, edit = situation
    batch, width = positions.shape
    sure, bad = torch.full((batch, 2, width), 0.5), torch.zeros(batch, dtype=torch.long)
    sure[0, 1, 0] = torch.nan if failing else 0.5
    for choice in choices(canvas, positions):
        given = replace(edit, commit=choice), replace(edit, commit=choice.made())
        (ours, told), (theirs, made) = (canvas.vouch(positions, one, bad, sure, forbidden) for one in given)
        assert torch.equal(ours, theirs) and torch.equal(told.commit, made.commit)
        failed = failing and bool(canvas.eligible(positions)[0, 0] & ~canvas.done[0])
        assert ours.tolist() == [int(canvas.step[0]) + 1 if failed else 0] + [0] * (batch - 1)
        assert not (told.commit[0].any() and failed), "a row that the model failed is not written to"
        assert not (told.commit & (edit.ids == forbidden)).any()
        after, expected = (canvas.apply(positions, one) for one in (told, made))
        for name in ("ids", "masked", "end", "stop"):
            assert torch.equal(getattr(after, name), getattr(expected, name))


def test_a_choice_is_made_once_and_by_who_reads_it():
    canvas = toys.canvas(torch.ones(2, 4, dtype=torch.bool))
    query = Query.masks(canvas)
    for choice in choices(canvas, query.positions):
        edit, expected = Edit(query.positions, choice), choice.made()
        held = copy.deepcopy(edit)
        assert edit.choice is choice and copy.copy(edit).choice is choice and held.choice is not None
        assert edit.commit is edit.commit and torch.equal(edit.commit, expected)
        assert edit.choice is None and replace(edit, ids=query.positions).commit is edit.commit
        assert torch.equal(held.commit, expected)


def test_one_rule_is_needed():
    canvas = toys.canvas(torch.ones(2, 4, dtype=torch.bool))
    tables = canvas, Query.masks(canvas).positions, torch.ones(2, 4)
    for rules in ({}, {"threshold": 0.5, "count": torch.ones(2)}, {"threshold": 0.0, "wanted": torch.ones(2, 4) > 0}):
        with pytest.raises(UserError, match="one rule"):
            Choice(*tables, **rules)
    with pytest.raises(TypeError, match="commit"):
        Edit(torch.ones(2, 4))  # it has no default


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"score": torch.ones(2, 3)}, r"score is \[2, 4\], not \[2, 3\]"),
        ({"score": torch.ones(2, 4).long()}, "score is of floating point numbers, not of torch.int64"),
        ({"threshold": torch.ones(1)}, "threshold is a number, not a Tensor"),
        ({"threshold": None, "count": torch.ones(1).long()}, r"count is \[2\] of torch.int64, not \[1\]"),
        ({"threshold": None, "count": torch.ones(2)}, r"not \[2\] of torch.float32"),
        (
            {"threshold": None, "wanted": torch.ones(2, 4)},
            r"wanted is \[2, 4\] of torch.bool, not \[2, 4\] of torch.float",
        ),
        ({"among": torch.ones(4) > 0}, r"among is \[2, 4\] of torch.bool, not \[4\]"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(given, said):
    """A kernel would read beyond its tables."""
    canvas = toys.canvas(torch.ones(2, 4, dtype=torch.bool))
    tables = {"positions": Query.masks(canvas).positions, "score": torch.ones(2, 4), "threshold": 0.5}
    with pytest.raises(UserError, match=f"a choice's {said}" if said[0] != "n" else said):
        Choice(canvas, **(tables | given))


def test_advance():
    canvas = replace(
        toys.canvas(torch.ones(4, 10, dtype=torch.bool)),
        start=torch.tensor([0, 4, 8, 4]),
        stop=torch.tensor([4, 8, 10, 8]),
        age=torch.tensor([2, 0, 1, 5]),
        step=torch.tensor([2, 3, 6, 7]),
        done=torch.tensor([False, False, False, True]),
    )
    after = canvas.advance(torch.tensor([False, True, True, True]), 4, None)
    assert after.start.tolist() == [0, 8, 10, 4]
    assert after.stop.tolist() == [4, 10, 10, 8]
    assert after.age.tolist() == [3, 0, 0, 5]
    assert after.step.tolist() == [3, 4, 7, 7]
    assert after.done.tolist() == [False, False, True, True]
    finish = torch.tensor([True, False, False, False])
    assert canvas.advance(torch.zeros(4, dtype=torch.bool), 4, finish).done.tolist() == [True, False, False, True]


def test_windows_and_queries():
    masked = torch.tensor([[False, True, True, False, True, True], [True, True, True, True, False, True]])
    canvas = replace(toys.canvas(masked), start=torch.tensor([1, 4]), stop=torch.tensor([5, 6]))
    assert canvas.in_block().nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 4], [1, 5]]
    assert canvas.noise_left().tolist() == [3, 1]
    assert canvas.window(4).tolist() == [[1, 2, 3, 4], [4, 5, 6, 6]]
    assert canvas.window(4, back=1).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    masks, window = Query.masks(canvas).trim(3), Query.window(canvas).trim(4)
    assert masks.positions.tolist() == [[1, 2, 4], [5, 6, 6]]
    assert canvas.eligible(masks.positions).tolist() == [[True, True, True], [True, False, False]]
    assert window.ids.tolist() == canvas.ids.gather(1, window.positions)[:, None].tolist()
    assert canvas.eligible(canvas.columns()[:, :-1].expand(2, -1)).sum(1).tolist() == [3, 1]

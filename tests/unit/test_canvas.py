"""`Canvas.apply`, `reject_nonfinite` and `advance`: the guarantees that every plug-in may rely on."""

from dataclasses import fields, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import Canvas, Edit, Query
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
    canvas = toys.changed(
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(situations())
def test_apply(situation):
    canvas, positions, edit = situation
    after = canvas.apply(positions, edit)
    for row in range(len(canvas.ids)):
        ids, masked, end = canvas.ids[row].tolist(), canvas.masked[row].tolist(), int(canvas.end[row])
        if not canvas.done[row]:
            for place, column in enumerate(positions[row].tolist()):
                if canvas.layout.frozen[row, column]:
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(situations(), st.booleans(), st.sampled_from([None, 33]))
def test_reject_nonfinite(situation, failing, forbidden):
    canvas, positions, edit = situation
    batch, width = positions.shape
    sure, bad = torch.full((batch, 2, width), 0.5), torch.zeros(batch, dtype=torch.long)
    sure[0, 1, 0] = torch.nan if failing else 0.5
    failed = failing and not bool(canvas.done[0])
    ours, told = canvas.reject_nonfinite(positions, edit, bad, sure, forbidden)
    assert ours.tolist() == [int(canvas.step[0]) + 1 if failed else 0] + [0] * (batch - 1)
    assert not (told.commit[0].any() and failed), "a row that the model failed is not written to"
    assert not (told.commit & (edit.ids == forbidden)).any()
    allowed = edit.commit & (edit.ids != (-1 if forbidden is None else forbidden))
    assert torch.equal(told.commit[int(failed) :], allowed[int(failed) :]), "nothing else is refused"


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

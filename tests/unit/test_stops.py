"""The end-of-text policies, step by step on a canvas."""

from dataclasses import replace

import torch

from dllm_sampler import Canvas, Edit, Query, Readout
from dllm_sampler.core.protocols import Stop
from dllm_sampler.stops.end_tokens import BlockStop, NoStop, PrefixStop, TruncateStop
from dllm_sampler.stops.fill import FillStop
from dllm_sampler.stops.prophet import Prophet
from tests import toys
from tests.sampling import each

E, M = toys.EOS, toys.MASK


def at(ids: list[int], **changes: object) -> Canvas:
    """A row that holds `ids`, masks where they say so; the rest is committed."""
    row = torch.tensor([ids])
    return toys.changed(toys.canvas(row == M), ids=torch.tensor([[*ids, 0]]), **changes)


def judged(stop: Stop, canvas: Canvas, commits: dict[int, int]) -> tuple[Edit, Canvas]:
    """What becomes of an edit that commits these tokens at these columns."""
    positions = torch.arange(canvas.length)[None]
    chosen = torch.tensor([[column in commits for column in range(canvas.length)]])
    ids = torch.tensor([[commits.get(column, 0) for column in range(canvas.length)]])
    edit = Edit(ids, chosen)
    after = canvas.apply(positions, edit)
    edit = stop.bind(toys.context())(canvas, after, Query.at(canvas, positions), None, edit)  # type: ignore[arg-type]
    return edit, canvas.apply(positions, edit)


def finishes(stop: Stop, canvas: Canvas, commits: dict[int, int]) -> bool:
    edit, _ = judged(stop, canvas, commits)
    return bool(edit.finish is not None and edit.finish.any())


def test_prefix():
    assert finishes(PrefixStop(), at([1, M, M, M]), {1: E})
    assert not finishes(PrefixStop(), at([1, M, M, M]), {2: E}), "a mask before it"
    assert finishes(PrefixStop(), at([1, M, E, M]), {1: 5}), "the last mask before an earlier end token"
    assert not finishes(PrefixStop(), at([1, M, M, M]), {1: 5})
    assert finishes(PrefixStop(), at([M, M, M, M]), {0: E})


@each(("start", "there"), [(1, [1, 2]), (-1, [0]), (-2, []), (3, [3])])
def test_prophet_looks_at_the_answer_alone(start: int, there: list[int]):
    """A region of two positions that begins before the generation, or ends behind it, has what lies inside."""
    canvas = at([M, M, M, M])
    region = Prophet(start, 2).region(canvas)[0].nonzero()[:, 0].tolist()
    assert region == there


def test_block():
    first = {"stop": torch.tensor([2])}
    assert finishes(BlockStop(), at([M, E, M, M], **first), {0: 5})
    assert not finishes(BlockStop(), at([M, M, M, M], **first), {1: E}), "the block has a mask left"
    assert not finishes(BlockStop(), at([M, 3, E, M], **first), {0: 5}), "the end token stands in another block"
    assert not finishes(BlockStop(), at([M, 3, M, M], **first), {0: 5})


def test_truncate():
    edit, after = judged(TruncateStop(), at([1, M, M, M, M]), {2: E})
    assert edit.end is not None and edit.end.tolist() == [3]
    assert after.end.tolist() == [3] and after.stop.tolist() == [3]
    assert after.masked[0, :5].tolist() == [False, True, False, False, False]
    edit, after = judged(TruncateStop(), at([1, M, M, M, M]), {3: E, 2: E})
    assert after.end.tolist() == [3], "the first of two"
    assert judged(TruncateStop(), at([1, M, M, M, M]), {2: 5})[1].end.tolist() == [5]


@each("stop", [PrefixStop(), BlockStop(), TruncateStop()])
def test_an_end_token_in_the_prompt_does_not_count(stop):
    frozen = torch.tensor([[True, True, False, False, True]])
    canvas = at(
        [E, 1, M, M], frozen=frozen, start=torch.tensor([2]), first=torch.tensor([2]), new_tokens=torch.tensor([2])
    )
    edit, after = judged(stop, canvas, {2: 5, 3: 6})
    assert edit.finish is None or not edit.finish.any()
    assert after.end.tolist() == [4]


def test_none():
    edit = Edit(torch.tensor([[E]]), torch.tensor([[True]]))
    assert NoStop()(None, None, None, None, edit) is edit  # type: ignore[arg-type]


def test_a_plug_in_is_bound_to_one_model_at_a_time():
    unbound = PrefixStop()
    bound = unbound.bind(toys.context())
    assert bound.end_ids == (toys.EOS,) and unbound.end_ids == ()


def filled(canvas: Canvas, edit: Edit) -> tuple[Edit, list[int], list[int]]:
    """What `stop=fill` makes of an edit at all columns and the empty slot; what it commits and takes back."""
    positions = torch.arange(canvas.length + 1)[None]
    ids, sure = edit.ids[:, None], torch.full((1, 1, canvas.length + 1), 0.5, dtype=torch.float64)
    stop, after = FillStop().bind(toys.context()), canvas.apply(positions, edit)
    found = stop(canvas, after, Query.at(canvas, positions), Readout(ids, sure), edit)
    assert found.remask is not None, "a token that is written over counts as taken back"
    return found, found.commit[0].nonzero()[:, 0].tolist(), found.remask[0].nonzero()[:, 0].tolist()


def test_fill():
    """Behind the first end token other tokens and masks become end tokens; what is one stays as it was committed."""
    canvas = at([1, M, E, 7, M, E])
    nothing = torch.zeros(1, 7, dtype=torch.bool)
    edit = Edit(torch.full((1, 7), 9), nothing)
    found, commit, remask = filled(canvas, edit)
    assert (commit, remask) == ([3, 4], [])
    assert found.ids.tolist() == [[9, 9, 9, E, E, 9, 9]]
    assert found.confidence is not None and found.confidence.tolist() == [[0.5, 0.5, 0.5, 1, 1, 0.5, 0.5]]
    assert found.finish is not None and not found.finish, "a mask is left before it"
    first = torch.arange(7)[None] == 1
    found, commit, _ = filled(canvas, replace(edit, commit=first, confidence=torch.full((1, 7), 0.25)))
    assert commit == [1, 3, 4] and bool(found.finish)
    assert found.confidence is not None and found.confidence[0, :4].tolist() == [0.25, 0.25, 0.25, 1]
    back = torch.arange(7)[None] == 4
    assert filled(canvas, replace(edit, remask=back))[1:] == ([], [4]), "the block is not over"
    over = replace(edit, remask=back, close_block=torch.tensor([True]))
    assert filled(canvas, over)[1:] == ([3, 4], [])
    frozen = canvas.layout.frozen | (torch.arange(7) == 3)
    assert filled(toys.changed(canvas, frozen=frozen), edit)[1] == [4]
    noise = canvas.ids.scatter(1, torch.tensor([[4]]), E)
    assert filled(replace(canvas, ids=noise), edit)[1] == [3, 4], "noise may look like an end token (uniform diffusion)"


def test_where_an_end_token_may_fill():
    canvas = at([1, M, E, M, M, 2])
    canvas = toys.changed(canvas, frozen=canvas.layout.frozen | (torch.arange(7) == 4), end=torch.tensor([5]))
    assert FillStop().positions(canvas)[0].nonzero()[:, 0].tolist() == [2, 3]

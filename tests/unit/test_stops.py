"""The end-of-text policies, step by step on a canvas."""

from dataclasses import replace

import pytest
import torch

from dllm_sampler import Canvas, Edit, Query
from dllm_sampler.core.protocols import Stop
from dllm_sampler.stops.end_tokens import BlockStop, NoStop, PrefixStop, TruncateStop
from dllm_sampler.stops.prophet import Prophet
from tests import toys

E, M = toys.EOS, toys.MASK


def at(ids: list[int], **changes: object) -> Canvas:
    """A row that holds `ids`, masks where they say so; the rest is committed."""
    row = torch.tensor([ids])
    return replace(toys.canvas(row == M), ids=torch.tensor([[*ids, 0]]), **changes)


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


@pytest.mark.parametrize(("start", "there"), [(1, [1, 2]), (-1, [0]), (-2, []), (3, [3])])
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


@pytest.mark.parametrize("stop", [PrefixStop(), BlockStop(), TruncateStop()], ids=lambda stop: type(stop).__name__)
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
    assert bound.eos == toys.EOS and unbound.eos == -1

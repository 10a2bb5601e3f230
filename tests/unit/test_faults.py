"""Plug-ins of one's own that return what they must not, or read what they did not ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dllm_sampler import Canvas, Edit, Query, Readout, Scheduler, UserError
from dllm_sampler.core.protocols import Blocks, Stop
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.stops.end_tokens import NoStop
from tests import toys


def edit(canvas: Canvas, query: Query, readout: Readout) -> Edit:
    return Edit(readout.token[:, 0], canvas.eligible(query.positions))


@dataclass(frozen=True)
class Mine(Scheduler):
    """Returns what a function makes."""

    function: Callable[[Canvas, Query, Readout], Any]

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> Any:
        return self.function(canvas, query, readout), None


def run(scheduler: Any, **plugins: Any) -> None:
    toys.sampler(scheduler=scheduler, **plugins).generate(toys.PROMPTS[:2], max_new_tokens=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, _: {"commit": one.commit[:, None]}, r"commit is \[2, 1, 6\] of torch.bool, and \[2, 6\] of"),
        (
            lambda one, _: {"commit": one.commit.long()},
            r"commit is \[2, 6\] of torch.int64, and \[2, 6\] of torch.bool",
        ),
        (lambda one, _: {"commit": None}, r"commit is NoneType, and \[2, 6\] of torch.bool is needed"),
        (lambda one, _: {"ids": one.ids[:, :3]}, r"ids is \[2, 3\] of torch.int64, and \[2, 6\] is needed"),
        (lambda one, _: {"ids": one.ids[:1]}, r"ids is \[1, 6\] of torch.int64, .* each of query.positions\.$"),
        (lambda one, seen: {"confidence": seen.confidence}, r"confidence is \[2, 1, 6\] of torch.float64"),
        (lambda one, _: {"keep_block": one.commit}, r"keep_block is \[2, 6\] of .* Return one value for each row\.$"),
        (lambda one, _: {"finish": True}, r"finish is bool, and \[2\] of torch.bool is needed"),
        (lambda one, _: {"stop": one.ids}, r"stop is \[2, 6\] of torch.int64, and \[2\] is needed"),
    ],
)
def test_an_edit_of_another_shape(change: Any, message: str) -> None:
    def changed(canvas: Canvas, query: Query, readout: Readout) -> Edit:
        made = edit(canvas, query, readout)
        return replace(made, **change(made, readout))

    with pytest.raises(UserError, match=f"^scheduler=Mine returned an Edit whose {message}"):
        run(Mine(changed))


class Cuts(NoStop):
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Any:
        return replace(edit, finish=edit.commit)


class Loses(Stop):
    def __call__(self, *_: Any) -> Any:
        return None


class Narrow(Blocks):
    def lookahead(self, tokens: int) -> int:
        return 3

    def progress(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Any:
        return replace(edit, commit=edit.commit[:, :1])


def test_other_plug_ins_return_edits_too() -> None:
    with pytest.raises(UserError, match=r"^stop=Cuts returned an Edit whose finish is \[2, \d\] of torch.bool"):
        run("threshold", stop=Cuts())
    with pytest.raises(UserError, match=r"^stop=Loses returned NoneType in place of an Edit\. Return an Edit\.$"):
        run("threshold", stop=Loses())
    with pytest.raises(UserError, match=r"^blocks=Narrow returned an Edit whose commit is \[2, 1\]"):
        run("threshold", blocks=Narrow())


def stored(canvas: Canvas, query: Query, readout: Readout) -> Any:
    entropy = readout.entropy
    made = edit(canvas, query, readout)
    return replace(made, commit=made.commit & (entropy[:, 0] < 9))  # pyright: ignore[reportOptionalSubscript]


def asserted(canvas: Canvas, query: Query, readout: Readout) -> Any:
    assert readout.margin is not None
    return replace(edit(canvas, query, readout), score=readout.margin[:, 0])


USES: list[tuple[Any, str]] = [
    (stored, "entropy"),
    (asserted, "margin"),
    (lambda canvas, query, readout: -readout.gap, "gap"),
    (lambda canvas, query, readout: canvas.layout.first + readout.logsumexp, "logsumexp"),
    (lambda canvas, query, readout: torch.where(canvas.done, readout.current, 0), "current"),
    (lambda canvas, query, readout: readout.logits.max(-1), "logits"),
    (lambda canvas, query, readout: readout.draw(readout.logits), "draw"),
]


@pytest.mark.parametrize(("function", "field"), USES)
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: Eoser(one)])
def test_a_field_that_needs_does_not_list(function: Any, field: str, wrap: Any) -> None:
    said = f"scheduler=Mine reads readout.{field}, which is not measured. Add '{field}' to what its property needs"
    with pytest.raises(UserError) as error:
        run(wrap(Mine(function)))
    assert str(error.value) == f"{said} returns."


def test_a_stop_that_forgets_what_it_needs() -> None:
    class Sure(Stop):
        def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
            return replace(edit, finish=readout.entropy.amax((1, 2)) < 0.1)  # pyright: ignore

    with pytest.raises(UserError, match=r"^stop=Sure reads readout\.entropy, which is not measured\."):
        run("threshold", stop=Sure())


def test_other_mistakes_stay_what_they_are() -> None:
    for function in (lambda *_: None.a, lambda canvas, *_: canvas.nothing, lambda *_: [][0]):  # type: ignore
        with pytest.raises((AttributeError, IndexError)):
            run(Mine(function))

"""Plug-ins of one's own that return what they must not, or read what they did not ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Edit, Query, Readout, Scheduler, UserError
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Blocks, Guide, Stop
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.stops.end_tokens import NoStop
from tests import toys
from tests.refusals import refused
from tests.sampling import each


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


@each(
    ("change", "message"),
    [
        (lambda one, _: {"commit": one.commit[:, None]}, "commit is"),
        (lambda one, _: {"commit": one.commit.long()}, "commit is"),
        (lambda one, _: {"commit": None}, "commit is"),
        (lambda one, _: {"ids": one.ids[:, :3]}, "ids is"),
        (lambda one, _: {"ids": one.ids[:1]}, "ids is"),
        (lambda one, _: {"ids": one.ids.float()}, "ids is"),
        (lambda one, seen: {"confidence": seen.confidence}, "confidence is"),
        (lambda one, _: {"keep_block": one.commit}, "keep_block is"),
        (lambda one, _: {"finish": True}, "finish is"),
        (lambda one, _: {"stop": one.ids}, "stop is"),
    ],
)
def test_an_edit_of_another_shape(change: Any, message: str) -> None:
    def changed(canvas: Canvas, query: Query, readout: Readout) -> Edit:
        made = edit(canvas, query, readout)
        return replace(made, **change(made, readout))

    with refused(f"plugin-result: scheduler=Mine, {message}"):
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
    with refused("plugin-result: stop=Cuts, [2, torch.bool"):
        run("threshold", stop=Cuts())
    with refused("plugin-result: stop=Loses"):
        run("threshold", stop=Loses())
    with refused("plugin-result: blocks=Narrow, [2, 1]"):
        run("threshold", blocks=Narrow())


class Settles(Guide):
    vetoes: ClassVar[bool] = True

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        return logits

    def settle(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Any:
        return edit


def test_a_guide_that_settles_says_what_it_refused() -> None:
    with refused("plugin-result: guide=Settles, Refusals"):
        run("threshold", guide=Settles())


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


@each(("function", "field"), USES)
@each("wrap", [lambda one: one, lambda one: Eoser(one)])
def test_a_field_that_needs_does_not_list(function: Any, field: str, wrap: Any) -> None:
    said = f"scheduler=Mine reads readout.{field}, which is not measured. Add '{field}' to its needs."
    with pytest.raises(UserError) as error:
        run(wrap(Mine(function)))
    assert str(error.value) == said


def test_a_stop_that_forgets_what_it_needs() -> None:
    class Sure(Stop):
        def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
            return replace(edit, finish=readout.entropy.amax((1, 2)) < 0.1)  # pyright: ignore

    with refused("plugin-needs: stop=Sure, readout.entropy"):
        run("threshold", stop=Sure())


def test_other_mistakes_stay_what_they_are() -> None:
    for function in (lambda *_: None.a, lambda canvas, *_: canvas.nothing, lambda *_: [][0]):  # type: ignore
        with pytest.raises((AttributeError, IndexError)):
            run(Mine(function))

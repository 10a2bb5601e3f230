"""When a row ends: the end-of-text policies (their rules stand side by side in docs/architecture.md)."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from dllm_sampler import select
from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.protocols import ModelSpec, Stop, block_over


def _first(chosen: Tensor) -> Tensor:
    """`[B]` first true column of a `[B, L+1] bool` set, L + 1 where there is none."""
    size = chosen.shape[1]
    return torch.where(chosen, select.numbers(size, chosen.device), size).amin(1)


@dataclass(frozen=True)
class NoStop(Stop):
    """Decode the whole canvas; the text is cut at the first end token afterwards (LLaDA's default)."""


@dataclass(frozen=True)
class _EosStop(Stop):
    eos: int = field(init=False, default=-1)

    def bind(self, spec: ModelSpec) -> Self:
        """See `Stop.bind`."""
        bound = replace(self)
        object.__setattr__(bound, "eos", spec.eos_id)
        return bound

    def ends(self, after: Canvas) -> Tensor:
        """`[B, L+1] bool` end tokens that stand committed in the generation."""
        return (after.ids == self.eos) & ~after.masked & ~after.frozen & after.seen()


def _finish(edit: Edit, finish: Tensor) -> Edit:
    return replace(edit, finish=finish if edit.finish is None else edit.finish | finish)


@dataclass(frozen=True)
class BlockStop(_EosStop):
    """Stop after a complete block that contains an end token; what lies behind it becomes padding."""

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """See `Stop.__call__`."""
        return _finish(edit, block_over(after, edit) & (self.ends(after) & canvas.in_block()).any(1))


@dataclass(frozen=True)
class PrefixStop(_EosStop):
    """Stop once an end token is committed and no mask remains before it; no token before it changes.

    A scheduler that takes tokens back (`edit.remask`) is done with them when the block is over.
    """

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """See `Stop.__call__`."""
        part = slice(canvas.origin, canvas.length)
        ends = (after.ids[:, part] == self.eos) & (after.masked[:, part].cumsum(1) == 0)
        fire = (ends & (canvas.columns()[:, part] < after.end[:, None])).any(1)
        return _finish(edit, fire if edit.remask is None else fire & block_over(after, edit))


@dataclass(frozen=True)
class TruncateStop(_EosStop):
    """Cut the canvas behind an end token as soon as it is committed: later masks vanish from the context.

    Where the scheduler takes tokens back (`edit.remask`), once its block is over.
    """

    cuts: ClassVar[bool] = True

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """See `Stop.__call__`."""
        end = _first(self.ends(after)) + 1
        if edit.remask is not None:
            end = torch.where(block_over(after, edit), end, canvas.end)
        return replace(edit, end=end if edit.end is None else torch.minimum(end, edit.end))


@dataclass(frozen=True)
class EndOfText(TruncateStop):
    """Cut the canvas behind the end of text, by a committed end token or by a predicted one.

    Source: End-of-Text prediction of Learn2PD, arXiv 2509.25188. `resolved` is the paper's rule: cut where an end
    token is committed (as `TruncateStop`). `predicted` is the published code's: where a step commits none, also cut
    behind the mask most surely predicted to be one, anywhere on the canvas. The code sets no bound there, and can cut
    after the very first forward: that is `min_conf=0`.

    Args:
        mode: `resolved` or `predicted`.
        min_conf: probability a predicted end token must reach.
    """

    mode: Literal["resolved", "predicted"] = "resolved"
    min_conf: float = 0.9

    def __post_init__(self) -> None:
        if self.mode not in ("resolved", "predicted"):
            raise UserError(f"stop.mode must be resolved or predicted, not {self.mode!r}")
        if isinstance(self.min_conf, bool) or not self.min_conf >= 0:
            raise UserError(f"stop.min_conf must be a probability from 0 on, not {self.min_conf!r}")

    def positions(self, canvas: Canvas) -> Tensor | None:
        """See `Stop.positions`."""
        return canvas.masked if self.mode == "predicted" else None

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """See `Stop.__call__`."""
        if self.mode == "resolved":
            return super().__call__(canvas, after, query, readout, edit)
        at, nowhere = query.positions, canvas.length + 1  # [B, Q]
        wrote = edit.commit & (edit.ids == self.eos) & (at < canvas.length)
        cut = torch.where(wrote, at + 1, nowhere).amin(1)
        open_ = after.masked.gather(1, at)
        likely = open_ & (readout.token[:, 0] == self.eos) & (readout.confidence[:, 0] >= self.min_conf)
        sure, surest = readout.confidence[:, 0].masked_fill(~likely, -1.0).max(1)  # first on a tie
        guess = torch.where(sure >= 0, at.gather(1, surest[:, None])[:, 0] + 1, nowhere)
        cut = torch.where(cut < nowhere, cut, guess)
        return replace(edit, end=cut if edit.end is None else torch.minimum(cut, edit.end))


@dataclass(frozen=True)
class Prophet(Stop):
    """Fill every mask at once when the best token stands far above the second on the answer's positions.

    Source: Prophet, arXiv 2508.19982. The gap is between the two best logits, averaged over the region, masked or
    not; the bound falls as decoding proceeds. It is judged only on forwards with fresh rows for the whole region and
    every mask: under a dual cache those that open a block.

    Args:
        start: first position of the answer region inside the generation; None: the region is every mask.
        length: positions of the region, of which those inside the generation count. With none there it never fires.
        early, mid, late: bounds on the mean gap until a third, two thirds and the rest of the way.
        steps: planned forwards, which make progress the step's number (from 1) over them, as published; None:
            progress is the share of the generation already committed.
    """

    fills: ClassVar[bool] = True

    start: int | None = None
    length: int = 5
    early: float = 7.5
    mid: float = 5.0
    late: float = 2.5
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("length", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"stop.{name} must be a whole number from 1 on, not {value!r}")
        for name in ("early", "mid", "late"):
            if math.isnan(getattr(self, name)):
                raise UserError(f"stop.{name} must be a number, not nan: infinity never fires")

    @property
    def needs(self) -> frozenset[str]:
        """The gap."""
        return frozenset({"gap"})

    def region(self, canvas: Canvas) -> Tensor:
        """`[B, L+1] bool` the answer's columns."""
        if self.start is None:
            return canvas.masked
        ahead = canvas.columns() - canvas.origin
        return (ahead >= max(0, self.start)) & (ahead < self.start + self.length) & canvas.seen()

    def positions(self, canvas: Canvas) -> Tensor:
        """See `Stop.positions`."""
        return canvas.masked | self.region(canvas)

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """See `Stop.__call__`."""
        assert readout.gap is not None
        region = self.region(canvas)
        there = region.gather(1, query.positions)  # [B, Q]
        asked = torch.zeros_like(canvas.masked).scatter(1, query.positions, True)
        covered = (asked | ~self.positions(canvas)).all(1)
        # Truncated to one token (top_p measured), a distribution has no second logit: the gap says nothing then.
        usable = there & (readout.gap[:, 0] < torch.inf)
        gap = readout.gap[:, 0].masked_fill(~usable, 0).sum(1) / there.sum(1).clamp(min=1)
        if self.steps is None:
            progress = 1 - canvas.masked.sum(1) / (canvas.end - canvas.origin)
        else:
            progress = (canvas.step + 1) / self.steps
        bound = torch.where(progress < 0.33, self.early, torch.where(progress < 0.67, self.mid, self.late))
        fire = covered & there.any(1) & (gap >= bound)
        fill = canvas.masked.gather(1, query.positions) & fire[:, None]
        ids = torch.where(fill, readout.token[:, 0], edit.ids)
        remask = None if edit.remask is None else edit.remask & ~fire[:, None]
        return _finish(replace(edit, ids=ids, commit=edit.commit | fill, remask=remask), fire)

"""DAWN: commit positions that do not depend on one another, by a graph of attention."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_choice, check_count, check_number, check_switch
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import AllColumns, Traits, WatchedLayers
from dllm_sampler.core.values import Canvas, Edit, Query, Readout

Exclude = Literal["linked", "published"]


@dataclass(frozen=True)
class Dawn(Scheduler):
    """DAWN: sure positions, those that attend to sure text, and an independent set of the less sure ones.

        while masks remain in the block:
            token, confidence, attention = model(canvas)
            sure = masks with confidence >= threshold
            induced = masks with confidence >= induce that depend on sure text
            rest = other masks with confidence >= low, linked to none of these
            picked = walk rest by confidence, take each linked to none taken before
            commit sure, induced and picked, or else the surest mask

    Source: DAWN, arXiv 2602.06953. Position j depends on column i if it attends to i with `edge` or more, unless i is a
    sink, which all columns attend to. Two positions are linked if one depends on the other. Sure text is what is
    committed and has a confidence of `threshold` now. Attention is a mean over heads and the last layers. Rows compute
    all columns in each forward, so caches are refused. The published code leaves out of `rest` only what depends on a
    position that is both sure and induced. Its walk does not end, and writes over the prompt's first token where two
    predicted tokens are linked. That is not reproduced.

    Args:
        threshold: confidence of sure positions and of sure text.
        low: confidence that a position needs to be in the walk.
        induce: confidence that a position needs if it depends on sure text.
        edge: attention from which a position depends on a column. Above 1 none does.
        sink: mean attention above which a column is a sink.
        relative_sink: `sink` is a multiple of the mean over a row's columns, which is 1 divided by their number.
        exclude: positions left out of the walk: `linked` ones, as in the paper, or those of the `published` code.
        attention_layers: number of last layers in the mean. All layers if the model has fewer.
    """

    threshold: float = 0.9
    low: float = 0.7
    induce: float = 0.7
    edge: float = 0.07
    sink: float = 0.01
    relative_sink: bool = False
    exclude: Exclude = "linked"
    attention_layers: int = 4

    def __post_init__(self) -> None:
        for name in ("threshold", "low", "induce"):
            check_number(f"scheduler.{name}", getattr(self, name), "a probability")
        for name in ("edge", "sink"):
            check_number(f"scheduler.{name}", getattr(self, name))
        check_switch("scheduler.relative_sink", self.relative_sink)
        check_choice("scheduler.exclude", self.exclude, Exclude)
        check_count("scheduler.attention_layers", self.attention_layers)

    @property
    @override
    def traits(self) -> Traits:
        rare = (AllColumns(), WatchedLayers(self.attention_layers))
        return Traits(asks_block=False, scope="model", rare=rare)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about all columns before the block's end: the confidence of committed ones counts."""
        return Query.at(canvas, select.columns(canvas.columns() < canvas.stop[:, None], canvas.length))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at, sure = query.positions, readout.confidence[:, 0]
        block, eligible = canvas.window(canvas.layout.width), canvas.eligible(at)  # [B, W], [B, Q]
        everywhere = torch.zeros(canvas.ids.shape, dtype=sure.dtype, device=sure.device).scatter(1, at, sure)
        chosen = self.chosen(canvas, block, everywhere, readout)
        chosen = torch.zeros_like(canvas.masked).scatter(1, block, chosen).gather(1, at)
        return Edit(readout.token[:, 0], select.at_least_one(chosen, sure, eligible)), carry

    def chosen(self, canvas: Canvas, block: Tensor, confidence: Tensor, readout: Readout) -> Tensor:
        """Return `[B, W] bool` the positions of `block [B, W]` to commit, by `confidence [B, L+1]` of all columns."""
        masks, own, sure = canvas.eligible(block), confidence.gather(1, block), confidence >= self.threshold
        depends = self.graph(canvas, block, readout)  # [B, W, L+1]
        anchors = sure & ~canvas.masked & (canvas.columns() < canvas.stop[:, None])
        sure = masks & sure.gather(1, block)
        induced = masks & (own >= self.induce) & (depends & anchors[:, None]).any(2)
        inside = depends.gather(2, block[:, None].expand(-1, block.shape[1], -1))  # [B, W, W]
        links = inside | inside.mT
        if self.exclude == "linked":
            near = (links & (sure | induced)[:, None]).any(2)
        else:
            near = (inside & (sure & induced)[:, None]).any(2)
        rest = masks & (own >= self.low) & ~(sure | induced | near)
        return sure | induced | self.walk(rest, own, links)

    def graph(self, canvas: Canvas, block: Tensor, readout: Readout) -> Tensor:
        """Return `[B, W, L+1] bool` the columns that each position of `block [B, W]` depends on."""
        assert readout.attention is not None and readout.attended is not None
        sinks = readout.attended[:, 0] > (self.sink / canvas.end[:, None] if self.relative_sink else self.sink)
        # The query has every column before the block's end, so that a column's place in it is its number.
        place = block.clamp(max=readout.attention.shape[2] - 1)[..., None]
        attention = readout.attention[:, 0].gather(1, place.expand(-1, -1, canvas.ids.shape[1]))
        return (attention >= self.edge) & (canvas.columns() != block[..., None]) & ~sinks[:, None]

    def walk(self, rest: Tensor, confidence: Tensor, links: Tensor) -> Tensor:
        """Return `[B, W] bool` positions of `rest` that a walk by confidence takes, none linked to another."""
        order = confidence.masked_fill(~rest, -torch.inf).argsort(dim=1, descending=True, stable=True)
        links = links.gather(1, order[..., None].expand_as(links))
        links = links.gather(2, order[:, None].expand_as(links))
        taken = rest.gather(1, order)
        for place in range(1, order.shape[1]):
            taken[:, place] &= ~(links[:, place, :place] & taken[:, :place]).any(1)
        return torch.zeros_like(rest).scatter(1, order, taken)

"""Learn2PD: a small network decides which predictions are final."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_share
from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import ModelSpec, TrainedBlocks, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.models.filter import Layers, find, judge, load
from dllm_sampler.schedulers.budget import SharedSteps, even_share
from dllm_sampler.schedulers.drawn_positions import DrawnPositions


@dataclass(frozen=True)
class LearnedFilter(SharedSteps, DrawnPositions):
    """Learn2PD: a small network decides which predictions are final.

        while masks remain in the block:
            token, confidence = model(canvas) at every position of the block
            accepted = masks with sigmoid(filter(confidence)) > threshold
            n = number of masks due in this step, by steps
            commit accepted, and the n surest masks

    Source: Learn2PD, arXiv 2509.25188. The filter maps the confidences of all positions of a block to one logit each.
    At a committed position it sees the probability of the token that the model would write now. It has linear layers
    with ReLU between (the activation is not published), and works for blocks of the length it was trained on. Missing
    positions (a short last block, a cut canvas) get the confidence 1.0. Published code fails on them, and may commit
    in a later block when n exceeds the masks left. Here n ends with the block.

    Args:
        filter: safetensors file with `fc1.weight`, `fc1.bias`, `fc2.weight`, ... By default `filter.safetensors` in
            the checkpoint's folder.
        threshold: probability that the filter's output must exceed. 1 accepts nothing.
        steps: forwards for the whole generation if the filter accepts nothing. By default one per token.
    """

    filter: str | None = None
    threshold: float = 0.96
    steps: int | None = None
    loaded: tuple[ModelSpec, Layers] | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("scheduler.steps", self.steps, optional=True)
        check_share("scheduler.threshold", self.threshold, "a probability")

    def bind(self, context: Context) -> Self:
        """Return a copy with the filter on the model's device, which is loaded once for a model.

        Raises:
            UserError: the file cannot be read, or has no filter for this model.
        """
        spec = context.spec
        if self.loaded is not None and self.loaded[0] == spec:
            return self
        return with_bound_fields(self, loaded=(spec, load(find(self.filter, spec), spec)))

    @property
    def layers(self) -> Layers:
        """Layers of the filter, none before `bind`."""
        return () if self.loaded is None else self.loaded[1]

    @property
    @override
    def traits(self) -> Traits:
        trained = (TrainedBlocks(self.layers[0][0].shape[1]),) if self.layers else ()
        return replace(super().traits, asks="window", rare=trained)

    def init(self, canvas: Canvas) -> Carry:
        """Return the block's schedule, and `[B, N]` the last confidences at the N positions of a block."""
        size, one = self.layers[0][0].shape[1], torch.ones_like(canvas.start)
        return (one, one), torch.ones(one.shape[0], size, device=one.device)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        share, plan = even_share(canvas, self.steps, carry[0])  # [B]
        known = carry[1].masked_fill((canvas.age == 0)[:, None], 1)
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        known, offset = lay_out(canvas, query.positions, sure, known)
        accepted, surest = self.accepts(known, offset) & eligible, top(self.order(canvas, query, sure), eligible, share)
        return Edit(readout.token[:, 0], accepted | surest), (plan, known)

    def accepts(self, known: Tensor, offset: Tensor) -> Tensor:
        """Return `[B, Q] bool` the positions that the filter accepts. `lay_out` returns the arguments."""
        logit = torch.cat([judge(self.layers, known), known[:, :1]], 1).gather(1, offset)
        return logit.sigmoid() > self.threshold


def lay_out(canvas: Canvas, positions: Tensor, values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Write `values [B, Q]` at `positions [B, Q]` over the values that are `known [B, N]`, in the active block's order.

    Returns:
        `[B, N]`, with 1 after the block's end; and `[B, Q]` the place of each position in it, N outside the block.
    """
    size = known.shape[1]
    offset = torch.where(canvas.inside(positions), positions - canvas.start[:, None], size)
    # One more slot takes what lies outside the block.
    known = torch.cat([known, known[:, :1]], 1).scatter(1, offset, values.to(known.dtype))[:, :size]
    there = torch.arange(size, device=offset.device) < (canvas.stop - canvas.start)[:, None]
    return known.masked_fill(~there, 1), offset

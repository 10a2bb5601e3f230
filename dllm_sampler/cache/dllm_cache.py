"""dLLM-Cache: keys, values and the outputs of attention and feed-forward are stored, and refreshed at intervals."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, PaddedPlan, changed, put, take
from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count, check_share
from dllm_sampler.core.packing import ForwardRequest, HeadRows
from dllm_sampler.core.protocols import LayerParts, Plan
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.core.visibility import Visible

STEP = 1e-12  # cosines are rounded to it: far above rounding errors of float64, and below those of float32


@dataclass(frozen=True, kw_only=True)
class IntervalPlan(PaddedPlan):
    """A plan of all columns. Each layer computes those that are due."""

    prompt: Tensor  # [B, P] columns of the prompt, padded with L
    response: Tensor  # [B, G] columns of the response, padded with L
    begin: Tensor  # [B] first column of the response
    seen: Tensor  # [B, G] bool: response columns that exist
    urgent: Tensor  # [B, G] bool: tokens that the last step replaced or remasked
    share: Tensor  # [B] number of response columns that are computed between two refreshes
    most: int  # the largest share


@dataclass
class IntervalCache(BaseCache):
    """dLLM-Cache: between refreshes only those response rows are computed whose values changed most.

        computes   the share `ratio` of the response, where values changed most
        reuses     all other positions, with the outputs of their layers
        refreshes  the prompt, and more often the response: see the options

    Source: dLLM-Cache, arXiv 2506.06295. Each layer stores keys, values, attention output and feed-forward output of
    every position. That is twice the memory of `dual`, and more with grouped heads. Stored outputs are added to the
    residual stream of rows that are not computed, so every position has a prediction.

    Between two refreshes of the response a layer computes all its values, which is cheap, and compares them with the
    stored ones. It computes the least similar rows. Of rows that changed equally, it takes the first. Tokens that were
    replaced or remasked come before all others. The first layer is always computed, as in the published code. Under a
    logit shift the prompt's last row belongs to the response, since it predicts the first token. The reported number of
    computed positions is the mean over the layers, rounded up.

    Args:
        prompt_every: forwards from one refresh of the prompt to the next, over the whole generation.
        response_every: forwards from one refresh of the response to the next, over the whole generation.
        ratio: share of the response computed between its refreshes. 0 computes nothing, 1 all of it.
        guidance_every: forwards from one that runs the branch without prompt to the next, under classifier-free
            guidance. Forwards in between reuse the difference of the branches. The first five forwards run both.
    """

    uses_padded_plan: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    prompt_every: int = 100
    response_every: int = 7
    ratio: float = 0.25
    guidance_every: int = 1
    made: int = field(init=False, default=0, repr=False, compare=False)  # forwards so far, the same for all live rows
    fresh: tuple[bool, bool] = field(init=False, default=(True, True), repr=False, compare=False)  # prompt, response
    attended: list[Tensor] = field(init=False, repr=False, compare=False)  # per layer [B, L+1, D] of attention
    fed: list[Tensor] = field(init=False, repr=False, compare=False)  # per layer [B, L+1, D] of the feed-forward
    urgent: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: replaced or remasked last
    difference: Tensor | None = field(init=False, default=None, repr=False, compare=False)  # see `ReusesGuidance`

    def __post_init__(self) -> None:
        for name in ("prompt_every", "response_every", "guidance_every"):
            check_count(f"cache.{name}", getattr(self, name))
        check_share("cache.ratio", self.ratio)

    @override
    def begin(self, canvas: Canvas) -> None:
        self.attended, self.fed = [], []
        self.urgent = torch.zeros_like(canvas.masked)

    @override
    def padded(
        self, canvas: Canvas, wanted: ForwardRequest, head_rows: HeadRows, sees: Visible, entries: Tensor
    ) -> PaddedPlan:
        # Whole rows. Each layer chooses the part that it computes.
        wanted = replace(wanted, sizes=wanted.sizes._replace(whole=True))
        return super().padded(canvas, wanted, head_rows, sees, entries)

    @override
    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        length, shift = canvas.length, int(self.spec.shift)
        begin, behind = (canvas.layout.first - shift).clamp(min=0)[:, None], canvas.layout.answer_end[:, None]
        prompt, response = (
            canvas.columns()[:, : max(0, length - canvas.layout.shortest - shift)],
            canvas.columns() + begin,
        )
        response = response[:, : canvas.layout.longest + shift]
        response = response.masked_fill(response >= behind, length)
        return IntervalPlan(
            **vars(super().plan(canvas, wanted)),
            prompt=prompt.expand(len(begin), -1).masked_fill(prompt >= begin, length),
            response=response,
            begin=begin[:, 0],
            seen=canvas.seen().gather(1, response),
            urgent=self.urgent.gather(1, response),
            share=(self.ratio * canvas.layout.new_tokens.double()).long(),
            most=int(self.ratio * canvas.layout.longest),
        )

    @override
    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        assert isinstance(plan, IntervalPlan) and self.slots is not None
        if index == 0:
            self.fresh = self.made % self.prompt_every == 0, self.made % self.response_every == 0
        at = self._due(index, parts, hidden, plan)  # [B, R]
        if at is None:
            hidden = hidden + self.attended[index][:, :-1]
            hidden = hidden + self.fed[index][:, :-1]
        else:
            q, k, v = parts.qkv(take(hidden, at), rope.at(at.clamp(max=hidden.shape[1] - 1)))
            put(self.slots.keys[index], at, k.transpose(1, 2))
            put(self.slots.values[index], at, v.transpose(1, 2))
            k, v = self.slots.read(index, self.slots.columns - 1 if plan.keys is None else plan.keys.shape[-1])
            mask = plan.keys
            if mask is not None:
                mask = take(mask, at)[:, None] if mask.dim() == 3 else mask[:, None, None]
            hidden = hidden + self._kept(self.attended, index, at, parts.attend(q, k, v, mask))
            hidden = hidden + self._kept(self.fed, index, at, parts.mlp(take(hidden, at)))
        self.made += index == self.spec.num_layers - 1
        return hidden

    def _due(self, index: int, parts: LayerParts, hidden: Tensor, plan: IntervalPlan) -> Tensor | None:
        """Return `[B, R]` columns of `hidden [B, L, D]` to compute in a layer, padded with L. None means no column."""
        assert self.slots is not None
        answer = plan.response
        prompt, response = self.fresh if index else (True, True)
        due = [*[plan.prompt] * prompt, *[answer] * response]
        if not response and self.ratio:  # values are stored even if the share of a short response is 0 rows
            values = parts.values(take(hidden, answer)).transpose(1, 2)  # [B, G, Hkv, Dh]
            stored = take(self.slots.values[index], answer)
            precise = torch.promote_types(values.dtype, torch.float32)
            now, then = values.flatten(2).to(precise), stored.flatten(2).to(precise)
            # 1 - cosine is half the square of this distance, which has no cancellation.
            distance = (F.normalize(now, dim=-1) - F.normalize(then, dim=-1)).norm(dim=-1)
            # Rounding errors must not choose among rows that did not change, or among masks that changed equally.
            still = (now - then).norm(dim=-1) <= torch.finfo(precise).eps ** 0.5 * then.norm(dim=-1)
            likeness = -(distance.square() / 2 / STEP).round().masked_fill(still, 0.0)
            likeness = likeness.masked_fill(plan.urgent, -torch.inf).masked_fill(~plan.seen, torch.inf)
            # As published: the values of all rows are kept, the keys of the chosen ones only.
            put(self.slots.values[index], answer, values)
            turn = select.rank(-likeness, torch.ones_like(plan.seen))
            chosen = select.columns(F.pad(turn < plan.share[:, None], (0, 1)), plan.most)
            due.append(F.pad(answer, (0, 1), value=hidden.shape[1]).gather(1, chosen))
        at = torch.cat(due, 1) if due else answer[:, :0]
        return at if at.shape[1] else None

    def _kept(self, outputs: list[Tensor], index: int, at: Tensor, fresh: Tensor) -> Tensor:
        """Store `fresh [B, R, D]` at `at [B, R]` of layer `index`. Return all that is stored, `[B, L, D]`."""
        if index == len(outputs):
            outputs.append(fresh.new_zeros(len(fresh), self.urgent.shape[1], fresh.shape[2]))
        put(outputs[index], at, fresh)
        return outputs[index][:, :-1]

    @override
    def cost(self, plan: Plan) -> Tensor:
        assert isinstance(plan, IntervalPlan)
        prompt, response = self.fresh
        answer = plan.seen.sum(1)  # [B]
        some = plan.begin * prompt
        some = some + (answer if response else torch.minimum(answer, plan.share))
        layers = self.spec.num_layers
        return ((plan.entries + some * (layers - 1) + layers - 1) // layers) * (plan.entries > 0)

    def reuses_guidance(self) -> bool | None:
        """Return True if the next forward may reuse the last difference. See `ReusesGuidance.reuses_guidance`."""
        return None if self.guidance_every == 1 else self.made >= 5 and self.made % self.guidance_every != 0

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.urgent = changed(canvas, query, edit)

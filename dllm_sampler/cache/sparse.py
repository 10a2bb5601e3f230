"""Sparse-dLLM: a dual cache that drops the keys at which the active block hardly looks."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import PaddedPlan, take
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cache.slots import Slots
from dllm_sampler.core import select
from dllm_sampler.core.checks import check_count, check_share, is_whole
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import LayerParts, Plan
from dllm_sampler.core.values import Canvas
from dllm_sampler.core.visibility import visible
from dllm_sampler.errors import invalid


@dataclass(frozen=True, kw_only=True)
class SparsePlan(PaddedPlan):
    """A padded plan, with the boolean tensors by which layers choose the keys that they store."""

    due: Tensor  # [B] bool: rows that compute and see every column
    sorts: Tensor | None  # [B] bool: rows that choose their keys in this forward. None if no row can
    seen: Tensor  # [B, L+1] bool: columns that exist, and whose keys this forward does not compute
    fresh: Tensor  # [B, M] bool: computed positions that exist
    block: Tensor  # [B, M] bool: positions that every forward of the block computes


@dataclass
class SparseCache(DualCache):
    """Sparse-dLLM: around the active block only the keys that it looks at are kept.

        computes   the active block
        reuses     the share `keep` of the keys around it, chosen in each layer
        refreshes  all, in the `delay` + 1 forwards that begin a block

    Source: Sparse-dLLM, arXiv 2508.02558. A block begins with `delay` + 1 whole forwards. In the last one each layer
    scores the keys outside the block by their product with the block's mean query, averaged over heads. A key's score
    becomes the maximum over its `kernel` neighbours outside the block. The share `keep` with the best scores is stored,
    and the rest is dropped until the next block opens. Of equal scores, which pooling often makes, the lower position
    comes first.

    Slots hold the kept keys only, so memory is about `keep` times that of `dual`. A whole forward also holds the keys
    of one layer.

    Args:
        keep: share of the keys outside the block that stay, rounded down. With 1 and `delay=0` this is the dual cache.
        kernel: odd number of neighbouring keys that share a maximum. 1 leaves scores as they are.
        delay: whole forwards after the one that opens the block. The last one chooses.
    """

    uses_padded_plan: ClassVar[bool] = True
    steady: ClassVar[bool] = False  # keys are chosen `delay` forwards after the block's first

    keep: float = 0.5
    kernel: int = 3
    delay: int = 1
    kept: list[Tensor] = field(init=False, repr=False, compare=False)  # per layer [B, C] columns, padded with L

    def __post_init__(self) -> None:
        check_share("cache.keep", self.keep)
        check_count("cache.delay", self.delay, 0)
        if not is_whole(self.kernel) or self.kernel < 1 or self.kernel % 2 == 0:
            raise invalid("cache.kernel", self.kernel, "Set an odd number of at least 1, for example 3")

    @override
    def begin(self, canvas: Canvas) -> None:
        assert self.slots is not None
        nothing = torch.full((len(canvas.ids), self.slots.columns), canvas.length, device=canvas.ids.device)
        self.kept = [nothing.clone() for _ in range(self.spec.num_layers)]

    @override
    def buffers(self, canvas: Canvas) -> Slots:
        return Slots(self.spec, len(canvas.ids), int(self.keep * canvas.length))

    @override
    def due(self, canvas: Canvas) -> Tensor:
        return canvas.age <= self.delay

    @override
    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        plan, sizes = super().plan(canvas, wanted), wanted.sizes
        assert isinstance(plan, PaddedPlan)
        back = self.back
        # A row that sorts computes all its columns. So a forward as narrow as the widest block holds no such row, if no
        # column is hidden and no block is as wide as an answer (one column more without a prompt, `Layout.given`).
        widest = canvas.layout.width + back + (canvas.layout.given is not None)
        narrow = not plan.contiguous and sizes.longest <= sizes.block + back and widest <= canvas.layout.shortest
        narrow = narrow and wanted.query.hidden is None
        seen, at = visible(canvas, wanted.query), plan.positions
        return SparsePlan(
            **vars(plan),
            due=self.due(canvas),
            sorts=None if narrow else canvas.age == self.delay,
            seen=seen & ~wanted.computed,  # a run of open blocks may have grown over kept keys
            # A finished row computes nothing, but a softmax needs something to see.
            fresh=seen.gather(1, at) | canvas.done[:, None],
            block=(at >= canvas.start[:, None] - back) & (at < canvas.stop[:, None]),
        )

    @override
    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        assert isinstance(plan, SparsePlan)
        q, k, v = parts.qkv(hidden, rope)
        keys, values, mask = self.store(index, k, v, plan)
        hidden = hidden + parts.attend(q, keys, values, mask)
        if plan.sorts is not None:
            self.sort(index, q, k, v, plan)
        return hidden + parts.mlp(hidden)

    @override
    def store(self, index: int, k: Tensor, v: Tensor, plan: PaddedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(plan, SparsePlan) and self.slots is not None
        if plan.contiguous:
            return k, v, None if plan.keys is None else plan.fresh[:, None, None]
        keys, values = self.slots.read(index, self.slots.columns)
        # [B, C] kept keys. Rows that compute every column see fresh ones only.
        old = plan.seen.gather(1, self.kept[index]) & ~plan.due[:, None]
        mask = torch.cat([old, plan.fresh], 1)[:, None, None]
        return torch.cat([keys.to(k.dtype), k], 2), torch.cat([values.to(v.dtype), v], 2), mask

    def sort(self, index: int, q: Tensor, k: Tensor, v: Tensor, plan: SparsePlan) -> None:
        """Choose the `k, v [B, Hkv, M, Dh]` that layer `index` stores, by its queries `q [B, H, M, Dh]`."""
        assert self.slots is not None and plan.sorts is not None
        score = importance(q, k, plan.block)  # [B, M]
        rest = plan.fresh & ~plan.block
        kept = best(score, rest, (rest.sum(1).double() * self.keep).long(), self.kernel)  # [B, M]
        chosen = select.columns(F.pad(kept, (0, 1)), self.slots.columns)  # [B, C] indices of computed positions, or M
        columns = F.pad(plan.positions, (0, 1), value=plan.seen.shape[1] - 1).gather(1, chosen)
        self.kept[index] = torch.where(plan.sorts[:, None], columns, self.kept[index])
        for slots, fresh in ((self.slots.keys[index], k), (self.slots.values[index], v)):
            moved = take(fresh.transpose(1, 2), chosen).to(slots.dtype)  # [B, C, Hkv, Dh]
            slots.copy_(torch.where(plan.sorts[:, None, None, None], moved, slots))


def importance(q: Tensor, k: Tensor, block: Tensor) -> Tensor:
    """Return `[B, M]` scores: the products of `k [B, Hkv, M, Dh]` with the block's mean query, averaged over heads.

    Args:
        q: `[B, H, M, Dh]` queries.
        block: `[B, M] bool` positions of the block.
    """
    weight = block.to(q.dtype)[:, None, :, None]
    mean = (q * weight).sum(2) / weight.sum(2).clamp(min=1)  # [B, H, Dh]
    mean = mean.unflatten(1, (k.shape[1], -1)).mean(2)  # [B, Hkv, Dh]: heads of a group share their keys
    return (k @ mean[..., None])[..., 0].mean(1)


def best(score: Tensor, among: Tensor, count: Tensor, kernel: int) -> Tensor:
    """Return `[B, M] bool` the `count [B]` best of `among`, by the best `score` of `kernel` neighbours in `among`."""
    order = select.columns(F.pad(among, (0, 1)), among.shape[1])  # [B, M]: `among` without gaps
    close = F.pad(score, (0, 1), value=-torch.inf).gather(1, order)
    pooled = F.max_pool1d(close[:, None], kernel, 1, kernel // 2)[:, 0]
    taken = select.top(pooled, order < among.shape[1], count)
    return torch.zeros_like(F.pad(among, (0, 1))).scatter(1, order, taken)[:, :-1]

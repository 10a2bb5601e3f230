"""What tests ask of the small networks of `dllm_sampler.check.toys`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dllm_sampler import Canvas, Context, Denoiser, ModelSpec, Query
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.check.toys import (  # noqa: F401
    EOS,
    EOT,
    FILTER,
    FILTER_BLOCK,
    MASK,
    PROMPTS,
    SEEDS,
    SIGNS,
    TOYS,
    VOCAB,
    causal_transformer,
    denoiser,
    reward,
    sampler,
    tokenizer,
    transformer,
    verifier,
    wrapped,
)
from dllm_sampler.core import packing
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Cache, Plan
from dllm_sampler.core.values import Layout, Spent


def context(spec: ModelSpec | None = None, kind: str = "llada") -> Context:
    """What a plug-in is bound to, on one of the toys."""
    spec, blocks = spec or denoiser(kind).spec, FixedBlocks()
    return Context(spec, blocks.bind(Context(spec, blocks)))


@dataclass
class Spy:
    """A denoiser that remembers every call and may rewrite the logits."""

    inner: Denoiser
    raise_mask: float = 0.0  # added to the mask token's logit

    def __post_init__(self) -> None:
        self.calls: list[tuple[Canvas, Query, Plan]] = []
        self.logits: list[Tensor] = []  # [B, K, Q, V] of each call, 0 where nothing was answered

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        self.calls.append((canvas, query, plan))
        return self.inner(canvas, query, plan)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.inner.head(hidden)
        logits[..., MASK] += self.raise_mask
        self.logits.append(self.calls[-1][2].head_rows.spread(logits.clone()))
        return logits

    @property
    def computed(self) -> list[list[int]]:
        """Positions computed per forward and row; 0 for a finished row."""
        return [plan.entries.tolist() for _, _, plan in self.calls]


def wanted(canvas: Canvas, query: Query, spec: ModelSpec, chosen: Tensor | None = None) -> packing.ForwardRequest:
    """The request for a query when the columns `chosen [B, L+1]` are computed, as far as they are seen; None: all."""
    return packing.forward_request(canvas, query, chosen, spec)


def planned(canvas: Canvas, query: Query, spec: ModelSpec, live: Cache | None = None) -> Plan:
    """Return how a live cache computes a query. By default there is no cache."""
    live = NoCache().init(canvas, spec) if live is None else live
    asked = wanted(canvas, query, spec, live.computes(canvas))
    return live.plan(canvas, packing.with_exact_sizes(canvas, asked))


def computed(plan: Plan) -> Tensor:
    """`[B, L+1] bool` the columns that a pack holds, without the empty slot."""
    assert plan.pack is not None
    at = torch.zeros_like(plan.wanted.computed)
    at[plan.pack.row, plan.pack.column] = True
    at[:, -1] = False
    return at


def columns(plan: Plan) -> list[list[int]]:
    """The same, by row."""
    return [row.nonzero()[:, 0].tolist() for row in computed(plan)]


def canvas(masked: Tensor, **changes: Any) -> Canvas:
    """A canvas without prompt whose noise is `masked [B, L] bool`, one block over everything."""
    batch, length = masked.shape
    zero = torch.zeros(batch, dtype=torch.long)
    empty = torch.zeros(batch, 1, dtype=torch.bool)
    masked = torch.cat([masked, empty], 1)
    layout = Layout(
        frozen=torch.arange(length + 1).expand(batch, -1) == length,
        first=zero,
        new_tokens=zero + length,
        seeds=zero,
        lookahead=zero + length,
        noise=CounterNoise(),
        shortest=length,
        longest=length,
        width=length,
        padded=False,
    )
    ids, end = torch.where(masked, MASK, 1), zero + length
    made = Canvas(ids, masked, zero, end, end, zero, zero, zero > 0, layout)
    return changed(made, **changes)


def changed(canvas: Canvas, **changes: Any) -> Canvas:
    """A canvas with other fields, of its layout too."""
    fixed = {name: value for name, value in changes.items() if hasattr(canvas.layout, name)}
    return replace(canvas.with_layout(**fixed), **{name: changes[name] for name in changes.keys() - fixed.keys()})

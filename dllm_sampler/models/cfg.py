"""Classifier-free guidance as LLaDA does it (arXiv 2502.09992): a denoiser around a denoiser."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Denoiser, Plan, ReusesGuidance
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.errors import UserError
from dllm_sampler.kernels.backend import Backend
from dllm_sampler.models import fused
from dllm_sampler.models.denoiser import TransformerDenoiser


@dataclass(frozen=True)
class GuidedDenoiser:
    """A denoiser that pushes predictions `c` away from those made without the prompt: `u + (scale + 1) (c - u)`.

    The unconditional branch `u` sees every frozen position (prompt, given tokens, padding) as a mask, and stores its
    keys and values in the cache's twin. Hidden states are mixed rather than logits: the head is linear, so it runs
    once. The two branches count as one pass (a doubled batch) over twice the positions.

    Args:
        denoiser: the model, with a mask token.
        scale: guidance strength. 0 means no guidance.
    """

    denoiser: Denoiser
    scale: float

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model, with a second branch."""
        return replace(self.denoiser.spec, branches=2)

    @torch.no_grad()
    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return guided hidden states `[R, D]`, one for each of `plan.head_rows`, and the cost of each row."""
        if isinstance(plan.cache, ReusesGuidance):
            reuse = plan.cache.reuses_guidance()
            if reuse is not None:
                return self._sparse(canvas, query, plan, plan.cache, reuse)
        conditional, spent = self.denoiser(canvas, query, plan)
        unconditional, other = self._unconditional(canvas, query, plan)
        hidden = unconditional + (self.scale + 1) * (conditional - unconditional)  # [R, D]
        return hidden, Spent(spent.nfe, spent.computed + other.computed)

    def _unconditional(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return hidden states and cost of the branch that does not see the prompt."""
        mask_id = self.denoiser.spec.mask_id
        assert mask_id is not None
        hidden = self.hidden(canvas)
        return self.denoiser(
            replace(canvas, ids=canvas.ids.masked_fill(hidden, mask_id)),
            replace(query, ids=query.ids.masked_fill(hidden.gather(1, query.positions)[:, None], mask_id)),
            replace(plan, cache=plan.cache.twin, means=None),
        )

    def hidden(self, canvas: Canvas) -> Tensor:
        """Return `[B, L+1] bool` the columns that the unconditional branch sees as masks."""
        return canvas.layout.frozen

    def _sparse(
        self, canvas: Canvas, query: Query, plan: Plan, cache: ReusesGuidance, reuse: bool
    ) -> tuple[Tensor, Spent]:
        """Return hidden states guided by the `difference` that the cache stores, and the cost of each row.

        It has every column of the answer, since later steps ask about others. With `reuse` it is the last one.
        """
        columns = torch.cat(
            [canvas.answer(), torch.full_like(canvas.layout.first, canvas.length)[:, None]], 1
        )  # [B, N+1]
        every = Query.at(canvas, columns)
        whole = replace(plan, head_rows=HeadRows.every(every))
        conditional, spent = self.denoiser(canvas, every, whole)  # [B*(G+1), D]
        if not reuse:
            unconditional, other = self._unconditional(canvas, every, whole)
            cache.difference = conditional - unconditional
            spent = Spent(spent.nfe, spent.computed + other.computed)
        assert cache.difference is not None
        hidden = conditional + self.scale * cache.difference
        row, position = plan.head_rows.row, plan.head_rows.position
        return hidden[
            row * columns.shape[1] + (position - canvas.layout.first[row]).clamp(0, canvas.layout.longest)
        ], spent

    def using(self, backend: Backend) -> GuidedDenoiser:
        """Return the same guided model on the kernels of `backend`."""
        using = getattr(self.denoiser, "using", None)
        return self if using is None else replace(self, denoiser=using(backend))

    @property
    def inference_mode(self) -> bool:
        """See `TransformerDenoiser.inference_mode`."""
        return getattr(self.denoiser, "inference_mode", False) is True

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., D]`."""
        return self.denoiser.head(hidden)


def compiled(denoiser: Denoiser) -> Denoiser:
    """Return the denoiser on compiled layers, under guidance too.

    Raises:
        UserError: the denoiser does not run a `Transformer`.
    """
    if isinstance(denoiser, GuidedDenoiser):
        return replace(denoiser, denoiser=compiled(denoiser.denoiser))
    if not isinstance(denoiser, TransformerDenoiser):
        said = f"compile=true does not support a model of type {type(denoiser).__name__}"
        raise UserError("compile-unsupported", f"{said}. Remove it, or compile your module by torch.compile.")
    return replace(denoiser, compile=True)


def guided(denoiser: Denoiser, scale: float) -> Denoiser:
    """Return `denoiser` under guidance of strength `scale`. Returns `denoiser` itself if that is 0.

    Raises:
        UserError: a negative or infinite scale, or a model without a mask token.
    """
    check_number("model.cfg_scale", scale, finite=True)
    if scale > 0 and denoiser.spec.mask_id is None:
        said = f"model.cfg_scale={scale:g} needs a mask token, and this model has none. Remove model.cfg_scale."
        raise UserError("mask-token-missing", said)
    return GuidedDenoiser(denoiser, float(scale)) if scale > 0 else denoiser


def laid_out(denoiser: Denoiser, kernels: Backend) -> None:
    """Make weights that are multiplied by the same input (q, k and v; gate and up) adjacent in memory, in place.

    Only for a `TransformerDenoiser`, alone or under guidance, and kernels that run layers. Otherwise nothing changes.
    """
    inner = denoiser.denoiser if isinstance(denoiser, GuidedDenoiser) else denoiser
    if isinstance(inner, TransformerDenoiser) and kernels.layer is not None:
        fused.join(inner.transformer)

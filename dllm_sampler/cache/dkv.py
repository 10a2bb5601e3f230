"""dKV-Cache: a token's keys and values are stored one step after its commit, and refreshed now and then."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, changed
from dllm_sampler.core.checks import check_choice, check_count
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.core.visibility import visible
from dllm_sampler.errors import UserError

Mode = Literal["decode", "prefill", "pd"]
Shift = Literal["un", "un_right"]


@dataclass
class DelayedCache(BaseCache):
    """dKV-Cache: a token is stored by the first forward after its commit.

        computes   the masks of the canvas, and what the previous step committed
        reuses     all other tokens
        refreshes  all, every `refresh_every` forwards

    Source: dKV-Cache-Decode, -Prefill and -PD, arXiv 2505.15781. Keys and values change most when a mask turns into
    text. The first forward that sees a token as text stores them, and later ones use them. A token that is replaced or
    remasked leaves the cache at once. Every mask is computed, so any rule that ranks masks sees fresh predictions.
    Schedulers that judge committed tokens by a new prediction (`editing`, `learn2pd`) get that of computed tokens only.
    Between refreshes about half of the answer is computed on average, so a small model at batch 1 may gain nothing.

    On a model with a logit shift row i predicts position i + 1. The row of a token is needed while its successor is a
    mask. `un` stores a row once its successor is committed, as in the paper's main figures. The row may still be that
    of a mask, and is served until a refresh. `un_right` stores a row once both are committed, and scored higher in the
    paper (GSM8K 77.71 against 76.34). The paper's third variant, `right`, loses rows that masks need and is left out.
    The canvas's last row predicts nothing and is stored once its own position is committed.

    Args:
        refresh_every: forwards from one full forward to the next. 1 never reuses. By default the paper's 8, or 4 under
            a logit shift. Refused with `mode=prefill`.
        mode: `decode` is the rule above. `prefill` computes the prompt once, and all else always. `pd` computes the
            prompt once, and all else as `decode`.
        per_block: count forwards from each block's opening, and make the second one full, too (the published LLaDA
            code). If false, count over the whole generation (its Dream code). None means as published for the model.
            Not used by `mode=prefill`.
        shift: the variant under a logit shift, `un` or `un_right`. Other models ignore it.
    """

    keeps_noise: ClassVar[bool] = False

    refresh_every: int | None = None
    mode: Mode = "decode"
    per_block: bool | None = None
    shift: Shift = "un"
    kept: Tensor = field(init=False, repr=False, compare=False)  # [B, L+1] bool: served from the slots

    def __post_init__(self) -> None:
        check_count("cache.refresh_every", self.refresh_every, optional=True)
        check_choice("cache.mode", self.mode, Mode)
        check_choice("cache.shift", self.shift, Shift)
        if self.mode == "prefill" and self.refresh_every is not None:
            raise UserError(
                "options-conflict",
                f"cache.refresh_every={self.refresh_every} has no effect with cache.mode=prefill. Remove it, or set"
                " cache.mode=pd.",
            )

    @override
    def begin(self, canvas: Canvas) -> None:
        self.kept = torch.zeros_like(canvas.masked)

    @override
    def due(self, canvas: Canvas) -> Tensor:
        if self.mode == "prefill":
            return canvas.step == 0
        every = self.refresh_every or (4 if self.spec.shift else 8)
        if not self.spec.shift if self.per_block is None else self.per_block:
            return (canvas.age < 2) | (canvas.age % every == 0)
        return canvas.step % every == 0

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        kept = self.kept & ~self.due(canvas)[:, None]
        if self.mode == "decode":
            return ~kept
        # The prompt's last row predicts the first generated position.
        prompt = canvas.columns() < canvas.layout.first[:, None] - int(self.spec.shift)
        prompt = prompt & (canvas.step > 0)[:, None]
        return ~(prompt if self.mode == "prefill" else prompt | kept)

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        void = changed(canvas, query, edit)
        text = canvas.seen() & ~canvas.masked & ~void  # [B, L+1] seen as text, and not changed by the step
        self.kept = self._unneeded(canvas, text) & ~void & (self.kept | visible(canvas, query))

    def _unneeded(self, canvas: Canvas, text: Tensor) -> Tensor:
        """Return `[B, L+1] bool` rows that need not be computed if the tokens at `text [B, L+1]` are settled."""
        if not self.spec.shift:
            return text
        last = canvas.columns() == canvas.end[:, None] - 1
        successor = torch.where(last, text, text.roll(-1, 1))
        return successor if self.shift == "un" else text & successor

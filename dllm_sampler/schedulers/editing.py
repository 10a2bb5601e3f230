"""LLaDA2.1's token editing: committed tokens of the block may still be replaced."""

from dataclasses import dataclass, replace

import torch

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import rank
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.threshold import Threshold


@dataclass(frozen=True)
class TokenEditing(Threshold):
    """Commit masks above a threshold and replace committed tokens of the block the model is now sure were wrong.

    Source: LLaDA2.1, arXiv 2602.08676 (T2T editing inside the active block; editing earlier blocks is not done).
    Comparisons are strict, as published. A full block is edited on until a step changes nothing.

    Deviation: the model's block-causal mask bans later blocks. Public copies of the code hand the network the mask as 0
    and 1, which it adds to the scores: a bias of 1 in place of a ban, so that earlier blocks see later ones. With the
    mask's logarithm they decode as this scheduler does.

    Args:
        threshold: probability a mask must exceed; if fewer than `quota` do, the `quota` surest are committed.
        edit: probability a different token must exceed to replace a committed one. From 1 on nothing is edited; the
            published loop still makes one editing step per block then, which this one omits.
        quota: masks committed per step at least.
        extra: editing steps after the last mask at most.
    """

    threshold: float = 0.7
    edit: float = 0.5
    quota: int = 1
    extra: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.edit", self.edit, "a probability (from 1 on: no edits)")
        check_count("scheduler.quota", self.quota)
        check_count("scheduler.extra", self.extra, 0)

    @property
    def traits(self) -> Traits:
        """It replaces tokens."""
        return replace(super().traits, asks="window", revises=self.edit < 1)

    def init(self, canvas: Canvas) -> Carry:
        """`[B]` editing steps made since the block was full."""
        return torch.zeros_like(canvas.start)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        at, token, sure = query.positions, readout.token[:, 0], readout.confidence[:, 0]  # [B, Q]
        inside = canvas.inside(at)
        eligible = inside & canvas.masked.gather(1, at)
        # Where enough masks exceed the threshold, the quota's best are among them.
        fill = eligible & ((sure > self.threshold) | (rank(self.order(canvas, query, sure), eligible) < self.quota))

        written = inside ^ eligible
        edits = written & (token != canvas.ids.gather(1, at)) & (sure > self.edit)
        some_left = eligible.any(1)
        made = (carry + 1).masked_fill(some_left, 0)
        # The step that fills the block is followed by an editing step; each of these by another if it changed a token.
        again = (some_left | edits.any(1)) & (made < self.extra)
        if self.edit >= 1:
            return Edit(token, fill), made
        # Nothing becomes noise, but stops should know that committed tokens are not final before the block is over.
        return Edit(token, fill | edits, remask=torch.zeros_like(fill), keep_block=again), made

    def bound(self, tokens: int) -> int:
        """Every block may be edited on."""
        return tokens * (1 + self.extra)

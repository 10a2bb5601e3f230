"""LLaDA2.1's token editing: committed tokens of the block may still be replaced, or become masks again."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count, check_number, check_share
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import rank, top
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.threshold import Threshold

Suspicion = Literal["low_prob", "t2t_remask", "logit_diff"]
BOUNDS: dict[str, float] = {"low_prob": 0.5, "t2t_remask": 0.9, "logit_diff": 0.3}


class Suspects(NamedTuple):
    """The state of `remask`: facts about each column from earlier steps."""

    made: Tensor  # [B] forwards of the full block
    taken: Tensor  # [B, L+1] times that a column was remasked
    token: Tensor  # [B, L+1] token that the last step left in the column. -1 if it judged none
    support: Tensor  # [B, L+1] probability of that token in the last step


@dataclass(frozen=True)
class TokenEditing(Threshold):
    """LLaDA2.1's token editing: committed tokens of the block are replaced, or become masks again.

        while masks remain in the block, or the last step changed it:
            token, confidence = model(canvas) at every position of the block
            commit the masks with confidence > threshold, and the quota surest
            if remask is None:
                replace committed tokens by others with confidence > edit
            else:
                remask suspect tokens, at most remask_share of the committed ones
            leave after extra steps without a mask

    Source: LLaDA2.1, arXiv 2602.08676 (T2T editing inside the active block, earlier ones are not edited). Comparisons
    are strict, as published.

    Source of `remask`: T2M (targeted remasking), arXiv 2604.18738. A wrong token can be remasked without a sure
    replacement, and no wrong replacement misleads the others. Its paper has remask=low_prob with remask_threshold=0.3
    and remask_limit=1.

    Deviation: the model's block-causal mask bans later blocks. Public copies of the code hand the network the mask as 0
    and 1, which it adds to the scores: a bias of 1 in place of a ban, so that earlier blocks see later ones. With the
    mask's logarithm they decode as this scheduler does.

    Args:
        threshold: probability a mask must exceed. If fewer than `quota` do, the `quota` surest are committed.
        edit: probability a different token must exceed to replace a committed one. From 1 on nothing is edited. The
            published loop still makes one editing step per block then, which this one omits.
        quota: least number of masks that a step commits.
        extra: upper bound on the editing steps after the last mask. With `remask` it is the largest number of forwards
            that a full block gets.
        remask: the trigger. low_prob: the probability of the token is now below `remask_threshold`. t2t_remask:
            another token's probability exceeds it. logit_diff: the token's probability has fallen by more than it since
            the last step. None replaces tokens.
        remask_threshold: bound of the trigger. None means 0.5 for low_prob, 0.9 for t2t_remask, 0.3 for logit_diff.
        remask_limit: upper bound on the times that a position is remasked.
        remask_share: a step remasks at most this share of the block's committed tokens, or one if that is less than
            one. The most suspect ones go first.
    """

    threshold: float = 0.7
    edit: float = 0.5
    quota: int = 1
    extra: int = 16
    remask: Suspicion | None = None
    remask_threshold: float | None = None
    remask_limit: int = 5
    remask_share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.edit", self.edit, "a probability")
        check_count("scheduler.quota", self.quota)
        check_count("scheduler.extra", self.extra, 0)
        if self.remask is not None:
            check_choice("scheduler.remask", self.remask, Suspicion)
        check_number("scheduler.remask_threshold", self.remask_threshold, "a probability", optional=True)
        check_count("scheduler.remask_limit", self.remask_limit, 0)
        check_share("scheduler.remask_share", self.remask_share)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the readout. Some triggers also need the committed token's log-probability."""
        return super().needs | ({"current"} if self.remask in ("low_prob", "logit_diff") else set())

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, asks="window", revises=self.edit < 1 or self.remask is not None)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B]` editing steps made since the block was full, or `Suspects`."""
        none = torch.zeros_like(canvas.start)
        if self.remask is None:
            return none
        taken = torch.zeros_like(canvas.ids)
        return Suspects(none, taken, taken - 1, torch.zeros_like(taken, dtype=torch.float64))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at, token, sure = query.positions, readout.token[:, 0], readout.confidence[:, 0]  # [B, Q]
        inside = canvas.inside(at)
        eligible = inside & canvas.masked.gather(1, at)
        # Where enough masks exceed the threshold, the quota's best are among them.
        fill = eligible & ((sure > self.threshold) | (rank(self.order(canvas, query, sure), eligible) < self.quota))

        written = inside ^ eligible
        if self.remask is not None:
            return self._take_back(canvas, query, readout, carry, fill, eligible, written)
        edits = written & (token != canvas.ids.gather(1, at)) & (sure > self.edit)
        some_left = eligible.any(1)
        made = (carry + 1).masked_fill(some_left, 0)
        # The step that fills the block is followed by an editing step, and each one that changed a token by another.
        again = (some_left | edits.any(1)) & (made < self.extra)
        if self.edit >= 1:
            return Edit(token, fill), made
        # Nothing becomes noise, but stops should know that committed tokens are not final before the block is over.
        return Edit(token, fill | edits, remask=torch.zeros_like(fill), keep_block=again), made

    def _take_back(
        self,
        canvas: Canvas,
        query: Query,
        readout: Readout,
        carry: Suspects,
        fill: Tensor,
        eligible: Tensor,
        written: Tensor,
    ) -> tuple[Edit, Suspects]:
        """Return the edit that commits `fill [B, Q]` and remasks suspects among `written [B, Q]`."""
        at, token, sure = query.positions, readout.token[:, 0], readout.confidence[:, 0]  # [B, Q]
        old, taken = canvas.ids.gather(1, at), carry.taken.gather(1, at)
        support = sure if readout.current is None else readout.current[:, 0].exp()
        assert self.remask is not None
        bound = BOUNDS[self.remask] if self.remask_threshold is None else self.remask_threshold
        if self.remask == "low_prob":
            suspect, doubt = support < bound, -support
        elif self.remask == "t2t_remask":
            suspect, doubt = (sure > bound) & (token != old), sure
        else:
            doubt = carry.support.gather(1, at) - support
            suspect = (doubt > bound) & (carry.token.gather(1, at) == old)
        most = (written.sum(1, dtype=torch.float64) * self.remask_share).long().clamp(min=1)
        back = top(doubt, written & suspect & (taken < self.remask_limit), most)

        left = eligible.any(1)
        made = carry.made.masked_fill(canvas.age == 0, 0) + ~left
        again = (left | back.any(1)) & (made < self.extra)
        # A step that finds no committed token has nothing to compare with.
        judged = torch.where(written, old, token).masked_fill(~written.any(1, keepdim=True), -1)
        after = Suspects(
            made,
            carry.taken.scatter(1, at, taken + back),
            carry.token.scatter(1, at, judged),
            carry.support.scatter(1, at, torch.where(written, support, sure)),
        )
        return Edit(token, fill, back, keep_block=again), after

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. Every block may be edited after it is full, and every token remasked."""
        return tokens * (1 + self.extra + (self.remask_limit if self.remask is not None else 0))

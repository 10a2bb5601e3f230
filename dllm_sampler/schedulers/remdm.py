"""ReMDM: some steps late in a block remask its least sure tokens and predict again."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.select import top
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.remasking import Remasking


@dataclass(frozen=True)
class Remdm(Remasking):
    """ReMDM: decoding in fixed steps that remasks some tokens late in each block.

        for each step of the block's part of steps, and revisions more:
            token, confidence = model(canvas)
            commit the surest masks, until as many are committed as are due
            if the next forward is a revision:
                remask the tokens positions that were least sure when committed

    Source: ReMDM, arXiv 2503.00307, in the form of its LLaDA port that ParallelBench, arXiv 2510.04767, compares with.
    Revisions come after 7/8 of the block's steps. The port counts 7/8 of the block's *positions*, the same with one
    step per token. Revisions are forwards on top of `steps`. The old confidence of a remasked position is forgotten.

    Args:
        steps: forwards for the whole generation, revisions not counted. By default one per token.
        revisions: revisions of each block. 0 is fixed steps.
        tokens: positions that each revision remasks.
    """

    steps: int | None = None
    revisions: int = 1
    tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("scheduler.revisions", self.revisions, 0)
        check_count("scheduler.tokens", self.tokens)

    @property
    @override
    def traits(self) -> Traits:
        return replace(super().traits, revises=self.revisions > 0)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. Every block adds its revisions. Blocks of one position reach it."""
        return tokens * (1 + self.revisions)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at, inside = query.positions, canvas.inside(query.positions)  # [B, Q]
        eligible = inside & canvas.masked.gather(1, at)
        length, steps = self.block(canvas)
        first = (steps * 7 // 8).clamp(min=1)  # [B] steps before the revisions
        beyond = canvas.age + 1 - first
        # Steps of the plain schedule up to this forward: revisions do not count.
        made = first + beyond - beyond.clamp(0, self.revisions)
        target = made if steps is length else made * (length // steps) + torch.minimum(made, length % steps)
        # No cache chooses among the masks (`needs_every_position`): all that the block has are queried.
        commit = top(readout.confidence[:, 0], eligible, target - length + eligible.sum(1))

        record = torch.where(commit, readout.confidence[:, 0], carry.gather(1, at))
        revise = (beyond >= 0) & (beyond < self.revisions)  # [B] the next step
        drop = top(-record, inside & (record < torch.inf), revise * self.tokens)
        undone = drop & commit
        edit = Edit(readout.token[:, 0], commit ^ undone, drop ^ undone)
        return edit, carry.scatter(1, at, record.masked_fill(drop, torch.inf))

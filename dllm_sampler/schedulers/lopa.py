"""LoPA: fill one more position in several ways, and continue where the model is surest of all that is left."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_choice, check_count, check_inner, check_share
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Blocks, Carry, Context, Scheduler
from dllm_sampler.core.spec import PlannedCommits, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.d2f import D2F, Sureness
from dllm_sampler.schedulers.drafting.forks import Forks
from dllm_sampler.schedulers.drafting.scheduler import undraftable
from dllm_sampler.schedulers.score import score_needs


class Held(NamedTuple):
    """The carry of `LoPA`."""

    inner: Carry
    forks: Forks


@dataclass(frozen=True)
class LoPA(Around):
    """LoPA around another scheduler: one more position is filled in several ways, and the surest result wins.

        while masks remain:
            predictions = model(the canvas and its variants), in one forward
            future = mean score of the masks of each, of the share with the lowest
            worth = alpha * score of the position it added + (1 - alpha) * future
            canvas = the one with the highest worth
            commit inner(canvas, its prediction)
            variants = the canvas with one more token,
                at each of the forks masks with the highest score

    Source: LoPA, arXiv 2512.16229. The variants, or forks, come from the winner's prediction, after the commit. There
    are fewer forwards than the inner scheduler makes, of more positions each, and other tokens. The published loop runs
    the candidates one after another.

    Args:
        inner: the scheduler that commits.
        forks: forks of each forward. 0 is the inner scheduler itself. In the published code `branching_factor`, where
            1 means none and 2 means two.
        score: measure of the model's certainty at a position: its entropy, the margin between the two best tokens, or
            the probability of the best one.
        share: share of a candidate's masks, those with the lowest scores, in the mean.
        alpha: weight of the score of the forked position (1 for the canvas) against that mean. With `score=entropy`,
            where scores are negative, hardly any fork wins above 0.
    """

    inner: Scheduler = field(default_factory=D2F)
    forks: int = 2
    score: Sureness = "entropy"
    share: float = 1.0
    alpha: float = 0.0
    blocks: Blocks | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("scheduler.forks", self.forks, 0)
        why = undraftable(check_inner(self.inner).traits)
        if self.forks and why is not None:
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(self)} does not support scheduler.inner={named(self.inner)}, which {why}. Use"
                " scheduler.inner=d2f.",
            )
        check_choice("scheduler.score", self.score, Sureness)
        check_share("scheduler.share", self.share)
        check_share("scheduler.alpha", self.alpha)

    @property
    @override
    def traits(self) -> Traits:
        own = super().traits
        if not self.forks:
            return own
        own = replace(own, asks_block=False, drafts=True, own_tokens=True, scope="model")
        return own.without(PlannedCommits)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return super().needs | score_needs(self.score)

    @override
    def inside(self, carry: Carry) -> Carry:
        return carry.inner

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """Return the inner scheduler's plan without forks. Returns None with forks."""
        return None if self.forks else super().ahead(canvas, carry)

    def bind(self, context: Context) -> Self:
        """Return a bound copy that stores the blocks, since a fork may open other blocks than the canvas."""
        return with_bound_fields(super().bind(context), blocks=context.blocks)

    def init(self, canvas: Canvas) -> Held:
        """Return the inner scheduler's carry, and no forks."""
        return Held(super().init(canvas), Forks.none(canvas, self.forks))

    def ask(self, canvas: Canvas, carry: Held) -> Query:
        """Return the inner scheduler's query, with the canvas and the forks as candidates."""
        if not self.forks:
            return super().ask(canvas, carry)
        assert self.blocks is not None
        stops = carry.forks.stops(canvas, self.blocks)
        wide = canvas if stops is None else replace(canvas, stop=stops.amax(1))
        return carry.forks.candidates(canvas, super().ask(wide, carry), stops)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Held) -> tuple[Edit, Carry]:
        """Return the edit that writes the winner's tokens and the inner scheduler's commits after them."""
        if not self.forks:
            edit, inner = self.inner.tell(canvas, query, readout, carry.inner)
            return edit, Held(inner, carry.forks)
        assert self.blocks is not None
        score = getattr(readout, self.score)  # [B, K, Q]
        score = -score if self.score == "entropy" else score
        won = carry.forks.winner(canvas, query, score, self.share, self.alpha)
        filled, token, sure = carry.forks.write(query, won)  # [B, Q]
        now = canvas.apply(query.positions, Edit(token, filled))
        if query.candidates.stops is not None:
            now = replace(now, stop=query.candidates.stops.gather(1, won[:, None])[:, 0])
        query, seen = query.under(won), readout.under(won)
        edit, inner = self.inner.tell(now, query, seen, carry.inner)
        edit = self.blocks.progress(now, query, seen, edit)
        own = seen.confidence[:, 0] if edit.confidence is None else edit.confidence
        edit = replace(
            edit,
            ids=torch.where(filled, token, edit.ids),
            commit=edit.commit | filled,
            confidence=torch.where(filled, sure, own),
            candidate=won,
        )
        score = score.gather(1, won[:, None, None].expand(-1, 1, score.shape[2]))[:, 0]  # [B, Q]
        return edit, Held(inner, Forks.best(now.apply(query.positions, edit), query, seen, score, self.forks))

"""LoPA: fill one more position in several ways, and continue where the model is surest of all that is left."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_share
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.d2f import Sureness
from dllm_sampler.schedulers.drafting.forking import Forking, Held
from dllm_sampler.schedulers.drafting.forks import Forks
from dllm_sampler.schedulers.score import score_needs


@dataclass(frozen=True)
class LoPA(Forking):
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

    score: Sureness = "entropy"
    share: float = 1.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scheduler.score", self.score, Sureness)
        check_share("scheduler.share", self.share)
        check_share("scheduler.alpha", self.alpha)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return super().needs | score_needs(self.score)

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

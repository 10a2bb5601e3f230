"""CCD: commit tokens that are the same in the contexts of the last steps."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count, check_number, check_share
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import rank, top
from dllm_sampler.core.spec import JudgedTokens, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.budget import SharedSteps, even_share
from dllm_sampler.schedulers.score import Score, rate, score_needs


@dataclass(frozen=True)
class Coherent(SharedSteps, Scheduler):
    """Coherent contextual decoding: masks whose predicted token is the same in two successive contexts are committed.

        while masks remain in the block:
            token, score = model(canvas)
            best = the n masks with the highest score, n due by steps
            agree = those of the first line masks that are expected with this token
            if one of best was expected, and agree has at least n masks:
                commit agree, with dynamic=false only the n best of it
            else:
                commit best
            expected = the next line masks after these commits, each with its token

    Source: CCD and CCD-DS, arXiv 2512.02044, the rule of its code (`ccd_marginal` is the paper's). Nothing is expected
    before the end of the warm-up. From then on `line` grows by one per step, up to n (1 + `expand`). It is published
    for one block and one token per step. Here everything counts within a block, and an n that does not divide evenly is
    larger in the first steps. Under a temperature the sampled tokens must agree.

    Args:
        dynamic: commit all that agree (CCD-DS). False commits the step's share (CCD).
        steps: forwards for the whole generation. By default one per token.
        score: statistic that ranks the masks. With entropy the lowest is first.
        warmup: steps at the start of a block that commit the best positions unverified.
        expand: limit on the growth of the line beyond n masks, as a multiple of n.
        late: share of the block's positions. If no more masks than that are left, the line has at most two positions.
    """

    dynamic: bool = True
    steps: int | None = None
    score: Score = "entropy"
    warmup: int = 5
    expand: float = 4.0
    late: float = 0.1

    def __post_init__(self) -> None:
        check_count("scheduler.steps", self.steps, optional=True)
        check_choice("scheduler.score", self.score, Score)
        check_count("scheduler.warmup", self.warmup)
        check_number("scheduler.expand", self.expand, finite=True)
        check_share("scheduler.late", self.late)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that compares a predicted token with the one predicted before."""
        ranks, draws = self.score == "confidence", self.score == "random"
        facts = Traits(ranks_by_confidence=ranks, draws_order=draws, scheduled=True)
        return facts.adding(JudgedTokens())

    @property
    @override
    def needs(self) -> frozenset[str]:
        return score_needs(self.score)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B, L+1]` expected positions and last predictions, `[B]` length of the line, and the schedule."""
        one = torch.ones_like(canvas.start)
        return torch.zeros_like(canvas.masked), torch.full_like(canvas.ids, -1), one, (one, one)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at, token, eligible = query.positions, readout.token[:, 0], canvas.eligible(query.positions)  # [B, Q]
        left = canvas.noise_left()  # [B] on the canvas: a cache may choose which masks are queried
        share, plan = even_share(canvas, self.steps, carry[3], left)
        late = left <= self.late * (canvas.stop - canvas.start)
        short = late | (canvas.age == 0)  # a line ends with its block
        line = torch.minimum(carry[2].masked_fill(short, 1) + 1, share + (share * self.expand).long())
        grows = canvas.age >= self.warmup - 1  # [B] nothing is expected before the first line
        line = line.where(grows, 1)

        score = rate(self.score, canvas, query, readout)
        place = rank(score, eligible)
        best = eligible & (place < share[:, None])
        expected = eligible & carry[0].gather(1, at)
        agree = expected & (place < line[:, None]) & (carry[1].gather(1, at) == token)
        supported = (best & expected).any(1) & (agree.sum(1) >= share)
        chosen = agree if self.dynamic else top(score, agree, share)
        commit = torch.where(supported[:, None], chosen, best)

        rest = eligible ^ commit
        ahead = rest.scatter(1, place, rest).cumsum(1).gather(1, place)  # [B, Q] those not worse, itself included
        behind = rest & (ahead <= line[:, None]) & grows[:, None]
        verify = torch.zeros_like(canvas.masked).scatter(1, at, behind)
        return Edit(token, commit), (verify, carry[1].scatter(1, at, token), line, plan)

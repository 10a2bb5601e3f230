"""FreeDave: a chain of drafts, verified by the forward that would be made anyway."""

from dataclasses import dataclass, field
from typing import Literal, Self

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import Context, Scheduler
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Edit, Query
from dllm_sampler.schedulers.drafting.candidates import Branch
from dllm_sampler.schedulers.drafting.pace import Pace
from dllm_sampler.schedulers.drafting.scheduler import Drafting, State
from dllm_sampler.schedulers.fixed import FixedSteps

Match = Literal["exact", "subset"]


@dataclass(frozen=True)
class FreeDave(Drafting):
    """FreeDave around another scheduler: its next states are drafted, and one forward verifies them all.

        while masks remain in the block:
            drafts = the canvas, and inner's next draft - 1 states
                if the last prediction did not change
            predictions = model(drafts), in one forward
            while inner(canvas, its prediction) is one of drafts:
                canvas = that draft
            canvas = inner(canvas, its prediction)

    Source: FreeDave, arXiv 2510.00294; `inner=threshold` is its FreeDave++. `match=exact` gives the inner scheduler's
    tokens, with any cache. The published rule is `subset`, which also accepts a draft that holds only a part of what
    the inner scheduler would commit. With one position per step that is the same. With more, tokens may differ. Usually
    a larger `draft` needs fewer forwards, but not always: a longer step may end at a state whose drafts fail.

    Args:
        inner, eager: see `Drafting`.
        draft: states per forward, the canvas included. 1 is the inner scheduler itself. `auto` has as many as take
            hardly longer than one, measured while it runs. Then the number of forwards depends on the machine.
        match: condition for a draft to be the next state, `exact` or `subset`.
    """

    inner: Scheduler = field(default_factory=FixedSteps)
    draft: int | Literal["auto"] = 4
    match: Match = "exact"
    measured: Pace = field(init=False, default_factory=Pace, repr=False, compare=False)
    most_candidates: int | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft != "auto":
            check_count("scheduler.draft", self.draft)
        check_choice("scheduler.match", self.match, Match)

    def bind(self, context: Context) -> Self:
        """Return a bound copy (`Drafting.bind`), which keeps the times that were measured on this model."""
        bound = super().bind(context)
        return with_bound_fields(bound, measured=self.measured) if self.mask_id == bound.mask_id else bound

    def branches(self, most: int) -> list[Branch]:
        """Return branches of 1, 2, 3, ... steps, fewer than `most`: a candidate without a mask predicts nothing."""
        longest = self.measured.most if self.draft == "auto" else self.draft
        longest = longest if self.most_candidates is None else min(longest, self.most_candidates)
        return [Branch(steps) for steps in range(1, min(longest, most))]

    @override
    def with_candidates(self, most: int) -> Self:
        return with_bound_fields(self, most_candidates=most)

    @override
    def pace(self, made: ForwardRequest, seconds: float) -> int | None:
        return self.measured.next(made, seconds) if self.draft == "auto" else None

    def fits(self, query: Query, before: State, after: State) -> Tensor:
        """Return `[B, K]` the fit of each candidate. `subset` prefers the fullest one that the step covers."""
        if self.match == "exact":
            return super().fits(query, before, after)
        noise = query.ids == self.mask_id  # [B, K, Q]
        size = (~noise).sum(2)  # [B, K]
        covered = (noise | (query.ids == after.canvas.ids.gather(1, query.positions)[:, None])).all(2)
        return size * (covered & (size > size.gather(1, before.candidate[:, None])))

    def follow(self, query: Query, before: State, after: State, candidate: Tensor) -> State:
        """Return the state of the candidate. `subset` may commit less than the step does."""
        after = super().follow(query, before, after, candidate)
        if self.match == "exact":
            return after
        ids = query.ids.gather(1, candidate[:, None, None].expand(-1, 1, query.ids.shape[2]))[:, 0]  # [B, Q]
        masked = before.canvas.masked.gather(1, query.positions)
        canvas = before.canvas.apply(query.positions, Edit(ids, masked & (ids != self.mask_id)))
        return after._replace(canvas=canvas.advance(canvas.noise_left() == 0, self.lookahead, None))

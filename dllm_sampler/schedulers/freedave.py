"""FreeDave: a chain of drafts, verified by the forward that would be made anyway."""

from dataclasses import dataclass, field
from typing import Literal, Self, get_args

import torch

from dllm_sampler.core.protocols import Context, Scheduler
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.schedulers.checks import check_count
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.pace import Pace
from dllm_sampler.schedulers.rows import choose
from dllm_sampler.schedulers.verifier import Branch, Verifier, Walked

Match = Literal["exact", "subset"]


@dataclass(frozen=True)
class FreeDave(Verifier):
    """Compute the next `draft` states of a scheduler at once, and go as far as it goes: equal tokens, fewer forwards.

    Source: FreeDave, arXiv 2510.00294; `inner=threshold` is its FreeDave++. `match=exact` gives the inner scheduler's
    tokens with the same cache, whatever it is. The published rule is `subset`: a draft that holds a part of what the
    inner scheduler would commit is accepted too. That is the same for one position per step; else it follows a path
    in which each step commits only what the inner scheduler would, but not all of it, and tokens may differ.
    Forwards usually fall with `draft`; no bound says so, since a longer step may end at a state that drafts less well.

    Args:
        inner, eager: see `Verifier`.
        draft: states per forward, the certain one included; 1 is the inner scheduler itself; `auto`: as many as take
            hardly longer than one, measured while it runs (tokens stay, forwards depend on the machine).
        match: what makes a draft the next state.
    """

    inner: Scheduler = field(default_factory=FixedSteps)
    draft: int | Literal["auto"] = 4
    match: Match = "exact"
    measured: Pace = field(init=False, default_factory=Pace, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft != "auto":
            check_count("draft", self.draft)
        if self.match not in get_args(Match):
            raise UserError(f"scheduler.match must be exact or subset, not {self.match!r}")

    def bind(self, context: Context) -> Self:
        """See `Verifier.bind`; what was measured on this model stays known."""
        bound = super().bind(context)
        if self.mask_id == bound.mask_id:
            object.__setattr__(bound, "measured", self.measured)
        return bound

    def branches(self, most: int) -> list[Branch]:
        """One, two, three ... guessed steps; a branch without a mask would have nothing to predict."""
        longest = self.measured.most if self.draft == "auto" else self.draft
        return [(first, 0) for first in range(1, min(longest, most))]

    def pace(self, canvas: Canvas, seconds: float) -> int | None:
        """See `Paced.pace`."""
        return self.measured.next(canvas, seconds) if self.draft == "auto" else None

    def _walk(self, canvas: Canvas, query: Query, readout: Readout, here: Walked) -> Walked:
        """See `Verifier._walk`; `subset` goes to the fullest draft that the step covers."""
        if self.match == "exact":
            return super()._walk(canvas, query, readout, here)
        at, there = query.positions, self._step(here, query, readout.of(here.node))
        open_ = query.ids == self.mask_id  # [B, K, Q]
        size = (~open_).sum(2)  # [B, K]
        fits = ((query.ids == there.state.ids.gather(1, at)[:, None]) | open_).all(2)
        fits = fits & (size > size.gather(1, here.node[:, None]))
        if query.step is not None:
            fits = fits & (query.step == there.state.step[:, None])
        found = fits.any(1) & self._foreseen(canvas, here.state, there.state)
        node = torch.where(fits, size, -1).argmax(1)
        ids = query.ids.gather(1, node[:, None, None].expand(-1, 1, query.ids.shape[2]))[:, 0]
        state = here.state.apply(at, Edit(ids, here.state.masked.gather(1, at) & (ids != self.mask_id)))
        state = state.advance(state.noise_left() == 0, self.lookahead, None)
        return choose(found, there._replace(node=node, state=state), here, canvas.length)

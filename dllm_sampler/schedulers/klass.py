"""KLASS: commit the tokens whose prediction is stable."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.checks import check_choice, check_count, check_number
from dllm_sampler.core.protocols import Carry, Context
from dllm_sampler.core.spec import ModelSpec, Traits, with_bound_fields
from dllm_sampler.core.statistics import Predictions
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.fixed import FixedSteps

Take = Literal["all", "surest", "steadiest"]
ROUNDING = 1e-12  # nats: two predictions that are nearer than this are the same


@dataclass(frozen=True)
class Klass(FixedSteps):
    """KLASS: masks that are sure, and whose prediction has hardly moved for some forwards, are committed.

        while masks remain in the block:
            p, token, confidence, score = model(canvas)
            move = KL(p || p one forward before), at each mask
            ready = masks with confidence > threshold
                and the last history moves below divergence
            n = number of masks due in this step, by steps and schedule
            commit ready, or else the n masks with the highest score

    Source: KLASS, arXiv 2511.05664. With a cache that predicts only some of the masks the fixed schedule also decides
    where fewer are ready than its share, since the last step could not commit all the rest. A mask that was not
    predicted last time has no history. Memory: the last forward's predictions, as large as the block's logits.

    Args:
        steps, score, schedule, eps, alg_temp: of the fixed schedule.
        threshold: confidence to exceed. The paper has 0.6, the published function 0.9 by default.
        divergence: bound in nats. 0 is the fixed schedule, infinity threshold decoding once there is a history.
        history: number of last divergences that must be below the bound.
        take: commit all ready masks, only the surest one or only the one of least divergence.
    """

    threshold: float = 0.6
    divergence: float = 0.01
    history: int = 2
    take: Take = "all"
    model: ModelSpec | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold", "divergence"):
            check_number(f"scheduler.{name}", getattr(self, name))
        check_count("scheduler.history", self.history)
        check_choice("scheduler.take", self.take, Take)

    def bind(self, context: Context) -> Self:
        """Return a copy that stores the facts about the model."""
        return with_bound_fields(self, model=context.spec)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that compares confidences with any score. It may have no schedule (without `steps`)."""
        scheduled = self.steps is not None or self.schedule != "uniform"
        return replace(super().traits, ranks_by_confidence=True, scheduled=scheduled)

    @property
    @override
    def needs(self) -> frozenset[str]:
        return super().needs | {"probabilities" if self.precise else "predictions"}

    @property
    def precise(self) -> bool:
        """True if divergences are ranked, and not only compared with a bound."""
        return self.take == "steadiest"

    def init(self, canvas: Canvas) -> Carry:
        """Return the fixed schedule's state, the last query `[B, Q]`, its predictions, and moves `[B, Q, history]`."""
        assert self.model is not None
        nowhere = torch.full_like(canvas.ids[:, :1], canvas.length)
        zero = torch.zeros_like(nowhere, dtype=self.model.dtype)[..., None]
        law, zero = Predictions(zero.repeat(1, 1, self.model.vocab_size), zero.double()[..., 0]), zero.double()
        return super().init(canvas), nowhere, law, zero.repeat(1, 1, self.history)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        opened, asked, then, moves = carry
        count, opened = self.count(canvas, opened)
        if not self.traits.scheduled:
            count = torch.ones_like(count)
        now = Predictions.of(readout)
        at, eligible = query.positions.contiguous(), canvas.eligible(query.positions)
        last = torch.searchsorted(asked, at).clamp(max=asked.shape[1] - 1)  # [B, Q]
        row = last + select.arange(len(asked), last.device)[:, None] * asked.shape[1]
        move = now.drift(then, row, self.precise).clamp(min=0)
        past = torch.cat([moves.flatten(0, 1)[row][..., 1:], move[..., None]], -1)  # [B, Q, history]
        # Masks only become fewer, but a cache that chooses among them may not have queried this one last time.
        new = (asked.gather(1, last) != at) | (canvas.age == 0)[:, None]
        past = past.masked_fill(new[..., None], torch.inf)
        sure = readout.confidence[:, 0]  # [B, Q]
        ready = eligible & (sure > self.threshold) & (past < self.divergence).all(-1)
        still = -move.masked_fill(move < ROUNDING, 0)  # otherwise rounding would rank equal predictions
        score = still if self.take == "steadiest" else sure
        chosen = ready if self.take == "all" else select.top(score, ready, torch.ones_like(canvas.age))
        # The last step takes all. A step that sees only a part of the masks must still keep to the schedule.
        free = (eligible.sum(1) == canvas.noise_left()) & (canvas.age + 1 < opened[1])
        follow = chosen.sum(1) >= count.masked_fill(free, 1)
        share = select.top(self.order(canvas, query, readout, count), eligible, count)
        return Edit(readout.token[:, 0], torch.where(follow[:, None], chosen, share)), (opened, at, now, past)

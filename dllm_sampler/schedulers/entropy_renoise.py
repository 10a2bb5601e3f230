"""DiffusionGemma's sampler: each step accepts tokens by entropy, and draws all others again."""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context, Guide, Scheduler
from dllm_sampler.core.spec import Traits, UniformNoise, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError, as_typed
from dllm_sampler.guides.annealing import LinearTemperature
from dllm_sampler.schedulers.entropy_bound import bounded


@dataclass(frozen=True)
class EntropyRenoise(Scheduler):
    """DiffusionGemma's sampler: each step accepts tokens by their entropy, and makes all others noise again.

        for n = 1 ... max_denoising_steps:
            token, H = model(canvas) at every position of the block, H the entropy
            leave if the best tokens did not change for stability_threshold forwards
                and the mean of H is below confidence_threshold
            accept the tokens of lowest H while sum(H) - max(H) <= entropy_bound
            make all other positions noise
        commit the best tokens of the last forward, not the accepted ones

    Source: the entropy-bound sampler of DiffusionGemma (transformers 5.23, `models/diffusion_gemma`), whose bound is
    the EB-Sampler's (arXiv 2505.24857). What an earlier step accepted may become noise again. A temperature that falls
    linearly from `t_max` towards `t_min` applies after the other guides, to tokens and to entropies. A temperature of
    the user's multiplies it. At temperature=0 each step takes the best tokens. Under a guide on the answer's form these
    are the tokens of the best string that has the form, so that what a block ends with can be completed.

    Args:
        entropy_bound: nats. The entropies of the accepted positions, without the largest, sum to at most this.
        max_denoising_steps: upper bound on the forwards per block.
        t_min, t_max: temperatures. The lower one is not reached. If both are 0, the best tokens are taken
            and measured as they are.
        stability_threshold: number of forwards before this one whose best tokens must be the same to stop early. None
            never stops early.
        confidence_threshold: nats. The block's mean entropy must be below it to stop early. None never stops early.
    """

    entropy_bound: float = 0.1
    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int | None = 1
    confidence_threshold: float | None = 0.005
    formed: bool = field(init=False, default=False)  # a guide chooses the tokens of a step together

    def __post_init__(self) -> None:
        check_number("scheduler.entropy_bound", self.entropy_bound)
        for name in ("t_min", "t_max"):
            check_number(f"scheduler.{name}", getattr(self, name), finite=True)
        check_count("scheduler.max_denoising_steps", self.max_denoising_steps)
        check_count("scheduler.stability_threshold", self.stability_threshold, 0, optional=True)
        check_number("scheduler.confidence_threshold", self.confidence_threshold, optional=True)
        if self.t_max < self.t_min:
            said = f"scheduler.t_max={as_typed(self.t_max)} is below scheduler.t_min={as_typed(self.t_min)}"
            raise UserError("option-range", f"{said}. Raise scheduler.t_max, or lower scheduler.t_min.")

    def bind(self, context: Context) -> Self:
        """Return a copy that knows if a guide restricts the form of the answer."""
        formed = any(guide.joint or guide.vetoes for guide in context.guides)
        return with_bound_fields(self, formed=formed)

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """Return the user's guides, with the falling temperature after them, but before a guide on the form.

        Raises:
            UserError: a guide may refuse the tokens that end a block.
        """
        for guide in given:
            if guide.vetoes:
                raise UserError(
                    "plugins-incompatible",
                    f"scheduler=entropy_renoise ends a block with its best tokens, and guide={named(guide)} may refuse"
                    " some. Use another scheduler, or a guide that chooses tokens together, as guide=grammar with"
                    " guide.grammar.depth=3 does.",
                )
        if self.t_max == 0:
            return given
        forms = tuple(guide for guide in given if guide.joint)
        falling = LinearTemperature(self.t_min, self.t_max, self.max_denoising_steps)
        return (*(guide for guide in given if not guide.joint), falling, *forms)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that judges the block as a whole, by entropy, and accepts nothing for good."""
        own = Traits(asks="window", ranks_by_confidence=False, needs_every_position=True, revises=True)
        return own.adding(UniformNoise())

    @property
    def needs(self) -> frozenset[str]:
        """Entropies, and logits for the best tokens. Under a form also the choice, to repeat it without noise."""
        return frozenset({"entropy", "logits", "logsumexp"} | ({"draw"} if self.formed else set()))

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B, L+1]` the last forward's best tokens, and `[B]` forwards before it with the same ones."""
        return torch.zeros_like(canvas.ids), torch.zeros_like(canvas.age)

    def accepts(self, canvas: Canvas, query: Query, entropy: Tensor) -> Tensor:
        """Return `[B, Q] bool` the positions of the block that this forward accepts, by their `entropy [B, Q]`."""
        return bounded(entropy, canvas.inside(query.positions), self.entropy_bound)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.entropy is not None and readout.logits is not None and readout.logsumexp is not None
        at, inside = query.positions, canvas.inside(query.positions)  # [B, Q]
        entropy, (peak, best) = readout.entropy[:, 0], readout.logits[:, 0].max(-1)
        if readout.draw is not None and self.formed:
            best = readout.draw.greedy()(readout.draw.logits)[:, 0]
            peak = readout.logits[:, 0].gather(2, best[..., None])[..., 0]
        same = (best == carry[0].gather(1, at)) | ~inside
        still = torch.where(same.all(1) & (canvas.age > 0), carry[1] + 1, 0)
        over = canvas.age + 1 >= self.max_denoising_steps  # [B]
        if self.stability_threshold is not None and self.confidence_threshold is not None:
            mean = (entropy * inside).sum(1) / inside.sum(1).clamp(min=1)
            over = over | ((still >= self.stability_threshold) & (mean < self.confidence_threshold))

        accepted, last = self.accepts(canvas, query, entropy), over[:, None]
        ids = torch.where(last, best, readout.token[:, 0])
        sure = torch.where(last, (peak.double() - readout.logsumexp[:, 0]).exp(), readout.confidence[:, 0])
        keep = inside & (accepted | last)
        # A token that is drawn again counts from its first commit.
        commit = keep & (canvas.masked.gather(1, at) | (ids != canvas.ids.gather(1, at)))
        edit = Edit(ids, commit, remask=inside & ~keep, keep_block=~over, close_block=over, confidence=sure)
        return edit, (carry[0].scatter(1, at, best), still)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps, which blocks of one token each reach."""
        return tokens * self.max_denoising_steps

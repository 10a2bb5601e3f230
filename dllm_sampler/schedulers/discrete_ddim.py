"""Discrete DDIM for uniform diffusion, with the leave-one-out corrector."""

from dataclasses import dataclass, replace
from math import log
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count, check_number, check_positive
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits, UniformNoise
from dllm_sampler.core.values import Canvas, Edit, Query, Readout

Selection = Literal["random", "lowest_maxprob", "lowest_current_prob", "lowest_log_margin"]
CLEAN, STAY, NOISE = 0, 1, 2  # routes of a position in a predictor step


@dataclass(frozen=True)
class DiscreteDDIM(Scheduler):
    """Discrete DDIM: the block is drawn from the exact posterior of uniform diffusion in each step.

        for n = 0 ... N - 1:
            y = model(canvas), a token at every position of the block
            each position becomes y, stays or becomes random, by q(x_s | x_t, y)
            if n < D, corrector_steps times:
                p = model(canvas)
                draw corrector_k positions again, by p_s(token | all others)
            if the best tokens have settled:  commit them, and leave
        commit y at every position

    Source: diffusers 0.42.1 (`DiscreteDDIMScheduler`), D3PM arXiv 2107.03006; corrector: arXiv 2605.22765. Step n takes
    the survival of a clean token from n / N to (n + 1) / N. A block takes `max_denoising_steps` forwards F. With c
    corrector sweeps after each of the first D = (F - 1) // (1 + c) predictor steps, N = F - D c predictor steps are
    left.

    Each predictor step draws positions independently, with an error that falls as 1 / N². Set temperature=1 for that
    law. Guides apply to the predictor. The corrector uses the model's own probabilities.

    A sweep leaves the law of the noisy block as it is only with `corrector_selection=random` and `corrector_k=1`. The
    other selections use the current tokens, and so sharpen it. For an exact model of three tokens a sweep at half
    noise moves the law by 0.106 in total variation with lowest_log_margin, the default of diffusers. It is 0.063 with
    lowest_current_prob and 0.006 with lowest_maxprob.

    Args:
        max_denoising_steps: F, upper bound on the forwards per block.
        corrector_steps: c, sweeps after each early predictor step.
        corrector_k: positions that a sweep draws again, all at once.
        corrector_selection: `random` positions, or the least sure ones by this statistic.
        corrector_selection_tau: temperature of the choice of positions. Lower takes the least sure ones.
        stability_threshold: number of predictor steps before this one whose best tokens must be the same to stop early.
            None never stops early.
        confidence_threshold: nats. The block's mean entropy must be below it to stop early. None never stops early.
    """

    max_denoising_steps: int = 48
    corrector_steps: int = 0
    corrector_k: int = 1
    corrector_selection: Selection = "random"
    corrector_selection_tau: float = 1.0
    stability_threshold: int | None = 1
    confidence_threshold: float | None = 0.005

    def __post_init__(self) -> None:
        check_count("scheduler.max_denoising_steps", self.max_denoising_steps)
        check_count("scheduler.corrector_steps", self.corrector_steps, 0)
        check_count("scheduler.corrector_k", self.corrector_k)
        check_choice("scheduler.corrector_selection", self.corrector_selection, Selection)
        check_positive("scheduler.corrector_selection_tau", self.corrector_selection_tau)
        check_count("scheduler.stability_threshold", self.stability_threshold, optional=True)
        check_number("scheduler.confidence_threshold", self.confidence_threshold, optional=True)

    @property
    def traits(self) -> Traits:
        """Traits of a rule that accepts nothing before its last step, and may write random tokens."""
        facts = Traits(
            asks="window", ranks_by_confidence=False, needs_every_position=True, revises=True, own_tokens=True
        )
        return replace(facts, scope="model" if self.corrector_steps else "block").adding(UniformNoise(masks=False))

    @property
    @override
    def needs(self) -> frozenset[str]:
        found = frozenset({"logits", "logsumexp"})
        return found if self.confidence_threshold is None else found | {"entropy"}

    def init(self, canvas: Canvas) -> Carry:
        """Return the facts about the last predictor step, zero or false before the first one.

        They are its best tokens `[B, L+1]`, the number of steps before it with the same best tokens `[B]`, and the rows
        whose block it has settled `[B] bool`.
        """
        return torch.zeros_like(canvas.ids), torch.zeros_like(canvas.age), torch.zeros_like(canvas.done)

    @property
    def corrected_steps(self) -> int:
        """D, the number of predictor steps that sweeps follow."""
        return (self.max_denoising_steps - 1) // (1 + self.corrector_steps) if self.corrector_steps else 0

    @property
    def predictor_steps(self) -> int:
        """N, the number of predictor steps."""
        return self.max_denoising_steps - self.corrected_steps * self.corrector_steps

    def clock(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Return `[B]` the number of the predictor step from 0, and `[B]` of the sweep after it, 0 without one."""
        early, group = canvas.age < self.corrected_steps * (1 + self.corrector_steps), 1 + self.corrector_steps
        late = canvas.age - self.corrected_steps * self.corrector_steps
        return torch.where(early, canvas.age // group, late), torch.where(early, canvas.age % group, 0)

    def conditions(self, canvas: Canvas) -> Tensor:
        """Return `[B] bool` rows in a predictor step. A sweep does not change the self-conditioning."""
        return self.clock(canvas)[1] == 0

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        assert readout.logits is not None and readout.logsumexp is not None
        at, inside, logits, ids = query.positions, canvas.inside(query.positions), readout.logits[:, 0], query.ids[:, 0]
        number, sweep = self.clock(canvas)
        sweeps, token = sweep > 0, readout.token[:, 0]

        best = logits.argmax(-1)
        same = (best == carry[0].gather(1, at)) | ~inside
        still = torch.where(same.all(1) & (canvas.age > 0), carry[1] + 1, 0)
        settled = torch.zeros_like(sweeps)
        if self.stability_threshold is not None and self.confidence_threshold is not None:
            assert readout.entropy is not None
            mean = (readout.entropy[:, 0] * inside).sum(1) / inside.sum(1).clamp(min=1)
            settled = (still >= self.stability_threshold) & (mean < self.confidence_threshold)
        best = torch.where(sweeps[:, None], carry[0], carry[0].scatter(1, at, best))
        still, settled = torch.where(sweeps, carry[1], still), torch.where(sweeps, carry[2], settled)
        follow = (number < self.corrected_steps) & (sweep < self.corrector_steps)  # [B] sweeps are still to come
        early = settled & ~follow
        over = early | (number + 1 == self.predictor_steps)

        vocab = logits.shape[-1]
        route = self.routes(canvas, at, route_law(token == ids, number, self.predictor_steps, vocab))
        written = torch.where(
            route == CLEAN, token, torch.where(route == STAY, ids, self.random_ids(canvas, at, vocab))
        )
        if self.corrector_steps:
            survival = torch.where(sweeps, (number + 1) / self.predictor_steps, 0.5)  # the last step has no sweep
            swept = self.swept(canvas, query, logits, survival.double())
            written = torch.where(sweeps[:, None], swept, written)
        written = torch.where(early[:, None], best.gather(1, at), written)
        sure = (logits.gather(-1, written[..., None])[..., 0].double() - readout.logsumexp[:, 0]).exp()
        commit, noise = inside & over[:, None], inside & ~over[:, None]
        edit = Edit(written, commit, remask=noise, keep_block=~over, close_block=over, confidence=sure)
        return edit, (best, still, settled)

    def routes(self, canvas: Canvas, positions: Tensor, law: Tensor) -> Tensor:
        """Return `[B, Q]` a route of each position, drawn by `law [B, Q, 3]`."""
        drawn = canvas.uniform(positions)
        return (drawn >= law[..., CLEAN]).long() + (drawn >= law[..., CLEAN] + law[..., STAY])

    def random_ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """Return `[B, Q]` random tokens."""
        # Those of this step began the block, if the forward has opened one.
        return canvas.layout.noise.ids(replace(canvas, step=canvas.step + 1), positions, vocab)

    def swept(self, canvas: Canvas, query: Query, logits: Tensor, survival: Tensor) -> Tensor:
        """Return `[B, Q]` the tokens after a sweep at `survival [B]`."""
        ids = query.ids[:, 0]
        chosen = self.chosen(canvas, query.positions, self.doubt(logits, ids, survival))  # [B, k] places among Q
        here = logits.gather(1, chosen[..., None].expand(-1, -1, logits.shape[-1]))
        law = conditional(here, ids.gather(1, chosen), survival)
        return ids.scatter(1, chosen, self.draw(canvas, query.positions.gather(1, chosen), law))

    def doubt(self, logits: Tensor, ids: Tensor, survival: Tensor) -> Tensor:
        """Return `[B, Q]` scores of doubt in the tokens. Positions are drawn in proportion to exp(score / tau)."""
        if self.corrector_selection == "random":
            return torch.zeros_like(ids, dtype=torch.float64)
        law, at = conditional(logits, ids, survival), ids[..., None]
        if self.corrector_selection == "lowest_maxprob":
            return -law.amax(-1)
        current = law.gather(-1, at)[..., 0]
        if self.corrector_selection == "lowest_current_prob":
            return -current
        return law.scatter(-1, at, -torch.inf).amax(-1) - current

    def chosen(self, canvas: Canvas, positions: Tensor, doubt: Tensor) -> Tensor:
        """Return `[B, k]` the places among Q of the positions to draw again."""
        inside = canvas.inside(positions)
        score = doubt / self.corrector_selection_tau + canvas.layout.noise.order(canvas, positions, inside.sum(1))
        score = score.masked_fill(~inside, -torch.inf)
        return score.topk(min(self.corrector_k, positions.shape[1]), 1).indices

    def draw(self, canvas: Canvas, positions: Tensor, law: Tensor) -> Tensor:
        """Return `[B, k]` tokens drawn from the log-probabilities `law [B, k, V]`."""
        query = Query.at(canvas, positions)
        noise = canvas.layout.noise.tokens(canvas, HeadRows.every(query), law.shape[-1])
        return (law + noise.view_as(law)).argmax(-1)

    @override
    def bound(self, tokens: int) -> int:
        return tokens * self.max_denoising_steps


def route_law(same: Tensor, number: Tensor, steps: int, vocab: int) -> Tensor:
    """Return `[B, Q, 3] float64` probabilities of the routes clean, stay and noise: q(x_s | x_t, x_0).

    Args:
        same: `[B, Q] bool` positions whose token is the predicted clean one.
        number: `[B]` number of the predictor step, from 0.
        steps: predictor steps of a block.
        vocab: number of tokens.
    """
    index = number[:, None].double()
    noise = ((steps - 1 - index) / (index + 1)).expand(same.shape)
    law = torch.stack([1 + index * vocab * same, index * noise, noise], -1)
    return law / law.sum(-1, keepdim=True)


def conditional(logits: Tensor, ids: Tensor, survival: Tensor) -> Tensor:
    """Return `[B, Q, V] float64` log-probabilities of a noisy token, given all others: p_s(x_i | others).

    The leave-one-out form removes from the model's prediction the evidence of the noisy token itself.

    Args:
        logits: `[B, Q, V]` of the model, which has seen the token.
        ids: `[B, Q]` the tokens.
        survival: `[B] float64` probability that a token is still clean, above 0 and below 1.
    """
    alpha, vocab = survival[:, None, None], logits.shape[-1]
    told = torch.log1p(vocab * alpha / (1 - alpha)).expand(*ids.shape, 1)
    blind = logits.double().scatter_add(-1, ids[..., None], -told).log_softmax(-1)
    return torch.logaddexp(alpha.log() + blind, torch.log1p(-alpha) - log(vocab))

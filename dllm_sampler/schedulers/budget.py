"""How many positions a step of a fixed schedule commits."""

import torch
from torch import Tensor

from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import UserError


class SharedSteps:
    """A scheduler whose field `steps` counts the forwards of a whole answer."""

    steps: int | None

    @property
    def total_steps(self) -> int | None:
        """See `Scheduler.total_steps`."""
        return self.steps


def check_eps(eps: float) -> None:
    """Refuse an end time outside (0, 1)."""
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise UserError("option-range", f"scheduler.eps must lie between 0 and 1, not {eps!r}")


def block_steps(canvas: Canvas, steps: int | None) -> Tensor:
    """`[B]` the active block's part of a generation's `steps`, by its length (at least 1); None: one per position."""
    if steps is None:
        return canvas.free_in_block().clamp(min=1)
    total = canvas.free_total()  # a stop may have cut off a part of them
    before, until = (canvas.free_before(at) * steps // total for at in (canvas.start, canvas.stop))
    return (until - before).clamp(min=1)


def uniform_share(masks: Tensor, steps: Tensor, age: Tensor) -> Tensor:
    """`[B]` LLaDA's transfer counts: `masks // steps`, the first `masks % steps` steps one more (arXiv 2502.09992)."""
    return masks // steps + (age < masks % steps)


def plan_block(canvas: Canvas, steps: int | None, plan: tuple[Tensor, Tensor], left: Tensor) -> tuple[Tensor, Tensor]:
    """`[B]` masks and `[B]` steps of the block, fixed when it opens, since a stop may shorten the canvas later.

    Args:
        steps: forwards for the whole generation; None: one per token.
        plan: what this returned in the last step.
        left: `[B]` masks of the block now.
    """
    opens = canvas.age == 0
    return torch.where(opens, left, plan[0]), torch.where(opens, block_steps(canvas, steps), plan[1])


def even_share(
    canvas: Canvas, steps: int | None, plan: tuple[Tensor, Tensor], left: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`[B]` positions this step commits under an even schedule, at least one; and the schedule, to hand in next time.

    Args:
        steps: forwards for the whole generation; None: one per token.
        plan: see `plan_block`.
        left: `[B]` masks of the block now, where they are counted already.
    """
    masks, planned = plan_block(canvas, steps, plan, canvas.noise_left() if left is None else left)
    return uniform_share(masks, planned, canvas.age).clamp(min=1), (masks, planned)


def timestep(steps: Tensor, at: Tensor, eps: float) -> Tensor:
    """`[B]` time before step `at` when `steps` steps lead from 1 to `eps`, in float32 as torch.linspace has it."""
    # linspace counts from the nearer end by a fused multiply-add, which decides the last bit and, truncated, a count:
    # float32 operands, exact in float64, rounded once.
    last = torch.full_like(steps, eps, dtype=torch.float32)
    stride = ((last - 1) / steps).double()
    forward, backward = 1 + stride * at, last.double() - stride * (steps - at)
    return torch.where(at < (steps + 1) // 2, forward, backward).float()


def timestep_share(masks: Tensor, steps: Tensor, age: Tensor, eps: float) -> Tensor:
    """`[B]` Dream's counts: the share 1 - s/t of the masks left, truncated; all in the last step (arXiv 2508.15487)."""
    now, then = timestep(steps, age, eps), timestep(steps, age + 1, eps)
    share = (masks.float() * (1 - then / now)).long()
    return torch.where(age + 1 >= steps, masks.long(), share)


def timestep_odds(steps: Tensor, age: Tensor, eps: float) -> Tensor:
    """`[B]` Dream's probability for a mask to be opened in this step: 1 - s/t, 1 in the last."""
    odds = 1 - timestep(steps, age + 1, eps) / timestep(steps, age, eps)
    return torch.where(age + 1 >= steps, 1.0, odds)

"""Shares of positions that the steps of a fixed schedule commit."""

import math

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.checks import is_real
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import invalid


class SharedSteps:
    """A scheduler whose field `steps` counts the forwards of a whole answer."""

    steps: int | None

    @property
    def total_steps(self) -> int | None:
        """Number of forwards for a whole answer, which is the option `steps`."""
        return self.steps


def check_eps(eps: float) -> None:
    """Refuse an end time that is not a number above 0 and below 1."""
    if not is_real(eps) or not 0 < eps < 1:
        raise invalid("scheduler.eps", eps, "Set a number above 0 and below 1")


def block_steps(canvas: Canvas, steps: int | None) -> Tensor:
    """Return `[B]` the active block's part of an answer's `steps`, by its length. With None, one per free column."""
    if steps is None:
        return canvas.free_in_block().clamp(min=1)
    total = canvas.free_total()  # a stop may have cut off a part of them
    before, until = (canvas.free_before(at) * steps // total for at in (canvas.start, canvas.stop))
    return (until - before).clamp(min=1)


def uniform_share(masks: Tensor, steps: Tensor, age: Tensor) -> Tensor:
    """Return `[B]` LLaDA's counts: `masks // steps`, and one more in the first `masks % steps` steps."""
    return masks // steps + (age < masks % steps)


def plan_block(canvas: Canvas, steps: int | None, plan: tuple[Tensor, Tensor], left: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[B]` masks and `[B]` steps of the block, fixed when it opens, since a stop may shorten the canvas later.

    Args:
        steps: forwards for the whole generation. By default one per token.
        plan: result of this function in the last step.
        left: `[B]` masks of the block now.
    """
    opens = canvas.age == 0
    return torch.where(opens, left, plan[0]), torch.where(opens, block_steps(canvas, steps), plan[1])


def even_share(
    canvas: Canvas, steps: int | None, plan: tuple[Tensor, Tensor], left: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return `[B]` positions that this step commits under an even schedule, at least one, and the next schedule.

    Args:
        steps: forwards for the whole generation. By default one per token.
        plan: see `plan_block`.
        left: `[B]` masks of the block now. With None they are counted here.
    """
    masks, planned = plan_block(canvas, steps, plan, canvas.noise_left() if left is None else left)
    return uniform_share(masks, planned, canvas.age).clamp(min=1), (masks, planned)


def timestep(steps: Tensor, at: Tensor, eps: float) -> Tensor:
    """Return `[B]` the time before step `at`, if it falls from 1 to `eps` in `steps`: float32, as torch.linspace."""
    # linspace counts from the nearer end by a fused multiply-add, which decides the last bit and, truncated, a count:
    # float32 operands, exact in float64, rounded once.
    last = torch.full_like(steps, eps, dtype=torch.float32)
    stride = ((last - 1) / steps).double()
    forward, backward = 1 + stride * at, last.double() - stride * (steps - at)
    return torch.where(at < (steps + 1) // 2, forward, backward).float()


def timestep_share(masks: Tensor, steps: Tensor, age: Tensor, eps: float) -> Tensor:
    """Return `[B]` Dream's counts: the part 1 - s/t of the masks left, truncated. The last step takes all.

    t and s are the times before and after the step (`timestep`).
    """
    now, then = timestep(steps, age, eps), timestep(steps, age + 1, eps)
    share = (masks.float() * (1 - then / now)).long()
    return torch.where(age + 1 >= steps, masks.long(), share)


def timestep_odds(steps: Tensor, age: Tensor, eps: float) -> Tensor:
    """Return `[B]` Dream's probability of committing a mask in this step: 1 - s/t as in `timestep_share`, finally 1."""
    odds = 1 - timestep(steps, age + 1, eps) / timestep(steps, age, eps)
    return torch.where(age + 1 >= steps, 1.0, odds)


def even_rest(masks: Tensor, steps: Tensor, done: Tensor) -> Tensor:
    """Return `[B]` the masks that RND1 leaves after `done` of `steps` steps: masks * (1 - done / steps), truncated.

    The product is one of float32 numbers, as published: its last bit decides a count.
    """
    return (masks.float() * ((steps - done).double() / steps).float()).long()


def equal_steps(canvas: Canvas, steps: int | None) -> Tensor:
    """Return `[B]` the active block's part of a generation's `steps` if all blocks get the same number, rounded up.

    Args:
        steps: forwards for the whole generation. With None each block gets one per position.
    """
    if steps is None:
        return canvas.free_in_block().clamp(min=1)
    layout, grid = canvas.layout, canvas.layout.grid
    begin, width = layout.first, layout.lookahead
    if grid is not None:
        length = grid.part or grid.length
        begin, width = canvas.grid_line(begin, length), torch.full_like(width, length)
    end = layout.answer_end.clamp(max=canvas.length)  # an engine lays out one block of a longer answer
    blocks = (end - begin + width - 1) // width
    return (steps + blocks - 1) // blocks


def opened_share(steps: Tensor, done: Tensor, *, cosine: bool = False) -> Tensor:
    """Return the part of the masks left that the step after `done` of `steps` opens: 1 - s/t, and 1 in the last step.

    t and s are the times before and after the step, which fall from 1 to 0 evenly, or on a cosine if `cosine` is true.
    They are float32, as published by `dllm`, since the last bit decides how a product between two counts is rounded.
    """

    def hidden(left: Tensor) -> Tensor:
        time = (left.clamp(min=0).double() / steps).float()
        return 1 - (1 - ((math.pi / 2 * (1 - time)).cos() if cosine else time))

    return 1 - (hidden(steps - done - 1) / hidden(steps - done)).double()


def rounded_share(
    left: Tensor, steps: Tensor, done: Tensor, most: int, *, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `[B]` the counts of `dllm`: `left` times `opened_share`, rounded to an integer, ties to even.

    A step that would open nothing is skipped. After the last one all masks left are opened.

    Args:
        left: `[B]` masks of the block now.
        steps, done: `[B]` steps of the block, and those made or skipped so far.
        most: no block has more steps.

    Returns:
        The counts, and `done` after this step.
    """
    number = select.arange(most, left.device)  # [S]
    share = opened_share(steps[:, None], number, cosine=cosine)  # [B, S]
    counts = (left[:, None] * share).round().long().minimum(left[:, None])
    usable = (number >= done[:, None]) & (number < steps[:, None]) & (counts > 0)
    chosen = torch.where(usable, number, most).amin(1)  # [B]
    count = counts.gather(1, chosen.clamp(max=most - 1)[:, None])[:, 0]
    return torch.where(chosen < most, count, left), torch.minimum(chosen + 1, steps)

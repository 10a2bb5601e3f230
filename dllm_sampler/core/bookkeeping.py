"""What every step does to a canvas besides computing: find the noise, check, write, take down, move on, report.

Letters as in `canvas`. Each function is a handful of operations on small tensors, and one launch where the engine has
kernels (`kernels.bookkeeping`, of the same names): at batch 1 launches are what the work beside a model costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_sampler.core import select


def eligible(masked: Tensor, positions: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """`[B, Q] bool` which of `positions [B, Q]` are noise (`masked [B, L+1]`) inside the block `start, stop [B]`."""
    inside = (positions >= start[:, None]) & (positions < stop[:, None])
    return masked.gather(1, positions) & inside


def noise(ids: Tensor, masked: Tensor, start: Tensor, stop: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`[B, width]` columns of the block's noise, padded with the empty slot L, and `[B, width]` what stands there."""
    positions = select.columns(masked & _within(masked, start, stop), width)
    return positions, ids.gather(1, positions)


def noise_left(masked: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """`[B] int64` how much noise is left inside the block."""
    return (masked & _within(masked, start, stop)).sum(1)


def vouch(
    masked: Tensor,
    positions: Tensor,
    start: Tensor,
    stop: Tensor,
    done: Tensor,
    step: Tensor,
    bad: Tensor,
    confidence: Tensor,
    commit: Tensor,
    token: Tensor,
    forbidden: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep a row that the model failed from being written to.

    Args:
        step: `[B]` forwards made before this one.
        bad: `[B]` the first forward (from 1) that failed; 0: none did.
        confidence: `[B, K, Q]` NaN where the model said nothing.
        commit, token: `[B, Q]` what the scheduler wants to write.
        forbidden: a token that is not committed.

    Returns:
        `[B]` bad, now; `[B, Q] bool` what may be committed.
    """
    asked = eligible(masked, positions, start, stop) & ~done[:, None]
    fails = (asked[:, None] & confidence.isnan()).flatten(1).any(1)
    bad = torch.where(fails & (bad == 0), step + 1, bad)
    commit = commit & (bad == 0)[:, None]
    return bad, commit if forbidden is None else commit & (token != forbidden)


def write(
    ids: Tensor,
    masked: Tensor,
    frozen: Tensor,
    done: Tensor,
    positions: Tensor,
    token: Tensor,
    commit: Tensor,
    remask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New `ids` and `masked [B, L+1]`: `token [B, Q]` stands where `commit` says, and is noise where `remask` says.

    Neither what is frozen nor a row that is done changes.
    """
    touched = commit if remask is None else commit | remask
    kept = frozen.gather(1, positions) | done[:, None] | ~touched  # [B, Q]
    # What is not written goes to the empty slot, as what stands there.
    at = positions.masked_fill(kept, ids.shape[1] - 1)
    return (
        ids.scatter(1, at, torch.where(kept, ids[:, -1:], token)),
        masked.scatter(1, at, False if remask is None else remask & ~kept),
    )


def note(
    step_map: Tensor,
    logprob: Tensor,
    entropy: Tensor | None,
    positions: Tensor,
    wrote: Tensor | None,
    commit: Tensor,
    was: Tensor,
    noise: Tensor,
    step: Tensor,
    sure: Tensor,
    unsure: Tensor | None = None,
) -> None:
    """Take down in `step_map`, `logprob` and `entropy [B, L+1]`, in place, when and how surely tokens were written.

    Args:
        wrote: `[B, Q] bool` where; None: where of `commit` what `was` noise (`[B, L+1]`) is `noise` no longer.
        step: `[B]` forwards made before this one.
        sure, unsure: `[B, Q]` probability of the token, entropy in nats.
    """
    if wrote is None:
        wrote = commit & (was.gather(1, positions) ^ noise.gather(1, positions))
    # What was not written goes to the empty slot, whose numbers nobody reads.
    idle = ~wrote
    at = positions.masked_fill(idle, step_map.shape[1] - 1)
    step_map.scatter_(1, at, step[:, None].masked_fill(idle, -1))
    logprob.scatter_(1, at, sure.log().to(logprob.dtype))
    if entropy is not None and unsure is not None:
        entropy.scatter_(1, at, unsure.to(entropy.dtype))


def advance(
    start: Tensor,
    stop: Tensor,
    begin: Tensor,
    end: Tensor,
    age: Tensor,
    step: Tensor,
    done: Tensor,
    closed: Tensor,
    finish: Tensor | None,
    lookahead: int,
    grid: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`[B]` start, stop, age, step and done one forward later: rows whose block `closed` go to their next.

    See `Canvas.advance`; `lookahead`, `grid` as in `reach`.
    """
    live = ~done
    closed = closed & live
    start = torch.where(closed, stop, start)
    done = done | (start >= end)
    return (
        start,
        torch.where(closed, reach(start, begin, end, lookahead, grid), stop),
        (age + live).masked_fill(closed, 0),
        step + live,
        done if finish is None else done | finish,
    )


def reach(start: Tensor, begin: Tensor, end: Tensor, lookahead: int, grid: int | None) -> Tensor:
    """`[B]` provisional end of blocks that begin at `start [B]`: so many columns on, or at the grid's next line."""
    stop = torch.minimum(start + lookahead, end)
    return stop if grid is None else torch.minimum(stop, on_grid(start, begin, grid) + grid)


def on_grid(column: Tensor, begin: Tensor, grid: int) -> Tensor:
    """`[B]` first column of the grid's block that `column [B]` lies in; counted from `begin [B]`."""
    return column - (column - begin) % grid


def _within(masked: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    column = select.numbers(masked.shape[1], masked.device)
    return (column >= start[:, None]) & (column < stop[:, None])

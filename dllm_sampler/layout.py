"""Laying prompts out as a canvas, and telling the host how large the next step must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_sampler import bookkeeping
from dllm_sampler.canvas import Canvas, Sizes
from dllm_sampler.noise import Noise
from dllm_sampler.protocols import Blocks, ModelSpec, Outlook


def canvas(
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    seeds: Sequence[int],
    spec: ModelSpec,
    blocks: Blocks,
    noise: Noise,
    cuts: bool,
    grain: int = 1,
) -> Canvas:
    """A batch before its first step: prompts left-padded to one column, then `new_tokens` of noise.

    Args:
        rows: token ids of each prompt, not empty.
        cuts: whether a stop policy may shorten rows.
        grain: that column is a multiple of it, where the model's context has room.

    A model that denoises whole blocks gets whole ones, and columns to spare behind the answer.
    """
    longest = max(len(row) for row in rows)
    surplus = -new_tokens % spec.block_length if spec.encoder and spec.block_length else 0
    new_tokens += surplus
    # A model may know no more positions than that, whoever stands at them.
    origin = max(longest, min(-(-longest // grain) * grain, spec.max_positions - new_tokens))
    length, batch = origin + new_tokens, len(rows)
    noise_id = spec.pad_id if spec.mask_id is None else spec.mask_id
    behind = [noise_id] * new_tokens + [spec.pad_id]
    ids = torch.tensor([[spec.pad_id] * (origin - len(row)) + [*row] + behind for row in rows], device=spec.device)
    column = torch.arange(length + 1, device=spec.device).expand(batch, -1)
    masked = (column >= origin) & (column < length)
    begin = torch.tensor([origin - len(row) for row in rows], device=spec.device)
    zero = torch.zeros_like(begin)
    start, end = zero + origin, zero + length
    width = blocks.lookahead(new_tokens)
    laid = Canvas(
        ids=ids,
        masked=masked,
        frozen=~masked,
        begin=begin,
        end=end,
        start=start,
        stop=end,
        age=zero,
        step=zero,
        done=zero > 0,
        nfe=zero,
        rows=zero,
        row_seed=torch.tensor(seeds, device=spec.device),
        origin=origin,
        padded=cuts or grain > 1 or any(len(row) != origin for row in rows),
        sizes=Sizes(masks=width, block=width, computed=length, whole=True),
        noise=noise,
        grid=blocks.grid,
        surplus=surplus,
    )
    return replace(laid, stop=laid.reach(start, width))


def widest(canvas: Canvas, blocks: Blocks) -> Sizes:
    """Sizes that are large enough whatever happened since the host last looked."""
    width = blocks.lookahead(canvas.length - canvas.origin)
    return Sizes(masks=width, block=width, computed=canvas.length, whole=False, all_open=False)


def measure(
    canvas: Canvas,
    bad: Tensor,
    count: Tensor | None,
    ahead: Tensor | None,
    limit: Tensor | None = None,
    outlook: Outlook | None = None,
    span: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`[9|13] int64` what the host wants to know between two steps, for `read`.

    Args:
        bad: `[B]` not 0 for a row without finite statistics.
        count: `[B]` how many columns the cache will compute; None: all.
        ahead: `[B, L+1]` what the scheduler will ask; None: the noise of the block.
        limit: `[B]` the first column that the scheduler will hide; None: none.
        outlook: of the scheduler; None: nothing is certain.
        span: see `Cache.span`; what the forwards behind the next one compute.
    """
    left = canvas.noise_left() if ahead is None else (ahead > 0).sum(1)
    certain = () if outlook is None or span is None else (outlook.lasts, outlook.least, span[1] - span[0])
    return bookkeeping.report(
        left, canvas.start, canvas.stop, canvas.begin, canvas.end, canvas.age, canvas.done, bad, count, limit, *certain
    )


LOOK = 32  # steps, at most, from one look of the host to the next: a model that fails is not run on for long


@dataclass(frozen=True)
class Found:
    """What the host learns when it looks."""

    sizes: Sizes | None  # of the next step; None: nobody asked
    coming: tuple[Sizes, ...]  # of steps behind it, as far as they are certain
    finished: bool  # every row is done
    bad: bool  # some row had no finite statistics


def read(canvas: Canvas, measured: list[int], hides: bool, shrinks: bool = True) -> Found:
    """What `measure`, or `bookkeeping.ended`, found.

    Args:
        hides: the scheduler has a horizon.
        shrinks: what a scheduler commits is noise no longer.
    """
    goes_on, bad, *measured = measured
    if not (goes_on and measured):
        return Found(None, (), not goes_on, bool(bad))
    masks, block, youngest, oldest, reach, computed, part, *outlook = measured
    sizes = Sizes(
        masks,
        block,
        computed if part else canvas.length,
        not part,
        youngest == 0,
        oldest == 0,
        reach=max(reach, 1) if hides else None,
    )
    coming: tuple[Sizes, ...] = ()
    if outlook:
        lasts, least, computed, part = -outlook[0], -outlook[1] * shrinks, *outlook[2:]
        later = replace(
            sizes, computed=computed if part else canvas.length, whole=not part, opens=False, all_open=False
        )
        steps = range(1, min(lasts, LOOK))
        coming = tuple(replace(later, masks=max(1, masks - least * taken)) for taken in steps)
    return Found(sizes, coming, False, bool(bad))


SIZES = 9  # numbers that `measure` says of the next step's sizes
ANY = 2**40  # more than any number of a row


def kind(sizes: Sizes) -> tuple[bool, bool]:
    """What a step opens and computes. No step is of two kinds: what is right for one is wrong for the others."""
    return sizes.opens, sizes.whole


def limits(sizes: Sizes) -> tuple[list[int], list[int]]:
    """Least and most that `measure` may say before a step of such sizes, and of this `kind`."""
    computed = ANY if sizes.whole else sizes.computed
    reach = ANY if sizes.reach is None else sizes.reach
    youngest = (0, 0) if sizes.opens else (-ANY, -1)  # below 0
    part = (0, 0) if sizes.whole else (1, ANY)
    least = [1, 0, -ANY, -ANY, youngest[0], -ANY, -ANY, -ANY, part[0]]
    most = [1, 0, sizes.masks, sizes.block, youngest[1], 0 if sizes.all_open else ANY, reach, computed, part[1]]
    return least, most


def fit(measured: list[int], sizes: Sizes) -> bool:
    """Whether all numbers are within `limits`."""
    return all(low <= number <= high for low, high, number in zip(*limits(sizes), measured, strict=True))

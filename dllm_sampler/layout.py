"""Laying prompts out as a canvas, and telling the host how large the next step must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dllm_sampler.canvas import Canvas, Sizes
from dllm_sampler.noise import Noise
from dllm_sampler.protocols import Blocks, ModelSpec


def canvas(
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    seeds: Sequence[int],
    spec: ModelSpec,
    blocks: Blocks,
    noise: Noise,
    cuts: bool,
) -> Canvas:
    """A batch before its first step: prompts left-padded to one column, then `new_tokens` of noise.

    Args:
        rows: token ids of each prompt, not empty.
        cuts: whether a stop policy may shorten rows.

    A model that denoises whole blocks gets whole ones, and columns to spare behind the answer.
    """
    origin = max(len(row) for row in rows)
    surplus = -new_tokens % spec.block_length if spec.encoder and spec.block_length else 0
    new_tokens += surplus
    length, batch = origin + new_tokens, len(rows)
    noise_id = spec.pad_id if spec.mask_id is None else spec.mask_id
    ids = torch.full((batch, length + 1), spec.pad_id)
    for row, prompt in zip(ids, rows, strict=True):
        row[origin - len(prompt) : origin] = torch.tensor(prompt)
    ids[:, origin:length] = noise_id
    ids = ids.to(spec.device)
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
        padded=cuts or any(len(row) != origin for row in rows),
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
    canvas: Canvas, bad: Tensor, count: Tensor | None, ahead: Tensor | None, limit: Tensor | None = None
) -> Tensor:
    """`[7|9] int64` what the host wants to know between two steps, for `read`.

    `bad [B]` is not 0 for a row without finite statistics, `count [B]` is how many columns the cache will compute
    (None: all), `ahead [B, L+1]` what the scheduler will ask (None: the noise of the block), `limit [B]` the first
    column it will hide (None: none).
    """
    live = ~canvas.done
    masks = canvas.noise_left() if ahead is None else (ahead > 0).sum(1)
    opens = canvas.age == 0
    values = [
        (masks * live).amax(),
        ((canvas.stop - canvas.start) * live).amax(),
        (opens & live).any(),
        (opens | canvas.done).all(),
        canvas.done.all(),
        bad.any(),
        ((canvas.end if limit is None else limit) * live).amax(),
    ]
    if count is not None:
        values += [(count * live).amax(), ((count == canvas.end - canvas.begin) | canvas.done).all()]
    return torch.stack(values)


def read(canvas: Canvas, measured: list[int], hides: bool) -> tuple[Sizes, bool, bool]:
    """The sizes of the next step, whether every row is done, whether any row is bad: what `measure` found.

    hides: the scheduler has a horizon
    """
    masks, block, some_open, all_open, finished, any_bad, reach, *of_cache = measured
    computed, whole = of_cache or (canvas.length, True)
    sizes = Sizes(
        masks,
        block,
        computed,
        bool(whole),
        bool(some_open),
        bool(all_open),
        reach=max(reach, 1) if hides else None,
    )
    return sizes, bool(finished), bool(any_bad)

"""Laying prompts out as a canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dllm_sampler.core.protocols import Blocks
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Noise, Sizes


def canvas(
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    seeds: Sequence[int],
    spec: ModelSpec,
    blocks: Blocks,
    noise: Noise,
    cuts: bool,
    multiple: int = 1,
    length: int = 0,
) -> Canvas:
    """A batch before its first step: each prompt from column 0 on, then `new_tokens` of noise.

    Args:
        rows: token ids of each prompt, not empty.
        cuts: whether a stop policy may shorten rows.
        multiple: the canvas is rounded up to a multiple of this many columns; no row uses the last ones.
        length: the canvas has at least this many.

    A model that denoises whole blocks gets whole ones, and columns to spare behind the answer.
    """
    surplus = -new_tokens % spec.block_length if spec.encoder and spec.block_length else 0
    new_tokens += surplus
    longest = max(length, max(len(row) for row in rows) + new_tokens)
    length = -(-longest // multiple) * multiple
    noise_id = spec.pad_id if spec.mask_id is None else spec.mask_id
    behind = [noise_id] * new_tokens
    laid_out = [[*row, *behind] + [spec.pad_id] * (length + 1 - len(row) - new_tokens) for row in rows]
    ids = torch.tensor(laid_out, device=spec.device)
    column = torch.arange(length + 1, device=spec.device)
    first = torch.tensor([len(row) for row in rows], device=spec.device)
    zero, end = torch.zeros_like(first), first + new_tokens
    masked = (column >= first[:, None]) & (column < end[:, None])
    width = blocks.lookahead(new_tokens)
    made = Canvas(
        ids=ids,
        masked=masked,
        frozen=~masked,
        first=first,
        end=end,
        start=first,
        stop=end,
        age=zero,
        step=zero,
        done=zero > 0,
        nfe=zero,
        computed=zero,
        row_seed=torch.tensor(seeds, device=spec.device),
        new_tokens=new_tokens,
        padded=cuts or any(len(row) + new_tokens != length for row in rows),
        sizes=Sizes(queries=1, block=1, computed=1, answers=1, longest=1, whole=True),  # read before the first step
        noise=noise,
        width=width,
        grid=blocks.grid,
        surplus=surplus,
    )
    return replace(made, stop=made.block_end(first, width))

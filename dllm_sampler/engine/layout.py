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
        computed=zero,
        row_seed=torch.tensor(seeds, device=spec.device),
        origin=origin,
        padded=cuts or grain > 1 or any(len(row) != origin for row in rows),
        sizes=Sizes(queries=1, block=1, computed=1, answers=1, longest=1, whole=True),  # read before the first step
        noise=noise,
        width=width,
        grid=blocks.grid,
        surplus=surplus,
    )
    return replace(laid, stop=laid.block_end(start, width))

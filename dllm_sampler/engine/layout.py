"""The layout of prompts on a canvas."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Blocks
from dllm_sampler.core.spec import ChangingLength, ModelSpec
from dllm_sampler.core.values import FREE, Canvas, Grid, Layout, Noise


def canvas(
    rows: Sequence[Sequence[int]],
    new_tokens: int | Sequence[int],
    seeds: Sequence[int],
    spec: ModelSpec,
    blocks: Blocks,
    noise: Noise,
    cuts: bool,
    multiple: int = 1,
    length: int = 0,
    lengths: Collection[int] = (),
    forms: Sequence[int] | None = None,
    given: Sequence[Sequence[int] | None] | None = None,
    changing: ChangingLength | None = None,
) -> Canvas:
    """Lay out a batch before its first step: each prompt from column 0 on, then `new_tokens` of noise.

    Args:
        rows: token ids of each prompt. A prompt may be empty if tokens of its answer are given.
        new_tokens: length of each answer, or one number for all.
        cuts: a stop policy may shorten rows.
        multiple: the number of columns is rounded up to a multiple of this, at most to the model's `max_positions`. The
            added columns are padding.
        length: least number of columns.
        lengths: lengths of answers that may join the batch later (`engine/in_flight.py`).
        forms: number of each answer's form, if a guide has a list of forms (`Guide.forms`).
        given: for each row the answer's tokens, with `FREE` at each position to generate, or None without given tokens.
            None if no row has given tokens, nor any row that joins later.
        changing: the scheduler's trait, which has the initial number of columns after the last given token. The canvas
            reserves `new_tokens` columns.

    For a model that denoises whole blocks (`ModelSpec.encoder`), answers are rounded up to whole blocks.
    """
    wanted = [new_tokens] * len(rows) if isinstance(new_tokens, int) else new_tokens
    block = spec.block_length if spec.encoder and spec.block_length else 1
    decoded = [-(-count // block) * block for count in wanted]
    ends = [len(row) + count for row, count in zip(rows, decoded, strict=True)]
    least = max(length, *ends)
    length = max(least, min(-(-least // multiple) * multiple, spec.max_positions))
    known = [list(one or ()) for one in given or [None] * len(rows)]
    laid_out = [
        [*row, *own, *[FREE] * (count - len(own)), *[spec.pad_id] * (length + 1 - end)]
        for row, own, count, end in zip(rows, known, decoded, ends, strict=True)
    ]
    lasts = [max((at for at, token in enumerate(own, 1) if token != FREE), default=0) for own in known]
    ids = torch.tensor(laid_out, device=spec.device)
    first, count, end, last = torch.tensor([[len(row) for row in rows], decoded, ends, lasts], device=spec.device)
    masked = ids == FREE
    ids = ids.masked_fill(masked, spec.noise_id)
    frozen = ~masked
    if changing is not None:
        end = torch.minimum(end, first + last + changing.initial_length)
        spare = masked & (torch.arange(length + 1, device=spec.device) >= end[:, None])
        ids, masked = ids.masked_fill(spare, spec.pad_id), masked & ~spare
    sizes = {*decoded, *lengths}
    lookahead = torch.tensor([blocks.lookahead(size) for size in decoded], device=spec.device)
    laid = Layout(
        frozen=frozen,
        first=first,
        new_tokens=count,
        seeds=torch.tensor(seeds, device=spec.device),
        lookahead=lookahead,
        noise=noise,
        shortest=min(sizes),
        longest=max(sizes),
        width=max(map(blocks.widest, sizes)),
        padded=cuts or changing is not None or any(end != length for end in ends),
        grid=None if blocks.grid is None else Grid(blocks.grid, blocks.part, spec.blocks_from),
        given=None if given is None else first + last,
        form=None if forms is None else torch.tensor(forms, device=spec.device),
        surplus=count - torch.tensor(wanted, device=spec.device) if decoded != [*wanted] else None,
    )
    made = _unopened(ids, masked, end, laid)
    moved = blocks.move(made)
    if moved is None:
        start = made.next_free(first)
        moved = start, made.block_end(start, lookahead)
    return replace(made, start=moved[0], stop=moved[1])


def block_canvas(ids: Tensor, masked: Tensor, frozen: Tensor, spec: ModelSpec) -> Canvas:
    """Return a canvas whose only content is one open block in each row.

    Args:
        ids: tokens `[B, L]`.
        masked: `[B, L] bool` positions of noise.
        frozen: `[B, L] bool` positions that no step may change. A run of them at the beginning counts as the prompt.
    """
    length = ids.shape[1]
    first = frozen.long().cumprod(1).sum(1)
    end = torch.full_like(first, length)
    laid = Layout(
        frozen=pad(frozen, (0, 1), value=True),
        first=first,
        new_tokens=end,
        seeds=torch.zeros_like(first),
        lookahead=end,
        noise=CounterNoise(),
        shortest=length,
        longest=length,
        width=length,
        padded=False,
        grid=Grid(length),
    )
    made = _unopened(pad(ids, (0, 1), value=spec.pad_id), pad(masked, (0, 1), value=False), end, laid)
    return replace(made, stop=end)


def _unopened(ids: Tensor, masked: Tensor, end: Tensor, layout: Layout) -> Canvas:
    """Return a canvas before its first step, with an empty active block. The last column is the empty slot."""
    first, zero = layout.first, torch.zeros_like(layout.first)
    return Canvas(
        ids=ids, masked=masked, start=first, stop=first, end=end, age=zero, step=zero, done=zero > 0, layout=layout
    )

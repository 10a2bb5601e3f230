"""The probability of what a sampler did, under the weights of now and with a gradient.

A trajectory is a sequence of transitions: forward s saw the state X^s and committed the tokens U_s. Its
log-probability, the order of positions taken as given, is the sum over s and over i in U_s of log p(x_i | X^s)
(CJ-GRPO, arXiv 2509.23924). States come from the trace's step map; those of many rows and steps share a forward.

Letters: B rows of the trace, L its columns, T forwards' rows ("items"), n items of a chunk, Q tokens asked in an item.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from dllm_sampler.core import select
from dllm_sampler.core.ends import end_ids, is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ChangingLength, HiddenMasks, ModelSpec, ShadowRows
from dllm_sampler.core.visibility import block_causal, clean_and_noisy
from dllm_sampler.errors import UserError
from dllm_sampler.models.scorable import scorable
from dllm_sampler.result import Trace
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.chunk import Chunk
from dllm_sampler.training.masked import Dice


@dataclass(frozen=True)
class Trajectories:
    """The transitions of a trace that count, cut into forwards.

    Args:
        trace: of a sampler that `check` accepts.
        eos_id: the end token, or a sequence of several: tokens after a row's first one do not count, that one does.
        after_eos: they do (published CJ-GRPO code computes the mask that drops them and does not use it).
        shift: the model predicts token i from row i-1 (Dream).
        parallel: block-causal models only: states of different blocks that have the same number inside their block
            share an item, after a clean copy of the row (each block sees the clean blocks before it). As many items
            as the slowest block has steps instead of one per step, each twice as long; the values are the same.
        single: one item per row with the whole answer masked, as diffu-GRPO scores it, in place of the states that
            were; `blank [B, L]` are prompt tokens masked besides.
        blocks: the model's context is causal, and it decoded blocks of this length, counted from the answer's first
            token. Its states are scored as with `parallel`: a finished block is read from left to right and an open one
            as a whole, which takes two copies of the row.
        seeds: the token before a block predicts the block's first one (Nemotron-Labs-Diffusion).

    Raises:
        UserError: a trace whose states cannot be rebuilt.
    """

    trace: Trace
    eos_id: int | Sequence[int]
    after_eos: bool = False
    shift: bool = False
    parallel: bool = False
    single: bool = False
    blank: Tensor | None = None
    blocks: int | None = None
    seeds: bool = False
    valid: Tensor = field(init=False)  # [B, L] bool tokens that count, each in one transition
    weight: Tensor = field(init=False)  # [B, L] float64: 1 / (transitions of the row * tokens of the transition)

    def __post_init__(self) -> None:
        trace = self.trace
        if trace.mask_id is None:
            raise UserError("trace-not-scorable", "this trace has no masks (uniform diffusion)")
        if trace.revised.any() and not self.single:
            raise UserError(
                "trace-not-scorable", "this trace's scheduler replaced tokens. Use scheduler=fixed or threshold."
            )
        if trace.born is not None and not self.single:
            raise UserError(
                "trace-not-scorable", "this trace's answers changed in length. Use scheduler=fixed or threshold."
            )
        if self.parallel and trace.grid is None and self.blocks is None:
            raise UserError("trace-not-scorable", "this model is not block-causal. Use parallel=false.")
        column = torch.arange(trace.ids.shape[1])
        valid = (column >= trace.origin) & (trace.step_map >= 0) & (trace.gone < 0)
        if not self.after_eos:
            ends = is_end(trace.ids, end_ids(self.eos_id)) & valid
            valid = valid & (ends.cumsum(1) - ends.long() == 0)
        self._select(valid)

    def _select(self, valid: Tensor) -> None:
        step = torch.zeros_like(self.trace.step_map) if self.single else self.trace.step_map.clamp(min=0)
        count = valid.new_zeros(len(valid), int(step.max()) + 1, dtype=torch.double)
        count.scatter_add_(1, step, valid.double())  # [B, S] tokens of each transition
        transitions = (count > 0).sum(1, keepdim=True)  # [B, 1]
        weight = torch.where(valid, 1 / (transitions * count.gather(1, step)), 0)
        object.__setattr__(self, "valid", valid)
        object.__setattr__(self, "weight", weight)

    def sample(self, steps: int, dice: Dice) -> Self:
        """Draw at most `steps` transitions of each row, without replacement; weights count only those."""
        step = self.trace.step_map
        chance = dice.uniform(step.amax(1) + 1, int(step.max()) + 1)  # [B, S]
        there = torch.zeros_like(chance).scatter_add_(1, step.clamp(min=0), self.valid.double()) > 0
        rank = chance.masked_fill(~there, 2).argsort(1).argsort(1)
        some = replace(self)
        some._select(self.valid & (rank < steps).gather(1, step.clamp(min=0)))
        return some

    @property
    def local(self) -> Tensor:
        """`[B, L]` what items are told apart by: the step of each token, or its number inside its block."""
        if self.single:
            return torch.zeros_like(self.trace.step_map)
        return self._inside if self.copied else self.trace.step_map

    @property
    def copied(self) -> bool:
        """True if items have a clean copy of the row before the noisy one."""
        return self.parallel or self.blocks is not None

    @property
    def _block(self) -> Tensor:
        """`[B, L]` block of each column, counted from the row's first token; in a causal context 0 is the prompt."""
        column = torch.arange(self.trace.ids.shape[1]).expand_as(self.trace.ids)
        if self.blocks is not None:
            return torch.where(column < self.trace.origin, 0, (column - self.trace.origin) // self.blocks + 1)
        assert self.trace.grid is not None
        return (column - self.trace.begin[:, None]).div(self.trace.grid, rounding_mode="floor")

    @property
    def _inside(self) -> Tensor:
        """`[B, L]` the step of each token counted from the first commit in its block."""
        step, block = self.trace.step_map, self._block.clamp(min=0)
        first = torch.full_like(step, torch.iinfo(step.dtype).max)
        first = first.scatter_reduce(1, block, torch.where(step >= 0, step, first), "amin")
        return torch.where(step >= 0, step - first.gather(1, block), -1)

    def items(self) -> Tensor:
        """`[T, 2]` row and number of each item that has a token, in order."""
        return torch.stack([self.valid.nonzero()[:, 0], self.local[self.valid]], 1).unique(dim=0)

    def parts(self, batch_tokens: int) -> Sequence[Tensor]:
        """Return all items in groups for `chunk`: as many as `batch_tokens` columns hold, but one at least."""
        width = self.trace.ids.shape[1] * (2 if self.copied else 1)
        return self.items().split(max(1, batch_tokens // width))

    def chunks(self, batch_tokens: int) -> Iterator[Chunk]:
        """Yield the forwards of all items, each of at most `batch_tokens` columns: the bound of the memory."""
        yield from map(self.chunk, self.parts(batch_tokens))

    def chunk(self, items: Tensor) -> Chunk:
        """The forward of `items [n, 2]`."""
        trace, (row, number) = self.trace, items.unbind(1)
        column = torch.arange(trace.ids.shape[1])
        begin = trace.begin[row, None]
        step, ids = trace.step_map[row], trace.ids[row]
        step_of = number[:, None].expand_as(step)  # [n, L] the step whose state each column belongs to
        block = self._block[row].clamp(min=0) if self.copied else torch.zeros_like(step)
        if self.copied:
            first = (step - self._inside[row]).masked_fill(step < 0, 0)
            # every column of a block gets the block's first step, the prompt's columns in it too
            step_of = step_of + torch.zeros_like(step).scatter_reduce(1, block, first, "amax").gather(1, block)
        hidden = (column >= trace.origin) & (step >= step_of)
        noisy = ids.masked_fill(hidden, trace.mask_id or 0)
        if self.blank is not None:
            noisy = noisy.masked_fill(self.blank[row], trace.mask_id or 0)
        real = trace.real[row]
        seen = real & ((trace.gone[row] < 0) | (trace.gone[row] >= step_of))  # [n, L]
        asked = self.valid[row] & (self.local[row] == number[:, None])
        width = int(asked.sum(1).max())
        columns = select.columns(torch.cat([asked, torch.zeros_like(asked[:, :1])], 1), width)  # [n, Q]
        there = columns < len(column)
        columns = torch.where(there, columns, trace.origin)
        answers = torch.where(columns > begin, columns - 1, columns) if self.shift or self.seeds else columns
        if self.seeds:
            answers = torch.where(block.gather(1, answers) < block.gather(1, columns), answers, columns)
        positions, keys = column - begin, seen
        if trace.grid is not None:
            keys = seen[:, None] & block_causal(positions, positions, trace.grid)
        if self.copied:
            # Under a shift a block's first token is predicted by the row before the block, which is clean.
            within = block.gather(1, answers) == block.gather(1, columns)
            answers = answers + torch.where(within, len(column), 0)
            context = noisy if self.single else ids
            noisy, positions = torch.cat([context, noisy], 1), torch.cat([positions] * 2, 1)
            keys = clean_and_noisy(block, real, seen, causal=self.blocks is not None)
            if self.blocks is not None:
                # Padding is before a causal row. It sees itself, at a position that exists: NaN would spread.
                keys = keys | torch.eye(keys.shape[1], dtype=torch.bool)
                positions = positions.clamp(min=0)
        tokens = ids.gather(1, columns)
        found = Chunk(row, columns, there, tokens, noisy, positions, keys, answers, trace.mask_id or 0)
        # Answers to one prompt begin with the same states, and often go on so.
        return Chunk.merged(torch.cat([noisy, seen.long(), real.long(), begin], 1), found)

    @torch.no_grad()
    def log_probabilities(
        self, model: nn.Module | Denoiser, batch_tokens: int = 2**14, chunks: Iterable[Chunk] | None = None
    ) -> Tensor:
        """`[B, L]` on the CPU: log-probability of every token that counts, 0 elsewhere; without a gradient.

        The mask token is left out, as in the record: the other tokens share its probability.

        For one with a gradient go over the `chunks`, score each and call `backward` on its share of the loss before
        the next: no more than one chunk's activations are alive.

        model: the module as it is, a `Transformer` or one of transformers, or the sampler's denoiser (`chunk.scorable`)
        chunks: those to score. None stands for all, of `batch_tokens` columns each
        """
        spec = None if isinstance(model, nn.Module) else model.spec
        model = scorable(model)
        device = next(model.parameters()).device if spec is None else spec.device
        found: Tensor | None = None
        for chunk in self.chunks(batch_tokens) if chunks is None else chunks:
            values = chunk.to(device).score(model)[0].cpu()
            if found is None:
                found = values.new_zeros(self.trace.ids.shape)
            at = chunk.there
            found[chunk.row[:, None].expand_as(at)[at], chunk.columns[at]] = values[at]
        return torch.zeros(self.trace.ids.shape) if found is None else found


def trajectories(
    trace: Trace,
    spec: ModelSpec,
    *,
    after_eos: bool = False,
    parallel: bool = False,
    single: bool = False,
    blank: Tensor | None = None,
    blocks: int | None = None,
) -> Trajectories:
    """The trajectories of a trace of the model that `spec` describes.

    Args:
        trace: of a sampler that `check` accepts.
        spec: of the model.
        after_eos, parallel, single, blank: see `Trajectories`.
        blocks: length of the blocks that were decoded, which a causal context alone asks about: of a sampler
            `sampler.plugins.blocks.lookahead(max_new_tokens)`.

    Raises:
        UserError: a trace whose states cannot be rebuilt.
    """
    causal = spec.attention == "causal_context"
    if causal and blocks is None:
        raise UserError("option-missing", "this model's context is causal. Set blocks= to a length.")
    return Trajectories(
        trace, spec.eos_ids, after_eos=after_eos, shift=spec.shift, parallel=parallel, single=single, blank=blank,
        blocks=blocks if causal else None, seeds=spec.seeds,
    )  # fmt: skip


def check(sampler: Sampler) -> None:
    """Refuse a sampler whose trajectories cannot be scored again.

    One with an approximate cache is accepted: what is scored is the model's own probability, without the cache.

    Raises:
        UserError: naming the plug-in and a way out.
    """
    plugins, spec = sampler.plugins, sampler.denoiser.spec
    rule, traits = plugins.scheduler, plugins.scheduler.traits
    why = {
        "takes tokens back or replaces them": traits.revises,
        "asks about states that may not come true": traits.drafts,
        "hides a part of the canvas": traits.has(HiddenMasks),
        "changes the length of answers": traits.has(ChangingLength),
        "adds shadow rows to the forward": traits.has(ShadowRows),
    }
    for reason, holds in why.items():
        if holds:
            raise UserError(
                "trajectories-unsupported",
                f"scheduler={named(rule)} {reason}, so its trajectories cannot be scored again: use one that"
                " commits each position once from the canvas as it is, for example fixed, threshold or ascending",
            )
    if plugins.blocks.hides:
        raise UserError(
            "trajectories-unsupported",
            f"blocks={named(plugins.blocks)} hides masks, so it cannot be scored. Use blocks=multi_block.",
        )
    if plugins.stop.fills and not plugins.stop.predicts:
        raise UserError(
            "trajectories-unsupported", f"stop={named(plugins.stop)} writes tokens that have no score. Use stop=prefix."
        )
    for guide in plugins.guides:
        if guide.measures:
            raise UserError(
                "trajectories-unsupported", f"guide={named(guide)} changes recorded probabilities. Remove it."
            )
    if spec.attention == "causal_context" and (plugins.blocks.sizes_on_open or plugins.blocks.several):
        raise UserError(
            "trajectories-unsupported",
            f"blocks={named(plugins.blocks)} has blocks of several lengths, and of a model whose context is causal"
            " trajectories can be scored with one length only: use blocks=fixed",
        )
    if spec.blocks_from != "text":
        raise UserError("trajectories-unsupported", "a model with blocks from the answer is not scorable")
    if spec.mask_id is None or spec.encoder or spec.branches > 1 or plugins.compat:
        raise UserError(
            "trajectories-unsupported", "only trajectories of a plain masked-diffusion Transformer can be scored"
        )

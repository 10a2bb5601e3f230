"""Log-probabilities of trajectories, with a gradient (CJ-GRPO, arXiv 2509.23924): the sum of log p(x_i | X^s).

X^s is the state that forward s saw, and i are the positions that it committed. Their order is taken as given.
B rows of a trace have L columns; T items are a state of a row each, n of them in a forward.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from dllm_sampler.core.ends import is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ChangingLength, HiddenMasks, ModelSpec, OwnInputs
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.errors import UserError
from dllm_sampler.models.scorable import scorable
from dllm_sampler.result import Trace
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.masked import Chunk


@dataclass(frozen=True)
class Trajectories:
    """The transitions of a trace that count, cut into forwards.

    Args:
        trace: of a sampler that `check` accepts.
        spec: of the model.
        after_eos: tokens after a row's first end-of-text token count, too, as in the published code of CJ-GRPO.
        single: one item per row with the whole answer masked, as diffu-GRPO scores it, in place of recorded states.
        blank: `[B, L] bool` prompt tokens that `single` masks besides.
        blocks: length of the decoded blocks, `sampler.plugins.blocks.lookahead(max_new_tokens)`. A causal context needs
            it. States with the same number inside their blocks share an item, which takes two copies of the row.
    """

    trace: Trace
    spec: ModelSpec
    after_eos: bool = False
    single: bool = False
    blank: Tensor | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        trace = self.trace
        if trace.mask_id is None:
            raise UserError("trace-not-scorable", "The trace has no masks (uniform diffusion). Use a masked model.")
        if (trace.revised.any() or trace.born is not None) and not self.single:
            said = "this trace's scheduler replaced tokens or changed lengths. Use scheduler=fixed or threshold."
            raise UserError("trace-not-scorable", said)
        if self.copied and self.blocks is None:
            said = "This model's context is causal. Set blocks= to the length of the blocks that were decoded."
            raise UserError("option-missing", said)

    @cached_property
    def valid(self) -> Tensor:
        """`[B, L] bool` tokens that count, each in one transition."""
        trace, column = self.trace, torch.arange(self.trace.ids.shape[1])
        valid = (column >= trace.origin) & (trace.step_map >= 0) & (trace.gone < 0)
        if not self.after_eos:
            ends = is_end(trace.ids, self.spec.eos_ids) & valid
            valid = valid & (ends.cumsum(1) - ends.long() == 0)
        return valid

    @cached_property
    def weight(self) -> Tensor:
        """`[B, L] float64` 1 / (transitions of the row * tokens of the transition)."""
        valid, step = self.valid, self.trace.step_map.clamp(min=0) * (not self.single)
        count = valid.new_zeros(len(valid), int(step.max()) + 1, dtype=torch.double)
        count.scatter_add_(1, step, valid.double())  # [B, S] tokens of each transition
        transitions = (count > 0).sum(1, keepdim=True)  # [B, 1]
        return torch.where(valid, 1 / (transitions * count.gather(1, step)), 0)

    @property
    def copied(self) -> bool:
        """True if items have a clean copy of the row before the noisy one."""
        return self.spec.attention == "causal_context"

    @cached_property
    def _block(self) -> Tensor:
        """`[B, L]` block of each column of a causal context; 0 is the prompt."""
        column = torch.arange(self.trace.ids.shape[1]).expand_as(self.trace.ids)
        assert self.blocks is not None
        return torch.where(column < self.trace.origin, 0, (column - self.trace.origin) // self.blocks + 1)

    @cached_property
    def _inside(self) -> Tensor:
        """`[B, L]` the step of each token counted from the first commit in its block."""
        step, block = self.trace.step_map, self._block
        first = torch.full_like(step, torch.iinfo(step.dtype).max)
        first = first.scatter_reduce(1, block, torch.where(step >= 0, step, first), "amin")
        return torch.where(step >= 0, step - first.gather(1, block), -1)

    @property
    def _local(self) -> Tensor:
        """`[B, L]` number of each token's item: its step, in a causal context counted inside its block."""
        if self.single:
            return torch.zeros_like(self.trace.step_map)
        return self._inside if self.copied else self.trace.step_map

    def items(self) -> Tensor:
        """Return `[T, 2]` row and number of each item that has a token, in order."""
        return torch.stack([self.valid.nonzero()[:, 0], self._local[self.valid]], 1).unique(dim=0)

    def parts(self, batch_tokens: int) -> Sequence[Tensor]:
        """Return all items in groups of at most `batch_tokens` columns, but one item at least."""
        width = self.trace.ids.shape[1] * (2 if self.copied else 1)
        return self.items().split(max(1, batch_tokens // width))

    def chunks(self, batch_tokens: int) -> Iterator[Chunk]:
        """Yield the forwards of all items. Each has at most `batch_tokens` columns, or a single item."""
        yield from map(self.chunk, self.parts(batch_tokens))

    def chunk(self, items: Tensor) -> Chunk:
        """Return the forward of `items [n, 2]`."""
        trace, (row, number) = self.trace, items.unbind(1)
        step, ids, real = trace.step_map[row], trace.ids[row], trace.real[row]
        column, begin = torch.arange(ids.shape[1]), trace.begin[row, None]
        step_of = number[:, None].expand_as(step)  # [n, L] the step whose state each column belongs to
        copy = None
        if self.copied:
            block = self._block[row]
            first = (step - self._inside[row]).masked_fill(step < 0, 0)
            # every column of a block gets the block's first step, the prompt's columns in it too
            step_of = step_of + torch.zeros_like(step).scatter_reduce(1, block, first, "amax").gather(1, block)
        hidden = (column >= trace.origin) & (step >= step_of)
        if self.blank is not None:
            hidden = hidden | self.blank[row]
        noisy = ids.masked_fill(hidden, trace.mask_id or 0)
        seen = real & ((trace.gone[row] < 0) | (trace.gone[row] >= step_of))  # [n, L]
        asked = self.valid[row] & (self._local[row] == number[:, None])
        positions, keys = column - begin, seen
        if self.copied:
            copy = self._block[row], noisy if self.single else ids, real
        elif trace.grid is not None:
            keys = seen[:, None] & block_causal(positions, positions, trace.grid)
        found = replace(Chunk.of(self.spec, ids, noisy, asked, positions, keys, copy), row=row)
        if self.copied:  # padding is before a causal row. It sees itself, at a position that exists: NaN would spread
            keys = found.keys | torch.eye(found.ids.shape[1], dtype=torch.bool)
            found = replace(found, keys=keys, positions=found.positions.clamp(min=0))
        # Answers to one prompt have the same first states, and often more of them.
        return found.merged(torch.cat([found.ids, seen.long(), real.long(), begin], 1))

    @torch.no_grad()
    def log_probabilities(
        self, model: nn.Module | Denoiser, batch_tokens: int = 2**14, chunks: Iterable[Chunk] | None = None
    ) -> Tensor:
        """Return `[B, L]` on the CPU: log-probability of every token that counts, 0 elsewhere; without a gradient.

        chunks: the forwards to score. None stands for all
        """
        spec = None if isinstance(model, nn.Module) else model.spec
        model = scorable(model)
        device = next(model.parameters()).device if spec is None else spec.device
        found = torch.zeros(self.trace.ids.shape)
        for chunk in self.chunks(batch_tokens) if chunks is None else chunks:
            values = chunk.to(device).score(model)[0].cpu()
            found = found.to(values.dtype)
            chunk.scatter(values, found)
        return found


def check(sampler: Sampler) -> None:
    """Refuse a sampler whose trajectories cannot be scored again. Scores are the model's own, also under a cache."""
    plugins, spec = sampler.plugins, sampler.denoiser.spec
    traits, blocks, stop = plugins.scheduler.traits, plugins.blocks, plugins.stop
    rule, fixed = f"scheduler={named(plugins.scheduler)}", "Use scheduler=fixed, threshold or ascending."
    causal = spec.attention == "causal_context"
    plain = spec.mask_id is not None and not spec.encoder and spec.branches == 1 and not plugins.compat
    reasons = {
        f"{rule} takes tokens back or replaces them. {fixed}": traits.revises,
        f"{rule} queries states that may not come true. {fixed}": traits.drafts,
        f"{rule} hides a part of the canvas. {fixed}": traits.has(HiddenMasks),
        f"{rule} changes the length of answers. {fixed}": traits.has(ChangingLength),
        f"{rule} adds inputs of its own to the forward. {fixed}": traits.has(OwnInputs),
        f"blocks={named(blocks)} hides masks. Use blocks=multi_block.": blocks.hides,
        f"stop={named(stop)} writes tokens that have no score. Use stop=prefix.": stop.fills and not stop.predicts,
        "a guide changes recorded probabilities. Remove it.": any(guide.measures for guide in plugins.guides),
        f"blocks={named(blocks)} has blocks of several lengths, and a causal context needs one. Use blocks=fixed.": (
            causal and (blocks.sizes_on_open or blocks.several)
        ),
        "the model's blocks begin with the answer. Set model.blocks_from=text.": spec.blocks_from != "text",
        "the model is not a plain masked-diffusion Transformer. Remove guidance and compat=true.": not plain,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError("trajectories-unsupported", f"Trajectories cannot be scored again: {reason}")

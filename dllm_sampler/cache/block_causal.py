"""The exact cache of block-causal models: finished blocks are stored, and only the current one is computed."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.cache.base import BaseCache, written
from dllm_sampler.cache.store_pass import StorePass
from dllm_sampler.core.checks import check_choice, check_switch
from dllm_sampler.core.packing import forward_request, with_exact_sizes
from dllm_sampler.core.protocols import Cache, Context, Denoiser, Scheduler
from dllm_sampler.core.values import Canvas, Edit, Layout, Query, Readout
from dllm_sampler.core.visibility import Visible
from dllm_sampler.errors import UserError

StorePasses = Literal["ride", "separate"]


@dataclass
class BlockCausalCache(BaseCache):
    """The exact cache of block-causal models: its answers are those of `cache=none`, since no block sees a later one.

        computes   the current block, and the last one until its tokens are stored
        reuses     all blocks before it
        refreshes  nothing: keys and values of a finished block are final

    Source: SDAR, arXiv 2510.06303; block diffusion, arXiv 2503.09573. The keys and values of a block are final once a
    forward has seen all its tokens. Published code spends a forward on each finished block and one on the prompt. Here
    the next block's first forward stores them. Blocks that are decoded in parts (`blocks.part`) are computed whole.
    Under a logit shift (Fast-dLLM v2) the row before the block predicts the block's first position. That row is
    computed until the position is known.

    In a causal context (Nemotron-Labs-Diffusion) the keys and values of a finished block change once it is context. The
    next block's first forward computes it again.

    Args:
        store_pass: `ride` stores with the next block's first forward. `separate` makes the published forwards that only
            store. They count as NFE.
        token_causal: tokens before the first mask see nothing after themselves. Keys and values are then those of the
            model at block size 1, which S2D2 (arXiv 2603.25702) calls an AR-like cache. Answers differ from those of
            `cache=none`.
    """

    keeps_noise: ClassVar[bool] = False
    causal: ClassVar[bool] = True
    steady: ClassVar[bool] = True

    store_pass: StorePasses = "ride"
    token_causal: bool = False

    clean: Tensor = field(init=False, repr=False, compare=False)  # [B] what is stored before this column is final

    def __post_init__(self) -> None:
        check_choice("cache.store_pass", self.store_pass, StorePasses)
        check_switch("cache.token_causal", self.token_causal)

    @override
    def bind(self, context: Context) -> Cache:
        chosen = {
            "cache.store_pass=separate": self.store_pass == "separate",
            "cache.token_causal=true": self.token_causal,
        }
        for option in (name for name, is_set in chosen.items() if is_set):
            if context.spec.attention == "causal_context":
                said = f"{option} does not support this model's causal context"
                raise UserError("cache-incompatible", f"{said}. Remove it.")
        return super().bind(context)

    def around(self, scheduler: Scheduler) -> Scheduler:
        """Return the scheduler. If `store_pass` is `separate`, it also makes forwards that only store."""
        return StorePass(scheduler) if self.store_pass == "separate" else scheduler

    @override
    def begin(self, canvas: Canvas) -> None:
        self.clean = torch.zeros_like(canvas.start)

    @override
    def sees(self, canvas: Canvas, query: Query) -> Visible:
        found = super().sees(canvas, query)
        if not self.token_causal:
            return found
        known = canvas.frontier()
        if query.causal is not None:
            known = torch.where(query.causal, torch.maximum(known, canvas.grid_end()), known)
        return found.causal(canvas.columns(), torch.zeros_like(known), known)

    def prefill(self, template: Cache, canvas: Canvas, samples: int, denoiser: Denoiser) -> Tensor | None:
        """Compute the prompt's full blocks, which see nothing after them, once per prompt. See `Prefills.prefill`."""
        if self.twin is not None:
            return None

        def firsts(value: Canvas | Layout) -> dict[str, Tensor]:
            return {name: rows[::samples] for name, rows in vars(value).items() if isinstance(rows, Tensor)}

        one = replace(canvas, **firsts(canvas)).with_layout(**firsts(canvas.layout))
        one = replace(one, end=one.grid_start())
        cache = template.init(one, self.spec)
        assert isinstance(cache, BlockCausalCache)
        query = Query.at(one, torch.full_like(one.start, one.length)[:, None])  # it queries no position
        wanted = forward_request(one, query, cache.computes(one), self.spec)
        wanted = with_exact_sizes(one, wanted)  # once per generation, before the first step
        _, spent = denoiser(one, query, cache.plan(one, wanted))
        assert self.slots is not None and cache.slots is not None
        for mine, its in ((self.slots.keys, cache.slots.keys), (self.slots.values, cache.slots.values)):
            for buffer, source in zip(mine, its, strict=True):
                buffer.copy_(source.repeat_interleave(samples, 0))
        self.clean = canvas.grid_start()
        return torch.stack([spent.computed, *[torch.zeros_like(spent.computed)] * (samples - 1)], 1).flatten()

    @override
    def computes(self, canvas: Canvas) -> Tensor:
        begin, column = canvas.grid_start(), canvas.columns()  # a block may begin with the prompt's last tokens
        first = torch.minimum(self.clean, begin)
        if self.spec.shift or self.spec.seeds:
            unknown = canvas.masked.gather(1, begin[:, None])[:, 0] & (begin > 0)
            first = torch.minimum(first, begin - unknown.long())
        return (column >= first[:, None]) & (column < canvas.grid_end()[:, None])

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        # What this forward stored of a block is final if the block was full and this step did not change it.
        full = ~((canvas.masked & canvas.in_grid_block()) | written(canvas, query, edit)).any(1)
        if query.mixture is not None:  # keys of soft inputs are not those of the tokens
            full = full & ~query.mixture.where.any(1)
        if self.spec.attention == "causal_context":  # a finished block is computed again, as context
            full = torch.zeros_like(full)
        clean = torch.where(full, canvas.grid_end(), canvas.grid_start())
        if query.shifted is not None:  # stored keys are context up to the first token that this step changed
            void = canvas.eligible(query.positions) & ~(edit.commit & (edit.ids == query.ids[:, 0]))
            sound = query.positions.masked_fill(~void, canvas.length).amin(1).minimum(canvas.stop)
            clean = torch.where(query.shifted, sound, clean)
        self.clean = torch.where(canvas.done, self.clean, clean)

"""FreeDave's static and drafting loops, for LLaDA, for Dream and for SDAR."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.store_pass import StorePass
from dllm_sampler.core.protocols import Cache, Carry, Scheduler
from dllm_sampler.core.spec import PlannedCommits, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.published import AllEnd, ForcedFirst, PublishedDualCache, PublishedFreeDave, PublishedPrefixCache
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_tokens import NoStop
from tests.conformance.block_causal import to_block_end
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size, Steps


class Arguments(BaseModel):
    """What the published functions take, with their defaults; without `draft_steps` it is the static loop."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_gen_length: Size = 128
    block_length: Size | None = 32  # null: all in one
    temperature: float = 0.0
    top_k: Size | None = None  # these two matter only at a temperature
    top_p: float | None = None
    alg_temp: float | None = None
    use_cache: bool = False
    dual_cache: bool = False
    confidence_threshold: float | None = None
    early_exit: bool = False
    draft_mode: Literal["batch_expanding", "tree_attention"] = "tree_attention"  # two ways to the same numbers
    decoding_steps: Size | None = None
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    cache: Literal["prefix", "dual"] | None = None
    draft_steps: Size | None = None
    eager_acceptance_mode: bool = False

    @property
    def block(self) -> int:
        """Length of blocks."""
        return self.block_length or self.max_gen_length


@dataclass
class Events:
    """A record in which commits are numbered, not forwards; Dream's forced first position shares the next number."""

    forced: bool = True
    number: int = 0
    numbers: dict[int, int] = field(default_factory=dict)

    def note(self, positions: Tensor, first: int) -> None:
        """Positions (inside the generation) that were committed together; `first` is the block's first one."""
        chosen = positions.tolist()
        self.numbers |= dict.fromkeys(chosen, self.number)
        self.number += any(position != first or not self.forced for position in chosen)

    def steps(self) -> Steps:
        """Positions of each number."""
        found = sorted(set(self.numbers.values()))
        return [sorted(at for at, number in self.numbers.items() if number == one) for one in found]


@dataclass(frozen=True)
class Noted(PublishedFreeDave):
    """The published drafting, with a note of what a forward verifies and of the last mask that it commits besides."""

    events: Events = field(default_factory=Events)

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """The first forward behind a forced commit drafts no full block."""
        query = super().ask(canvas, carry)
        open_ = (query.ids[0] == self.mask_id).any(1)  # [K] of one row, fuller from one candidate to the next
        drafts = query.candidates
        live = torch.ones_like(open_) if drafts.live is None else drafts.live[0]
        if not self.events.forced or int(canvas.age[0]) != 1 or not bool((live & ~open_).any()):
            return query
        kept = max(1, int((live & open_).sum()))
        live, step = (None if one is None else one[:, :kept] for one in (drafts.live, drafts.step))
        return replace(query, ids=query.ids[:, :kept], candidates=drafts._replace(live=live, step=step))

    @override
    def commits_next(self, canvas: Canvas, before: Canvas, after: Canvas) -> Tensor:
        commits = super().commits_next(canvas, before, after)
        first = int(canvas.start[0] - canvas.layout.first[0])
        for old, new in ((canvas, before), (before, after if commits[0] else before)):
            self.events.note((old.masked & ~new.masked)[0, int(canvas.layout.first[0]) :].nonzero()[:, 0], first)
        return commits


@dataclass(frozen=True)
class PublishedEager(ForcedFirst):
    """The published eager acceptance, which is not lossless: no plug-in to choose. One row; reads the host.

    The window is the block and the next ones, which all fill before the block is left, near blocks first. Once the
    block is full each round takes one step more than it verified, and drafts from the predictions of the last round
    before that. Dream's forced commit also overwrites a block's first position that an earlier window filled.
    Block-causal loops differ: they leave a block as soon as it is full, and a draft must equal what the step makes.
    """

    draft: int
    block: int
    threshold: float | None
    mask_id: int
    forced: bool
    causal: bool = False
    events: Events = field(default_factory=Events)

    @property
    def traits(self) -> Traits:
        """It decodes by a rule of its own."""
        return replace(super().traits, asks_block=False).without(PlannedCommits)

    def init(self, canvas: Canvas) -> Carry:
        """Tokens and confidences held, `[L+1]`; whether they are those of the forward that opened the block."""
        return canvas.ids[0], torch.zeros(canvas.length + 1), True

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """The window, under each draft."""
        start, stop = int(canvas.start[0]), int(canvas.stop[0])
        size = min(stop + -(-self.draft // self.block) * self.block, canvas.length) - start
        query = Query.at(canvas, torch.arange(start, start + size)[None], keeps_positions=True)
        if int(canvas.age[0]) == 0:
            return query
        token, sure, stale = carry
        token, sure, now = token[start:][:size], sure[start:][:size], query.ids[0, 0]
        count = min(self.draft, int((now == self.mask_id).sum()))
        drafts = [now if stale and self.forced else self._advance(now, token, sure, self.threshold)]
        while len(drafts) < count:
            drafts.append(self._advance(drafts[-1], token, sure, None))
        return replace(query, ids=torch.stack(drafts)[None])

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """Follow the published acceptance."""
        if int(query.positions[0, 0]) == canvas.length:  # a forward that only stores
            return Edit(query.ids[:, 0], torch.zeros_like(query.positions, dtype=torch.bool)), carry
        start, stop, now = int(canvas.start[0]), int(canvas.stop[0]), canvas.ids[0].gather(0, query.positions[0])
        first, last, block = start - int(canvas.layout.first[0]), stop >= canvas.length, stop - start
        drafts, tokens, sure = query.ids[0], readout.token[0], readout.confidence[0].float()
        best, (token, certainty, stale) = 0, carry
        if int(canvas.age[0]) == 0:
            after = now.clone()
            if self.forced:
                after[0] = tokens[0, 0]
                self.events.note(torch.tensor([first]), first)
        else:
            targets = [self._advance(*row, self.threshold) for row in zip(drafts, tokens, sure, strict=True)]
            while inside := [j for j in range(best + 1, len(drafts)) if self._within(drafts[j], targets[best])]:
                best = max(inside)
            after = drafts[best]
            full = bool((after[:block] != self.mask_id).all())
            after = targets[best] if full else after
        full = bool((after[:block] != self.mask_id).all())
        opens = int(canvas.age[0]) == 0
        if opens or not full:
            token = token.scatter(0, query.positions[0], tokens[best])
            certainty, stale = certainty.scatter(0, query.positions[0], sure[best]), opens
        if not opens:
            self._note(now, after, first)
        if last and int((after == self.mask_id).sum()) == 1:
            before, after = after, self._advance(after, token[start:], certainty[start:], self.threshold)
            self._note(before, after, first)
        left = after[:block] if opens or self.causal else after
        over = torch.tensor([bool((left != self.mask_id).all())])
        wrote = after != now
        if opens and self.forced:
            wrote[0] = True
        return Edit(after[None], wrote[None], keep_block=~over, close_block=over), (token, certainty, stale)

    def bound(self, tokens: int) -> int:
        """A forward that opens a block, and the first one after it, may commit nothing."""
        return 3 * tokens

    def _note(self, before: Tensor, after: Tensor, first: int) -> None:
        self.events.note((before != after).nonzero()[:, 0] + first, -1)

    def _within(self, draft: Tensor, target: Tensor) -> bool:
        return bool(((draft == target) | ((draft == self.mask_id) & (not self.causal))).all())

    def _advance(self, now: Tensor, token: Tensor, sure: Tensor, threshold: float | None) -> Tensor:
        """One step of the static loop on `now [W]`: blocks nearer by one count one more in confidence."""
        near = torch.arange(len(now) - 1, -1, -1) // self.block
        masked = now == self.mask_id
        rank = (sure[: len(now)] + near).masked_fill(~masked, -torch.inf)
        chosen = masked & (torch.arange(len(now)) == rank.argmax())
        if threshold is not None:
            above = rank >= threshold + (near * masked).max()
            chosen = above if bool(above.any()) else chosen
        return torch.where(chosen, token[: len(now)], now)


def freedave(line: Line, checkpoints: Checkpoints) -> Setup:
    """Either loop."""
    args = line.arguments(Arguments)
    denoiser = checkpoints.load(line.model, args.mask_token_id, args.eos_token_id)
    if args.cache not in (None, "dual" if args.dual_cache else "prefix"):
        raise Unsupported(f"dual_cache {args.dual_cache} is not the cache {args.cache}")
    if args.temperature or args.alg_temp:
        raise Unsupported("only greedy runs can be repeated")
    if not args.use_cache:
        raise Unsupported("without its cache the published loop does not see the prompt after the first step")
    if denoiser.spec.shift and args.draft_steps is not None and args.block == 2:
        raise Unsupported("in blocks of two the published loop drafts the forced commit alone, and leaves masks")
    if args.draft_steps is None and (args.decoding_steps or args.max_gen_length) < args.max_gen_length:
        raise Unsupported("with fewer steps than tokens the published static loop leaves masks behind")
    rule = args.confidence_threshold
    scheduler: Scheduler = FixedSteps() if rule is None else Threshold(rule)
    if denoiser.spec.shift:
        scheduler = ForcedFirst(scheduler)
    events = Events() if denoiser.spec.shift and args.draft_steps is not None else None
    if args.draft_steps is not None and args.eager_acceptance_mode:
        if args.dual_cache and args.max_gen_length > args.block:
            raise Unsupported("published eager acceptance fails with a dual cache and several blocks")
        assert denoiser.spec.mask_id is not None
        scheduler = PublishedEager(
            scheduler,
            draft=args.draft_steps,
            block=args.block,
            threshold=rule,
            mask_id=denoiser.spec.mask_id,
            forced=denoiser.spec.shift,
            events=events or Events(),
        )
    elif args.draft_steps is not None:
        scheduler = Noted(scheduler, draft=args.draft_steps, match="subset", events=events or Events())
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=FixedBlocks(args.block),
        stop=AllEnd(drafting=args.draft_steps is not None) if args.early_exit else NoStop(),
        cache=PublishedDualCache() if args.dual_cache else PublishedPrefixCache(),
        compat=True,
    )
    # The static loop looks for masks after the second forward of a block only.
    wasted = args.block if args.draft_steps is None else None
    fill = denoiser.spec.eos_id if args.early_exit else None
    return Setup(sampler, args.max_gen_length, wasted_block=wasted, fill=fill, steps=events and events.steps)


def sdar(line: Line, checkpoints: Checkpoints) -> Setup:
    """Either loop for block-causal models; both ignore `use_cache` and `decoding_steps`."""
    args = line.arguments(Arguments)
    denoiser = checkpoints.load(line.model, args.mask_token_id, args.eos_token_id)
    if args.temperature or args.alg_temp:
        raise Unsupported("only greedy runs can be repeated")
    assert denoiser.spec.mask_id is not None
    rule = args.confidence_threshold
    scheduler: Scheduler = FixedSteps() if rule is None else Threshold(rule)
    cache: Cache = BlockCausalCache("separate")
    events = Events(forced=False)
    if args.draft_steps is not None and args.eager_acceptance_mode:
        # Its window holds blocks that the cache does not compute; answers are the same without one.
        cache, scheduler = (
            NoCache(),
            StorePass(
                PublishedEager(
                    scheduler,
                    draft=args.draft_steps,
                    block=args.block,
                    threshold=rule,
                    mask_id=denoiser.spec.mask_id,
                    forced=False,
                    causal=True,
                    events=events,
                )
            ),
        )
    elif args.draft_steps is not None:
        scheduler = Noted(scheduler, events=events, draft=args.draft_steps)
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=FixedBlocks(args.block),
        stop=AllEnd(drafting=args.draft_steps is not None) if args.early_exit else NoStop(),
        cache=cache,
        compat=True,
    )
    tokens = to_block_end(line, args.max_gen_length, args.block)
    fill = denoiser.spec.eos_id if args.early_exit else None
    steps = None if args.draft_steps is None else events.steps
    return Setup(sampler, tokens, only_commits=True, fill=fill, steps=steps)

"""The published loops of Fast-dLLM v2: `generate` and `batch_sample`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Carry, Denoiser, Guide
from dllm_sampler.core.select import at_least_one
from dllm_sampler.core.values import Canvas, Edit, Noise, Query, Readout
from dllm_sampler.guides import Temperature, TopP
from dllm_sampler.published import PartDraws, PublishedSubBlockCache, SeededBlocks, StopAt, StoresApart
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_tokens import with_finish
from tests.conformance.builder import Checkpoints, Measured, Setup, Task, Unsupported
from tests.conformance.lines import Count, Line, Size


class Arguments(BaseModel):
    """What both loops take, with the defaults of `generate`."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    block_size: Size = 32
    small_block_size: Size = 8
    threshold: float = 1.0
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = 0.95
    use_block_cache: bool = False
    stop_token: Count
    mask_id: Count

    @property
    def guides(self) -> list[Guide]:
        """A greedy run filters nothing."""
        if self.temperature == 0:
            return []
        tempered: list[Guide] = [Temperature(measured=True, value=self.temperature)]
        return tempered if self.top_p >= 1 else [*tempered, TopP(measured=True, p=self.top_p)]


@dataclass(frozen=True)
class Above(Threshold):
    """`Threshold` where "reaches" is >."""

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sure, eligible = readout.confidence[:, 0], canvas.eligible(query.positions)  # [B, Q]
        return Edit(readout.token[:, 0], at_least_one(sure > self.threshold, sure, eligible)), carry


@dataclass(frozen=True)
class StopWithBlock(StopAt):
    """End a row once the block is full and a stop token stands in the answer."""

    @override
    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        full = ~(after.masked & canvas.in_grid_block()).any(1)
        return with_finish(edit, full & self.ends(after).any(1))


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """The model's own `generate`: the answer ends behind its first stop token."""
    setup, prompt, args = _setup(line, checkpoints, line.arguments(Arguments), "prefix")
    tokens = (args.max_new_tokens // args.block_size) * args.block_size - prompt % args.block_size + 1
    return replace(setup, new_tokens=tokens, cut=tokens)


def batch_sample(line: Line, checkpoints: Checkpoints) -> Task:
    """The evaluation's loop: a block is filled whatever stands in it, and padded behind the first stop token."""
    args = line.arguments(Arguments)
    if line.batched:
        return _batch(line, checkpoints, args)
    setup, prompt, args = _setup(line, checkpoints, args, StopWithBlock((args.stop_token,)))
    tokens = (args.max_new_tokens // args.block_size) * args.block_size - prompt % args.block_size + 1
    return replace(setup, new_tokens=tokens, ends=(args.stop_token,), pad=line.params.get("pad_id"))


def _batch(line: Line, checkpoints: Checkpoints, args: Arguments) -> Callable[[], str | None]:
    """Rows of a batch wait for each other in each part of a block; ours run alone, and their forwards are put together.

    Steps are not recorded: tokens are compared, and the number of forwards.
    """
    if args.use_block_cache:
        raise Unsupported("a row's first open position decides what the block cache refreshes for all rows")
    length, part, lengths = args.block_size, args.small_block_size, [len(prompt) for prompt in line.prompts]
    if length in lengths:
        raise Unsupported("a prompt of exactly one block is ignored by the published loop")
    sampler = _sampler(
        checkpoints.load(line.model, args.mask_id, args.stop_token), args, StopWithBlock((args.stop_token,)), None
    )
    end = (args.max_new_tokens // length + max(lengths) // length) * length + 1  # the last forward adds a token

    def run() -> str | None:
        parts, made, lasts = Counter[int](), list[list[int]](), list[int]()
        for prompt in line.prompts:
            trace = sampler.generate([prompt], max_new_tokens=end - len(prompt)).trace
            made.append(trace.ids[0, trace.origin :][trace.generated[0] >= 0].tolist())
            columns = [len(prompt) + step[0] for step in trace.steps() if step]
            parts |= Counter(column // part for column in columns if column % length)  # seeds are stores of all rows
            lasts.append(columns[-1] // length)
        for row, (tokens, wanted) in enumerate(zip(made, line.outputs, strict=True)):
            if args.stop_token in tokens:  # a token is added to this row too, where others go on
                first = tokens.index(args.stop_token) + 1
                behind = len(tokens) - first + (lasts[row] < max(lasts))
                tokens = tokens[:first] + [line.params["pad_id"]] * behind
            if tokens != wanted:
                return f"row {row}: tokens {tokens}, recorded {wanted}"
        nfe = parts.total() + max(lasts) - min(lengths) // length + (min(lengths) > length)
        return None if nfe == line.nfe else f"NFE {nfe}, recorded {line.nfe}"

    return run


def _setup(line: Line, checkpoints: Checkpoints, args: Arguments, stop: object) -> tuple[Setup, int, Arguments]:
    if line.batched:
        raise Unsupported("the rows of the published batch wait for each other")
    prompt = len(line.prompts[0])
    if prompt == args.block_size:
        raise Unsupported("a prompt of exactly one block is ignored by the published loop")
    if args.temperature > 0 and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    denoiser = Measured(checkpoints.load(line.model, args.mask_id, args.stop_token))
    noise = PartDraws(line.rng.torch_manual_seed, "sdar") if line.rng else None
    return Setup(_sampler(denoiser, args, stop, noise), 0, measured=denoiser), prompt, args


def _sampler(denoiser: Denoiser, args: Arguments, stop: object, noise: Noise | None) -> Sampler:
    return Sampler(
        denoiser,
        scheduler=SeededBlocks(Above(args.threshold)),
        blocks=FixedBlocks(args.block_size, args.small_block_size),
        stop=stop,
        cache=PublishedSubBlockCache() if args.use_block_cache else StoresApart(),
        guide=args.guides,
        noise=noise,
        compat=True,
    )

"""The published loops of Nemotron-Labs-Diffusion: `generate` and its self-speculation, `linear_spec_generate`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.guides import Temperature
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.published import (
    BlockDraws,
    ContextDraws,
    LeavesAtEnd,
    PrefillsApart,
    PublishedLinearSpec,
    SeededContext,
    StopStored,
    StoresApart,
)
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.threshold import Threshold
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size

ONE = 2.0  # no probability reaches it: one token per step


class Arguments(BaseModel):
    """What `generate` takes."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    block_length: Size = 32
    threshold: float | None = None
    causal_context: bool = True
    temperature: float = Field(default=0.0, ge=0)
    eos_token_id: Count
    mask_id: Count | None = None


class Speculation(BaseModel):
    """What `linear_spec_generate` takes."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    block_length: Size = 32
    threshold: float = 0.0
    temperature: float = Field(default=0.0, ge=0)
    eos_token_id: Count
    mask_id: Count | None = None


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """The diffusion loop: the context's last row seeds each block, and finished blocks are stored causally."""
    args = line.arguments(Arguments)
    if line.batched:
        raise Unsupported("the published loop takes one prompt at a time")
    if args.max_new_tokens % args.block_length or (args.causal_context and args.block_length == 1):
        raise Unsupported(f"{args.max_new_tokens} tokens are no blocks of {args.block_length}, or of one token")
    if args.temperature > 0 and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    model = checkpoints.load(line.model, args.mask_id, args.eos_token_id)
    rule = Threshold(ONE if args.threshold is None else args.threshold)
    made: dict[str, Any] = {"scheduler": SeededContext(rule, args.eos_token_id), "stop": "none", "cache": StoresApart()}
    tokens, draws = args.max_new_tokens + 1, ContextDraws
    if not args.causal_context:
        assert isinstance(model, TransformerDenoiser)
        model, tokens, draws = model.in_blocks("whole_prompt"), args.max_new_tokens, BlockDraws
        made = {"scheduler": LeavesAtEnd(rule, args.eos_token_id), "stop": StopStored(), "cache": PrefillsApart()}
    denoiser = Measured(model)
    sampler = Sampler(
        denoiser,
        blocks=FixedBlocks(args.block_length),
        guide=[Temperature(value=args.temperature)] if args.temperature > 0 else [],
        noise=draws(line.rng.torch_manual_seed, "llada") if line.rng else None,
        compat=True,
        **made,
    )
    return Setup(sampler, tokens, measured=denoiser, cut=args.max_new_tokens)


def speculate(line: Line, checkpoints: Checkpoints) -> Setup:
    """`linear_spec_generate`: rounds of one draft and one verification, the last one whole."""
    args = line.arguments(Speculation)
    if line.batched:
        raise Unsupported("the published loop takes one prompt at a time")
    if args.temperature > 0:
        raise Unsupported("how a draft is verified where tokens are drawn is not published")
    if args.block_length == 1:
        raise Unsupported("how a window of one token is drafted is not published")
    denoiser = Measured(checkpoints.load(line.model, args.mask_id, args.eos_token_id))
    rule = PublishedLinearSpec(args.threshold, tokens=args.max_new_tokens, eos=args.eos_token_id)
    blocks = FixedBlocks(args.block_length + 1)  # the last position is the verifier's alone
    sampler = Sampler(denoiser, scheduler=rule, blocks=blocks, stop="none", cache="block_causal", compat=True)
    tokens = args.max_new_tokens + args.block_length
    return Setup(sampler, tokens, measured=denoiser, counted={"acceptance_counts": rule.accepted})

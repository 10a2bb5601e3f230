"""The published loops of Nemotron-Labs-Diffusion: `generate`; its self-speculation has no plug-ins."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.eval.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from dllm_sampler.eval.conformance.lines import Count, Line, Size
from dllm_sampler.eval.conformance.published import ContextDraws, SeededContext, StoresApart
from dllm_sampler.guides import Temperature
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.threshold import Threshold

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


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """The diffusion loop: the context's last row seeds each block, and finished blocks are stored causally."""
    args = line.arguments(Arguments)
    if line.batched:
        raise Unsupported("the published loop takes one prompt at a time")
    if not args.causal_context:
        raise Unsupported("no plug-ins for a context whose blocks are counted from the prompt's end and see themselves")
    if args.max_new_tokens % args.block_length or args.block_length == 1:
        raise Unsupported(f"{args.max_new_tokens} tokens are no blocks of {args.block_length}, or of one token")
    if args.temperature > 0 and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    denoiser = Measured(checkpoints.load(line.model, args.mask_id, args.eos_token_id))
    rule = Threshold(ONE if args.threshold is None else args.threshold)
    sampler = Sampler(
        denoiser,
        scheduler=SeededContext(rule, args.eos_token_id),
        blocks=FixedBlocks(args.block_length),
        stop="none",
        cache=StoresApart(),
        guide=[Temperature(value=args.temperature)] if args.temperature > 0 else [],
        noise=ContextDraws(line.rng.torch_manual_seed, "llada") if line.rng else None,
        compat=True,
    )
    return Setup(sampler, args.max_new_tokens + 1, measured=denoiser, cut=args.max_new_tokens)


def speculate(line: Line, checkpoints: Checkpoints) -> Setup:
    """`linear_spec_generate`."""
    raise Unsupported("no plug-ins for drafts of a block that the same model verifies causally")

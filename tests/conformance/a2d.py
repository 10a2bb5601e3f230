"""The published samplers of the `dllm` library, for Tiny-A2D and BERT-Chat: `MDLMSampler` and `BD3LMSampler`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Denoiser, Guide
from dllm_sampler.guides import EndTokens, Temperature
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.published import (
    BinomialSteps,
    BlockDraws,
    HiddenUncounted,
    HidesPads,
    KeepsTokens,
    PrefillsApart,
    RightPaddedDraws,
    StopTogether,
)
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size


class Arguments(BaseModel):
    """What both samplers take, with the defaults of `MDLMSampler`."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size = 128
    block_size: Size = 128
    steps: Size = 128
    temperature: float = Field(default=0.0, ge=0)
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    stochastic_transfer: bool = False
    cfg_scale: float = Field(default=0.0, ge=0)
    cfg_keep_tokens: list[int] = []
    right_shift_logits: bool = False
    alpha_scheduler: Literal["linear", "cosine"] = "linear"
    mask_id: Count
    eos_token_id: Count
    pad_token_id: Count

    @property
    def draws(self) -> bool:
        """Whether anything is left to chance."""
        return self.temperature > 0 or self.stochastic_transfer or self.remasking == "random"

    @property
    def planned(self) -> int:
        """Steps of all blocks."""
        return self.steps

    @property
    def scheduler(self) -> FixedSteps:
        """The counts: rounded shares, or drawn when a block opens."""
        kind = BinomialSteps if self.stochastic_transfer else FixedSteps
        score = "random" if self.remasking == "random" else "confidence"
        return kind(self.planned, score, "cosine" if self.alpha_scheduler == "cosine" else "rounded")


class WholeRows(Arguments):
    """`MDLMSampler`'s own."""

    suppress_tokens: list[int] = []
    begin_suppress_tokens: list[int] = []

    @property
    def guides(self) -> list[Guide]:
        """Tokens that are never chosen, the temperature, and tokens that are chosen without confidence."""
        guides: list[Guide] = [EndTokens("ban", tuple(self.suppress_tokens))] if self.suppress_tokens else []
        if self.temperature > 0:
            guides.append(Temperature(value=self.temperature))
        if self.begin_suppress_tokens:
            guides.append(EndTokens("defer", tuple(self.begin_suppress_tokens)))
        return guides


class Blocks(Arguments):
    """`BD3LMSampler`'s own."""

    block_size: Size = 32
    steps_per_block: Size | None = None

    @property
    @override
    def planned(self) -> int:
        blocks = -(-self.max_new_tokens // self.block_size)
        return super().planned if self.steps_per_block is None else self.steps_per_block * blocks


def mdlm(line: Line, checkpoints: Checkpoints) -> Setup:
    """`MDLMSampler`: whole rows in every step, padded at the right; blocks from each prompt's end."""
    args = line.arguments(WholeRows)
    sampler = Sampler(
        _guided(_denoiser(line, checkpoints, args), args),
        scheduler=args.scheduler,
        blocks=FixedBlocks(args.block_size),
        stop="none",
        cache="none",
        guide=args.guides,
        noise=RightPaddedDraws(_seed(line, args), "llada") if args.draws else None,
        compat=True,
    )
    return Setup(sampler, args.max_new_tokens)


def bd3lm(line: Line, checkpoints: Checkpoints) -> Setup:
    """`BD3LMSampler`: blocks counted back from the prompt's end, each after a forward of the text before it.

    Its forwards of the text are not listed. Under guidance all are made twice.
    """
    args = line.arguments(Blocks)
    model = _denoiser(line, checkpoints, args)
    assert isinstance(model, TransformerDenoiser)
    model = HiddenUncounted(**vars(model)).in_blocks("answer", args.block_size)
    sampler = Sampler(
        _guided(model, args),
        scheduler=HidesPads(args.scheduler, args.pad_token_id),
        blocks=FixedBlocks(args.block_size),
        stop=StopTogether(),
        cache=PrefillsApart(),
        guide=[Temperature(value=args.temperature)] if args.temperature > 0 else [],
        noise=BlockDraws(_seed(line, args), "llada") if args.draws else None,
        compat=True,
    )
    twice = (lambda step: True) if args.cfg_scale else None
    return Setup(sampler, args.max_new_tokens, only_commits=True, ends=(), guided=twice)


def _denoiser(line: Line, checkpoints: Checkpoints, args: Arguments) -> Denoiser:
    """The model with the tokens of the line; a masked LM of transformers brings its mask token itself."""
    if line.system.startswith("bert"):
        denoiser = checkpoints.load(line.model)
        assert isinstance(denoiser, MaskedLMDenoiser)
        if denoiser.mask_id != args.mask_id or args.right_shift_logits:
            raise Unsupported(f"mask_id={args.mask_id}, or a logit shift, is not the checkpoint's")
        return replace(denoiser, eos_id=args.eos_token_id, pad_id=args.pad_token_id)
    denoiser = checkpoints.load(line.model, args.mask_id, args.eos_token_id)
    assert isinstance(denoiser, TransformerDenoiser)
    return replace(denoiser, pad_id=args.pad_token_id, shift=args.right_shift_logits)


def _guided(denoiser: Denoiser, args: Arguments) -> Denoiser:
    return KeepsTokens(denoiser, args.cfg_scale, tuple(args.cfg_keep_tokens)) if args.cfg_scale else denoiser


def _seed(line: Line, args: Arguments) -> int:
    if line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    return line.rng.torch_manual_seed

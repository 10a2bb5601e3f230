"""RND1's published loop, `diffusion_sample`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.core.protocols import Guide, Scheduler
from dllm_sampler.guides import Temperature
from dllm_sampler.published import CappedEntropyBound, EvenRest, JudgedTemperature, ShiftedDraws
from dllm_sampler.sampler import Sampler
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Count, Line, Size


class Arguments(BaseModel):
    """What `diffusion_sample` takes, with its defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    seq_len: Size = 256
    num_steps: Size = 256
    temperature: float = Field(default=1.0, ge=0)
    greedy: bool = True
    top_k: Size | None = None
    top_p: float | None = None
    add_eos_at_end: bool = False
    eb_gamma: float | None = Field(default=None, ge=0)
    mask_id: Count = 151669
    eos_token_id: Count = 151645
    pad_token_id: Count = 0

    @property
    def guides(self) -> list[Guide]:
        """What makes entropies and tokens of the logits."""
        value = max(self.temperature, 1e-8)
        if not self.greedy:
            return [Temperature(measured=True, value=value)]
        return [] if value == 1 else [JudgedTemperature(value)]


def sample(line: Line, checkpoints: Checkpoints) -> Setup:
    """The loop: the row's last position is reserved, for padding or an end token."""
    args = line.arguments(Arguments)
    if line.batched:
        raise Unsupported("the published loop takes one prompt at a time")
    if args.top_k or (args.top_p is not None and 0 < args.top_p < 1):
        raise Unsupported("entropies of a filtered law are not numbers in the published loop")
    if not args.greedy and line.rng is None:
        raise Unsupported("a random run without rng cannot be repeated")
    tokens = args.seq_len - len(line.prompts[0])
    if tokens < 2:
        raise Unsupported(f"a row of {args.seq_len} leaves nothing to decode")
    scheduler: Scheduler = EvenRest(args.num_steps, "entropy", "even")
    if args.eb_gamma is not None:
        scheduler = CappedEntropyBound(args.eb_gamma, "confidence", args.num_steps)
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id, args.eos_token_id),
        scheduler=scheduler,
        blocks=FullBlock(),
        stop="none",
        cache="none",
        guide=args.guides,
        noise=ShiftedDraws(line.rng.torch_manual_seed, "dream") if line.rng else None,
        compat=True,
    )
    return Setup(sampler, tokens, suffix=[args.eos_token_id if args.add_eos_at_end else args.pad_token_id])

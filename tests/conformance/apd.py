"""APD's published loop for Dream: its own rule, and the left-to-right baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.cache.none import NoCache
from dllm_sampler.cache.trailing import TrailingCache
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.published import EndsAnywhere, PublishedParallelDecoding
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.leftright import LeftToRight
from tests.conformance.builder import Checkpoints, Measured, Setup, Unsupported
from tests.conformance.lines import Line, Size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Arguments(BaseModel):
    """What the loop takes, with its defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size
    alg: str
    apd_mixture_weight: float | None = None
    kv_window: int | None = Field(None, ge=0)
    max_lookahead: Size | None = None
    tokens_per_step: Size = 1
    temperature: float | None = 0.0
    top_k: Size | None = None  # without effect on greedy runs
    mask_token_id: int | None = None
    eos_token_id: int | None = None


def apd(line: Line, checkpoints: Checkpoints) -> Setup:
    """Both algorithms; a mixture weight decides, not `alg`. An end token ends a row anywhere, even in the prompt."""
    args = line.arguments(Arguments)
    denoiser = Measured(checkpoints.load(line.model, args.mask_token_id, args.eos_token_id))
    if args.temperature:
        raise Unsupported("no order of draws is known for this loop")
    if args.kv_window == 0:
        raise Unsupported("with kv_window 0 the published loop reads a row it did not compute")
    read: list[int] = []
    if args.alg not in ("apd", "leftright"):
        raise Unsupported(f"alg {args.alg} is none of APD's")
    if args.apd_mixture_weight is not None:
        name = (line.model_extra or {}).get("verifier")
        if not isinstance(name, str):
            raise Unsupported("a mixture weight without a verifier")
        model = _watched(str(checkpoints.folder / name), denoiser.spec, read)
        scheduler = PublishedParallelDecoding(args.max_lookahead, model, args.apd_mixture_weight)
    else:
        if args.tokens_per_step > (args.max_lookahead or args.tokens_per_step):
            raise Unsupported("more tokens per step than it looks at: the published loop repeats one, or fails")
        scheduler = LeftToRight(args.max_lookahead, args.tokens_per_step)
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=FullBlock(),
        stop=EndsAnywhere(),
        cache=NoCache() if args.kv_window is None else TrailingCache(args.kv_window),
        compat=True,
    )
    return Setup(sampler, args.max_new_tokens, measured=denoiser, counted={"verifier_query_lengths": read})


def _watched(path: str, spec: ModelSpec, read: list[int]) -> PreTrainedModel:
    """The causal LM in a folder, which takes down how many tokens each of its passes reads."""
    from dllm_sampler.models import autoregressive  # transformers' modelling code takes seconds to import

    model = autoregressive.load(path, spec).model

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        # The first published pass reads the draft's last token as well, later ones that instead of the one before it.
        read.append(given["input_ids"].shape[1] + (not read))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return model

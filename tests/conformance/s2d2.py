"""The published loop of S2D2 for SDAR (`block_diffusion_generate` with a verification policy)."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.core.noise import ReplayNoise
from dllm_sampler.published import Level, PublishedSelfVerified, StopAt
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.drafting.routing import Estimator, Policy
from tests.conformance.block_causal import NEVER, SdarLoop, to_block_end
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size


class Arguments(SdarLoop):
    """What S2D2 adds to SDAR's loop, with its defaults, and how a line drew."""

    cache_ver: bool = False
    draft_ver: bool = False
    min_ssd_span_length: Size = 1
    ssd_ratio_tempering_factor: float = 1.0
    do_verify_policy: str = "mask_span_length"
    do_verify_score_threshold: float = 0.0
    hysteresis_threshold_on: float = 1.0
    hysteresis_threshold_off: float = -5.0
    do_verify_score_type: Literal["difference_static", "difference_dynamic"] = "difference_static"
    score_penalty_coef: float = 1.0
    token_acceptance_estimator: str = "hard_margin_threshold"
    ssd_confidence_margin_threshold: float = 0.05
    ssd_entropy_temperature: float = 1.0
    ucb_beta: float = 1.0
    seed: int | None = None
    uniform: float | None = Field(None, ge=0, lt=1)


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """At temperature 0, as recorded; a run draws by torch's generator, or every uniform number is one."""
    args = line.arguments(Arguments)
    if args.cache_ver != args.draft_ver:
        raise Unsupported("no cache is causal by token where it stores and not where it drafts, or the other way round")
    if args.seed is None and args.uniform is None:
        raise Unsupported("a run without seed that draws cannot be repeated")
    noise = ReplayNoise(args.seed, "sdar") if args.uniform is None and args.seed is not None else None
    stops = tuple(args.stopping_criteria_idx or ())
    sampler = Sampler(
        checkpoints.load(line.model, args.mask_id),
        scheduler=PublishedSelfVerified(
            threshold=args.confidence_threshold if args.remasking_strategy == "low_confidence_dynamic" else NEVER,
            steps=args.denoising_steps,
            score="position" if args.remasking_strategy == "sequential" else "confidence",
            policy=_known(args.do_verify_policy, Policy),
            min_span=args.min_ssd_span_length,
            least=args.do_verify_score_threshold,
            enter=args.hysteresis_threshold_on,
            leave=args.hysteresis_threshold_off,
            cost=args.score_penalty_coef,
            cost_above=args.confidence_threshold if args.do_verify_score_type == "difference_dynamic" else None,
            estimator=_known(args.token_acceptance_estimator, Estimator),
            entropy_weight=args.ssd_entropy_temperature,
            margin=args.ssd_confidence_margin_threshold,
            beta=args.ucb_beta,
            tempering=args.ssd_ratio_tempering_factor,
        ),
        blocks=FixedBlocks(args.block_length),
        stop=StopAt(stops) if stops else "none",
        cache=BlockCausalCache("separate", token_causal=args.cache_ver),
        noise=noise or Level(0, "sdar", uniforms=args.uniform or 0.0),
        compat=True,
    )
    tokens = to_block_end(line, args.gen_length, args.block_length)
    return Setup(sampler, tokens, only_commits=True, ends=stops, before=True)


def _known(name: str, names: Any) -> Any:
    """One of the `names` that there are plug-ins for."""
    if name not in get_args(names):
        raise Unsupported(f"no plug-in has the rule {name}")
    return name

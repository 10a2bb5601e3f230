"""Answers for any number of prompts, as they finish: behind `Sampler.generate_many`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal

from dllm_sampler.core.checks import check_count
from dllm_sampler.engine.in_flight import obstacle
from dllm_sampler.engine.lockstep import Ranks
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import UserError
from dllm_sampler.generation.stream import Stream, alone
from dllm_sampler.inputs import prompts as texts
from dllm_sampler.inputs.arguments import check_progress
from dllm_sampler.inputs.given import Fixed
from dllm_sampler.kernels.backend import warn
from dllm_sampler.options import BATCHING, MOST_ROWS, Progress
from dllm_sampler.result import Answer

if TYPE_CHECKING:
    from dllm_sampler.sampler import Sampler


def answers(
    sampler: Sampler,
    plugins: Plugins,
    prompts: Iterable[Any],
    *,
    places: int,
    new_tokens: int | Sequence[int],
    forms: int | Sequence[int] | None,
    seed: int | Sequence[int],
    stops: str | Sequence[str],
    samples: int,
    order: str,
    max_length: int | None,
    on_error: Literal["raise", "yield"],
    batching: str,
    progress: Progress | None,
    fixed: Fixed,
) -> Iterator[Answer]:
    """See `Sampler.generate_many`: its arguments, checked before the first prompt is read."""
    check_count("batch_size", places, most=MOST_ROWS)
    check_count("samples", samples, most=MOST_ROWS)
    check_count("max_length", max_length, optional=True)
    new_tokens, seed = texts.numbers("max_new_tokens", new_tokens), texts.numbers("seed", seed)
    forms = texts.check_forms(forms, plugins.forms)
    if max_length is not None:  # no prompt with its answer is longer than the context
        max_length = min(max_length, sampler.denoiser.spec.max_positions)
    # Infills say themselves how long they are.
    asked = not isinstance(prompts, list | tuple) or not all(isinstance(one, texts.Infill) for one in prompts)
    if asked and isinstance(new_tokens, int):
        texts.check_new_tokens(new_tokens, sampler.denoiser.spec)
    for number, one in enumerate(new_tokens, 1) if asked and not isinstance(new_tokens, int) else ():
        texts.check_new_tokens(one, sampler.denoiser.spec, f"max_new_tokens of prompt {number}")
    for one in [seed] if isinstance(seed, int) else seed:
        if abs(one) >= 2**62:
            raise UserError(f"seed must be a whole number of 62 bits, not {one!r}")
    check_progress(progress)
    if asked and max_length is not None and isinstance(new_tokens, int) and max_length <= new_tokens:
        raise UserError(f"max_length={max_length} leaves no room for a prompt: max_new_tokens is {new_tokens}")
    for name, value, choices in (
        ("order", order, ("finished", "given")), ("on_error", on_error, ("raise", "yield")),
        ("batching", batching, BATCHING),
    ):  # fmt: skip
        if value not in choices:
            raise UserError(f"{name} must be {' or '.join(choices)}, not {value!r}")
    try:
        several = None if isinstance(prompts, str | Mapping) else iter(prompts)
    except TypeError:  # a tensor of no dimension is an `Iterable`, too
        several = None
    if several is None:
        raise UserError("generate_many takes several prompts, in a list or any iterable: for one use generate")
    if isinstance(prompts, Sized):
        wrong = texts.uneven(new_tokens, forms, seed, len(prompts), samples) or fixed.uneven(len(prompts))
        if wrong is not None:
            raise wrong
    why = obstacle(plugins, sampler.noise, sampler.denoiser) if batching == "in_flight" else None
    ranks = Ranks.of(sampler.denoiser)
    if ranks.mesh is not None and (why is not None or batching == "static"):
        raise alone(why or "batching is static")
    if why is not None:
        warn(f"prompts are answered batch by batch: {why}")
    found = texts.stop_strings(stops, sampler.tokenizer)
    stream = Stream(
        sampler, plugins, several, places, new_tokens, forms, seed, found, samples, max_length, on_error,
        progress, fixed, ranks=ranks,
    )  # fmt: skip
    flies = batching == "in_flight" and why is None
    if flies and stream.group > places:
        raise UserError(
            f"batch_size={places} is less than samples={samples}, and this cache computes a prompt once for all of its"
            " answers, which so begin together: raise batch_size"
        )
    if flies and isinstance(prompts, list | tuple) and max_length is None:
        stream.fit(prompts)
    made = stream.in_flight() if flies else stream.in_batches()
    return in_order(made, samples) if order == "given" else made


def in_order(answers: Iterable[Answer], samples: int) -> Iterator[Answer]:
    """The answers by prompt and sample; those that are early wait."""
    early: dict[int, Answer] = {}
    following = 0
    for answer in answers:
        early[answer.index * samples + answer.sample] = answer
        while following in early:
            yield early.pop(following)
            following += 1

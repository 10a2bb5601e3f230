"""The options of a sampler and of a generation: name, type, default, check and help, each declared once.

Commands extend `Options`. Their help pages and the checks of `Sampler` read these declarations. The signatures of
`Sampler` repeat names and defaults for type checkers, and a test compares them. This module does not import torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from dllm_sampler import config
from dllm_sampler.core.checks import check_count, check_number, check_positive, check_switch, is_whole
from dllm_sampler.errors import UserError, invalid, nearest, short, unknown

if TYPE_CHECKING:
    from dllm_sampler.core.spec import ModelSpec
    from dllm_sampler.core.values import Noise

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
BATCHING = ("in_flight", "static")
MOST_ROWS = 2**20  # samples of a prompt, and prompts of a batch
AUTO = "auto"
MOST_THREADS = 2**12
Progress = Callable[[int, int, int], None]  # called with (step, tokens committed, tokens wanted)
LARGEST_SEED = 10**18 - 1  # leaves room in an int64 for a prompt's seed + i


class SamplerOptions(TypedDict, total=False):
    """Options of `Sampler`, also accepted by its other constructors and its methods."""

    scheduler: object
    blocks: object
    stop: object
    cache: object
    guide: object
    particles: object
    temperature: float | None
    top_k: int | None
    top_p: float | None
    noise: Noise | None
    compat: bool
    judge: str
    stop_token_ids: int | Sequence[int] | None
    max_steps: int | None
    backend: str
    cuda_graph: bool | str
    compile: bool | str
    entropy: bool


class GenerateOptions(SamplerOptions, total=False):
    """Options that `Sampler.infill` and `Sampler.refine` pass on. `Sampler.generate` describes them."""

    block_length: int | None
    seed: int | Sequence[int]
    stop_strings: str | Sequence[str]
    progress: Progress | None
    samples: int
    forms: int | Sequence[int] | None


def check_among(*choices: object) -> Callable[[str, object], None]:
    """Return a check of an option's name and value that refuses values other than `choices`."""
    words = [str(one).lower() if isinstance(one, bool) else str(one) for one in choices]

    def check_one(name: str, value: object) -> None:
        if not any(type(value) is type(one) and value == one for one in choices):
            raise invalid(name, value, f"Set {', '.join(words[:-1])} or {words[-1]}", "choice-unknown")

    return check_one


def check_threads(name: str, value: object) -> None:
    """Refuse anything but `auto` or a number of threads."""
    if value != AUTO and (not is_whole(value) or not 1 <= value <= MOST_THREADS):
        raise invalid(name, value, f"Set {AUTO} or a whole number from 1 to {MOST_THREADS}")


def _check_temperature(name: str, value: object) -> None:
    check_number(name, value, finite=True, optional=True)
    if isinstance(value, int) and value >= 2**31:  # the limit of torch for integers
        raise invalid(name, value, f"Set at most {2**31 - 1}")


def _check_mass(name: str, value: object) -> None:
    if value is not None:
        check_positive(name, value, "a probability", most=1)


def _check_seed(name: str, value: int) -> None:
    if not -LARGEST_SEED <= value <= LARGEST_SEED:
        raise invalid(name, value, "Give at most 18 digits")


def _check_dtype(name: str, value: str) -> None:
    if value.removeprefix("torch.") not in DTYPES:
        raise unknown(name, value, DTYPES)


def option(default: Any, about: str, check: Callable[[str, Any], None] | None = None) -> Any:
    """Return the field of an option.

    Args:
        default: value if the option is not set.
        about: description on a help page.
        check: raises `UserError` for a value of the right type that the option does not allow.
    """
    return field(default=default, metadata={"about": about, "check": check})


_OPTIONAL_COUNT = partial(check_count, optional=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command that samples, without the plug-ins."""

    max_new_tokens: int | None = option(None, "length of the answer's canvas, in tokens", _OPTIONAL_COUNT)
    block_length: int | None = option(None, "shortcut for blocks.length", _OPTIONAL_COUNT)
    temperature: float | None = option(
        None, "draw tokens (guide.temperature.value); null: the likeliest", _check_temperature
    )
    top_k: int | None = option(None, "shortcut for guide.top_k.k, after the temperature", _OPTIONAL_COUNT)
    top_p: float | None = option(None, "shortcut for guide.top_p.p, after top_k", _check_mass)
    stop_token_ids: list[int] | int | None = option(
        None, "token id, or a list, that ends an answer as the model's own end-of-text tokens do"
    )
    seed: int = option(0, "prompt i of a run is sampled with seed + i, whatever its batch", _check_seed)
    batch_size: int = option(8, "prompts denoised together; changes no answer", partial(check_count, most=MOST_ROWS))
    batching: Literal["in_flight", "static"] = option(
        "in_flight",
        "an answered prompt is replaced by the next one in the batch; static: batch after batch",
        check_among(*BATCHING),
    )
    max_steps: int | None = option(None, "most steps of an answer; null: the scheduler's bound", _OPTIONAL_COUNT)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, mps")
    threads: int | Literal["auto"] = option(
        AUTO,
        "of each process on a CPU: a number, or auto: 1 for models below 20M parameters, else torch's own choice",
        check_threads,
    )
    dtype: str = option("auto", "auto (the checkpoint's), float32, bfloat16, float16, float64", _check_dtype)
    backend: Literal["auto", "triton", "torch"] = option(
        "auto", "kernels: triton, torch, or auto (triton on a GPU)", check_among("auto", "triton", "torch")
    )
    cuda_graph: bool | Literal["auto"] = option(
        False,
        "record each size of step as a CUDA graph and replay it: true, false, or auto (if possible)",
        check_among(True, False, "auto"),
    )
    compile: bool | Literal["step"] = option(
        False,
        "torch.compile: true compiles the model's layers, instead of Triton's kernels for them, and the step around"
        " the model; step compiles only the latter",
        check_among(True, False, "step"),
    )
    compat: bool = option(False, "allow every token, also the mask token, as published code does", check_switch)
    judge: Literal["draw", "best"] = option(
        "draw",
        "schedulers judge the drawn token, as published; best: they judge the likeliest one",
        check_among("draw", "best"),
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            if (check_one := one.metadata.get("check")) is not None:
                check_one(one.name, getattr(self, one.name))

    def of_sampler(self) -> SamplerOptions:
        """Return the values of the options that `Sampler` has, too."""
        return {name: getattr(self, name) for name in OF_SAMPLER}  # type: ignore[return-value]


_CHECKS = {one.name: one.metadata["check"] for one in fields(Options)} | {"entropy": check_switch}
OF_SAMPLER = tuple(one.name for one in fields(Options) if one.name in SamplerOptions.__annotations__)


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options of `Sampler` with wrong values. Plug-ins and end-of-text tokens are checked later."""
    for name, value in given.items():
        if (check_one := _CHECKS.get(name)) is not None:
            check_one(name, value)


def pages(command: type) -> list[tuple[str, Any, str]]:
    """Return the name, the default and the help of each option of a command."""
    return [(one.name, one.default, one.metadata["about"]) for one in fields(command)]


def check_known(options: Mapping[str, Any], *calls: Callable[..., Any]) -> None:
    """Refuse options that a sampler does not have.

    Args:
        options: the given options by name.
        calls: methods whose parameters may have been meant, too.

    Raises:
        TypeError: an option is unknown, as for an unknown keyword argument in Python.
    """
    known = SamplerOptions.__annotations__
    name = next((name for name in options if name not in known), None)
    if name is None:
        return
    others = {other: call for call in calls for other in signature(call).parameters if other not in ("self", "options")}
    if name in others:
        other = others[name].__name__
        raise TypeError(f"'{name}' is an option of {other}, not of this call. Pass it to {other}.")
    for group in config.GROUPS[1:]:
        if having := [one for one in config.names(group) if name in config.entry(group, one).settings]:
            text = f'{group}={{"name": "NAME", "{name}": {short(repr(options[name]))}}}'
            raise TypeError(f"'{name}' is a setting of a plug-in. Write {text}, where NAME is {' or '.join(having)}.")
    near = nearest(name, [*known, *others], 1)
    hint = f". Did you mean '{near[0]}'?" if near else "."
    raise TypeError(f"unknown option '{name}'{hint} The options are in the docstring of Sampler.")


def end_token_ids(given: Any, spec: ModelSpec) -> tuple[int, ...]:
    """Return `stop_token_ids`, a token id, a list of ids or None, as a tuple of ids.

    Raises:
        UserError: the value is something else, an id is outside the vocabulary, or is the mask token.
    """
    given = given.tolist() if hasattr(given, "tolist") else () if given is None else given
    try:
        several = given if isinstance(given, list | tuple | set | range) else [given]
        if any(isinstance(one, bool) for one in several):
            raise TypeError
        listed = [operator.index(one) for one in several]  # numpy's and torch's integers too
    except TypeError:
        way = "Set a token id, or a list of them as [5, 6]"
        raise invalid("stop_token_ids", given, way, "option-type") from None
    for token in listed:
        if not 0 <= token < spec.vocab_size:
            raise UserError(
                "token-outside-vocabulary",
                f"stop_token_ids has {token}, outside the vocabulary of {spec.vocab_size}. Remove it.",
            )
        if token == spec.mask_id:
            raise UserError("mask-token-given", f"stop_token_ids has {token}, the mask token. Remove it.")
    return tuple(listed)

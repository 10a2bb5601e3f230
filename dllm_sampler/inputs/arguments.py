"""Checks of the types of those arguments of `Sampler` that no other code checks before it uses them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static, signature
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dllm_sampler import config
from dllm_sampler.core.checks import check_count, check_switch
from dllm_sampler.core.naming import named
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, first_line, nearest, short


def check_name(model: object) -> None:
    """Refuse a model that is no name, path or settings, such as a module."""
    if isinstance(model, torch.nn.Module):
        raise UserError(
            f"from_pretrained loads a model by name, and a {type(model).__name__} is one: use"
            " Sampler(TransformerDenoiser(model, mask_id=..., eos_id=...))"
        )
    if not isinstance(model, str | PathLike | Mapping):
        raise UserError(f"model must be a name, a folder, a hub id or a settings dict, not a {type(model).__name__}")


def check_known(options: Mapping[str, Any], *calls: Callable[..., Any], current: Mapping[str, Any]) -> None:
    """Refuse options that a sampler does not have.

    Args:
        calls: methods whose parameters may have been meant, too.
        current: options that hold where these say nothing.

    Raises:
        TypeError: as Python's own for an argument that a function does not have.
    """
    known = config.Options.__annotations__
    name = next((name for name in options if name not in known), None)
    if name is None:
        return
    others = {other: call for call in calls for other in signature(call).parameters if other not in ("self", "options")}
    if name in others:
        raise TypeError(f"'{name}' is an option of {others[name].__name__}, and not of this call")
    fields = _plugin_fields()
    near = [name] if name in fields else nearest(name, [*known, *others], 1) or nearest(name, fields, 1, 0.8)
    meant = [_as_setting(fields[one], one, options[name], {**current, **options}) for one in near if one in fields]
    hint = meant[0] if meant else f"'{near[0]}'" if near else ""
    raise TypeError(f"unknown option '{name}'" + (f", did you mean {hint}?" if hint else ""))


def _plugin_fields() -> dict[str, dict[str, list[str]]]:
    """The fields of all plug-ins: for each the groups, and their choices, that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for group in config.GROUPS[1:]:
        for choice in config.names(group):
            for one in config.entry(group, choice).settings:
                if one != "_target_":
                    found.setdefault(one, {}).setdefault(group, []).append(choice)
    return found


def _as_setting(owners: Mapping[str, Sequence[str]], name: str, value: object, options: Mapping[str, Any]) -> str:
    """A field as it is written, in the settings of the plug-in that was chosen if that has it."""
    for group, choices in owners.items():
        spec = options.get(group)
        chosen = spec.get("name") if isinstance(spec, Mapping) else spec if isinstance(spec, str) else named(spec)
        if chosen in choices:
            break
    else:
        group, choices = next(iter(owners.items()))
        chosen = choices[0] if len(choices) == 1 else "NAME"
    text = f'{group}={{"name": "{chosen}", "{name}": {short(repr(value))}}}'
    return text if chosen != "NAME" else f"{text}, where NAME is one of {', '.join(choices)}"


def check_parts(denoiser: object, tokenizer: object, noise: Any) -> None:
    """Refuse a denoiser without a spec (a bare module), a tokenizer not of transformers, an incomplete `Noise`."""
    spec = _spec(denoiser)
    if not isinstance(spec, ModelSpec):
        raise UserError(
            f"a {type(denoiser).__name__} is no denoiser: wrap a Transformer in dllm_sampler.TransformerDenoiser, a"
            " masked LM of transformers by dllm_sampler.models.huggingface.wrap. Any other module or function is a"
            " model for Sampler.from_callable"
        )
    if spec.mask_id in spec.eos_ids:
        raise UserError(
            f"{type(denoiser).__name__}: mask_id and eos_id are both {spec.mask_id}. Give each the token that the model"
            " was trained with"
        )
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer must be a tokenizer of transformers, or None, not a {type(tokenizer).__name__}")
    methods = ("tokens", "order", "uniform", "ids")
    complete = not isinstance(noise, type) and all(callable(getattr(noise, one, None)) for one in methods)
    if noise is not None and not complete:
        raise UserError(
            f"noise must be a source of noise (dllm_sampler.CounterNoise()), or None, not a {type(noise).__name__}: for"
            " other random numbers give another seed"
        )


def _spec(denoiser: object) -> object:
    """Return the `spec` of a denoiser; None if it has none.

    Raises:
        UserError: the property raises an AttributeError, which `getattr` would take for a missing `spec`.
    """
    found = getattr_static(denoiser, "spec", None)
    if found is None:
        return getattr(denoiser, "spec", None)
    try:
        # A module would look elsewhere for an attribute whose property raises, and report that.
        return found.__get__(denoiser, type(denoiser)) if hasattr(type(found), "__get__") else found
    except AttributeError as error:
        raise UserError(
            f"the spec of a {type(denoiser).__name__} raises AttributeError: {first_line(error)}. Correct its property"
            " `spec`"
        ) from error


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options of the constructor that are of a wrong type."""
    check_count("max_steps", given["max_steps"], optional=True)
    check_count("poll_every", given["poll_every"])
    check_switch("compat", given["compat"])
    check_switch("entropy", given["entropy"])
    if isinstance(given["temperature"], int) and given["temperature"] >= 2**31:  # torch takes no larger integers
        raise UserError(f"temperature must be at most {2**31 - 1}, not {given['temperature']}")
    if not isinstance(given["compile"], bool) and given["compile"] != "step":
        raise UserError(f"compile must be true, false or step, not {given['compile']!r}")


def stop_token_ids(given: Any, spec: ModelSpec) -> tuple[int, ...]:
    """Return a user's end tokens as a tuple. None is none.

    Raises:
        UserError: something else than a token id of the model's or a list of them, or the mask token.
    """
    given = given.tolist() if hasattr(given, "tolist") else () if given is None else given
    try:
        several = given if isinstance(given, list | tuple | set | range) else [given]
        if any(isinstance(one, bool) for one in several):
            raise TypeError
        listed = [operator.index(one) for one in several]  # numpy's and torch's integers too
    except TypeError:
        raise UserError(
            f"stop_token_ids={given!r} is no token id or list of token ids. Write [5, 6], for example."
        ) from None
    for token in listed:
        if not 0 <= token < spec.vocab_size:
            raise UserError(
                f"stop_token_ids has the token id {token}, outside the vocabulary of {spec.vocab_size}. Give ids of"
                " this model's tokens."
            )
        if token == spec.mask_id:
            raise UserError(
                f"stop_token_ids has {token}, the mask token, which no answer contains. Leave it out of the list."
            )
    return tuple(listed)


def check_progress(progress: object) -> None:
    """Refuse what cannot be called."""
    if progress is not None and not callable(progress):
        raise UserError(f"progress must be a function, not {progress!r}")

"""Checks of the arguments of `Sampler` that are objects: the model, the tokenizer and the noise."""

from collections.abc import Mapping
from inspect import getattr_static
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, first_line


def check_name(model: object) -> None:
    """Refuse a model that is not a name, a path or settings, for example a module."""
    if isinstance(model, torch.nn.Module):
        raise UserError(
            "model-invalid",
            f"from_pretrained takes a name, but model is of type {type(model).__name__}. Use"
            " Sampler(TransformerDenoiser(...)).",
        )
    if not isinstance(model, str | PathLike | Mapping):
        raise UserError(
            "model-invalid", f"model is of type {type(model).__name__}. Give a name, a folder, a hub id or a dict."
        )


def check_parts(denoiser: object, tokenizer: object, noise: Any) -> None:
    """Refuse a denoiser without a spec (a plain module), a tokenizer not of transformers, or an incomplete `Noise`."""
    spec = _spec(denoiser)
    if not isinstance(spec, ModelSpec):
        said = f"The denoiser is of type {type(denoiser).__name__}, which has no ModelSpec `spec`. Use"
        way = "Sampler.from_pretrained, Sampler.from_callable, or dllm_sampler.models.huggingface.wrap for a network"
        raise UserError("model-invalid", f"{said} {way}.")
    if spec.mask_id in spec.eos_ids:
        raise UserError(
            "mask-token-invalid",
            f"{type(denoiser).__name__}: mask_id={spec.mask_id} is also an end-of-text token. Correct it or eos_id.",
        )
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            "option-type", f"tokenizer is of type {type(tokenizer).__name__}. Give a tokenizer of transformers."
        )
    methods = ("tokens", "order", "uniform", "ids")
    complete = not isinstance(noise, type) and all(callable(getattr(noise, one, None)) for one in methods)
    if noise is not None and not complete:
        raise UserError(
            "option-type",
            f"noise is of type {type(noise).__name__}. Give CounterNoise() or None, and set seed to draw other"
            " numbers.",
        )


def _spec(denoiser: object) -> object:
    """Return the `spec` of a denoiser, or None if it has none.

    Raises:
        UserError: the property `spec` raises an AttributeError, which `getattr` would report as a missing attribute.
    """
    found = getattr_static(denoiser, "spec", None)
    if found is None:
        return getattr(denoiser, "spec", None)
    try:
        # `torch.nn.Module.__getattr__` would hide the error of a property.
        return found.__get__(denoiser, type(denoiser)) if hasattr(type(found), "__get__") else found
    except AttributeError as error:
        raise UserError(
            "model-invalid",
            f"{type(denoiser).__name__}.spec raises an error: {first_line(error)}. Correct that property.",
        ) from error

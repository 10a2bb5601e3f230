"""Masked language models of transformers (BERT, RoBERTa, ModernBERT ...) as denoisers without a cache."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from dllm_sampler.core.checks import is_whole
from dllm_sampler.core.ends import end_ids
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import NoEffectWarning, UserError, counted, short
from dllm_sampler.models import adapter as adapters
from dllm_sampler.models import weights
from dllm_sampler.models.denoiser import check_tokens, checked_ends
from dllm_sampler.models.fields import check_numbers, config_error, end_tokens, ignorable, shown
from dllm_sampler.models.rows import RowsDenoiser, RowsModule


@dataclass(frozen=True)
class MaskedLMDenoiser(RowsDenoiser):
    """A denoiser that runs a masked LM on whole rows in every step.

    Rows are right-padded, so each model's default positions, relative or absolute, are right.

    Args:
        model: the module, used as it is (weights, mode and `requires_grad` untouched).
        mask_id, eos_id, pad_id: the special tokens, as in `TransformerDenoiser`.
        folder: folder of the checkpoint that the model was loaded from.
    """

    model: PreTrainedModel
    mask_id: int
    eos_id: int | Sequence[int]
    pad_id: int
    folder: Path | None = None

    def __post_init__(self) -> None:
        size = self.model.config.vocab_size
        vars(self)["eos_id"] = checked_ends(self.eos_id, size)
        check_tokens(size, mask_id=self.mask_id, pad_id=self.pad_id)

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model. A cache cannot run its layers, so `cacheable` is False."""
        config = self.model.config
        heads = getattr(config, "num_attention_heads", 1)
        eos_id, *others = end_ids(self.eos_id)
        return ModelSpec(
            vocab_size=config.vocab_size,
            mask_id=self.mask_id,
            eos_id=eos_id,
            other_eos_ids=tuple(others),
            pad_id=self.pad_id,
            max_positions=_max_positions(self.model),
            num_layers=getattr(config, "num_hidden_layers", 0),
            num_kv_heads=heads,
            head_dim=getattr(config, "hidden_size", heads) // heads,
            dtype=self.model.dtype,
            device=self.model.device,
            cacheable=False,
            folder=self.folder,
        )

    @override
    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask.long()).logits

    @override
    def module(self) -> MaskedLM:
        return MaskedLM(self.model)


class MaskedLM(RowsModule):
    """A masked LM with the call of a `Transformer`, for training."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @override
    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask.long()).logits


def load(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: torch.device,
    adapter: Path | None = None,
    eos_id: int | None = None,
) -> MaskedLMDenoiser:
    """Load a masked LM from a checkpoint folder, safetensors only, and merge an adapter into it if one is given.

    Args:
        eos_id: the setting `model.eos_id`, which replaces the checkpoint's end-of-text tokens. None keeps them.

    Raises:
        UserError: the checkpoint does not fit its config, or has no mask token or end-of-text token.
    """
    model = pretrained(AutoModelForMaskedLM, folder, "a masked language model", dtype)
    model = model.eval().to(device)
    if adapter is not None:
        adapters.merge(model, adapter)
    if eos_id is not None:
        return replace(_wrapped(model, tokenizer, {eos_id: "model.eos_id"}), folder=folder)
    generation = folder / "generation_config.json"
    places: dict[str, object] = {
        f"the tokenizer of {folder}": getattr(tokenizer, "eos_token_id", None),
        str(generation): weights.read_json(generation).get("eos_token_id") if generation.is_file() else None,
        str(folder / "config.json"): getattr(model.config, "eos_token_id", None),
    }
    return replace(_wrapped(model, tokenizer, end_tokens(places)), folder=folder)


def check_config(folder: Path) -> None:
    """Refuse a `config.json` that transformers cannot read. The tokenizer's loader would report a broken tokenizer.

    Raises:
        UserError: a field has a value that the model's class does not accept.
    """
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds
        raise config_error(folder / "config.json", f"transformers cannot read it ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """Return the kind and the text of an error, in one line."""
    return short(f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip("."), 300)


def pretrained(kind: Any, folder: Path, what: str, dtype: torch.dtype | None, **options: Any) -> Any:
    """Load a checkpoint folder by `kind.from_pretrained`, from safetensors only and without an adapter.

    Args:
        what: the kind of model, for errors.
        dtype: dtype of the weights. None means as stored.

    Raises:
        UserError: the checkpoint cannot be loaded as this kind of model, or does not fit its config.
    """
    source = folder / "config.json"
    if not source.is_file():
        raise UserError("checkpoint-incomplete", f"{folder} has no config.json. Name a folder with a checkpoint.")
    # First, so that pickles, broken files and absurd sizes get our messages: transformers builds before it compares.
    raw = weights.read_json(source)
    check_numbers(raw, weights.shapes(folder), str(source))
    if (generation := folder / "generation_config.json").is_file():
        weights.read_json(generation)
    options |= {"dtype": dtype or "auto", "use_safetensors": True, "ignore_mismatched_sizes": True}
    try:
        with adapters.base_alone(folder) as alone:
            model, report = kind.from_pretrained(alone, output_loading_info=True, **options)
    except Exception as error:  # transformers raises many kinds for a checkpoint that does not fit
        wrong = f"{folder}: transformers cannot load it as {what} ({_reason(error)})"
        way = "Correct its configuration, or use another checkpoint"
        raise UserError("checkpoint-config-invalid", f"{wrong}. {way}.") from None
    wrong = [f"{name} {list(has)} instead of {list(says)}" for name, has, says in sorted(report["mismatched_keys"])]
    weights.complain(folder, "has {} of another shape than its config.json says", wrong)
    weights.complain(folder, "lacks {} that its config.json needs", sorted(report["missing_keys"]))
    layers = sorted(name for name in report["unexpected_keys"] if re.search(r"layers?\.\d+\.", name))
    weights.complain(folder, "has {} of layers that its config.json does not have", layers)
    if getattr(model.config, "quantization_config", None) is None:  # else integers are what it should hold
        weights.check_floating(folder, [name for name, _ in model.named_parameters()])
    multiply_experts(model)
    if found := unread(model.config, raw):
        listing = ", ".join(f"{key} = {shown(value)}" for key, value in found.items())
        known = type(model.config).__name__
        count = counted(len(found), "field")
        warnings.warn(
            f"{source} has {count} that transformers' {known} does not use: {listing}. If the network depends on such"
            " a field, its answers are wrong.",
            NoEffectWarning,
            stacklevel=2,
        )
    return model


def unread(config: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a `config.json` about the network that the config's class in transformers drops."""
    found = dict[str, Any]()
    try:
        plain = type(config)()
    except Exception:  # some have no defaults, and check for themselves
        return found
    known = {*plain.to_dict(), *dir(type(plain))}
    for key, value in raw.items():
        if isinstance(value, dict) and key in config.sub_configs:
            inside = unread(getattr(config, key), value)
            found |= {f"{key}.{inner}": given for inner, given in inside.items()}
            continue
        again = any(key.endswith(name) and raw[name] == value for name in known & raw.keys())
        if not (key in known or again or ignorable(key, value) or value == "absolute" or _converts(plain, key, value)):
            found[key] = value
    return found


def _converts(plain: Any, key: str, value: Any) -> bool:
    """Return True if a config's class uses a field that it does not keep, for example an older name."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    for one in (value, value + 1) if number else (value,):  # one of two numbers is not the default
        try:
            made = type(plain)(**{key: one}).to_dict()
        except Exception:  # it was looked at
            return True
        if {name: found for name, found in made.items() if name != key} != plain.to_dict():
            return True
    return False


@cache
def cache_keyword(kind: type[nn.Module]) -> str:
    """Return the name under which a module class of transformers takes its cache of keys and values.

    It is `cache` from transformers 5.24 on, and `past_key_values` before. Code that comes with a checkpoint may have
    either with any release.
    """
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def multiply_experts(model: PreTrainedModel) -> None:
    """Make a float64 model multiply its experts one by one, since transformers' grouped product has no float64.

    That takes memory for a matrix per token and expert, so the implementation stays in other dtypes.
    """
    implementations = getattr(model, "get_experts_implementation", dict)()  # older versions have no choice
    if model.dtype == torch.float64 and "grouped_mm" in implementations.values():
        model.set_experts_implementation("batched_mm")


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, eos_id: int | Sequence[int] | None = None
) -> MaskedLMDenoiser:
    """Wrap a live masked LM as a denoiser. Its special tokens are the tokenizer's, or else those of its config.

    All end-of-text tokens of the tokenizer and the config end an answer. The tokenizer's is the one that is written. If
    neither has one, it is the separator, which ends texts of BERT, or else the padding token.

    Args:
        eos_id: further end-of-text tokens, before those of the config.

    Raises:
        UserError: the mask token or the end-of-text tokens are missing, or one of them is not a token of the model.
    """
    places: dict[str, object] = {
        "the tokenizer": getattr(tokenizer, "eos_token_id", None),
        "the argument eos_id": eos_id,
        "the model's config": getattr(model.config, "eos_token_id", None),
    }
    return _wrapped(model, tokenizer, end_tokens(places))


def _wrapped(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, listed: dict[int, str]
) -> MaskedLMDenoiser:
    """Return a masked LM as a denoiser with the end-of-text tokens `listed`, each with the place that names it."""

    def token(name: str) -> int | None:
        found = [getattr(source, name, None) for source in (tokenizer, model.config)]
        return next((value for value in found if is_whole(value)), None)

    mask_id = token("mask_token_id")
    named = getattr(model.config, "mask_token_id", None)
    kind = type(model).__name__
    if mask_id is None and named is not None:
        said = f"{kind}: mask_token_id of the model's config is {shown(named)}"
        raise UserError("mask-token-invalid", f"{said}. Set it to a token id.")
    if mask_id is None:
        said = f"{kind}: neither the tokenizer nor the model's config has a mask token"
        raise UserError("mask-token-missing", f"{said}. Set mask_token_id in the config.")
    pad_id = token("pad_token_id")
    if not listed:
        name = "pad_token_id" if token("sep_token_id") is None else "sep_token_id"
        last = token(name)
        if last is None:
            said = f"{kind}: neither the tokenizer nor the model's config has an end-of-text token"
            raise UserError("end-token-missing", f"{said}. Set eos_token_id in the config.")
        listed = {last: name}
    ends = tuple(listed)
    if mask_id in listed:
        raise UserError(
            "mask-token-invalid",
            f"{kind}: {mask_id} is the mask token, but also the end-of-text token ({listed[mask_id]}). Correct one.",
        )
    for end, place in listed.items():
        check_tokens(model.config.vocab_size, **{place: end})
    check_tokens(model.config.vocab_size, mask_token_id=mask_id, pad_token_id=pad_id)
    multiply_experts(model)
    return MaskedLMDenoiser(model, mask_id, ends, ends[0] if pad_id is None else pad_id)


def _max_positions(model: PreTrainedModel) -> int:
    """Return the number of tokens of the longest row. RoBERTa's positions start after the padding index."""
    size = getattr(model.config, "max_position_embeddings", 512)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    offset = getattr(table, "padding_idx", None)
    return size if offset is None else size - offset - 1

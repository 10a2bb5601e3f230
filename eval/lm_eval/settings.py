"""Settings of a sampler from the harness's `--model_args`, with every name and type checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from dllm_sampler import config, options
from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.options import option

PLUGINS = config.GROUPS[1:]
MODEL = ("revision", "trust_remote_code", "mask_id", "cfg_scale", "device_map", "causal_context", "adapter")


@dataclass(frozen=True, kw_only=True)
class Settings(options.Options):
    """Settings of the harness's model: `NAME=VALUE` in `--model_args`, with commas between them.

    `scheduler`, `blocks`, `stop`, `cache` and `guide` choose plug-ins. A field of one is `threshold`, or
    `scheduler.threshold` if several have it; `block_length` is `blocks.length`. Options and fields of a model are those
    of `dllm-eval`. Without `temperature`, `top_k` and `top_p` a request's own `do_sample` and `temperature` count.
    Texts of a task's `until` may be special tokens, and `stop_token_ids` adds further end-of-text tokens.

    The files of `conf/lm_eval` are for the harness's option `--config`.

    Args:
        pretrained: a model name, folder or hub id.
        max_new_tokens: tokens of an answer. Without it the request's `max_gen_toks`, or 256.
        likelihood: `bound` by Monte Carlo, or `exact` under the sampler's own settings (`Sampler.score`). One seed
            serves all requests, so that choices of equal length are compared under the same masks. Rolling
            likelihoods add up windows of the model's context.
        mc_num: masks drawn for a likelihood. The standard error falls with the square root of their number.
        mc_batch_size: masks per forward. None means `batch_size`.
        check_greedy: report for each likelihood if greedy decoding, one token per step, gives the text. It takes a
            forward per token. If false, the report is always no, and metrics that use it (LAMBADA's accuracy) are void.
        add_bos: put the BOS token before prompts if the tokenizer does not (Dream's base model).
        plugins, model: settings for `Sampler.from_pretrained`.
    """

    pretrained: str
    batch_size: int = option(1, "", partial(check_count, most=options.MOST_ROWS))
    likelihood: str = option("bound", "", options.check_among("bound", "exact"))
    mc_num: int = option(128, "", check_count)
    mc_batch_size: int | None = option(None, "", partial(check_count, optional=True))
    check_greedy: bool = True
    add_bos: bool = False
    plugins: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shortcuts(self) -> options.SamplerOptions:
        """Options of the sampler that differ from their defaults."""
        given = self.of_sampler().items()
        return {name: value for name, value in given if value != DEFAULTS[name]}  # type: ignore[return-value]

    def described(self) -> dict[str, Any]:
        """Return `choices` and `config` in the form of `run.json`: all settings that decide about answers."""
        model = {"path": self.pretrained, **self.model}
        choices = {"model": Path(self.pretrained).name}
        settings: dict[str, Any] = {"model": model, "max_new_tokens": self.max_new_tokens}
        settings |= {"seed": self.seed, "batching": self.batching}
        for group, default in _defaults().items():
            chosen = self.plugins.get(group, {"name": default})
            choices[group] = chosen["name"]
            settings[group] = {**config.entry(group, chosen["name"]).settings, **chosen}
        settings["guide"] = [] if choices["guide"] == "none" else [settings["guide"]]
        return {"choices": choices, "config": {**settings, **self.shortcuts}}


DEFAULTS = {one.name: one.default for one in fields(Settings)}
OWN = [name for name in DEFAULTS if name not in ("plugins", "model", "block_length")]


def parse(given: Mapping[str, Any]) -> Settings:
    """Return the settings that `--model_args` describe.

    Raises:
        UserError: `pretrained` is missing, a name is unknown or ambiguous, or a value has the wrong type.
    """
    rest = {key: value for key, value in given.items() if value is not None}
    rest["pretrained"] = str(rest.get("pretrained", ""))
    if not rest["pretrained"]:
        raise UserError("option-missing", "--model_args has no pretrained=NAME. Add it, for example pretrained=mini.")
    chosen: dict[str, dict[str, Any]] = {group: {"name": str(rest.pop(group))} for group in PLUGINS if group in rest}
    named: dict[str, dict[str, Any]] = {
        group: chosen.get(group, {"name": default}) for group, default in _defaults().items()
    }
    if "block_length" in rest:
        if "blocks.length" in rest:
            raise UserError(
                "options-conflict", "--model_args: block_length and blocks.length are the same field. Remove one."
            )
        rest["blocks.length"] = rest.pop("block_length")
    own: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for key, value in rest.items():
        if key == "batch_size":
            own[key] = _batch_size(value)
        elif key in OWN:
            own[key] = value
        elif key in MODEL:
            model[key] = value
        else:
            group, name = _place(key, named)
            known = config.entry(group, named[group]["name"]).settings[name]
            named[group][name] = float(value) if isinstance(known, float) and type(value) is int else value
            chosen[group] = named[group]
    return Settings(**config.check("--model_args", Settings, own), plugins=chosen, model=model)


def _defaults() -> dict[str, str]:
    return {group: name for group, name in config.defaults("eval").items() if group in PLUGINS}


def _place(key: str, named: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Return the group and the field that an argument such as `threshold` or `scheduler.threshold` names."""
    owned = {
        group: [name for name in config.entry(group, plugin["name"]).settings if name != "_target_"]
        for group, plugin in named.items()
    }
    group, dot, name = key.partition(".")
    if dot and group in owned:
        if name not in owned[group]:
            raise unknown(f"field of {group}={named[group]['name']}", name, owned[group])
        return group, name
    found = [group for group, names in owned.items() if key in names]
    if len(found) > 1:
        raise UserError(
            "option-ambiguous", f"--model_args: {' and '.join(found)} both have {key}. Write {found[0]}.{key}."
        )
    if not found:
        fields_of = [name for names in owned.values() for name in names]
        raise unknown("model argument", key, [*OWN, "block_length", *PLUGINS, *MODEL, *fields_of])
    return found[0], key


def _batch_size(value: Any) -> Any:
    """Return the harness's text `--batch_size` as a number. Raises `UserError` for `auto`."""
    if isinstance(value, str) and value.partition(":")[0] == "auto":
        raise UserError("option-type", f"batch_size={value} is not supported. Set a number, as in --batch_size 8.")
    return int(value) if isinstance(value, str) and value.isdecimal() else value

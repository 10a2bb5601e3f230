"""`--model_args` of the harness as our settings, every name and type checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_sampler import config
from dllm_sampler.cli import threads
from dllm_sampler.config import BATCHING
from dllm_sampler.errors import UserError, installing, unknown

PLUGINS = ("scheduler", "blocks", "stop", "cache", "guide")
SHORTCUTS = {"temperature": float, "top_k": int, "top_p": float, "compat": bool, "max_steps": int, "poll_every": int}
CHECKED = ("backend", "cuda_graph", "compile", "stop_token_ids")  # by the sampler
MODEL = ("revision", "trust_remote_code", "mask_id", "cfg_scale", "device_map", "causal_context", "adapter")


@dataclass(frozen=True)
class Settings:
    """What the harness's model is made of.

    pretrained: a model name, folder or hub id
    batch_size: prompts that are sampled together; it changes no answer
    batching: `in_flight`: an answer that ends gives its place to the next; `static`: batch after batch
    max_new_tokens: canvas of an answer; None: the request's `max_gen_toks`, or 256 where it has none
    seed: of sampling and of the likelihood's masks
    mc_num: masks drawn for a likelihood; the standard deviation falls with its root
    mc_batch_size: masks per forward; None: as `batch_size`
    check_greedy: whether a likelihood also says if one token per step, greedily, would give that text (a forward for
        each of its tokens); without, the answer is no, and metrics that count it (LAMBADA's accuracy) are void
    add_bos: begin prompts with the tokenizer's first-token mark where it does not do so itself (Dream's base model)
    threads: as of `dllm-sample`; the harness alone sets them, this class called from Python does not
    plugins, shortcuts, model: for `Sampler.from_pretrained`
    """

    pretrained: str
    batch_size: int = 1
    batching: str = "in_flight"
    max_new_tokens: int | None = None
    seed: int = 0
    mc_num: int = 128
    mc_batch_size: int | None = None
    check_greedy: bool = True
    add_bos: bool = False
    dtype: str | None = None
    device: str = "auto"
    threads: int | str = "auto"
    plugins: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    shortcuts: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        threads.check(self.threads)
        for name in ("batch_size", "max_new_tokens", "mc_num", "mc_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model_args: {name} must be at least 1, not {value}")
        if self.batching not in BATCHING:
            raise UserError(f"model_args: batching must be {' or '.join(BATCHING)}, not {self.batching!r}")

    def described(self) -> dict[str, Any]:
        """Return the choice of each group, and all settings that decide about answers, as `run.json` has them."""
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


OWN = [one.name for one in fields(Settings) if one.default is not MISSING or one.name == "pretrained"]


def harness() -> None:
    """Refuse to begin without lm-evaluation-harness."""
    if find_spec("lm_eval") is None:
        raise UserError(f"this command needs lm-evaluation-harness: {installing('eval')}")


def parse(given: Mapping[str, Any]) -> Settings:
    """Settings of what stands in `--model_args`.

    A plug-in's field is written `scheduler.threshold=0.9`, or `threshold=0.9` where only one of the chosen plug-ins has
    it; `block_length` is `blocks.length`.

    Raises:
        UserError: an unknown name (with the nearest), one that several have, or a value of the wrong type.
    """
    rest = {key: value for key, value in given.items() if value is not None}
    if "pretrained" not in rest:
        raise UserError("model_args need the model, as in pretrained=mini or pretrained=GSAI-ML/LLaDA-8B-Base")
    chosen: dict[str, dict[str, Any]] = {group: {"name": str(rest.pop(group))} for group in PLUGINS if group in rest}
    named: dict[str, dict[str, Any]] = {
        group: chosen.get(group, {"name": default}) for group, default in _defaults().items()
    }
    if "block_length" in rest:
        rest["blocks.length"] = rest.pop("block_length")
    own: dict[str, Any] = {}
    shortcuts: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for key, value in rest.items():
        if key == "batch_size":
            own[key] = _batch_size(value)
        elif key in OWN:
            own[key] = value
        elif key in SHORTCUTS:
            shortcuts[key] = _number(key, SHORTCUTS[key], value)
        elif key in CHECKED:
            shortcuts[key] = value
        elif key in MODEL:
            model[key] = _number(key, float, value) if key == "cfg_scale" else value
        else:
            group, name = _place(key, named)
            known = config.entry(group, named[group]["name"]).settings[name]
            named[group][name] = float(value) if isinstance(known, float) and type(value) is int else value
            chosen[group] = named[group]
    return Settings(**config.check("model_args", Settings, own), plugins=chosen, shortcuts=shortcuts, model=model)


def _defaults() -> dict[str, str]:
    return {"scheduler": "threshold", "blocks": "fixed", "stop": "prefix", "cache": "exact", "guide": "none"}


def _place(key: str, named: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Which plug-in a field belongs to."""
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
        raise UserError(f"model_args: {' and '.join(found)} both have a {key}: write {found[0]}.{key}")
    if not found:
        fields_of = [name for names in owned.values() for name in names]
        raise unknown("model argument", key, [*OWN, "block_length", *PLUGINS, *SHORTCUTS, *CHECKED, *MODEL, *fields_of])
    return found[0], key


def _batch_size(value: Any) -> Any:
    """The harness hands on `--batch_size` as a string, and searches for the size itself where it says `auto`."""
    if isinstance(value, str) and value.partition(":")[0] == "auto":
        raise UserError("batch_size=auto is not supported: name a number, as in --batch_size 8; it changes no answer")
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _number(key: str, kind: type, value: Any) -> Any:
    """A number; a whole one may stand for a fraction."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"model_args: {key} should be a {kind.__name__}, not {value!r}")
    return value

"""Construction of plug-ins from names and settings. The YAML files of `conf/` are the registry.

One YAML describes one plug-in. `_target_` names its class, the other keys are the class's fields with their defaults,
and the first comment is a sentence about it, with the paper.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from os import PathLike, fspath
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from dllm_sampler.core.naming import named, typed
from dllm_sampler.errors import UserError, as_typed, invalid, short, unknown
from dllm_sampler.host.functions import resolve, resolve_callable
from dllm_sampler.host.paths import expanded

PACKAGE = "dllm_sampler.conf"  # the packaged YAML files
GROUPS = ("model", "scheduler", "blocks", "stop", "cache", "guide", "particles")
# The base class of each group's plug-ins. It is named, not imported, since that would import torch.
BASES = {
    **{group: f"dllm_sampler.core.protocols:{group.title()}" for group in GROUPS[1:]},
    "task": "dllm_sampler.eval.tasks.base:Task",
    "train": "dllm_sampler.training.trainer:CommandTrainer",
}
CHECKPOINT = "checkpoint"  # conf/model/checkpoint.yaml, for a folder or a hub id without a YAML

# ${package:models/mini} in a YAML is a path inside the installed package, wherever that is.
OmegaConf.register_new_resolver("package", lambda path: str(files("dllm_sampler") / path), replace=True)


@dataclass(frozen=True)
class Entry:
    """One YAML of a group: its name, the sentence that describes it, the paper's arXiv id, and its settings."""

    name: str
    about: str
    paper: str | None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSettings:
    """The fields of a YAML of the group `model`.

    Args:
        path: a checkpoint folder or a hub id.
        revision: branch, tag or commit on the hub. null means the main branch.
        trust_remote_code: run the code that comes with the checkpoint's tokenizer.
        mask_id: the mask token, if the checkpoint does not name it.
        cfg_scale: strength of classifier-free guidance, which doubles the batch. 0 means no guidance.
        device_map: placement of the layers on devices: auto, balanced, balanced_low_0, or a device for each module.
        quantize: int8 stores the weights of the layers as 8-bit integers (docs/kernels.md). null keeps their type.
        causal_context: for Nemotron-Labs-Diffusion. With false, attention inside the prompt and inside each finished
            block is bidirectional.
        block_length: for Tiny-A2D, the length of blocks (bd3lm). null means attention to all tokens (mdlm).
        blocks_from: origin of these blocks: text (its first token), answer (towards both sides) or whole_prompt.
        adapter: folder or hub id of a peft adapter (LoRA) to merge into the weights. null uses the checkpoint's.
        eos_id: the end-of-text token, instead of those that the checkpoint names.
        stop_strings: texts that end an answer, besides those of a call.
        chat_template: a Jinja template for chat messages, instead of the checkpoint's.
        chat_options: variables of the chat template, for example {enable_thinking: false}.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    mask_id: int | None = None
    cfg_scale: float = 0.0
    device_map: str | dict[str, Any] | None = None
    quantize: str | None = None
    causal_context: bool | None = None
    block_length: int | None = None
    blocks_from: str = "answer"
    adapter: str | None = None
    eos_id: int | None = None
    stop_strings: tuple[str, ...] | None = None
    chat_template: str | None = None
    chat_options: dict[str, Any] | None = None


def names(group: str) -> list[str]:
    """Return the packaged choices of a configuration group, sorted, `none` first."""
    return [*_names(group)]


@cache
def _names(group: str) -> tuple[str, ...]:
    found = [Path(file.name).stem for file in _folder(group).iterdir() if file.name.endswith(".yaml")]
    return tuple(sorted(found, key=lambda name: (name != "none", name)))


@cache
def entry(group: str, name: str) -> Entry:
    """Return the YAML `conf/<group>/<name>.yaml`, with its interpolations resolved.

    Raises:
        UserError: the group has no such choice. The message names the nearest ones.
    """
    if name not in names(group):
        raise unknown(group, name, names(group))
    found = described(name, (_folder(group) / f"{name}.yaml").read_text(encoding="utf-8"))
    return replace(found, settings=resolved(found.settings))


def defaults(root: str) -> dict[str, Any]:
    """Return the choice of each group in `conf/<root>.yaml`."""
    return dict(_defaults(root))


@cache
def _defaults(root: str) -> tuple[tuple[str, Any], ...]:
    listed = described(root, (files(PACKAGE) / f"{root}.yaml").read_text(encoding="utf-8")).settings["defaults"]
    pairs = [pair for one in listed if isinstance(one, dict) for pair in one.items()]
    return tuple((str(group), name) for group, name in pairs if not str(group).startswith("override "))


def comment(text: str) -> str:
    """Return the first line of a YAML file that begins with `# `, without it and unless `@package` follows, or ""."""
    found = re.search(r"^# (?!@package)(.+)", text, re.MULTILINE)
    return found[1].strip() if found else ""


def described(name: str, text: str) -> Entry:
    """Return the entry for the text of a YAML file. Interpolations are not resolved."""
    about = comment(text)
    paper = re.search(r"arXiv (\d{4}\.\d{4,5})", about)
    settings = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(settings, dict):
        raise ValueError("it should have names with values, not a list")
    return Entry(name, about, paper[1] if paper else None, {str(key): value for key, value in settings.items()})


def resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with their interpolations resolved.

    Raises:
        OmegaConfBaseException: an interpolation names a key that does not exist.
    """
    if not _interpolates(settings):
        return settings
    found = OmegaConf.to_container(OmegaConf.create(settings), resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _interpolates(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_interpolates, value.values()))
    return any(map(_interpolates, value)) if isinstance(value, list) else isinstance(value, str) and "${" in value


def build(group: str, spec: object) -> Any:
    """Return the plug-in that `spec` describes.

    Args:
        group: `scheduler`, `blocks`, `stop`, `cache`, `guide` or `particles`.
        spec: a name (`"threshold"`), a dict (`{"name": "threshold", "threshold": 0.9}`) or a plug-in object. `None`
            means `none`, in a group that has it. For `guide` also a sequence of these, in the order in which they
            change logits.

    Returns:
        The plug-in, or for `guide` a tuple of plug-ins, which is empty for `none`.

    Raises:
        UserError: a name or field is unknown, or a value has the wrong type or is out of range.
    """
    if group == "guide":
        specs = spec if isinstance(spec, Sequence) and not isinstance(spec, str) else [spec]
        built = [_one(group, item) for item in specs]
        return tuple(guide for guide in built if guide is not None)
    return _one(group, spec)


def model(spec: str | PathLike[str] | Mapping[str, object]) -> dict[str, Any]:
    """Return the settings of a model: a value for each field of `ModelSettings`.

    Args:
        spec: a name of the group `model`, a checkpoint folder, a hub id (`org/name`), or a dict with `name` or
            `path` and any of the settings.

    Raises:
        UserError: the name is not a known name, a folder or a hub id, or a setting is wrong.
    """
    given = dict(spec) if isinstance(spec, Mapping) else {"name": fspath(spec)}
    name = str(given.pop("name", CHECKPOINT))
    if name not in names("model"):
        given, name = {"path": checkpoint(name), **given}, CHECKPOINT
    owner = "model" if name == CHECKPOINT else f"model={name}"
    if isinstance(adapter := given.get("adapter"), PathLike):
        given["adapter"] = fspath(adapter)
    made = ModelSettings(**check(owner, ModelSettings, {**entry("model", name).settings, **given}))
    if made.path == "???":  # as in conf/model/checkpoint.yaml
        raise UserError(
            "option-missing", 'The model settings have no name or path. Give one, for example {"name": "mini"}.'
        )
    if made.revision is not None and expanded("model.path", made.path).is_dir():
        raise UserError(
            "option-not-applicable",
            f"model.revision={made.revision} has no effect, because the model {made.path} is a folder. Remove"
            " model.revision.",
        )
    return vars(made)


def checkpoint(name: str) -> str:
    """Return the path of an existing folder, or a hub id `org/name` unchanged. Raises `UserError` for other names."""
    if (folder := expanded("model", name)).is_dir():
        return str(folder)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "~")):
        return name
    if "/" in name or name.startswith((".", "~")):
        raise UserError("model-not-found", f"The folder '{short(name)}' does not exist. Name a folder with a model.")
    known = [one for one in names("model") if one != CHECKPOINT]
    there = "See dllm-sample --info model, or name a folder or a hub id org/name"
    raise unknown("model", name, known, there)


def check(
    owner: str, target: Any, values: Mapping[str, object], whole: bool = False, path: str | None = None
) -> dict[str, Any]:
    """Return `values` as arguments of `target`, every name and type checked against its signature.

    Args:
        owner: name of the target in errors, for example `scheduler=threshold`. It is empty for options of a command.
        target: a class or a function.
        values: the arguments by name.
        whole: also require every argument without a default.
        path: beginning of the arguments' names in errors, for example `scheduler.`. By default it follows from `owner`.

    Raises:
        UserError: an argument is unknown, is missing, or has a wrong type.
    """
    parameters = _parameters(target)
    path = _path(owner) if path is None else path
    checked = {}
    for key, value in values.items():
        if key not in parameters:
            raise unknown(f"field of {owner}" if owner else "option", key, parameters)
        checked[key] = _typed(path + key, target, key, value)
    for key, one in parameters.items() if whole else ():
        if one.default is one.empty and key not in values and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise UserError("option-missing", f"{path}{key} is missing. Set it.")
    return checked


def _path(owner: str) -> str:
    """Return the beginning of the names of an owner's fields, for example `scheduler.` for `scheduler=threshold`."""
    if match := re.fullmatch(r"(\w+)=([^\s,]+)", owner):
        return f"guide.{match[2]}." if match[1] == "guide" else f"{match[1]}."
    return f"{owner}." if re.fullmatch(r"[\w.]+", owner) else f"{owner}: " if owner else ""


def plugin_class(owner: str, group: str, target: str) -> type:
    """Return the class that the `_target_` of a plug-in names. Its module is imported, and nothing is called.

    Args:
        owner: name of the plug-in in errors, for example `scheduler=threshold`.
        group: a key of `BASES`, for example `scheduler`.
        target: `package.module.Class`, as for `host.functions.resolve`.

    Raises:
        UserError: the class does not exist, or does not extend the group's base class.
    """
    found: Any = resolve_callable(f"{owner}: _target_ ", target)
    base = resolve(BASES[group])
    if not inspect.isclass(found) or found is base or not issubclass(found, base):
        raise UserError(
            "target-invalid",
            f"{owner}: _target_={target} is not a class that extends {base.__name__}. Name such a class.",
        )
    return found


def _one(group: str, spec: object, place: str | None = None) -> Any:
    """Return one plug-in, or None for `guide=none`. `place` is its name in errors, for example `scheduler.inner`."""
    if spec is None and "none" in names(group):
        spec = "none"
    if isinstance(spec, str):
        spec = {"name": spec}
    if isinstance(spec, DictConfig):
        spec = OmegaConf.to_container(spec, resolve=True)
    if not isinstance(spec, Mapping):
        return _made(group, spec)
    given = {str(key): value for key, value in spec.items()}
    name, target = given.pop("name", None), given.pop("_target_", None)
    if "_target_" in spec and not target:
        owner = f"{place or group}={name}" if name else place or group
        raise UserError("target-invalid", f"{owner}: _target_ is empty or missing. Write package.module.Class.")
    if target is None and name is None:
        wrong = f"{place or group}={as_typed(dict(spec))} has no name"
        raise UserError("option-missing", f'{wrong}. Give one, for example {{"name": "{names(group)[-1]}"}}.')
    if target is None:
        defaults = dict(entry(group, str(name)).settings)
        target = defaults.pop("_target_", None)
        given = {**defaults, **given}
    owner = f"{place or group}={name}" if name else place or group
    if target is None:  # guide=none
        if given:
            raise unknown(f"field of {owner}", next(iter(given)), [])
        return None
    cls = plugin_class(owner, group, str(target))
    path = _path(owner) if place is None else f"{place}."
    nested = {key: _nested(_hints(cls).get(key), value, path + key) for key, value in given.items()}
    for key, value in nested.items():
        _check_size(path + key, value)
    if name:
        typed(cls, str(name))
    arguments = check(owner, cls, nested, whole=True, path=path)
    try:
        return cls(**arguments)
    except UserError as error:
        if place is None:
            raise
        raise UserError(error.code, re.sub(rf"\b{group}\.(?=\w)", path, str(error))) from None


def _made(group: str, plugin: object) -> object:
    """Return a plug-in object after checking the types of its fields, like those of a YAML."""
    if is_dataclass(plugin) and not isinstance(plugin, type):
        for one in fields(plugin):
            if one.init:
                value = getattr(plugin, one.name)
                name = _path(f"{group}={named(plugin)}") + one.name
                _typed(name, type(plugin), one.name, value)
                _check_size(name, value)
    return plugin


def _check_size(name: str, value: object) -> None:
    if isinstance(value, int) and abs(value) >= 2**31:
        limit = 2**31 - 1
        raise invalid(name, value, f"Set a number from -{limit} to {limit}")


def _nested(hint: Any, value: object, place: str) -> Any:
    """Return the value of a field. If its type is `Scheduler` or `Cache`, a name or mapping becomes a plug-in."""
    kind = {"Scheduler": "scheduler", "Cache": "cache"}.get(getattr(hint, "__name__", ""))  # no import: it needs torch
    return value if kind is None or not isinstance(value, str | Mapping) else _one(kind, value, place)


@cache
def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `target` by name."""
    return inspect.signature(target).parameters


@cache
def _hints(target: Any) -> dict[str, Any]:
    """Return the types of the arguments of `target` by name, empty if any cannot be resolved."""
    try:
        typed = target if is_dataclass(target) or not inspect.isclass(target) else target.__init__
        return get_type_hints(typed, include_extras=True)
    except NameError:  # a type imported for the type checker only: nothing to check against
        return {}


@cache
def _adapter(target: Any, key: str) -> TypeAdapter[Any] | None:
    """Return the type check of one argument of `target`, or None without a type that can be checked."""
    if key not in _hints(target):
        return None
    try:
        return TypeAdapter(_hints(target)[key], config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # not a type that pydantic knows
        return None


def _typed(name: str, target: Any, key: str, value: object) -> Any:
    """Return `value` after a strict type check: text is not a number. A list is converted to a tuple if necessary."""
    hint = _hints(target).get(key)
    kinds = () if get_origin(hint) is list else (hint, *get_args(hint))
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        value = tuple(value)
    plain = _adapter(target, key)
    if plain is None:
        return value
    try:
        return plain.validate_python(value, strict=True)
    except ValidationError as error:
        kinds = [one["type"] for one in error.errors()]
        ranges = all(kind.startswith(("greater_than", "less_than", "finite_number")) for kind in kinds)
        code = "choice-unknown" if "literal_error" in kinds else "option-range" if ranges else "option-type"
        way = f"Set {expected(error)}"
        if "string_type" in kinds and isinstance(value, int | float):  # a shell removes its own quotes
            way += f""". In a shell, write {name}='"{as_typed(value, exact=True)}"'"""
        raise invalid(name, value, way, code, exact=True) from None


# Words of pydantic, and those of a message about a setting. The second word is for the items of a list.
_EXPECTED = {
    "a valid boolean": ("true or false", "true and false"),
    "a valid integer": ("a whole number", "whole numbers"),
    "a valid number": ("a number", "numbers"),
    "a valid string": ("a text", "texts"),
    "a valid list": ("a list as [a,b]", "lists"),
    "a valid tuple": ("a list as [a,b]", "lists"),
    "a valid dictionary": ("a mapping as {a: b}", "mappings"),
}


def expected(error: ValidationError) -> str:
    """Return a description of the right values, for example `a whole number`, with each type of a union once."""
    found = []
    for one in error.errors():
        message = one["msg"].removeprefix("Input should be ")
        plain, items = _EXPECTED.get(message, (message, f"values, each {message}"))
        if one["type"] == "literal_error":
            plain = plain.replace("'", "").replace("False", "false")
        elif match := re.fullmatch(r"an instance of (Scheduler|Cache)", message):
            kind = match[1].lower()
            plain = f"a {kind}: its name, or {{name: NAME}} with its fields"
        elif one["type"].startswith(("greater_than", "less_than")):
            plain = f"a number {plain}"
        if "[key]" in one["loc"]:
            plain = f"a mapping whose keys are {items}"
        elif any(isinstance(place, int) for place in one["loc"]):  # an item
            plain = f"a list of {items}"
        found.append(plain)
    named = [one for one in found if not one.startswith("an instance of ")]
    return ", or ".join(dict.fromkeys(named or found))


def _folder(group: str) -> Traversable:
    return files(PACKAGE) / group

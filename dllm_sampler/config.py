"""From names and settings to plug-ins: the YAML files of `conf/` are the registry.

One YAML is one plug-in: `_target_` names its class, the other keys are the class's fields and their defaults,
and the first comment says in one sentence what it is, with the paper.
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
from dllm_sampler.errors import UserError, short, unknown
from dllm_sampler.host.functions import resolve, resolve_callable
from dllm_sampler.host.paths import expanded

PACKAGE = "dllm_sampler.conf"  # the packaged YAML files
GROUPS = ("model", "scheduler", "blocks", "stop", "cache", "guide", "particles")
# What a class must extend that a YAML of the group names. Named, not imported: that would bring torch.
BASES = {
    **{group: f"dllm_sampler.core.protocols:{group.title()}" for group in GROUPS[1:]},
    "task": "dllm_sampler.eval.tasks.base:Task",
    "train": "transformers:Trainer",
}
CHECKPOINT = "checkpoint"  # conf/model/checkpoint.yaml: a folder or a hub id that has no YAML of its own

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
        revision: branch, tag or commit on the hub; null: its main branch.
        trust_remote_code: run the code that comes with the checkpoint's tokenizer.
        mask_id: the mask token, where the checkpoint does not name it.
        cfg_scale: strength of classifier-free guidance, which doubles the batch; 0: none.
        device_map: where the layers go, on several devices: auto, balanced, balanced_low_0, or modules and devices.
        quantize: int8: the weights of the layers as 8-bit integers (docs/kernels.md); null: as stored.
        causal_context: Nemotron-Labs-Diffusion; false: the prompt and each finished block see themselves whole.
        block_length: Tiny-A2D in blocks of this length (bd3lm). Without it each token sees everything (mdlm).
        blocks_from: where these are counted from: text (its first token), answer (towards both sides), whole_prompt.
        adapter: folder or hub id of an adapter of peft (LoRA), merged into the weights; null: the model's own, if any.
        eos_id: the end-of-text token, in place of those that the checkpoint names.
        stop_strings: texts that end an answer, besides those of a call.
        chat_template: a template of Jinja for chat messages, in place of the checkpoint's.
        chat_options: names that the chat template sees, for example {enable_thinking: false}.
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
        UserError: the group has no such choice; the message names the nearest ones.
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
    """Return the first comment of a YAML file's text, or an empty text."""
    found = re.search(r"^# (?!@package)(.+)", text, re.MULTILINE)
    return found[1].strip() if found else ""


def described(name: str, text: str) -> Entry:
    """Return the entry that a YAML file's text makes, with its interpolations."""
    about = comment(text)
    paper = re.search(r"arXiv (\d{4}\.\d{4,5})", about)
    settings = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(settings, dict):
        raise ValueError("it should have names with values, not a list")
    return Entry(name, about, paper[1] if paper else None, {str(key): value for key, value in settings.items()})


def resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with their interpolations resolved.

    Raises:
        OmegaConfBaseException: one of them names nothing.
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
    """The plug-in that `spec` stands for.

    Args:
        group: `scheduler`, `blocks`, `stop`, `cache`, `guide` or `particles`.
        spec: a name (`"threshold"`), a dict (`{"name": "threshold", "threshold": 0.9}`), or the object itself,
            which is handed back; `None` is the group's `none`. For `guide` also a sequence of these, in the
            order in which they rewrite the logits.

    Returns:
        The object; for `guide` always a tuple of objects, empty for `none`.

    Raises:
        UserError: an unknown name or field (with the nearest one), or a value of the wrong type.
    """
    if group == "guide":
        specs = spec if isinstance(spec, Sequence) and not isinstance(spec, str) else [spec]
        built = [_one(group, item) for item in specs]
        return tuple(guide for guide in built if guide is not None)
    return _one(group, spec)


def model(spec: str | PathLike[str] | Mapping[str, object]) -> dict[str, Any]:
    """The settings of a model: a value for each field of `ModelSettings`.

    Args:
        spec: a name of the group `model`, a checkpoint folder, a hub id (`org/name`), or a dict with `name` or
            `path` and any of the settings.

    Raises:
        UserError: neither a known name, nor a folder, nor written like a hub id.
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
            "option-missing", 'The model settings have no name or path. Give {"name": "mini"}, for example.'
        )
    if made.revision is not None and expanded(f"{owner}: path", made.path).is_dir():
        raise UserError(
            "option-not-applicable", f"{owner}: the folder {made.path} has no revision={made.revision}. Remove it."
        )
    return vars(made)


def checkpoint(name: str) -> str:
    """`name` if it can be a checkpoint: an existing folder, or a hub id written `org/name`."""
    if (folder := expanded("model", name)).is_dir():
        return str(folder)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "~")):
        return name
    if "/" in name or name.startswith((".", "~")):
        raise UserError("model-not-found", f"The folder '{short(name)}' does not exist. Name a folder with a model.")
    known = [one for one in names("model") if one != CHECKPOINT]
    there = "See dllm-sample --info model, or name a folder or a hub id org/name"
    raise unknown("model", name, known, there)


def check(owner: str, target: Any, values: Mapping[str, object], whole: bool = False) -> dict[str, Any]:
    """Return `values` as arguments of `target`, every name and type checked against its signature.

    Args:
        owner: what an error calls the target, as in `scheduler=threshold`; empty for the root's options.
        target: a class or a function.
        values: what it is to be called with.
        whole: with nothing besides: what has no default must be there.

    Raises:
        UserError: naming the argument and what it should be.
    """
    parameters = _parameters(target)
    checked = {}
    for key, value in values.items():
        if key not in parameters:
            raise unknown(f"field of {owner}" if owner else "option", key, parameters)
        checked[key] = _typed(f"{owner}: {key}" if owner else key, target, key, value)
    for key, one in parameters.items() if whole else ():
        if one.default is one.empty and key not in values and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise UserError("option-missing", f"{owner}: the field {key} is missing. Set it.")
    return checked


def plugin_class(owner: str, group: str, target: str) -> type:
    """Return the class that the `_target_` of a plug-in names. Its module is imported, and nothing is called.

    Args:
        owner: what an error calls the plug-in, as in `scheduler=threshold`.
        group: `scheduler`, `blocks`, `stop`, `cache`, `guide`, `task` or `train`.
        target: `package.module.Class`, as `core.functions.resolve` finds it.

    Raises:
        UserError: it does not exist, or is not a class of the group's plug-ins.
    """
    found: Any = resolve_callable(f"{owner}: _target_", target)
    base = resolve(BASES[group])
    if not inspect.isclass(found) or found is base or not issubclass(found, base):
        raise UserError("target-invalid", f"{owner}: _target_={target} is not a {base.__name__}. Extend that.")
    return found


def _one(group: str, spec: object) -> Any:
    """One plug-in from a name, a mapping or an object."""
    if spec is None:
        spec = "none"
    if isinstance(spec, str):
        spec = {"name": spec}
    if isinstance(spec, DictConfig):
        spec = OmegaConf.to_container(spec, resolve=True)
    if not isinstance(spec, Mapping):
        return _made(group, spec)
    given = {str(key): value for key, value in spec.items()}
    name, target = given.pop("name", None), given.pop("_target_", None)
    if "_target_" in spec and target is None:
        owner = f"{group}={name}" if name else group
        raise UserError("target-invalid", f"{owner}: _target_ is empty. Write package.module.Class.")
    if target is None and name is None:
        raise UserError("option-missing", f'{group} has no name. Give {{"name": "{names(group)[-1]}"}}.')
    if target is None:
        defaults = dict(entry(group, str(name)).settings)
        target = defaults.pop("_target_", None)
        given = {**defaults, **given}
    owner = f"{group}={name}" if name else str(target).rpartition(".")[2] or group
    if target is None:  # guide=none
        if given:
            raise unknown(f"field of {owner}", next(iter(given)), [])
        return None
    cls = plugin_class(owner, group, str(target))
    nested = {key: _nested(_hints(cls).get(key), value) for key, value in given.items()}
    for key, value in nested.items():
        _check_size(owner, key, value)
    if name:
        typed(cls, str(name))
    return cls(**check(owner, cls, nested, whole=True))


def _made(group: str, plugin: object) -> object:
    """A plug-in that was built in Python; the types of its fields are checked like those of a YAML."""
    if is_dataclass(plugin) and not isinstance(plugin, type):
        for one in fields(plugin):
            if one.init:
                value = getattr(plugin, one.name)
                _typed(f"{group}={named(plugin)}: {one.name}", type(plugin), one.name, value)
                _check_size(f"{group}={named(plugin)}", one.name, value)
    return plugin


def _check_size(owner: str, key: str, value: object) -> None:
    if isinstance(value, int) and abs(value) >= 2**31:
        raise UserError("option-range", f"{owner}: {key}={value} is too large. Set at most {2**31 - 1}.")


def _nested(hint: Any, value: object) -> Any:
    """A field of a plug-in: where a scheduler or a cache belongs, it is named like any other."""
    kind = {"Scheduler": "scheduler", "Cache": "cache"}.get(getattr(hint, "__name__", ""))  # no import: it needs torch
    return value if kind is None or not isinstance(value, str | Mapping) else _one(kind, value)


@cache
def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `target`."""
    return inspect.signature(target).parameters


@cache
def _hints(target: Any) -> dict[str, Any]:
    """The types of what `target` is called with: a dataclass's fields, or the annotations of `__init__`."""
    try:
        typed = target if is_dataclass(target) or not inspect.isclass(target) else target.__init__
        return get_type_hints(typed, include_extras=True)
    except NameError:  # a type imported for the type checker only: nothing to check against
        return {}


@cache
def _adapter(target: Any, key: str) -> TypeAdapter[Any] | None:
    """Return what checks one argument of `target`, or None if it has no type to check against."""
    if key not in _hints(target):
        return None
    try:
        return TypeAdapter(_hints(target)[key], config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a class of its own making: its constructor has judged
        return None


def _typed(what: str, target: Any, key: str, value: object) -> Any:
    """Check `value` strictly: text is not a number, nor a number a switch. A list counts as a tuple."""
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
        number = any(one["type"] == "string_type" and isinstance(one["input"], int | float) for one in error.errors())
        quote = ", in quotes" if number else ""
        ranges = all(one["type"].startswith(("greater_than", "less_than", "finite_number")) for one in error.errors())
        code = "option-range" if ranges else "option-type"
        raise UserError(code, f"{what} is {short(repr(value))}. Set {expected(error)}{quote}.") from None


def expected(error: ValidationError) -> str:
    """Return what would be right, in words; of a union, each of its types once."""
    found = []
    for one in error.errors():
        message = one["msg"].removeprefix("Input should be ").replace("a valid boolean", "true or false")
        message = message.replace("a valid integer", "a whole number").replace("a valid number", "a number")
        if any(isinstance(place, int) for place in one["loc"]):  # an item
            message = f"a list of {message.removeprefix('a ')}s"
        message = message.replace("a valid list", "a list as [a,b]")
        found.append(f"a number {message}" if message.startswith(("greater", "less")) else message)
    return ", or ".join(dict.fromkeys(found))


def _folder(group: str) -> Traversable:
    return files(PACKAGE) / group

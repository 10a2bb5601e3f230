"""Hydra's compose API, with its errors turned into one sentence each."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dllm_sampler import config
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.quoting import TEXTS, as_text, quoted, unreadable
from dllm_sampler.cli.shorthand import spelled_out
from dllm_sampler.errors import UserError, unknown

LOCAL = Path("conf")  # the user's own YAML files: found before the packaged ones


PACKAGED = "dllm_sampler.conf"

# What Hydra raises for input it does not like; the last two come from its own code, unprepared for it.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError)

# Values that are a path or a hub id are taken to the letter: Hydra's grammar has its own ideas of commas and brackets.
_LETTERS = r"model|model\.path|target|separator|prompts_file|output|report|prefix|suffix|infill"
_LITERAL = re.compile(rf"({_LETTERS})=(?!null\Z|['\"])(.+)\Z", re.DOTALL)


@dataclass(frozen=True)
class App:
    """A command that reads a configuration: its root is `conf/<root>.yaml`."""

    name: str
    root: str
    groups: tuple[str, ...]


SAMPLE = App("dllm-sample", "sample", (*config.GROUPS, "experiment"))
GROUPS = SAMPLE.groups
SEVERAL = ("guide", "experiment")  # groups of which a list can be chosen


LISTS = (*SEVERAL, "stop_strings", "forms")  # what can be a list


@dataclass(frozen=True)
class Composed:
    """A configuration as Hydra composed it, and the name that each group was set to."""

    tree: dict[str, Any]
    choices: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """A composed configuration: the root's options, and what each group was set to."""

    options: Options
    model: dict[str, Any]
    plugins: dict[str, object]  # group -> what `config.build` takes


def settings(overrides: Sequence[str]) -> Settings:
    """Compose `conf/sample.yaml` with the overrides.

    Raises:
        UserError: an override that cannot be read, or that names nothing there is.
    """
    composed = composition(SAMPLE, overrides)
    model, plugins = parts(composed)
    return Settings(Options(**config.check("", Options, composed.tree)), model, plugins)


def composition(app: App, overrides: Sequence[str]) -> Composed:
    """Compose an app's root with the overrides.

    Raises:
        UserError: an override that cannot be read, or that names nothing there is.
    """
    words = [word for given in spelled_out(overrides, holders) for word in literal(given)]
    parsed = [parse(word) for word in words]
    for override in parsed:
        if override.is_sweep_override():
            raise _several(app, str(override.input_line))
        group = override.key_or_group
        if group in app.groups and group not in SEVERAL and isinstance(override.value(), list):
            raise UserError(f"{override.input_line} names several, and there can be one only: say {group}=NAME")
        if group in SEVERAL:
            _check_package(group, override.value())
    try:
        cfg, chosen = _compose(app, words)
        tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except HYDRA_ERRORS as error:
        raise _explain(app, parsed, error) from error
    assert isinstance(tree, dict)
    return Composed({str(key): value for key, value in tree.items()}, chosen)


def choices(group: str) -> list[str]:
    """The names a group can be set to: the packaged ones, then those in `./conf`."""
    packaged = config.names(group)
    return packaged + [name for name in own(group) if name not in packaged]


def own(group: str) -> dict[str, Path]:
    """The user's own choices of a group: name to file, sorted. In a checkout of this project there are none."""
    if LOCAL.resolve() == Path(str(files(PACKAGED))).resolve():
        return {}
    return {file.stem: file for file in sorted((LOCAL / group).glob("*.yaml"))}


def entry(group: str, name: str) -> config.Entry:
    """The YAML of a choice: the user's own, else the packaged one.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    local = own(group).get(name)
    if local is not None:
        try:
            return config.described(name, local.read_text(encoding="utf-8"))
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"{local} cannot be read: {_first_line(error)}") from error
    if name not in config.names(group):
        raise unknown(group, name, choices(group))
    return config.entry(group, name)


def holders(group: str, field: str) -> list[str]:
    """The choices of a group that have a field of this name."""
    found = []
    for name in choices(group) if group in config.GROUPS else ():
        with suppress(UserError):  # a file of the user's that cannot be read
            if field in entry(group, name).settings:
                found.append(name)
    return found


class LocalFirst(SearchPathPlugin):
    """Puts `./conf` before the packaged configuration, and before nothing else."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See `SearchPathPlugin`."""
        packaged = any(str(part.path) == f"pkg://{PACKAGED}" for part in search_path.get_path())
        if packaged and LOCAL.is_dir():
            search_path.prepend("local", f"file://{LOCAL.resolve()}")


Plugins.instance().register(LocalFirst)


def _compose(app: App, words: list[str]) -> tuple[DictConfig, dict[str, Any]]:
    with initialize_config_module(PACKAGED, job_name=app.name, version_base="1.3"):
        cfg = compose(app.root, overrides=words, return_hydra_config=True)
    chosen = OmegaConf.to_container(cfg.hydra.runtime.choices)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    assert isinstance(chosen, dict)
    return cfg, {str(key): value for key, value in chosen.items()}


def parts(composed: Composed) -> tuple[dict[str, Any], dict[str, object]]:
    """Take the model's settings and the plug-ins out of a composed tree, which keeps the rest.

    Raises:
        UserError: one is missing.
    """
    tree, chosen = composed.tree, composed.choices
    plugins: dict[str, object] = {}
    model = tree.pop("model", None)
    if not isinstance(model, dict) or model.get("path") in (None, "???"):
        raise UserError("no model: say model=NAME, model=FOLDER or model=ORG/NAME")
    for group in config.GROUPS[1:]:
        found = tree.pop(group, None)
        plugins[group] = _guides(found) if group == "guide" else _plugin(group, found, chosen)
    return model, plugins


def _plugin(group: str, found: object, chosen: dict[str, Any]) -> object:
    if not isinstance(found, dict) or not found:
        raise UserError(f"no {group}: say {group}=NAME, with one of {', '.join(choices(group))}")
    return _inner(group, {"name": str(chosen.get(group)), **found})


def _inner(group: str, found: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's settings, in which a user's own scheduler inside it has its settings in place of its name."""
    inner = found.get("inner")
    given = {"name": inner} if isinstance(inner, str) else inner
    if group != "scheduler" or not isinstance(given, dict):
        return found
    if given.get("name") in own(group):
        given = {**entry(group, given["name"]).settings, **given}
    return {**found, "inner": _inner(group, given) if given != {"name": inner} else inner}


def _guides(found: object) -> list[object]:
    """The guides chosen by name, in their order."""
    guides: dict[str, dict[str, Any]] = {}
    for name, given in found.items() if isinstance(found, dict) else ():
        if not isinstance(given, dict):
            raise UserError(f"guide.{name} should be a guide's settings, as in guide={name}, not {given!r}")
        guides[str(name)] = given
    return [{"name": name, **given} for name, given in guides.items()]


def literal(word: str) -> Sequence[str]:
    """A word of the command line as Hydra should read it; a checkpoint that has no YAML becomes two words."""
    key, _, value = word.partition("=")
    if key in TEXTS and value:
        return [f"{key}={as_text(key, value, lambda text: readable(f'{key}={text}'))}"]
    match = _LITERAL.match(word)
    if not match:
        return [word]
    key, value = match.groups()
    if key != "model":
        return [f"{key}={quoted(value)}"]
    if value in choices("model") and value != config.CHECKPOINT:  # a folder may have that name
        return [word]
    return [f"model={config.CHECKPOINT}", f"model.path={quoted(config.checkpoint(value))}"]


def parse(word: str) -> Override:
    """An override as Hydra reads it.

    Raises:
        UserError: it cannot.
    """
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        raise UserError(unreadable(word)) from None


def readable(word: str) -> bool:
    """Whether Hydra can read an override."""
    try:
        parse(word)
    except UserError:
        return False
    return True


def _explain(app: App, parsed: list[Override], error: Exception) -> UserError:
    """Which override it was that Hydra did not like, and what was probably meant."""
    chosen: list[str] = []
    for override in parsed:
        key = override.key_or_group
        if key not in app.groups or override.package is not None:
            continue
        value = override.value()
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or name not in choices(key):
                return unknown(key, "" if name is None else str(name), choices(key))
            if isinstance(error, YAMLError):  # it does not say which file is no YAML
                entry(key, name)
        chosen.append(str(override.input_line))
    try:
        cfg, named = _compose(app, chosen)
    except HYDRA_ERRORS:
        return UserError(_first_line(error))
    known = OmegaConf.to_container(cfg, resolve=False)
    for override in parsed:
        if not override.is_add() and (wrong := _missing(app, override.key_or_group, known, named)):
            return wrong
    return UserError(_first_line(error))


def _check_package(group: str, names: object) -> None:
    """Refuse a user's own guide or experiment whose YAML does not say where its settings go."""
    package = "_global_" if group == "experiment" else "guide."
    for name in names if isinstance(names, list) else [names]:
        file = own(group).get(str(name))
        if file is not None and not re.search(
            rf"^# *@package {package}", file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            full = package + str(name) * (group == "guide")
            raise UserError(f"{file} should begin with the line '# @package {full}', so that its settings are found")


def _several(app: App, word: str) -> UserError:
    """The error for `key=a,b` where one value is wanted."""
    key, _, value = word.partition("=")
    listed = key in LISTS or "." in key
    sweep = "; dllm-eval runs every one of several" if app is SAMPLE else ""
    return UserError(f"{word} gives several values: give one{f', or a list as {key}=[{value}]' * listed}{sweep}")


def _missing(app: App, key: str, known: Any, chosen: Mapping[str, object]) -> UserError | None:
    """The error for a dotted key that `known` does not have, or None."""
    first, *rest = key.split(".")
    if first not in known:
        paths = {name: name for name in known}
        paths |= {
            leaf: f"{group}.{leaf}" for group in app.groups for leaf in _leaves(known.get(group)) if leaf not in paths
        }
        where = next((group for group in app.groups if holders(group, first)), None)
        if where is not None and first not in paths:
            others, inside = holders(where, first), ".NAME" * (where == "guide")
            name = others[0] if len(others) == 1 else "NAME"
            return UserError(
                f"unknown option '{first}': {where}={chosen.get(where)} has no such field; say {where}={name}"
                f" {where}{inside.replace('NAME', name)}.{first}=VALUE"
                + (f", where NAME is one of {', '.join(others)}" if len(others) > 1 else "")
            )
        near = [paths[name] for name in get_close_matches(first, paths, n=2)]
        hint = f", did you mean {' or '.join(near)}?" if near else ""
        prompt = "; a prompt may follow --" if app is SAMPLE else ""
        return UserError(f"unknown option '{first}'{hint} ({app.name} --help lists them{prompt})")
    at, node = f"{first}={chosen[first]}" if first in chosen else first, known[first]
    for part in rest:
        if not isinstance(node, dict) or part not in node:
            wrong = unknown(f"field of {at}", part, _leaves(node))
            if first == "guide" and node is known[first] and part in choices(first):
                return UserError(f"guide.{part} sets a guide that is not chosen: add guide={part}")
            others = holders(first, part) if node is known[first] else []
            return UserError(f"{wrong}; those that have it are {first}={', '.join(others)}") if others else wrong
        # Guides have their names between the group's and the field's: several may be given.
        at, node = f"guide={part}" if first == "guide" and node is known[first] else f"{at}.{part}", node[part]
    return None


def _leaves(node: object) -> list[str]:
    return [str(name) for name in node if name != "_target_"] if isinstance(node, dict) else []


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")

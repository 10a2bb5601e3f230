"""Hydra's compose API, with its errors turned into one sentence each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dllm_sampler import config
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.quoting import TEXTS, as_text, quoted, unreadable
from dllm_sampler.cli.shorthand import spelled_out
from dllm_sampler.cli.yours import PACKAGED, check, choices, entry, holders, own
from dllm_sampler.errors import UserError, first_line, nearest, short, unknown
from dllm_sampler.host.files import uninterrupted

# What Hydra raises for input it does not like; from YAMLError on they come from its own code, unprepared for it.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, OSError, RecursionError)

# Values that are a path or a hub id are taken to the letter: Hydra's grammar has its own ideas of commas and brackets.
_LETTERS = r"model|model\.path|target|separator|prompts_file|output|report|prefix|suffix|infill"
_LITERAL = re.compile(rf"({_LETTERS})=(?!null\Z|['\"])(.+)\Z", re.DOTALL)

# Hydra's own groups, which nothing here reads: without them composing takes a quarter less time.
_UNREAD = [
    f"~hydra/{group}"
    for group in ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging")
]


@dataclass(frozen=True)
class App:
    """A command that reads a configuration: its root is `conf/<root>.yaml`."""

    name: str
    root: str
    groups: tuple[str, ...]


SAMPLE = App("dllm-sample", "sample", (*config.GROUPS, "experiment"))
GROUPS = SAMPLE.groups
SEVERAL = ("guide", "experiment")  # groups of which a list can be chosen


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
    config.model(model)  # a mistake in it shows here
    return Settings(Options(**config.check("", Options, composed.tree)), model, plugins)


def composition(app: App, overrides: Sequence[str]) -> Composed:
    """Compose an app's root with the overrides.

    Raises:
        UserError: an override that cannot be read, or that names nothing there is.
    """
    words = [word for given in spelled_out(overrides, holders) for word in literal(given)]
    parsed: list[Override] = []
    unread: tuple[str, UserError] | None = None  # the first word that cannot be read, and why
    for word in words:
        try:
            parsed.append(parse(word))
        except UserError as error:
            unread = unread or (word, error)
    for override in parsed:
        if override.is_sweep_override():
            raise several(app, str(override.input_line))
        group = override.key_or_group
        if re.match(r"hydra([./@]|\Z)", group):
            raise UserError(f"{override.input_line} sets how Hydra runs, which {app.name} decides itself: leave it out")
        if group in app.groups and group not in SEVERAL and isinstance(override.value(), list):
            raise UserError(f"{override.input_line} names several, and there can be one only: say {group}=NAME")
        if group in SEVERAL:
            check_named(group, override.value())
    if unread is not None:
        raise _unreadable(app, parsed, *unread)
    try:
        cfg, chosen = _compose(app, words)
        tree = config.resolved(cfg)
    except HYDRA_ERRORS as error:
        raise _explain(app, parsed, error) from error
    assert isinstance(tree, dict)
    for group in app.groups:
        check(group, str(chosen.get(group)))
    guides = tree.get("guide")
    for name in guides if isinstance(guides, dict) else ():  # Hydra does not tell what a list named
        check("guide", str(name))
    return Composed({str(key): value for key, value in tree.items()}, chosen)


def _compose(app: App, words: list[str]) -> tuple[DictConfig, dict[str, Any]]:
    # OmegaConf cleans up after an exception: Ctrl-C at the wrong moment would end as an AttributeError of its own.
    with uninterrupted(), initialize_config_module(PACKAGED, job_name=app.root, version_base="1.3"):
        cfg = compose(app.root, overrides=[*words, *_UNREAD], return_hydra_config=True)
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
    return _inner(group, _from_file(str(chosen.get(group)), found))


def _from_file(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """What a choice's file says; `config.build` must not look elsewhere for a class that it lacks."""
    return {"name": name, "_target_": None, **found}


def _inner(group: str, found: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's settings, in which a user's own scheduler inside it has its settings in place of its name."""
    inner = found.get("inner")
    given = {"name": inner} if isinstance(inner, str) else inner
    if group != "scheduler" or not isinstance(given, dict):
        return found
    check(group, str(given.get("name")))
    if given.get("name") in own(group):
        given = _from_file(given["name"], {**entry(group, given["name"]).settings, **given})
    return {**found, "inner": _inner(group, given) if given != {"name": inner} else inner}


def _guides(found: object) -> list[object]:
    """The guides chosen by name, in their order."""
    guides: dict[str, dict[str, Any]] = {}
    for name, given in found.items() if isinstance(found, dict) else ():
        if not isinstance(given, dict):
            raise UserError(f"guide.{name} should be a guide's settings, as in guide={name}, not {given!r}")
        guides[str(name)] = given
    return [_from_file(name, given) for name, given in guides.items()]


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
    except (HydraException, RecursionError):
        raise UserError(unreadable(word)) from None


def readable(word: str) -> bool:
    """Whether Hydra can read an override."""
    try:
        parse(word)
    except UserError:
        return False
    return True


def _unreadable(app: App, parsed: list[Override], word: str, why: UserError) -> UserError:
    """What is wrong with an override that Hydra cannot read: its key, a name that another word chooses, or `why`."""
    key = word.partition("=")[0]
    if len(word) > 1000 or not readable(f"{key}=null"):
        return why
    emptied = parse(f"{key}=null")
    return _explain(app, parsed if emptied.key_or_group in app.groups else [*parsed, emptied], why)


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
            if isinstance(error, YAMLError) or type(error) is ValueError:  # it does not name the file
                entry(key, name)
        chosen.append(str(override.input_line))
    try:
        cfg, named = _compose(app, chosen)
    except HYDRA_ERRORS:
        return UserError(first_line(error))
    known = OmegaConf.to_container(cfg, resolve=False)
    for override in parsed:
        value = short(str(override.input_line).partition("=")[2])
        if not override.is_add() and (wrong := missing(app, override.key_or_group, known, named, value)):
            return wrong
    inner = getattr(error.__cause__, "full_key", None)  # of a field inside a value, as a in guide.choices={a: b}
    return (missing(app, inner, known, named) if inner else None) or UserError(first_line(error))


# Mistakes in the words of a command line.

LISTS = ("guide", "experiment", "stop_strings", "stop_token_ids", "forms")  # what can be a list


def check_named(group: str, names: object) -> None:
    """Refuse a guide that is named twice, and a user's own guide or experiment that is not trusted, or whose YAML does
    not say where its settings go."""
    repeated = next((name for name in names if names.count(name) > 1), None) if isinstance(names, list) else None
    if group == "guide" and repeated is not None:
        raise UserError(
            f"guide=[...] names {repeated} twice, and a command has one set of settings for it: name it once"
        )
    package = "_global_" if group == "experiment" else "guide."
    for name in names if isinstance(names, list) else [names]:
        check(group, str(name))
        file = own(group).get(str(name))
        if file is not None and not re.search(rf"^# *@package {package}", _text(file), re.MULTILINE):
            full = package + str(name) * (group == "guide")
            raise UserError(f"{file} should begin with the line '# @package {full}', so that its settings are found")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no file any more, or no UTF-8
        raise UserError(f"{file} cannot be read: {error}") from error


def several(app: App, word: str) -> UserError:
    """The error for `key=a,b` where one value is wanted."""
    key, _, value = word.partition("=")
    listed = key in LISTS or "." in key
    sweep = "; dllm-eval runs every one of several" if app.name == "dllm-sample" else ""
    return UserError(f"{word} gives several values: give one{f', or a list as {key}=[{value}]' * listed}{sweep}")


def missing(app: App, key: str, known: Any, chosen: Mapping[str, object], value: str = "VALUE") -> UserError | None:
    """The error for a dotted key that `known` does not have, or None; `value` is what was to be set."""
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
                f" {where}{inside.replace('NAME', name)}.{first}={value}"
                + (f", where NAME is one of {', '.join(others)}" if len(others) > 1 else "")
            )
        if app.name == "dllm-sample" and first in ("prompt", "prompts"):
            return UserError(
                f"unknown option '{first}': a prompt is written without a name. Type it alone in quotes, after -- if it"
                " looks like an option, or name a file with several by prompts_file=FILE"
            )
        near = [paths[name] + f"={value}" * (paths[name] != name) for name in nearest(first, paths)]
        hint = f", did you mean {' or '.join(near)}?" if near else ""
        prompt = "; a prompt may follow --" if app.name == "dllm-sample" else ""
        return UserError(f"unknown option '{first}'{hint} ({app.name} --help lists them{prompt})")
    at, node = f"{first}={chosen[first]}" if first in chosen else first, known[first]
    for part in rest:
        if not isinstance(node, dict) or part not in node:
            fields = _leaves(node)
            if first == "guide" and node is known[first]:
                if part in choices(first):
                    return UserError(f"guide.{part} sets a guide that is not chosen: add guide={part}")
                if len(rest) > 1:
                    return unknown("guide", part, choices(first))
                # Names of guides may be left out before their fields.
                names, fields = fields, [*dict.fromkeys(leaf for one in node.values() for leaf in _leaves(one))]
                if nearest(part, names) and not nearest(part, fields):
                    return unknown("guide", part, choices(first))
            wrong = unknown(f"field of {at}", part, fields)
            others = holders(first, part) if node is known[first] else []
            return UserError(f"{wrong}; those that have it are {first}={', '.join(others)}") if others else wrong
        # Guides have their names between the group's and the field's: several may be given.
        at, node = f"guide={part}" if first == "guide" and node is known[first] else f"{at}.{part}", node[part]
    return None


def _leaves(node: object) -> list[str]:
    return [str(name) for name in node if name != "_target_"] if isinstance(node, dict) else []

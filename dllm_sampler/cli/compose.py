"""Hydra's compose API, with its errors turned into one sentence each."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dllm_sampler import config
from dllm_sampler.cli.options import Options
from dllm_sampler.errors import UserError, unknown

GROUPS = (*config.GROUPS, "experiment")
LOCAL = Path("conf")  # the user's own YAML files, beside the packaged ones


# What Hydra raises for input it does not like; the last two come from its own code, unprepared for it.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError)

# Values that are a path or a hub id are taken to the letter: Hydra's grammar has its own ideas of commas and brackets.
_LITERAL = re.compile(r"(model|model\.path|target|separator|prompts_file|output)=(?!null\Z|['\"])(.+)\Z", re.DOTALL)


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
    words = [word for given in overrides for word in _literal(given)]
    parsed = [_parse(word) for word in words]
    try:
        composed = _compose(words)
        tree = OmegaConf.to_container(composed.cfg, resolve=True, throw_on_missing=False)
    except HYDRA_ERRORS as error:
        raise _explain(parsed, error) from error
    assert isinstance(tree, dict)
    return _settings({str(key): value for key, value in tree.items()}, composed.choices)


def choices(group: str) -> list[str]:
    """The names a group can be set to: the packaged ones, then those in `./conf`."""
    packaged = config.names(group)
    local = sorted(file.stem for file in (LOCAL / group).glob("*.yaml"))
    return packaged + [name for name in local if name not in packaged]


@dataclass(frozen=True)
class _Composed:
    cfg: DictConfig
    choices: dict[str, Any]


def _compose(words: list[str]) -> _Composed:
    search = [f"hydra.searchpath=['file://{_quoted(str(LOCAL.resolve()))}']"] if LOCAL.is_dir() else []
    with initialize_config_module("dllm_sampler.conf", job_name="dllm-sample", version_base="1.3"):
        cfg = compose("sample", overrides=[*search, *words], return_hydra_config=True)
    chosen = OmegaConf.to_container(cfg.hydra.runtime.choices)
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    assert isinstance(chosen, dict)
    return _Composed(cfg, {str(key): value for key, value in chosen.items()})


def _settings(tree: dict[str, Any], chosen: dict[str, Any]) -> Settings:
    plugins: dict[str, object] = {}
    model = tree.pop("model", None)
    if not isinstance(model, dict) or model.get("path") in (None, "???"):
        raise UserError("no model: say model=NAME, model=FOLDER or model=ORG/NAME")
    for group in config.GROUPS[1:]:
        found = tree.pop(group, None)
        plugins[group] = _guides(found) if group == "guide" else _plugin(group, found, chosen)
    return Settings(Options(**config.check("", Options, tree)), model, plugins)


def _plugin(group: str, found: object, chosen: dict[str, Any]) -> object:
    if not isinstance(found, dict) or not found:
        raise UserError(f"no {group}: say {group}=NAME, with one of {', '.join(choices(group))}")
    return {"name": str(chosen.get(group)), **found}


def _guides(found: object) -> list[object]:
    """The guides chosen by name, in their order."""
    guides: dict[str, dict[str, Any]] = {}
    for name, given in found.items() if isinstance(found, dict) else ():
        if not isinstance(given, dict):
            raise UserError(f"guide.{name} should be a guide's settings, as in guide={name}, not {given!r}")
        guides[str(name)] = given
    return [{"name": name, **given} for name, given in guides.items()]


def _literal(word: str) -> Iterable[str]:
    """A word of the command line as Hydra should read it; a checkpoint that has no YAML becomes two words."""
    match = _LITERAL.match(word)
    if not match:
        return [word]
    key, value = match.groups()
    if key != "model":
        return [f"{key}='{_quoted(value)}'"]
    if value in choices("model"):
        return [word]
    return [f"model={config.CHECKPOINT}", f"model.path='{_quoted(config.checkpoint(value))}'"]


def _quoted(value: str) -> str:
    """`value` as the inside of a single-quoted string of Hydra's grammar, interpolation switched off."""
    value = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value)
    return re.sub(r"(\\+)\Z", lambda match: match[1] * 2, value).replace("${", r"\${")


def _parse(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        value = word.partition("=")[2]
        raise UserError(
            f"cannot read the override {word}: quote its value, as in {word.partition('=')[0]}='\"{value}\"', "
            "or put -- before it if it is a prompt"
        ) from None
    if override.is_sweep_override():
        raise UserError(f"{word} gives several values: give one, or quote it, or write a list as [a,b]")
    return override


def _explain(parsed: list[Override], error: Exception) -> UserError:
    """Which override it was that Hydra did not like, and what was probably meant."""
    chosen: list[str] = []
    for override in parsed:
        key = override.key_or_group
        if key not in GROUPS or override.package is not None:
            continue
        value = override.value()
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or name not in choices(key):
                return unknown(key, "" if name is None else str(name), choices(key))
        chosen.append(str(override.input_line))
    try:
        composed = _compose(chosen)
    except HYDRA_ERRORS:
        return UserError(_first_line(error))
    known = OmegaConf.to_container(composed.cfg, resolve=False)
    for override in parsed:
        if not override.is_add() and (wrong := _missing(override.key_or_group, known, composed.choices)):
            return wrong
    return UserError(_first_line(error))


def _missing(key: str, known: Any, chosen: Mapping[str, object]) -> UserError | None:
    """The error for a dotted key that `known` does not have, or None."""
    first, *rest = key.split(".")
    if first not in known:
        paths = {name: name for name in known}
        paths |= {
            leaf: f"{group}.{leaf}" for group in GROUPS for leaf in _leaves(known.get(group)) if leaf not in paths
        }
        near = [paths[name] for name in get_close_matches(first, paths, n=2)]
        hint = f", did you mean {' or '.join(near)}?" if near else ""
        return UserError(f"unknown option '{first}'{hint} (dllm-sample --help lists them; a prompt may follow --)")
    at, node = f"{first}={chosen[first]}" if first in chosen else first, known[first]
    for part in rest:
        if not isinstance(node, dict) or part not in node:
            return unknown(f"field of {at}", part, _leaves(node))
        at, node = f"{at}.{part}", node[part]
    return None


def _leaves(node: object) -> list[str]:
    return [str(name) for name in node if name != "_target_"] if isinstance(node, dict) else []


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")

"""What is wrong with words that Hydra cannot compose, and what was probably meant, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_sampler.cli.yours import check, choices, holders, own
from dllm_sampler.errors import UserError, nearest, unknown

if TYPE_CHECKING:
    from dllm_sampler.cli.compose import App

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

"""A command's configuration, composed from YAML files and the words of a command line."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf.errors import OmegaConfBaseException

from dllm_sampler import config
from dllm_sampler.cli import recommended
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.user_files import check, choices, entry, holders, own, read
from dllm_sampler.cli.words import literal, parse, readable, spelled_out
from dllm_sampler.errors import UserError, as_typed, first_line, nearest, short, unknown
from dllm_sampler.host.files import uninterrupted
from dllm_sampler.options import Options as CommonOptions


@dataclass(frozen=True)
class App:
    """A command with a configuration. `conf/<root>.yaml` chooses its plug-ins, and a dataclass has its options."""

    name: str
    root: str
    groups: tuple[str, ...]
    options: type | None = None


SAMPLE = App("dllm-sample", "sample", (*config.GROUPS, "experiment"), Options)
GROUPS = SAMPLE.groups
SEVERAL = ("guide", "experiment")  # groups that take a list


@dataclass(frozen=True)
class Composed:
    """A composed configuration, and the name that each group was set to."""

    tree: dict[str, Any]
    choices: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """A checked configuration of `dllm-sample`: its options, its model and its plug-ins."""

    options: Options
    model: dict[str, Any]
    plugins: dict[str, object]  # group -> argument of `config.build`


def settings(overrides: Sequence[str]) -> Settings:
    """Return the settings of `dllm-sample` under the overrides of a command line.

    Raises:
        UserError: an override cannot be read, names an unknown option or choice, or has a wrong value.
    """
    composed = composition(SAMPLE, overrides)
    model, plugins = parts(composed)
    config.model(model)  # checks it
    return Settings(Options(**config.check("", Options, composed.tree)), model, plugins)


def composition(app: App, overrides: Sequence[str]) -> Composed:
    """Compose an app's root with the overrides.

    Packaged files are read once per process. A file of the user's is read only if a word or another file that is read
    names it. The syntax is Hydra's: a defaults list chooses files, and a word sets, adds (`+`) or removes (`~`) a
    field.

    Raises:
        UserError: an override cannot be read, has several values, or names an unknown option or choice.
    """
    known = recommended.expand(spelled_out(overrides), str(config.defaults(app.root).get("model")))
    words = [word for given in known for word in literal(given)]
    parsed: list[Override] = []
    unread: UserError | None = None  # about the first word that cannot be read
    for word in words:
        try:
            override = parse(word)
            if not override.key_or_group:
                raise UserError("option-syntax", f"{word} has no name. Write NAME=VALUE.")
            if override.is_sweep_override():
                raise several(app, str(override.input_line))
            parsed.append(override)
        except UserError as error:
            key = word.partition("=")[0]
            if error.code == "option-repeated" and key in app.groups:
                raise  # its fields depend on the choice
            if unread is None and len(word) <= 1000 and readable(f"{key}=null") and key not in app.groups:
                parsed.append(parse(f"{key}=null"))  # an unknown name is reported first
            if error.code == "option-syntax" and app.name == "dllm-sample":
                error = UserError(error.code, f"{str(error)[:-1]}, or put -- before it if it is a prompt.")
            unread = unread or error
    for override in parsed:
        group = override.key_or_group
        if re.match(r"hydra([./@]|\Z)", group):
            raise UserError("option-reserved", f"{app.name} does not support {override.input_line}. Remove it.")
        if override.package is not None:
            way = f"Write {group}=VALUE" + ", or put -- before it if it is a prompt" * (app.name == "dllm-sample")
            raise UserError("option-syntax", f"{override.input_line} has an @, which is not supported. {way}.")
        kind = {list: "list", dict: "mapping"}.get(type(override.value()))
        if group in app.groups and (kind == "mapping" or (kind == "list" and group not in SEVERAL)):
            takes = "names" if group in SEVERAL else "one name"
            way = f"Write {group}=NAME"
            raise UserError("option-missing", f"{override.input_line} is a {kind}, but {group} takes {takes}. {way}.")
    with uninterrupted():  # OmegaConf fails where Ctrl-C comes while it cleans up
        composed = _compose(app, parsed)
    if unread is not None:
        raise unread
    try:
        return replace(composed, tree=config.resolved(composed.tree))
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        key = getattr(error, "full_key", None)
        typed = {one.key_or_group: f"{one.input_line}: " for one in parsed}
        place = typed.get(key, f"{key} in a YAML file: ") if key else ""
        raise UserError("config-invalid", f"{place}{first_line(error)}. Correct the value.") from error


def _compose(app: App, parsed: Sequence[Override]) -> Composed:
    chosen: dict[str, Any] = config.defaults(app.root)
    typed: dict[str, Any] = {}
    rest: list[Override] = []
    for one in parsed:
        group, value = one.key_or_group, one.value()
        if group not in app.groups:
            rest.append(one)
        elif one.is_delete():
            chosen.pop(group, None)
        elif value is None and group not in SEVERAL:
            raise UserError("option-missing", f"{group}=null chooses nothing. Write {group}=NAME, which is required.")
        else:
            typed[group] = value
    overridden: dict[str, Any] = {}
    names = _names({**chosen, **typed}.get("experiment"))
    if recommended.NAME in names:  # `recommended.expand` has replaced the word itself
        raise UserError(
            "option-syntax", f"experiment={recommended.NAME} works alone. Write it without a list, quotes or +."
        )
    recipes = {name: _file(app, "experiment", name, overridden) for name in names}
    chosen |= overridden | typed
    tree: dict[str, Any] = {} if app.options is None else {one.name: one.default for one in fields(app.options)}
    for group in (group for group in app.groups if group in chosen and group != "experiment"):
        if group == "guide":
            names = _names(chosen[group])
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise UserError("options-conflict", f"guide=[{','.join(names)}] names {repeated} twice. Name it once.")
            tree[group] = {name: _file(app, group, name) for name in names if name != "none"}
        elif chosen[group] != "???":
            tree[group] = _file(app, group, _names(chosen[group])[0])
    for name, recipe in recipes.items():
        _check_recipe(name, recipe, tree, chosen)
        _merge(tree, recipe)
    for one in rest:
        _apply(app, tree, chosen, one)
    return Composed(tree, chosen)


def _check_recipe(name: str, recipe: Mapping[str, Any], tree: Mapping[str, Any], chosen: Mapping[str, object]) -> None:
    """Refuse an experiment that sets an option, or a field of a chosen plug-in, that does not exist."""
    for key, given in recipe.items():
        known, sets = tree.get(key), f"experiment={name} sets {key}"
        if key not in config.GROUPS and key not in tree:
            near = "".join(f". Did you mean '{one}'?" for one in nearest(key, tree, 1)) or "."
            raise UserError("option-unknown", f"{sets}, an unknown option{near} Correct the file.")
        if key in config.GROUPS and not isinstance(given, dict):
            way = f"Write 'override /{key}: NAME' in its defaults list"
            raise UserError("config-invalid", f"{sets} to {as_typed(given)}, not to fields. {way}.")
        if key not in config.GROUPS[1:] or not isinstance(known, dict):
            continue
        strange = next((field for field in given if field not in known), None)
        if strange is None or (key != "guide" and chosen[key] in own(key)):
            continue
        if key == "guide":
            text = f"{sets}.{strange}, a guide that is not chosen. Add guide={strange}."
        else:
            text = f"{sets}.{strange}, a field that {key}={chosen[key]} does not have."
            text += f" Choose another {key} or experiment."
        raise UserError("options-conflict", text)


def _names(value: object) -> list[str]:
    """Return the names in `value`, which is a name, a list of names or None."""
    names = [] if value is None else value if isinstance(value, list) else [value]
    return [name if isinstance(name, str) else as_typed(name) for name in names]


def _file(
    app: App, group: str, name: str, overridden: dict[str, Any] | None = None, seen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the settings of a choice, merged with those of the choices in its defaults list.

    Args:
        overridden: receives the choices of an experiment for other groups.
        seen: names of the files whose defaults lists led to this one.
    """
    given = _copy(read(group, name).settings)
    entries = given.pop("defaults", None) or []
    tree: dict[str, Any] = {}
    for one in [*entries, *(["_self_"] if "_self_" not in entries else [])] if isinstance(entries, list) else [entries]:
        key, value = next(iter(one.items())) if isinstance(one, dict) and len(one) == 1 else (group, one)
        key = str(key).removeprefix("override ").strip().lstrip("/")
        if one == "_self_":
            _merge(tree, given)
        elif key == group and isinstance(value, str) and value not in (name, *seen):
            _merge(tree, _file(app, group, value, overridden, (name, *seen)))
        elif (
            overridden is not None and key in app.groups and key != group and (isinstance(value, str) or key == "guide")
        ):
            overridden[key] = value
        else:
            said = f"{group}={name}: its defaults list has {short(json.dumps(one))}. Name another {group}, or in an"
            way = f"experiment 'override /GROUP: NAME', where GROUP is one of {', '.join(app.groups)}"
            raise UserError("config-invalid", f"{said} {way}.")
    return tree


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def _merge(tree: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = _copy(value)


def _apply(app: App, tree: dict[str, Any], chosen: Mapping[str, object], one: Override) -> None:
    """Set, add or remove a field.

    Raises:
        UserError: the field is unknown, exists already (`+`), or has another value (`~`).
    """
    key, value, word = one.key_or_group, one.value(), str(one.input_line)
    *above, last = re.split(r"[.\[\]]+", key.rstrip("]"))
    adds = (one.is_add() or one.is_force_add()) and (above[:1] != ["guide"] or [*above, last][1] in tree["guide"])
    node: Any = tree
    for part in above:
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
            continue
        if adds and isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, list) and last.isdecimal() and int(last) < len(node) and not one.is_delete():
        node[int(last)] = _copy(value)
        return
    there = isinstance(node, dict) and last in node
    if not isinstance(node, dict) or not (there or adds):
        if one.is_delete():
            raise UserError("field-unknown", f"{word} removes a field that does not exist. Correct the name.")
        wrong = missing(app, key, tree, chosen, word, short(word.partition("=")[2]))
        raise wrong or UserError("field-unknown", f"{word}: the field '{key}' is unknown. Write +{word} to add it.")
    if one.is_delete():
        if value is not None and value != node[last]:
            raise UserError(
                "field-unknown", f"{word}: the value of {key} is {short(json.dumps(node[last]))}. Write ~{key}."
            )
        del node[last]
    elif one.is_add() and there and node[last] is not None and not isinstance(value, dict | list):
        raise UserError("options-conflict", f"{word} adds a field that exists already. Write {word[1:]}.")
    elif isinstance(value, dict) and isinstance(node.get(last), dict):
        inner = None if adds else _unknown_field(node[last], value)
        if inner is not None:
            raise missing(app, f"{key}.{inner}", tree, chosen, word) or UserError(
                "field-unknown", f"{word}: the field '{inner}' is unknown. Remove it."
            )
        _merge(node[last], {str(name): each for name, each in value.items()})
    else:
        node[last] = _copy(value)


def _unknown_field(known: Mapping[str, Any], given: Mapping[Any, Any]) -> str | None:
    """Return the path of the first field of `given` that `known` does not have, or None."""
    for key, value in given.items():
        if str(key) not in known:
            return str(key)
        node = known[str(key)]
        if isinstance(value, dict) and isinstance(node, dict) and (inner := _unknown_field(node, value)) is not None:
            return f"{key}.{inner}"
    return None


def parts(composed: Composed) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the model's settings and those of the plug-ins, and remove both from the composed tree.

    Raises:
        UserError: the model or a plug-in is missing.
    """
    tree, chosen = composed.tree, composed.choices
    plugins: dict[str, object] = {}
    model = tree.pop("model", None)
    if not isinstance(model, dict):
        raise UserError("option-missing", "The model is missing. Add model=NAME, model=FOLDER or model=ORG/NAME.")
    if model.get("path") in (None, "???"):
        text = f"model={chosen.get('model')} has no path. Set model.path to a folder or a hub id."
        raise UserError("option-missing", text)
    for group in config.GROUPS[1:]:
        found = tree.pop(group, None)
        plugins[group] = _guides(found) if group == "guide" else _plugin(group, found, chosen)
    return model, plugins


def _plugin(group: str, found: object, chosen: dict[str, Any]) -> object:
    if not isinstance(found, dict):
        raise UserError("option-missing", f"No {group} is chosen. Add {group}=NAME: {', '.join(choices(group))}.")
    return _inner(group, _from_file(str(chosen.get(group)), found))


def _from_file(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a choice's settings with its name. If they have no class, `config.build` must not look for one."""
    return {"name": name, "_target_": None, **found}


def _inner(group: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a plug-in's settings. A user's scheduler inside a scheduler is replaced by its settings."""
    inner = found.get("inner")
    given = {"name": inner} if isinstance(inner, str) else inner
    if group != "scheduler" or not isinstance(given, dict):
        return found
    check(group, str(given.get("name")))
    if given.get("name") in own(group):
        given = _from_file(given["name"], {**entry(group, given["name"]).settings, **given})
    return {**found, "inner": _inner(group, given) if given != {"name": inner} else inner}


def _guides(found: object) -> list[object]:
    """Return the settings of the chosen guides, in their order."""
    guides: dict[str, dict[str, Any]] = {}
    for name, given in found.items() if isinstance(found, dict) else ():
        if not isinstance(given, dict):
            raise UserError("option-type", f"guide.{name}={given!r} is not a set of settings. Write guide={name}.")
        guides[str(name)] = given
    return [_from_file(name, given) for name, given in guides.items()]


# Mistakes in the words of a command line.

LISTS = ("guide", "experiment", "stop_strings", "stop_token_ids", "forms")  # options that take a list


def several(app: App, word: str) -> UserError:
    """Return the error for a word with several values, for example `key=a,b` or `key=range(3)`."""
    key, _, value = word.partition("=")
    ways = ["Give one"]
    if (key in LISTS or "." in key) and "(" not in value:
        ways.append(f"{key}=[{value}] if it takes a list")
    if app.name == "dllm-sample":
        if key.partition(".")[0] in (*app.groups, *CommonOptions.__dataclass_fields__):
            ways.append("run each by dllm-eval")
        ways += ["put -- before a prompt"] * (" " in word)
    return UserError("option-repeated", f"{word} has several values. {', or '.join(ways)}.")


def missing(
    app: App, key: str, known: Any, chosen: Mapping[str, object], word: str, value: str = "VALUE"
) -> UserError | None:
    """Return the error for a dotted key that `known` does not have, or None.

    Args:
        app: the command.
        key: the key.
        known: the composed tree.
        chosen: the name that each group was set to.
        word: the override.
        value: its value.
    """
    first, *rest = key.split(".")
    if first not in known:
        return _missing_option(app, first, known, chosen, value)
    at = path = first
    node = known[first]
    if isinstance(chosen.get(first), str):
        at = f"{first}={chosen[first]}"
    for part in rest:
        if isinstance(node, dict) and part in node:
            path, node = f"{path}.{part}", node[part]
            # A guide's name is between the group's and the field's, since there may be several guides.
            at = f"guide={part}" if path == f"guide.{part}" else path
        elif not isinstance(node, dict):
            said = f"{word.removeprefix('++')} sets a field, but {path}={as_typed(node)} is a single value"
            return UserError(
                "field-unknown", f"{said}. Set {path}=VALUE, or for a plug-in '{path}={{name: NAME, FIELD: VALUE}}'."
            )
        elif path == "guide":
            return _missing_guide(part, rest, node, word, value)
        elif path == "model" and part in config.ModelSettings.__dataclass_fields__:
            return UserError(
                "field-unknown", f"{word} sets a field that {at} does not set yet. Write {shlex.quote(f'+{word}')}."
            )
        else:
            wrong = unknown(f"field of {at}", part, _leaves(node))
            others = holders(first, part) if path == first else []
            there = f" The field exists in {first}={', '.join(others)}." if others else ""
            return UserError("field-unknown", f"{wrong}{there}")
    return None


def _missing_option(app: App, name: str, known: Any, chosen: Mapping[str, object], value: str) -> UserError:
    """Return the error for an option that does not exist. It suggests fields of plug-ins, too."""
    paths = {leaf: f"{group}.{leaf}" for group in reversed(app.groups) for leaf in _leaves(known.get(group))}
    paths |= {one: one for one in known}
    where = next((group for group in app.groups if holders(group, name)), None)
    if where is not None and name not in paths:
        now = ",".join(_names(chosen.get(where))) or "none"
        now = f"[{now}]" if "," in now else now
        return UserError(
            "option-unknown",
            f"unknown option '{name}': {where}={now} has no such field. {_choose(where, name, value)}.",
        )
    if app.name == "dllm-sample" and name in ("prompt", "prompts"):
        return UserError(
            "option-unknown",
            f"unknown option '{name}': a prompt has no name. Quote it after --, or write prompts_file=FILE.",
        )
    near = [f"'{paths[one]}{f'={value}' * (paths[one] != one)}'" for one in nearest(name, paths)]
    hint = f". Did you mean {' or '.join(near)}?" if near else "."
    prompt = ", and put -- before a prompt that contains =" if app.name == "dllm-sample" else ""
    return UserError("option-unknown", f"unknown option '{name}'{hint} See {app.name} --help{prompt}.")


def _choose(group: str, field: str, value: str) -> str:
    """Return the advice to choose a plug-in that has a field, without its full stop."""
    others, inside = holders(group, field), ".NAME" * (group == "guide")
    name = others[0] if len(others) == 1 else "NAME"
    way = f"Write {group}={name} {group}{inside.replace('NAME', name)}.{field}={value}"
    return f"{way}, where NAME is one of {', '.join(others)}" if len(others) > 1 else way


def _missing_guide(part: str, rest: Sequence[str], node: Mapping[str, Any], word: str, value: str) -> UserError:
    """Return the error for a key `guide.PART...` if PART is not a chosen guide. Names of guides may be left out."""
    if part in choices("guide"):
        others = f"[{','.join([*node, part])}]" if node else part
        return UserError("option-not-applicable", f"{word} sets a guide that is not chosen. Write guide={others}.")
    fields = [*dict.fromkeys(leaf for one in node.values() for leaf in _leaves(one))]
    if len(rest) > 1 or (nearest(part, node) and not nearest(part, fields)):
        return unknown("guide", part, choices("guide"))
    if holders("guide", part):
        return UserError(
            "field-unknown", f"{word} sets a field that no chosen guide has. {_choose('guide', part, value)}."
        )
    if not node:
        return UserError("field-unknown", f"{word} sets a field of a guide, and none is chosen. Add guide=NAME.")
    return unknown(f"field of guide={','.join(node)}", part, fields)


def _leaves(node: object) -> list[str]:
    return [str(name) for name in node if name != "_target_"] if isinstance(node, dict) else []

"""The page of `dllm-sample --help GROUP=NAME`, written from the YAML, the docstring and the traits of a plug-in."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich.console import Console

from dllm_sampler import config
from dllm_sampler.cli import recommended, user_files
from dllm_sampler.cli.terminal import row, say, written
from dllm_sampler.errors import UserError

LIMITS = {
    "scheduler": "Rules that rank positions by the confidence of drawn tokens prefer likely answers."
    " With temperature=1 and one token per step, scheduler=random_order and scheduler=leftright draw from the model's"
    " own distribution (docs/tasks.md).",
    "cache": "By default all caches but none, exact, block_causal and sub_block are approximate: mini gets 99 of 100"
    " shuffles right with cache=exact and 9 with cache=dual (docs/caches.md).",
    "log-probability": "A recorded probability is that of one token in the state in which it was committed. The product"
    " over an answer is not its likelihood, which Sampler.score computes (docs/likelihood.md).",
}
CHECK = "Run python -m dllm_sampler.check {}={} to try it with models and all other plug-ins."

CODE = "    "  # begins each line of a literal block


def explain(console: Console, group: str, name: str) -> None:
    """Print the page of one choice: its description, its fields with defaults, its paper and its limits.

    Raises:
        UserError: the user's own YAML cannot be read, or names no class.
    """
    entry = user_files.entry(group, name)
    target, given = (
        entry.settings.get("_target_"),
        {key: value for key, value in entry.settings.items() if key != "_target_"},
    )
    say(console, f"{group}={name}")
    _paragraph(console, user_files.about(group, name))
    if group == "experiment" and name == recommended.NAME:
        for model in given["models"]:
            say(console, f"model={model}")
            recommended.show(console, model)
    elif group == "experiment":
        _section(console, "Sets", [(f"{key}={written(value)}", "") for key, value in _chosen(given)])
    elif group == "model":
        _section(console, "Fields", _fields(group, config.ModelSettings, given))
        if recommended.entries(name):
            say(console, "Recommended")
            recommended.show(console, name)
    elif target:
        import dllm_sampler.models  # noqa: F401 - before transformers, whose log it silences

        cls = config.plugin_class(f"{group}={name}", group, str(target))
        for paragraph in _prose(cls):
            _paragraph(console, paragraph)
        _section(console, "Fields", _fields(f"guide.{name}" if group == "guide" else group, cls, given))
        if group in config.GROUPS:
            _section(console, "Goes with", [("", line) for line in (*_words(group, name), CHECK.format(group, name))])
        if group in LIMITS:
            _section(console, "Limits", [("", LIMITS[group])])
    if entry.paper:
        _paragraph(console, f"Paper: https://arxiv.org/abs/{entry.paper}")
    say(console, "")


def listing(console: Console, prefix: str, cls: Any, settings: Mapping[str, Any]) -> None:
    """Print the settings of a class with their meanings from its docstring. Each entry of a dict has its own line.

    The meaning of names that share a line of the docstring is printed once, at the first of them.
    """
    said, told = meanings(cls), set[str]()
    for name, value in settings.items():
        if name == "_target_":
            continue
        meaning = said.get(name, "")
        shared = [other for other in settings if meaning and said.get(other) == meaning]
        if meaning in told:
            meaning = ""
        told.add(meaning)
        if len(shared) > 1 and meaning:
            meaning = f"{', '.join(shared)}: {meaning}"
        for left in _flat(f"{prefix}.{name}", value):
            row(console, left, meaning, indent=2, column=29)
            meaning = ""


def meanings(cls: Any) -> dict[str, str]:
    """Return the meaning of each field by the docstrings of a class and of those that it extends."""
    return {name: said for base in reversed(cls.__mro__) for name, said in _arguments(base).items()}


def _flat(name: str, value: object) -> Iterator[str]:
    """Yield a setting as `NAME=VALUE`, or each entry of a dict as `NAME.KEY=VALUE`."""
    if not isinstance(value, Mapping) or not value:
        yield f"{name}={written(value)}"
        return
    for key, one in value.items():
        yield from _flat(f"{name}.{key}", one)


def _paragraph(console: Console, text: str) -> None:
    if text.startswith(CODE):
        say(console, text)
    else:
        row(console, "", text, column=2)
    say(console, "")


def _section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print rows under a title. Prints nothing without rows."""
    found = list(rows)
    if found:
        row(console, title, "", indent=2)
        for left, right in found:
            row(console, left, right, indent=4, column=29 if left else 4)
        say(console, "")


def _documentation(cls: Any) -> str:
    """Return the docstring of a class, or "" if it has none. Python's default for dataclasses does not count."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return "" if text.startswith(f"{cls.__name__}(") else text


def _prose(cls: Any) -> Iterator[str]:
    """Yield the paragraphs of a docstring before its arguments. An indented one is code, and keeps its lines."""
    text = re.split(r"\n(?:Args|Attributes):", _documentation(cls))[0].rstrip()
    for paragraph in re.split(r"\n\s*\n", text):
        yield paragraph if paragraph.startswith(CODE) else " ".join(paragraph.split())


def _arguments(cls: Any) -> dict[str, str]:
    """Return the meanings of `Args:` by name, or else those of the docstring's last paragraph."""
    doc = _documentation(cls)
    before, _, text = doc.partition("\nArgs:\n")
    if not text:
        text = before.rpartition("\n\n")[2]
    return _named(text)


def _named(text: str) -> dict[str, str]:
    """Return the meaning of each name in lines such as `name, other: meaning`, which indented lines continue."""
    found: dict[str, str] = {}
    for part in re.split(r"\n(?=\S)", inspect.cleandoc("\n" + text.partition("\n\n")[0])):
        names, _, meaning = part.partition(":")
        if not meaning.lstrip().startswith("see `"):  # that class has the meaning
            found |= {one.strip(): _yaml(" ".join(meaning.split())) for one in names.split(",")}
    return found


def _yaml(text: str) -> str:
    """Return a text with null, true and false in place of Python's constants."""
    for python, yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{python}\b", yaml, text)
    return text


def _fields(prefix: str, cls: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `NAME=DEFAULT` and the meaning of each field. A default in `given` replaces that of the class."""
    try:
        hints = get_type_hints(cls)
    except NameError:  # a type imported for the type checker only
        hints = {}
    for field in (one for one in fields(cls) if one.init):
        home = next((base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {})), cls)
        places = (home, *cls.__mro__)  # the class that has the field says more of it than one that extends it
        meaning = next((said for base in places if (said := _arguments(base).get(field.name))), "")
        hint = hints.get(field.name)
        values = [one for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for one in get_args(kind)]
        named = all(str(value) in meaning for value in values)
        default = None if field.default is MISSING else field.default
        meaning = meaning if named else f"{meaning} [{', '.join(map(str, values))}]"
        yield f"{prefix}.{field.name}={written(given.get(field.name, default))}", meaning


def _chosen(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each setting of an experiment, as typed on the command line."""
    for one in settings.get("defaults", []) if not prefix else []:
        for key, value in one.items() if isinstance(one, Mapping) else ():
            yield key.removeprefix("override /"), value
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _chosen(value, f"{prefix}{key}.")
        elif key != "defaults":
            yield prefix + key, value


def facts(kind: type) -> dict[str, dict[str, str]]:
    """Return the sentences of a docstring about each of its `Attributes`, by value as YAML writes it.

    The first sentence belongs to `true`. The others follow "If VALUE:".
    """
    found = {}
    for name, text in _named(_documentation(kind).partition("\nAttributes:\n")[2]).items():
        first, *others = re.split(r"\s*\bIf (\w+): ", text)
        found[name] = {"true": first} | dict(zip(others[::2], others[1::2], strict=True))
    return found


def _words(group: str, name: str) -> Iterator[str]:
    """Yield the sentences about traits that are not the default, or the reason that the defaults are refused."""
    try:
        built = config.build(group, {"name": name, **user_files.entry(group, name).settings})
    except UserError as error:
        yield f"With its default settings it is refused: {error}"
        return
    built = built[0] if group == "guide" else built
    described, rare = (built.traits, built.traits.rare) if group == "scheduler" else (built, ())
    for kind in reversed(type(described).__mro__):
        for name, sentences in facts(kind).items():
            value = getattr(described, name, None)
            if value != getattr(kind, name, value) and written(value) in sentences:
                yield sentences[written(value)]
    yield from (next(_prose(type(one))) for one in rare)

"""Names of plug-ins in messages: as the user typed them."""

import re
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib.resources import files

KINDS = ("scheduler", "blocks", "stop", "cache", "guide", "particles")
_TYPED: dict[type, str] = {}


def named(plugin: object) -> str:
    """Return the name by which a user selects a plug-in, for example `dllm` for an `IntervalCache` (`cache=dllm`).

    A plug-in whose class no YAML names is called by its class. A plug-in that was built in place of another one has
    the name of its `stands_for`: a name, a class or a plug-in.
    """
    stands_for = getattr(plugin, "stands_for", None)
    if stands_for is not None:
        return stands_for if isinstance(stands_for, str) else named(stands_for)
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return _TYPED.get(cls) or _packaged(cls) or cls.__name__


def described(plugin: object) -> str:
    """Return a plug-in's name and the fields that differ from their defaults: `threshold(threshold=0.7)`."""
    told = []
    settings = [one for one in fields(plugin) if one.init and one.repr] if is_dataclass(plugin) else []
    for one in settings:
        value = getattr(plugin, one.name)
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if not _same(value, default):
            inner = any(hasattr(value, name) for name in ("traits", "bind"))
            told.append(f"{one.name}={described(value) if inner else repr(value)}")
    return f"{named(plugin)}({', '.join(told)})" if told else named(plugin)


def _same(one: object, other: object) -> bool:
    same = one == other
    return same if isinstance(same, bool) else False


def typed(cls: type, name: str) -> None:
    """Remember the name of the YAML, possibly a user's own, from which a plug-in of class `cls` was built."""
    _TYPED[cls] = name


def _packaged(cls: type) -> str | None:
    """Return the name of the packaged YAML whose `_target_` is a class, or None."""
    names = {package: name for (package, word), name in _targets().items() if word == cls.__name__}
    return next((name for package, name in names.items() if f"{cls.__module__}.".startswith(f"{package}.")), None)


@cache
def _targets() -> dict[tuple[str, str], str]:
    """Return the names of the packaged YAMLs by the module and the class of their `_target_`."""
    found = {}
    for kind in KINDS:
        for file in files("dllm_sampler.conf").joinpath(kind).iterdir():
            if file.name.endswith(".yaml") and (
                match := re.search(r"^_target_: (\S+)\.(\w+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            ):
                found[match[1], match[2]] = file.name.removesuffix(".yaml")
    return found

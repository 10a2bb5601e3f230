"""Files of the user's own that decide what a run does: code, schemas, grammars, filters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from dllm_sampler.cli.yours import entry, own

_FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # module:function


def files(group: str, settings: Any) -> list[Path]:
    """What the settings of a plug-in, or of a task, name: each file once, in order.

    Args:
        group: `scheduler`, `task` or another folder of `conf/`.
        settings: a mapping with the plug-in's name, or a list of these.
    """
    return list(dict.fromkeys(_files(group, settings)))


def digest(found: Sequence[Path], more: str | None = None) -> str | None:
    """A hash of what files hold, in this order, and of `more`; 16 hexadecimal digits, None where there is nothing."""
    if not found:
        return more
    whole = sha256()
    for file in found:
        whole.update(sha256(file.read_bytes()).digest())
    whole.update((more or "").encode())
    return whole.hexdigest()[:16]


def _files(group: str, value: Any) -> Iterator[Path]:
    if isinstance(value, dict):
        name = value.get("name")
        if isinstance(name, str) and name in own(group):
            yield from _code(str(entry(group, name).settings.get("_target_")))
        for field, one in value.items():
            if field != "name":
                yield from _files(group, one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _files(group, one)
    elif isinstance(value, str):
        if _FUNCTION.fullmatch(value):
            yield from _code(value)
        with suppress(OSError, ValueError, RuntimeError):  # no path at all
            if (path := Path(value).expanduser()).is_file():
                yield path


def _code(name: str) -> list[Path]:
    """The module of the working directory that `package.module:function` or `package.module.Class` lies in."""
    top = Path(re.split("[.:]", name, maxsplit=1)[0])
    return [file for file in (top.with_suffix(".py"), *sorted(top.glob("**/*.py"))) if file.is_file()]

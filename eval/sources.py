"""The user's files that decide what a run does: code, schemas, grammars and filters."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_sampler.cli.user_files import entry, own

_FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")  # module:function


def files(group: str, settings: Any) -> list[Path]:
    """Return the files that the settings of a plug-in or of a task name, each once, in order.

    `settings` is a mapping with the plug-in's name, or a list of these. `group` is a folder of `conf/`.
    """
    return list(dict.fromkeys(_files(group, settings)))


def digest(found: Sequence[Path], more: str | None = None) -> str | None:
    """Return a hash (16 hexadecimal digits) of the contents of files and of `more`. Without files, return `more`."""
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
            if (path := Path(value).expanduser()).is_file() and os.access(path, os.R_OK):
                yield path


def _code(name: str) -> list[Path]:
    """Return the file of `package.module:function` or `package.module.Class`, or all files of a local package.

    Nothing is imported, since a text such as a regular expression may look like a name.
    """
    module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
    top, *rest = module.split(".")
    here = [file for file in (Path(f"{top}.py"), *sorted(Path(top).glob("**/*.py"))) if file.is_file()]
    if here:
        return here
    try:
        spec = find_spec(top)
    except ValueError:  # a module that was made by hand has none
        return []
    if spec is None or not rest:
        found = [] if spec is None or not spec.has_location else [Path(str(spec.origin))]
    else:
        folders = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
        found = [file for one in folders for file in (one.with_suffix(".py"), one / "__init__.py")]
    return [file for file in found if file.is_file()]

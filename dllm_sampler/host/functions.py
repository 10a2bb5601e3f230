"""Functions and classes that a user names in a setting, in installed modules or in a file of the working directory."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from dllm_sampler.errors import UserError


class _Named:
    """A finder for one module in the working directory. Python asks it last, after all other finders."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, or None for other names. Python calls this on imports."""
        if fullname != self.name:
            return None
        return FileFinder(str(Path.cwd()), (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(fullname)


def resolve(name: str) -> Any:
    """Import the module of `package.module:attribute` or `package.module.attribute`, and return the attribute.

    The module may be a file or a package in the working directory. An installed module of that name comes first. Only
    the named module is searched there. `sys.path` does not change, so no other file of the working directory is
    imported by accident.

    Raises:
        ImportError, AttributeError, ValueError: the name does not exist. An import may raise any other error.
    """
    finder = _Named(name.partition(":")[0].partition(".")[0])
    sys.meta_path.append(finder)
    try:
        return resolve_name(name)
    finally:
        sys.meta_path.remove(finder)


def resolve_callable(what: str, name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names. Its module is imported as `resolve` does.

    Args:
        what: beginning of errors, for example `task.metric=`. The name follows it.

    Raises:
        UserError: the name cannot be imported, or is not callable.
    """
    try:
        found = resolve(name)
    except (Exception, SystemExit) as error:  # the import of a user's module may raise anything
        raise UserError("function-missing", f"{what}{name} cannot be imported{_reason(name, error)}") from None
    if not callable(found):
        said = f"{what}{name} is of type {type(found).__name__}. Name a function, as in package.module:function."
        raise UserError("function-invalid", said)
    return found


def _reason(name: str, error: BaseException) -> str:
    """Return the end of a message: the reason that `name` cannot be imported, and the advice."""
    top = name.partition(":")[0].partition(".")[0]
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        return f". Write {Path(module).stem}:{attribute or 'FUNCTION'}, with the name of the module, not of its file."
    if isinstance(error, ModuleNotFoundError) and error.name == top:
        return f". Install the module '{top}', or put {top}.py into the working directory."
    found = f" ({type(error).__name__}: {error})"
    if isinstance(error, ModuleNotFoundError) and Path(f"{error.name}.py").is_file():
        return f"{found}: a file of the working directory cannot import {error.name}.py there. Make a package of both."
    own = Path.cwd() / f"{top}.py"
    with suppress(OSError):
        if own.exists() and not own.samefile(getattr(sys.modules.get(top), "__file__", None) or own):
            return f"{found}: the module '{top}' is installed, too. Rename {own.name} in the working directory."
    return f"{found}. Correct it."

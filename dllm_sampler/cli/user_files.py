"""The user's own YAML files, in `./conf` and in the folder of `--config-dir` (docs/security.md).

A file counts where its name is typed, or where a file chooses it whose name is typed. Nothing else in these folders is
read. A file with the name of a packaged choice is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dllm_sampler import config
from dllm_sampler.errors import UserError, first_line, unknown
from dllm_sampler.host.paths import expanded

FLAG = "--config-dir"
_LOCAL = Path("conf")
_BEGINNING = 10_000  # characters of a file of the user's in which its first comment is looked for
_named: list[Path] = []  # the folder of --config-dir, while a command runs


def folders() -> list[Path]:
    """Return the folders of the user's files. The first one that has a name counts."""
    ours = Path(str(files(config.PACKAGE))).resolve()  # in a checkout of this project ./conf is the packaged folder
    return [folder for folder in (*_named, _LOCAL) if folder.resolve() != ours]


def home() -> Path:
    """Return the folder that a command writes a new file to."""
    return (*_named, _LOCAL)[0]


def named_folder() -> Path | None:
    """Return the folder of `--config-dir`. Returns None if none was named."""
    return _named[0] if _named else None


@contextmanager
def using(folder: Path | None) -> Iterator[None]:
    """Look for files in a folder, before `./conf`."""
    before = [*_named]
    _named[:] = [] if folder is None else [folder]
    try:
        yield
    finally:
        _named[:] = before


def with_config_dir(words: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """Run a command line without its `--config-dir`, whose folder holds meanwhile.

    Raises:
        UserError: it names no folder.
    """
    kept, folder, rest = list[str](), None, iter(words)
    for word in rest:
        if word == "--":
            kept += [word, *rest]
        elif word.partition("=")[0] == FLAG:
            name = word.partition("=")[2] if "=" in word else next(rest, "")
            folder = expanded(FLAG, name) if name else None
            if folder is None or not folder.is_dir():
                raise UserError("file-missing", f"{FLAG} {name}".rstrip() + " does not exist. Name a folder.")
        else:
            kept.append(word)
    with using(folder):
        return run(kept)


def choices(group: str) -> list[str]:
    """Return the names that a group can be set to: the packaged ones, then the user's."""
    return config.names(group) + list(own(group))


def choices_of(word: str) -> list[tuple[str, str]]:
    """Return the group and each name of `GROUP=NAME` or `GROUP=[NAME,NAME]`.

    Raises:
        UserError: a name that the group does not have.
    """
    group, _, value = word.partition("=")
    names = [name.strip() for name in value.strip("[]").split(",")]
    for name in names:
        if name not in choices(group):
            raise unknown(group, name, choices(group))
    return [(group, name) for name in names]


def own(group: str) -> dict[str, Path]:
    """Return the user's choices of a group by name, sorted. Packaged names are left out."""
    packaged = config.names(group)
    return {name: file for name, file in sorted(_found(group).items()) if name not in packaged}


def read(group: str, name: str) -> config.Entry:
    """Return the YAML of a choice. Interpolations of a user's file are those of a whole configuration.

    Raises:
        UserError: there is none, it cannot be read, or the user's file has the name of a packaged one.
    """
    check(group, name)
    if name in config.names(group):
        return config.entry(group, name)  # its interpolations name paths of the package
    file = own(group).get(name)
    if file is None:
        raise unknown(group, name, choices(group))
    with _readable(file):
        return config.described(name, file.read_text(encoding="utf-8"))


def entry(group: str, name: str) -> config.Entry:
    """Return the YAML of a choice, with its interpolations resolved.

    Raises:
        UserError: as `read`.
    """
    found = read(group, name)
    if name in config.names(group):
        return config.entry(group, name)
    with _readable(own(group)[name]):
        return replace(found, settings=config.resolved(found.settings))


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise UserError("file-unreadable", f"{file} cannot be read ({first_line(error)}). Correct it.") from error


def check(group: str, name: str) -> None:
    """Refuse a packaged choice if the user has another file of that name.

    Raises:
        UserError: it names the file.
    """
    file = _found(group).get(name) if name in config.names(group) else None
    if file is not None and not _is_packaged(file, group):
        raise UserError("choice-taken", f"{file} has the name of a packaged file. Rename it for {group}=NEWNAME.")


def about(group: str, name: str) -> str:
    """Return the first comment of a choice's YAML, and for a file of the user's also its name."""
    file = own(group).get(name)
    try:
        check(group, name)
        if file is None:
            return config.entry(group, name).about
        with file.open(encoding="utf-8") as lines:
            said = config.comment(lines.read(_BEGINNING))
    except UserError as error:
        return str(error)
    except (OSError, ValueError) as error:  # no file any more, or no UTF-8
        return f"{file} cannot be read: {first_line(error)}"
    return f"{said} [yours: {file}]".lstrip()


def holders(group: str, field: str) -> list[str]:
    """Return the choices of a group that have a field of this name."""
    found = []
    for name in choices(group) if group in config.GROUPS else ():
        with suppress(UserError):  # a file of the user's that cannot be read
            if field in entry(group, name).settings:
                found.append(name)
    return found


def _found(group: str) -> dict[str, Path]:
    each = [file for folder in reversed(folders()) for file in (folder / group).glob("*.yaml") if file.is_file()]
    return {file.stem: file for file in each}


def _is_packaged(file: Path, group: str) -> bool:
    """Return True if a file has the bytes of the packaged one, as in a checkout of this project."""
    with suppress(OSError):
        return file.read_bytes() == (files(config.PACKAGE) / group / file.name).read_bytes()
    return False

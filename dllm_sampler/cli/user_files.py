"""The user's own YAML files, in `./conf` and in the folder of `--config-dir` (docs/security.md).

A file is read only if its name is typed, or if a file whose name is typed chooses it. A file with the name of a
packaged choice is refused.
"""

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
_BEGINNING = 10_000  # characters of a user's file in which its first comment must be
_named: list[Path] = []  # the folder of --config-dir, while a command runs


def folders() -> list[Path]:
    """Return the folders of the user's files. If several have a file of one name, the first folder counts."""
    ours = Path(str(files(config.PACKAGE))).resolve()  # in a checkout of this project ./conf is the packaged folder
    return [folder for folder in (*_named, _LOCAL) if folder.resolve() != ours]


def home() -> Path:
    """Return the folder of new files: that of `--config-dir`, or `./conf`."""
    return (*_named, _LOCAL)[0]


def named_folder() -> Path | None:
    """Return the folder of `--config-dir`, or None without this flag."""
    return _named[0] if _named else None


@contextmanager
def using(folder: Path | None) -> Iterator[None]:
    """Read user files from `folder` before `./conf`, or only from `./conf` if it is None."""
    before = [*_named]
    _named[:] = [] if folder is None else [folder]
    try:
        yield
    finally:
        _named[:] = before


def with_config_dir(words: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """Run a command line without its `--config-dir`, with user files from that folder.

    Raises:
        UserError: `--config-dir` names no existing folder.
    """
    kept, folder, rest = list[str](), None, iter(words)
    for word in rest:
        if word == "--":
            kept += [word, *rest]
        elif word.partition("=")[0] == FLAG:
            name = word.partition("=")[2] if "=" in word else next(rest, "")
            folder = expanded(FLAG, name) if name else None
            if folder is None or not folder.is_dir():
                raise UserError("file-missing", f"{FLAG} '{name}' is not an existing folder. Write {FLAG} FOLDER.")
        else:
            kept.append(word)
    with using(folder):
        return run(kept)


def choices(group: str) -> list[str]:
    """Return the names that a group can be set to: the packaged ones, then the user's."""
    return config.names(group) + list(own(group))


def choices_of(word: str) -> list[tuple[str, str]]:
    """Return a pair of group and name for each name in `GROUP=NAME` or `GROUP=[NAME,NAME]`.

    Raises:
        UserError: a name that the group does not have.
    """
    group, _, value = word.partition("=")
    names = [name.strip() for name in value.strip("[]").split(",")]
    for name in names:
        if name not in choices(group):
            raise _unknown(group, name)
    return [(group, name) for name in names]


def _unknown(group: str, name: str) -> UserError:
    return unknown("trainer" if group == "train" else group, name, choices(group))


def own(group: str) -> dict[str, Path]:
    """Return the files of the user's choices of a group by name, sorted, without packaged names."""
    packaged = config.names(group)
    return {name: file for name, file in sorted(_found(group).items()) if name not in packaged}


def read(group: str, name: str) -> config.Entry:
    """Return the YAML of a choice. Interpolations of a user's file are not resolved.

    Raises:
        UserError: the choice is unknown or cannot be read, or a user's file has the name of a packaged one.
    """
    check(group, name)
    if name in config.names(group):
        return config.entry(group, name)  # its interpolations name paths of the package
    file = own(group).get(name)
    if file is None:
        if group == "model":
            config.checkpoint(name)  # its message does not list all models
        raise _unknown(group, name)
    with _readable(file):
        return config.described(name, file.read_text(encoding="utf-8"))


def entry(group: str, name: str) -> config.Entry:
    """Return the YAML of a choice, with its interpolations resolved.

    Raises:
        UserError: as `read`, or an interpolation cannot be resolved.
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
    """Refuse a packaged choice if the user has a different file of that name.

    Raises:
        UserError: there is such a file.
    """
    file = _found(group).get(name) if name in config.names(group) else None
    if file is not None and not _is_packaged(file, group):
        raise UserError(
            "choice-taken", f"{file} has the name of a packaged file. Rename it, and write {group}=NEWNAME."
        )


def about(group: str, name: str) -> str:
    """Return the first comment of a choice's YAML, with the file's name if it is the user's."""
    file = own(group).get(name)
    try:
        check(group, name)
        if file is None:
            return config.entry(group, name).about
        with file.open(encoding="utf-8") as lines:
            said = config.comment(lines.read(_BEGINNING))
    except UserError as error:
        return str(error)
    except (OSError, ValueError) as error:  # the file was removed, or is not UTF-8
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

"""The user's own YAML files in `./conf`: which there are, and when one of them counts (docs/security.md).

A file counts where its name is typed, or is chosen by a file whose name is typed. One that has the name of a packaged
file would count unasked, in whatever directory a command is called: it is refused, unless `--trust-conf` was said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dllm_sampler import config
from dllm_sampler.errors import UserError, first_line, unknown
from dllm_sampler.host.reading import yaml_text

LOCAL = Path("conf")
PACKAGED = "dllm_sampler.conf"
FLAG, VARIABLE = "--trust-conf", "DLLM_SAMPLER_TRUST_CONF"


def trusts() -> bool:
    """Whether the user trusts `./conf` as a whole: its files then come before the packaged ones."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def trusting(words: Sequence[str], run: Callable[[list[str]], int]) -> int:
    """`run` of a command line without `--trust-conf`, which holds inside it, and for processes that begin there."""
    before = os.environ.get(VARIABLE)
    end = list(words).index("--") if "--" in words else len(words)
    kept = [word for place, word in enumerate(words) if word != FLAG or place > end]
    if len(kept) < len(words):
        os.environ[VARIABLE] = "1"
    try:
        return run(kept)
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def choices(group: str) -> list[str]:
    """The names a group can be set to: the packaged ones, then those in `./conf`."""
    packaged = config.names(group)
    return packaged + [name for name in own(group) if name not in packaged]


def own(group: str) -> dict[str, Path]:
    """The user's own choices of a group: name to file, sorted. In a checkout of this project there are none."""
    return {name: file for name, file in _found(group).items() if trusts() or name not in config.names(group)}


def entry(group: str, name: str) -> config.Entry:
    """The YAML of a choice: the user's own, else the packaged one.

    Raises:
        UserError: there is none, it cannot be read, or it has the name of a packaged one and is not trusted.
    """
    check(group, name)
    local = own(group).get(name)
    if local is not None:
        try:
            return config.described(name, yaml_text(local))
        except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
            raise UserError(f"{local} cannot be read: {first_line(error)}") from error
    if name not in config.names(group):
        raise unknown(group, name, choices(group))
    return config.entry(group, name)


def check(group: str, name: str) -> None:
    """Refuse a choice for which there are two files, ours and one in `./conf` that is not trusted.

    Raises:
        UserError: it names the file and both ways out.
    """
    file = None if trusts() or name not in config.names(group) else _found(group).get(name)
    if file is not None and not _same(file, files(PACKAGED) / group / f"{name}.yaml"):
        raise UserError(
            f"{file} has the name of a file of ours, and would be used in its place: rename it and say {group}=NEWNAME,"
            f" or say {FLAG} if you trust all files in ./{LOCAL}"
        )


def holders(group: str, field: str) -> list[str]:
    """The choices of a group that have a field of this name."""
    found = []
    for name in choices(group) if group in config.GROUPS else ():
        with suppress(UserError):  # a file of the user's that cannot be read
            if field in entry(group, name).settings:
                found.append(name)
    return found


def _found(group: str) -> dict[str, Path]:
    if LOCAL.resolve() == Path(str(files(PACKAGED))).resolve():
        return {}
    return {file.stem: file for file in sorted((LOCAL / group).glob("*.yaml")) if file.is_file()}


def _same(file: Path, packaged: Traversable) -> bool:
    """Whether a file has the bytes of a packaged one; one that cannot be read has not."""
    with suppress(OSError):
        return file.read_bytes() == packaged.read_bytes()
    return False


class Own(FileConfigSource):
    """`./conf`, without the files that have the name of one of ours or of Hydra's, unless it is trusted."""

    @staticmethod
    def scheme() -> str:
        """See `ConfigSource`."""
        return "own"

    def is_config(self, config_path: str) -> bool:
        """See `ConfigSource`."""
        name = self._normalize_file_name(config_path)
        known = files(PACKAGED).joinpath(name).is_file() or ConfigStore.instance().get_type(name) == ObjectType.CONFIG
        return (trusts() or not known) and super().is_config(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """See `ConfigSource`."""
        yaml_text(Path(self.path) / self._normalize_file_name(config_path))  # before OmegaConf writes aliases out
        return super().load_config(config_path)


class Local(SearchPathPlugin):
    """Adds `./conf` behind the packaged configuration, or before it where it is trusted; to nothing else."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See `SearchPathPlugin`."""
        packaged = any(str(part.path) == f"pkg://{PACKAGED}" for part in search_path.get_path())
        if packaged and LOCAL.is_dir():
            add = search_path.prepend if trusts() else search_path.append
            add("local", f"{Own.scheme()}://{LOCAL.resolve()}")


for plugin in (Own, Local):
    Plugins.instance().register(plugin)

"""Figures of runs in a file of JSON lines, written as they come: a cut run goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json

Figures = TypeVar("Figures")
Plugins = dict[str, Any]


class Store(Generic[Figures]):
    """Figures by plug-ins and task, for one setup. Code that changed in between is not noticed.

    Args:
        path: the file; its folder is made.
        schema: of the lines; those of another one are not read.
        setup: what is run and where: figures of another setup are not found.
        settings: spells out every default of the plug-ins: a changed default is another measurement.
        read, written: figures from a line's fields, and the fields of figures.

    Raises:
        UserError: results cannot be kept there.
    """

    def __init__(
        self,
        path: Path,
        schema: int,
        setup: Mapping[str, Any],
        settings: Callable[[Plugins], Plugins],
        read: Callable[[Mapping[str, Any]], Figures],
        written: Callable[[Figures], dict[str, Any]],
    ):
        self.path, self.schema, self.setup = path, schema, dict(setup)
        self.settings, self.written = settings, written
        self.found: dict[str, Figures] = {}
        files.make_folder(path.parent)
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except OSError as error:
            raise UserError("file-not-written", f"results cannot be kept in {path}: {error.strerror}") from error
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # the run was cut in the middle of the line
                entry = load_json(line)
                key = self._key(entry["schema"], entry["setup"], entry["plugins"], entry["task"])
                self.found[key] = read(entry)

    def find(self, plugins: Plugins, task: str) -> Figures | None:
        """The result of these plug-ins on a task, in this setup."""
        return self.found.get(self._key(self.schema, self.setup, self.settings(plugins), task))

    def add(self, plugins: Plugins, task: str, figures: Figures) -> None:
        """Write down a result; what a cut run left of a line is closed first."""
        about = {"schema": self.schema, "setup": self.setup, "plugins": self.settings(plugins), "task": task}
        line = json.dumps({**about, **self.written(figures)})
        files.append(self.path, line + "\n")
        self.found[self._key(*about.values())] = figures

    @staticmethod
    def _key(schema: int, setup: object, plugins: object, task: str) -> str:
        return json.dumps([schema, setup, plugins, task], sort_keys=True)

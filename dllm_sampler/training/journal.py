"""The log of a run: a line of JSON for each step, and the same in a tracker of the user's choice."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_sampler.core.checks import is_whole
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json

FILE = "log.jsonl"
TRACKERS = ("tensorboard", "trackio")


def check(tracker: str | None) -> None:
    """Refuse a tracker that there is not.

    Raises:
        UserError: its name is unknown, or its package is not installed.
    """
    if tracker is None:
        return
    if tracker not in TRACKERS:
        raise unknown("train.tracker", tracker, TRACKERS)
    if find_spec(tracker) is None:
        raise UserError("package-missing", f"train.tracker={tracker} is missing: pip install {tracker}")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a killed process has left unfinished, or that is none of a log, ends it."""
    found = []
    for text in path.read_bytes().splitlines():
        try:
            line = load_json(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not is_whole(line.get("step")):
            break
        found.append(line)
    return found


class Journal:
    """Takes down figures by step. Lines behind the saved state that a run goes on from are taken out, for they are
    made again.

    Args:
        path: of the JSON lines; tensorboard's files go next to it, into a folder with the ending .tensorboard.
        done: steps of the saved state, 0: a new run.
        tracker: None, `tensorboard` or `trackio` (where each folder of runs is a project, and shows a step twice that
            was made twice).
        settings: of the run, for the tracker.
        active: False in all processes but one.
    """

    def __init__(
        self, path: Path, done: int, tracker: str | None = None, settings: Mapping[str, Any] | None = None,
        active: bool = True,
    ):  # fmt: skip
        self._path, self._active, self._tracker = path, active, tracker
        self._place = path.with_suffix(".tensorboard")
        self._board: Any = None
        if not active:
            return
        kept = [line for line in read(path) if line["step"] <= done] if done and path.exists() else []
        files.write(path, "".join(json.dumps(line) + "\n" for line in kept))
        if tracker == "tensorboard":
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            _hush()
            with files.reported(self._place):
                self._board = writer(str(self._place), purge_step=done + 1 if done else None)
        elif tracker == "trackio":
            run = path.resolve().parent if path.name == FILE else path.resolve().with_suffix("")
            about = json.loads(json.dumps(settings or {}))
            name = {"project": run.parent.name or "dllm-train", "name": run.name}
            with redirect_stdout(sys.stderr):  # it greets
                self._board = import_module("trackio").init(**name, config=about, resume="allow")

    def note(self, step: int, figures: Mapping[str, float]) -> dict[str, float]:
        """Write a line, rounded to eight digits, and return it."""
        line = {"step": step}
        line |= {key: value if isinstance(value, int) else float(f"{value:.8g}") for key, value in figures.items()}
        if not self._active:
            return line
        files.append(self._path, json.dumps(line) + "\n")
        if self._tracker == "tensorboard":
            with files.reported(self._place):
                for key, value in line.items():
                    if key != "step":
                        self._board.add_scalar(key, value, step)
                self._board.flush()
        elif self._tracker == "trackio":
            self._board.log({key: value for key, value in line.items() if key != "step"}, step=step)
        return line

    def close(self) -> None:
        """Nothing more is coming."""
        if self._tracker == "tensorboard" and self._board is not None:
            with files.reported(self._place):
                self._board.close()
        elif self._tracker == "trackio" and self._board is not None:
            with redirect_stdout(sys.stderr):
                self._board.finish()


@cache
def _hush() -> None:
    """Let tensorboard's thread end without a traceback: the next call raises what it met."""
    plain = threading.excepthook

    def hook(met: threading.ExceptHookArgs) -> None:
        if not isinstance(met.exc_value, OSError) or type(met.thread).__module__.partition(".")[0] != "tensorboard":
            plain(met)

    threading.excepthook = hook

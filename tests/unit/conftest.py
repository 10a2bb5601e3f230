"""What tests of commands share."""

import io
from pathlib import Path

import pytest


class Terminal(io.StringIO):
    """A standard input with no pipe."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No pipe, an empty working folder, 80 columns."""
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def words(checkpoint: Path) -> list[str]:
    """A tiny model, and answers of six tokens."""
    return [f"model={checkpoint}", "max_new_tokens=6", "device=cpu"]

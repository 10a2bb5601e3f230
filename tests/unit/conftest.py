"""What tests of commands share."""

import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests import tiny


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


@pytest.fixture(scope="session")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA with a tokenizer of characters."""
    return tiny.write("llada", tmp_path_factory.mktemp("llada") / "m")


@pytest.fixture
def words(checkpoint: Path) -> list[str]:
    """A tiny model, and answers of six tokens."""
    return [f"model={checkpoint}", "max_new_tokens=6", "device=cpu"]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Put a driver into Triton, in place of the one that it looks for."""

    def put(driver: object) -> None:
        holder = import_module("triton.runtime").driver
        monkeypatch.setattr(holder, "_active" if hasattr(holder, "_active") else "active", driver)  # Triton 3.4

    return put

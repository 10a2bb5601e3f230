"""The command that compares S2D2 and linear_spec with decoding one token after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampling import each
from tests.tables import verified


@each("wrong", [False, True])
def test_its_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """1 where a row differs that must not, and the figures are written in any case."""

    class Found:
        def __init__(self, scheduler: str, count: int) -> None:
            self.count = count

        def rows(self) -> Iterator[tuple[bool, list[str]]]:
            yield False, ["`s2d2`, all", str(self.count), "0, 12.0"]

        def linear(self) -> Iterator[tuple[bool, list[str]]]:
            yield wrong, ["`linear_spec`", str(self.count), "1, 7.0"]

    monkeypatch.setattr(verified, "Subject", Found)
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {verified.SECTION} -->\nstale\n<!-- /{verified.SECTION} -->\nafter\n")
    assert verified.main(["--prompts", "5", "--docs", str(page)]) == int(wrong)
    assert "stale" not in page.read_text() and "| `linear_spec` | 5 | 1, 7.0 |" in page.read_text()

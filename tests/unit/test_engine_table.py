"""The table of what runs in which engine, in `docs/engines.md`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tables import engines

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_has_the_table_that_the_command_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "engines.md"
    shutil.copy(PAGE, copy)
    assert engines.main(["--docs", str(copy)]) == 0
    assert copy.read_text() == PAGE.read_text(), f"{engines.COMMAND} --docs docs/engines.md"
    assert engines.main([]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text()

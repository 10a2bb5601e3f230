"""The table of answers that find their length: one command writes it into its document."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables import lengths, markdown


@pytest.mark.slow
def test_it_writes_its_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- length table -->\n<!-- /length table -->\nbehind\n")
    assert lengths.main(["--prompts", "2", "--tasks", "copy", "--docs", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n")
    (head, *rows), *_ = markdown.tables(text)
    assert tuple(head) == lengths.HEAD and len(rows) == len(lengths.FIXED) + len(lengths.GROWING)
    columns = {row[0]: float(row[5]) for row in rows}
    assert columns["`daedal(initial=16, eos_tokens=8)`"] < 64 and columns["`rho_eos`"] == 0, "cut as published"
    assert lengths.COMMAND in capsys.readouterr().out
    assert lengths.main(["--tasks", "copie", "--docs", str(page)]) == 2
    assert "Did you mean 'copy'" in capsys.readouterr().err


def test_the_document_has_the_table() -> None:
    (head, *rows), *_ = markdown.tables(markdown.section(lengths.DOCS.read_text(), lengths.SECTION) or "")
    assert tuple(head) == lengths.HEAD and len(rows) == len(lengths.FIXED) + len(lengths.GROWING)

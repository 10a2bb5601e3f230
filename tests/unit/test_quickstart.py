"""The notebook of examples/: it runs, and shows what its text says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this interpreter, not of the user's folder
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "clear the outputs before a commit"
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs: list[list[Any]] = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    sampled, watched, streamed, compared, plotted = outputs
    assert printed(sampled) == "['Ada, Eve, Dan, Cal, Ben'] in 6 forwards\n"
    assert "<input" in watched[0].data["text/html"]
    assert printed(streamed).splitlines()[-1] == "step 6: 0 masks left"
    curves = ast.literal_eval(compared[0].data["text/plain"])
    fixed, threshold = curves["fixed"], curves["threshold"]
    assert fixed[-1] == (16.0, pytest.approx(0.94, abs=0.05))
    assert threshold[-1][0] < 8 and threshold[-1][1] > fixed[3][1] + 0.5  # more right answers in fewer forwards
    assert any("image/png" in one.get("data", {}) for one in plotted)


def printed(outputs: list[Any]) -> str:
    return "".join(one.text for one in outputs if one.get("name") == "stdout")

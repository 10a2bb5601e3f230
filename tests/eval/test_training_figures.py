"""The figures of docs/training.md: curves of several seeds, and forwards at equal accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.refusals import refused
from tests.tables import distilled, learning_curves
from tests.tables.comparison import Figures


def run(folder: Path, right: dict[int, float]) -> str:
    """The state of a trainer that measured at some steps."""
    folder.mkdir()
    lines: list[dict[str, float]] = [{"step": step, "eval_right": value} for step, value in right.items()]
    lines.append({"step": max(right), "train_runtime": 6.0})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    return str(folder)


@pytest.mark.slow
def test_a_curve_is_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = run(tmp_path / "a", {0: 0.25, 2: 0.5}), run(tmp_path / "b", {0: 0.5, 2: 0.5})
    page = tmp_path / "page.md"
    page.write_text("# Runs\n<!-- rl -->\nold\n<!-- /rl -->\n")
    assert learning_curves.main([f"first={one} {two}", f"second={two}", "--docs", str(page)]) == 0
    text = page.read_text()
    assert capsys.readouterr().out.strip() in text
    assert "old" not in text
    assert "| first, 2 runs | 37.5 | 50.0 | 12.5 | 50.0 | 0.0 |" in text, "no range of so few"
    assert "first: 2 steps, 0.1 to 0.1 minutes" in text
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_range_takes_eight_runs(tmp_path: Path) -> None:
    runs = [run(tmp_path / str(number), {0: 0.25, 1: 0.5 + 0.01 * number, 2: 0.5}) for number in range(8)]
    table = learning_curves.content([learning_curves.curve("x", runs)])
    mean = "| x, 8 runs | 25.0 (25.0 to 25.0) | 50.0 (50.0 to 50.0) | 25.0 (25.0 to 25.0) | 53.5 (50.0 to 57.0) | -3.5"
    assert mean in table
    assert learning_curves.draw([learning_curves.curve("x", runs)]) != learning_curves.draw(
        [learning_curves.curve("x", runs[:7])]
    )


def test_runs_that_do_not_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = run(tmp_path / "a", {0: 0.25, 2: 0.5}), run(tmp_path / "b", {0: 0.5, 1: 0.5})
    with refused("made-up"):
        learning_curves.curve("x", [one, two])
    assert learning_curves.main([one]) == 2
    assert "curves are written NAME=FOLDERS" in capsys.readouterr().err
    assert learning_curves.main([f"x={tmp_path / 'none'}"]) == 2
    assert "holds no log" in capsys.readouterr().err


def figures(shift: float) -> dict[str, Figures]:
    """Accuracy falls by 10 points with each bound, from 1, and forwards by one, from 10."""
    found: dict[str, Figures] = {}
    for rule, bounds in distilled.BOUNDS.items():
        for place, bound in enumerate(bounds):
            found[f"{rule} {bound:g}"] = {"right": 1 - 0.1 * place, "nfe": 10.0 - place - shift}
    return found


def test_forwards_at_equal_accuracy() -> None:
    before, after = figures(0.0), figures(1.0)
    assert distilled.forwards(before, "entropy", 0.95) == pytest.approx(9.5)
    assert distilled.forwards(before, "entropy", 0.0) == pytest.approx(10 - len(distilled.BOUNDS["entropy"]) + 1)
    assert distilled.forwards({**before, "entropy 0.02": {"right": 0.9, "nfe": 10}}, "entropy", 0.95) is None
    rows = distilled.equal(before, [after, before]).splitlines()
    assert rows[2] == "| entropy | 90 % | 9.00 | 8.50 | 1.06 |"
    poor = {name: {**each, "right": 0.85} for name, each in after.items()}
    assert "1 of 2 do not reach it" in distilled.equal(before, [poor, before])
    assert "not reached" in distilled.equal(poor, [before])
    assert distilled.main(["--after", "x", "--tasks", "dance"]) == 2

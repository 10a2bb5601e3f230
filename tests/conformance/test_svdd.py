"""SVDD's recorded runs, made again by our choice among candidates on the code's kernel and noise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import svdd
from tests.conformance.svdd import Run, check
from tests.sampling import sample, sampled

FILE = Path(__file__).parent / "data" / "traces" / "svdd.jsonl"
LINES = [Run.model_validate_json(line) for line in FILE.read_text().splitlines()]


def test_all_are_there() -> None:
    assert Counter(line.variant for line in LINES) == {"mc": 8, "pm": 8, "zeros": 8}
    assert {line.candidates for line in LINES} == {1, 2, 5, 10}


@pytest.mark.parametrize("line", sampled(LINES, lambda line: [line.variant, line.candidates], lambda line: line.id))
def test_states_and_output_are_those_recorded(line: Run) -> None:
    assert check(line) is None


@pytest.mark.parametrize("change", [{"seed": 1}, {"candidates": 3}, {"variant": "mc"}, {"steps": 7}], ids=str)
def test_another_run_is_told_apart(change: dict[str, Any]) -> None:
    line = next(line for line in LINES if line.variant == "pm" and line.candidates == 2)
    found = check(line.model_copy(update=change))
    assert found is not None and "should be" in found


def test_another_reward_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a choice, the worst candidate is another than the best."""
    reward = svdd._reward
    monkeypatch.setattr(svdd, "_reward", lambda ids: -reward(ids))
    some = list(sample(LINES, lambda line: [line.variant, line.candidates]))
    assert [check(line) is not None for line in some] == [line.candidates > 1 for line in some]
    assert {line.candidates > 1 for line in some} == {True, False}

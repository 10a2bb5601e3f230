"""Every contract case gives the tokens, forwards and step map that were recorded (`golden.json`), in float64."""

import pytest

from tests.contract.cases import CASES, RECORDED, Case, thinned


@pytest.mark.parametrize("case", thinned([case for case in CASES if case.id in RECORDED]))
def test_a_case_gives_what_was_recorded(case: Case) -> None:
    assert case.compute_record() == RECORDED[case.id], "python -m tests.contract.golden names all cases that differ"


def test_most_cases_are_recorded() -> None:
    """A new plug-in has cases before it has records; all others keep theirs."""
    assert len(RECORDED) > 200 and len(RECORDED.keys() - {case.id for case in CASES}) == 0

"""Codes of errors: each is in docs/errors.md, and survives a worker process."""

import pickle
from pathlib import Path

from dllm_sampler.errors import NotFiniteError, NotWrittenError, RowError, UserError, unknown
from tests.sampling import each

ROOT = Path(__file__).parents[2]
MADE = {"UserError", "RowError"}


@each(
    "error",
    [
        UserError("made-up", "two\nlines"),
        NotWrittenError("full"),
        RowError("made-up", "wrong: {prompts}", [0, 2]),
        NotFiniteError(3, [1]),
    ],
)
def test_workers(error: UserError) -> None:
    """An error of a worker process arrives as it was raised."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) and vars(again) == vars(error)


def test_unknown() -> None:
    """Names, fields and options that do not exist have three codes."""
    assert unknown("scheduler", "x", ["fixed"]).code == "choice-unknown"
    assert unknown("field of blocks=fixed", "x", ["length"]).code == "field-unknown"
    assert unknown("option", "x", ["seed"]).code == "option-unknown"

"""Codes of errors: each is in docs/errors.md, and survives a worker process."""

import ast
import pickle
import re
from pathlib import Path

from dllm_sampler.errors import NotFiniteError, NotWrittenError, RowError, UserError, unknown
from tests.sampling import each

ROOT = Path(__file__).parents[2]
MADE = {"UserError", "RowError"}


def listed() -> list[str]:
    """Return the codes of the page, in its order."""
    return re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)


def raised() -> set[str]:
    """Return the codes that the package's source gives errors."""
    codes = {"field-unknown", "flag-unknown", "option-unknown", "choice-unknown", "file-not-written", "not-finite"}
    for folder in ("dllm_sampler", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in MADE
                    and node.args
                ):
                    first = node.args[0]
                    if isinstance(first, ast.Constant):
                        codes.add(str(first.value))
                    else:
                        assert ast.unparse(first).endswith("code"), f"{file}:{node.lineno} has no code"
    return codes


def test_page() -> None:
    """The page lists each code once, and no other."""
    codes = listed()
    assert len(set(codes)) == len(codes)
    assert set(codes) == raised()
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", code) for code in codes)


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

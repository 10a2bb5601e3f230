"""Codes of errors, and text of others on a terminal."""

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from dllm_sampler import config
from dllm_sampler.cli import live, terminal
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.terminal import ending, show, visible
from dllm_sampler.core import checks
from dllm_sampler.errors import LONGEST, NoEffectWarning, NotFiniteError, NotWrittenError, RowError, UserError, unknown
from tests.sampling import each

# Codes of errors: each is described, and survives a worker process


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


# Text of others on a terminal: escape sequences are shown, not obeyed. Pipes and files get it as it is


EVIL = "a\x1b]0;title\x07\x9b2J\r\u202eb\tc\nd"
SPELLED = r"a\x1b]0;title\x07\x9b2J\r\u202eb" + "\tc\nd"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Tokenizer:
    all_special_ids = ()

    def decode(self, ids: list[int]) -> str:
        return "".join(EVIL if token else "x" for token in ids)


def test_every_control_character_is_spelled_out_but_tab_and_newline() -> None:
    assert visible(EVIL) == SPELLED
    obeyed = [chr(one) for one in (*range(32), *range(127, 160)) if chr(one) in visible(chr(one))]
    assert obeyed == ["\t", "\n"]
    assert visible("é 漢 👍 {}[]") == "é 漢 👍 {}[]"


@each(("kind", "said"), [(Terminal, SPELLED), (io.StringIO, EVIL)])
def test_answers_errors_and_pages(kind: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise UserError("file-invalid", "a \x1b[2J b")

    out, err, page = kind(), kind(), kind()
    show(EVIL, out)
    assert out.getvalue() == said + "\n"
    monkeypatch.setattr("sys.stderr", err)
    assert ending("it", fail) == 2
    assert err.getvalue() == (r"it: a \x1b[2J b" if kind is Terminal else "it: a \x1b[2J b") + "\n"
    terminal.say(Console(file=page, force_terminal=kind is Terminal, color_system=None), "a \x1b[2J b")
    assert (r"\x1b[2J" in page.getvalue()) == ("\x1b[2J" not in page.getvalue()) == (kind is Terminal)


def test_a_stream_shows_them_on_a_terminal() -> None:
    ids, masked, steps = [1, 0], [False, False], [0, 0]
    assert live.render(ids, masked, steps, Tokenizer(), terminal=True).plain == SPELLED + "x"  # type: ignore[arg-type]
    assert "\x1b" in live.render(ids, masked, steps, Tokenizer()).plain  # type: ignore[arg-type]


def test_messages_are_bounded_whatever_they_quote() -> None:
    long = "x" * 10**6
    words = "word " * 10**5
    for error in (UserError("made-up", f"there is no {long}: name one"), NoEffectWarning(f"{long} has no effect")):
        assert len(str(error)) < 200
    for error in (
        UserError("made-up", f"there is no {words}: name one"),
        RowError("made-up", f"{{prompts}} {words}: name one", [0]),
    ):
        assert len(str(error)) < LONGEST and str(error).endswith(": name one")
    again = UserError("made-up", str(UserError("made-up", words)))
    assert str(again) == str(UserError("made-up", words)), "as where a worker's error is raised again"
    assert str(UserError("made-up", "short")) == "short"


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: checks.check_switch("option", 3),
        lambda: checks.check_count("option", 0, optional=True),
        lambda: checks.check_count("option", 9, most=8),
        lambda: checks.check_number("option", -1, "a probability", most=1),
        lambda: checks.check_positive("option", 0, most=1),
        lambda: checks.check_choice("option", "c", Literal["a", "b"]),
        lambda: config.check("", Options, {"seed": "abc"}),
        lambda: config.check("", Options, {"sed": 1}),
        lambda: checks.check_text("option", "\udc80"),
    ],
)
def test_a_message_says_what_is_wrong_and_then_what_to_do(refuse: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        refuse()
    assert re.fullmatch(r"(option[ =]|seed=|unknown option ).+[.?] [A-Z].+\.", str(caught.value)), str(caught.value)

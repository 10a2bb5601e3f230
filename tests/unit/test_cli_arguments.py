"""Which words of a command line are prompts, overrides, flags."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.cli.arguments import is_override, split
from dllm_sampler.errors import UserError

PROMPTS = [
    "reverse: Ada, Ben, Cal, Dan",
    "insert at 1: Ada, Ben; Eve",
    "2+2=4 ?",
    "x = 3",
    "f(x)=3",
    "-5 + 3",
    "--what is this",
    "+1 555 0100",
    "++",
    "+model",
    "~ about",
    "~50 people",
    "https://example.org/?a=b",
    '{"a"=1}',
    "Wie heißt du=?",
    "",
    "=",
    "model",
]
OVERRIDES = [
    "scheduler=threshold",
    "scheduler.threshold=0.8",
    "seed=",
    "guide=[temperature,top_p]",
    "scheduler@other=fixed",
    "output=/a b/c.jsonl",
    "+new.key=1",
    "++seed=3",
    "~guide",
    "~scheduler.steps=3",
    "hydra/launcher=x",
]


@pytest.mark.parametrize("word", PROMPTS)
def test_a_prompt(word: str) -> None:
    assert not is_override(word)


@pytest.mark.parametrize("word", OVERRIDES)
def test_an_override(word: str) -> None:
    assert is_override(word)


def test_sorting() -> None:
    found = split(["a prompt", "seed=1", "another", "--", "seed=2", "--help", "--"])
    assert (found.action, found.prompts, found.overrides) == (
        "run",
        ["a prompt", "another", "seed=2", "--help", "--"],
        ["seed=1"],
    )


@settings(max_examples=30)
@given(st.lists(st.text()))
def test_all_is_prompt_behind_two_dashes(words: list[str]) -> None:
    assert split(["--", *words]).prompts == words


@settings(max_examples=30)
@given(st.lists(st.sampled_from(PROMPTS + OVERRIDES)))
def test_nothing_is_lost(words: list[str]) -> None:
    found = split(words)
    assert sorted(found.prompts + found.overrides) == sorted(words)


@pytest.mark.parametrize(("words", "action"), [(["-h"], "help"), (["x", "--help"], "help"), (["--info"], "info")])
def test_flags(words: list[str], action: str) -> None:
    assert split(words).action == action


def test_an_unknown_flag() -> None:
    with pytest.raises(UserError, match="unknown flag '--inof', did you mean '--info'"):
        split(["--inof"])

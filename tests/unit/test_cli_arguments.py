"""Which words of a command line are prompts, overrides, flags."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.cli.words import is_override, literal, parse, split
from dllm_sampler.errors import UserError
from tests.refusals import refused
from tests.sampling import each

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


@each("word", PROMPTS)
def test_a_prompt(word: str) -> None:
    assert not is_override(word)


@each("word", OVERRIDES)
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
@given(st.lists(st.text("ab1 =+~-.,:/[]{}\"'é日\n")))
def test_all_is_prompt_behind_two_dashes(words: list[str]) -> None:
    assert split(["--", *words]).prompts == words


@settings(max_examples=30)
@given(st.lists(st.sampled_from(PROMPTS + OVERRIDES)))
def test_nothing_is_lost(words: list[str]) -> None:
    found = split(words)
    assert sorted(found.prompts + found.overrides) == sorted(words)


@each(("words", "action"), [(["-h"], "help"), (["x", "--help"], "help"), (["--info"], "info")])
def test_flags(words: list[str], action: str) -> None:
    assert split(words).action == action


def test_an_unknown_flag() -> None:
    with refused("flag-unknown: '--inof', '--info'"):
        split(["--inof"])
    with refused("options-conflict"):
        split(["--help", "scheduler=fixed", "--info"])


INTEGER = '{"type": "integer"}'


@each(
    ("word", "value"),
    [
        (f"guide.json_schema.schema={INTEGER}", INTEGER),
        (f"guide.json_schema.schema=[{INTEGER}, {INTEGER}]", [INTEGER, INTEGER]),
        ("guide.json_schema.schema=[a.json,b.json]", ["a.json", "b.json"]),
        ("guide.json_schema.schema={type: integer}", {"type": "integer"}),
        ("guide.regex.pattern=[a-z]{3}(x|y)", "[a-z]{3}(x|y)"),
        ("guide.regex.pattern=[a-z]", "[a-z]"),
        ("guide.regex.pattern=a,b", "a,b"),
        ("guide.regex.pattern=123", "123"),
        ("guide.regex.pattern='[a-z]{2}'", "[a-z]{2}"),
        ('guide.regex.pattern="a"|"b"', '"a"|"b"'),
        (r"guide.regex.pattern=it's \d+\\", r"it's \d+\\"),
        (r"""guide.regex.pattern=["\d+", 'b{2}']""", [r"\d+", "b{2}"]),
        ("guide.choices.choices=[yes, no]", ["yes", "no"]),
        ("guide.grammar.grammar=my (1), a.grammar", "my (1), a.grammar"),
    ],
)
def test_patterns_and_schemas_need_the_quotes_of_the_shell_only(word: str, value: object) -> None:
    (read,) = literal(word)
    assert parse(read).value() == value


@each("word", ["separator.x=it's", 'scheduler.reward={"a": 1}', "stop_strings=(a,b", "seed=a\\'", 'suffix="}'])
def test_the_way_to_quote_that_an_error_names_is_right(word: str) -> None:
    with refused("option-syntax") as error:
        parse(word)
    example = str(error.value).partition("as in ")[2].removesuffix(".")
    (given,) = shlex.split(example)
    assert parse(given).value() == word.partition("=")[2]


@each(("word", "way"), [('suffix="}', """'suffix="\\"}"'"""), ("separator.x=it's", r'''"separator.x='it\'s'"''')])
def test_the_way_to_quote_is_short(word: str, way: str) -> None:
    with pytest.raises(UserError) as error:
        parse(word)
    assert f"as in {way}." in str(error.value)


def test_the_way_to_quote_in_a_list() -> None:
    with refused("option-syntax"):
        parse("guide.choices.choices=[don't know, no]")

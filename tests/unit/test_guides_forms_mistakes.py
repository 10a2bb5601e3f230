"""Forms that cannot be built or met, and wrong settings: each is one sentence."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import UserError
from dllm_sampler.guides import Choices, JsonSchema, Regex
from dllm_sampler.guides.forms import library
from tests import toys
from tests.forms import built


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a", "cannot be used as a form: missing \\), .* at character 1"),
        ("a)|(b", "cannot be used as a form: unbalanced parenthesis at character 2"),
        ("\ud800", "half a surrogate pair"),
        ("a(?=b)", r"cannot be used as a form: '\(\?=' at character 2 is look-around, .* write the pattern without it"),
        pytest.param("(a|b)*a(a|b){40}", "make it simpler", marks=pytest.mark.slow),
        ("(a|b)*a(a|b){13}", r"has \d+ states, at most 10000"),
        ("a" * 100_001, "100001 bytes as a regular expression, at most 100000"),
    ],
)
def test_hostile_patterns_end_in_a_sentence(pattern: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SECONDS", 2)
    begun = time.monotonic()
    with pytest.raises(UserError, match=said):
        built(pattern)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "enum": ["Ada"]}, '"Ada" among its values, which is not of its `type`'),
        ({"type": "string", "const": 5}, "5 among its values"),
        ({"type": "string", "format": "date", "maxLength": 10}, "`format` next to `maxLength`"),
        ({"type": "string", "pattern": "[0-9]{4}", "maxLength": 10}, "`maxLength` next to `pattern`"),
        ({"allOf": [{"type": "object"}], "properties": {"a": {}}}, "`allOf` next to `properties`"),
        ({"$ref": "#/$defs/a", "type": "string"}, "`[$]ref` next to `type`"),
        ({"type": "array", "prefixItems": [{}], "minItems": 3}, "`minItems` next to `prefixItems`"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "say `anyOf` if any may"),
        ({"enum": []}, "an empty `enum`"),
        ({"type": "object", "required": "a"}, "which is no list of names"),
        ({"type": "object", "required": [["a"]]}, "which is no list of names"),
        ({"type": "object", "properties": ["a"]}, "`properties`: .*, which is no object of schemas"),
        ({"$defs": "a"}, "`[$]defs`: .*, which is no object of schemas"),
        ({"anyOf": 2**70}, "`anyOf`: .*, which is no list of schemas"),
        ({"enum": "abc"}, "`enum`: .*, which is no list of values"),
        ({"$ref": 5}, "`[$]ref`: 5, which is no name"),
        *(
            ({"type": kind, word: bound}, f"`{word}`: .*, which is no whole number of at least 0")
            for kind, what in (("string", "Length"), ("array", "Items"))
            for word in (f"min{what}", f"max{what}")
            for bound in ("2", 2.0, 2.5, -1, True, None)
        ),
        ({"type": "string", "pattern": 5}, "`pattern`: 5, which is no pattern"),
        ({"type": "string", "pattern": ["a"]}, "`pattern`: .*, which is no pattern"),
        ({"type": "array", "minItems": 5, "maxItems": 2}, "`minItems` above `maxItems`, which no document meets"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "`minLength` above `maxLength`"),
        ({"type": 5}, "`type`: 5, which is no name of a type"),
        ({"type": [{}]}, "`type`: .*, which is no name of a type"),
        ({"format": []}, "`format`: .*, which is no name"),
    ],
)
def test_keywords_of_which_one_would_be_lost(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        JsonSchema({"type": "object", "properties": {"inside": schema}, "required": ["inside"]}).expressions()


def test_what_cannot_be_met_is_said_at_the_start() -> None:
    sampler = toys.sampler(guide={"name": "choices", "choices": ["abcabc-xy", "cd-x-cd"]})
    with pytest.raises(UserError, match="the shortest answer of that form has 5 tokens, and max_new_tokens is 4"):
        sampler.generate([1], max_new_tokens=4)
    answers = list(sampler.generate_many([[1], [2]], max_new_tokens=[5, 4], on_error="yield", order="given"))
    assert [answer.finish_reason == "refused" for answer in answers] == [False, True]
    with pytest.raises(UserError, match="no text of this model's tokens has that form"):
        toys.sampler(guide=Choices(("Zoe",)))
    assert Choices((1, "two")).choices == ("1", "two")
    assert toys.sampler(guide=Regex("^abc$")).generate([1], max_new_tokens=4).texts == ["abc"]
    with pytest.raises(UserError, match="this checkpoint has no tokenizer"):
        toys.sampler(guide=Regex("a"), tokenizer=None)
    with pytest.raises(UserError, match="both say what form an answer has"):
        toys.sampler(guide=[Regex("a"), Choices(("b",))])
    with pytest.raises(UserError, match="stop=prophet fills in tokens by itself"):
        toys.sampler(guide="regex", stop="prophet")


@pytest.mark.parametrize("name", ["true.json", "false-friends.json", "{x}.json", "null", "[v1].json", "1"])
def test_files_of_schemas(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are called."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('{"type": "integer"}')
    assert JsonSchema(name).schema == '{"type": "integer"}'
    Path(name).write_text('{"type": "integer"')
    with pytest.raises(UserError, match=rf"guide.json_schema.schema={re.escape(name)} is not JSON that can be read"):
        JsonSchema(name)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Choices([]).expressions(), r"guide=choices needs texts to choose from: guide.choices.choices=\[Ada"),
        (lambda: Choices("yes"), r"guide.choices.choices must be a list of texts, as in \[Ada, Ben\], not 'yes'"),
        (lambda: Choices(("a", "")), "guide.choices.choices has an empty text"),
        (lambda: Choices([True, False]), r'has True, which is no text: quote it, as in \["yes", "no"\]'),
        (lambda: Choices((1.5,)), "has 1.5, which is no text"),
        (lambda: Regex(""), "guide.regex.pattern must be a regular expression"),
        (lambda: JsonSchema().expressions(), "guide=json_schema needs a schema"),
        (lambda: JsonSchema("nowhere.json"), "no file that can be read: No such file or directory"),
        (lambda: JsonSchema("{"), "guide.json_schema.schema is not JSON"),
        (lambda: JsonSchema('{"type": "what"}').expressions(), "cannot be used as a form"),
        (lambda: JsonSchema({"type": "integer", "minimum": 3}).expressions(), "has 'minimum', which this guide"),
        (lambda: JsonSchema({"type": "object", "required": ["a"]}).expressions(), "'a' among `required`"),
        (lambda: JsonSchema({"properties": {'a"b': {}}}).expressions(), "signs that JSON escapes"),
        (lambda: JsonSchema({"type": "string", "pattern": "a|b"}).expressions(), "only letters, digits"),
        (lambda: JsonSchema({"type": "string", "format": "email"}).expressions(), "the format 'email'"),
        (lambda: JsonSchema({"allOf": [{"enum": [1]}, {"enum": [2]}]}).expressions(), "`allOf` of several"),
        (lambda: JsonSchema({}).expressions(), "has {}, which does not say what stands there: give it a `type`"),
        (
            lambda: JsonSchema({"type": "array", "items": {"title": "a"}}).expressions(),
            'has {"title": "a"}, which does',
        ),
        (lambda: JsonSchema("true").expressions(), 'has true for a schema: give an object such as {"type"'),
        (lambda: JsonSchema({"properties": {"a": 5}}).expressions(), "has 5 for a schema"),
        (lambda: JsonSchema({"anyOf": []}).expressions(), "an empty `anyOf`, which no document meets"),
        (
            lambda: JsonSchema({"type": "string", "pattern": "[a"}).expressions(),
            r"a `pattern`, and '\[a' cannot .*: unterminated .* 1",
        ),
        (lambda: JsonSchema("[" * 10**5).expressions(), "guide.json_schema.schema"),
        (lambda: JsonSchema({"a": {1}}).expressions(), "must be a mapping as JSON has it"),
    ],
)
def test_wrong_settings(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_a_schema_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "boolean"}')
    assert JsonSchema(str(file)) == JsonSchema({"type": "boolean"}) == JsonSchema('{"type": "boolean"}')

"""Forms that cannot be built or met, and wrong settings: each is one sentence."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler.errors import short
from dllm_sampler.guides import Choices, JsonSchema, Regex
from dllm_sampler.guides.forms import library
from tests import toys
from tests.forms import built
from tests.refusals import refused
from tests.sampling import each


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a", "form-invalid"),
        ("a)|(b", "form-invalid"),
        ("\ud800", "form-invalid"),
        ("a(?=b)", "form-invalid: ?='"),
        ("[a&&b]", "form-impossible: matches no text"),
        pytest.param("(a|b)*a(a|b){40}", "form-too-large", marks=pytest.mark.slow),
        ("(a|b)*a(a|b){13}", "form-too-large: 10000"),
        ("a" * 100_001, "form-too-large: 100001, 100000"),
    ],
)
def test_hostile_patterns_end_in_a_sentence(pattern: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SECONDS", 2)
    begun = time.monotonic()
    with refused(said):
        built(pattern)
    assert time.monotonic() - begun < 10


@each(
    ("schema", "said"),
    [
        ({"type": "integer", "enum": ["Ada"]}, '"Ada", `type`'),
        ({"type": "string", "const": 5}, "5, `type`"),
        ({"type": "string", "format": "date", "maxLength": 10}, "`format`, `maxLength`"),
        ({"type": "string", "pattern": "[0-9]{4}", "maxLength": 10}, "`maxLength`, `pattern`"),
        ({"allOf": [{"type": "object"}], "properties": {"a": {}}}, "`allOf`, `properties`"),
        ({"$ref": "#/$defs/a", "type": "string"}, "`$ref`, `type`"),
        ({"type": "array", "prefixItems": [{}], "minItems": 3}, "`minItems`, `prefixItems`"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf`, `anyOf`"),
        ({"enum": []}, "`enum`"),
        ({"type": "object", "required": "a"}, '`required`, "a"'),
        ({"type": "object", "required": [["a"]]}, '`required`, [["a"]]'),
        ({"type": "object", "properties": ["a"]}, '`properties`, ["a"]'),
        ({"$defs": "a"}, '`$defs`, "a"'),
        ({"anyOf": 2**70}, f"`anyOf`, {2**70}"),
        ({"enum": "abc"}, '`enum`, "abc"'),
        ({"$ref": 5}, "`$ref`, 5"),
        *(
            ({"type": kind, word: bound}, f"`{word}`, {json.dumps(bound)}")
            for kind, what in (("string", "Length"), ("array", "Items"))
            for word in (f"min{what}", f"max{what}")
            for bound in ("2", 2.0, 2.5, -1, True, None)
        ),
        ({"type": "string", "pattern": 5}, "`pattern`, 5"),
        ({"type": "string", "pattern": ["a"]}, '`pattern`, ["a"]'),
        ({"type": "array", "minItems": 5, "maxItems": 2}, "`minItems`, `maxItems`"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "`minLength`, `maxLength`"),
        ({"type": 5}, "`type`, 5"),
        ({"type": [{}]}, "`type`, [{}]"),
        ({"format": []}, "`format`, []"),
    ],
)
def test_keywords_that_would_be_lost(schema: dict[str, Any], said: str) -> None:
    with refused(f"form-invalid: {said}"):
        JsonSchema({"type": "object", "properties": {"inside": schema}, "required": ["inside"]}).expressions()


def test_what_cannot_be_met_is_said_at_the_start() -> None:
    sampler = toys.sampler(guide={"name": "choices", "choices": ["abcabc-xy", "cd-x-cd"]})
    with refused("form-impossible: max_new_tokens"):
        sampler.generate([1], max_new_tokens=4)
    answers = list(sampler.generate_many([[1], [2]], max_new_tokens=[5, 4], on_error="yield", order="given"))
    assert [answer.finish_reason == "refused" for answer in answers] == [False, True]
    with refused("form-impossible"):
        toys.sampler(guide=Choices(("Zoe",)))
    assert Choices((1, "two")).choices == ("1", "two")
    assert toys.sampler(guide=Regex("^abc$")).generate([1], max_new_tokens=4).texts == ["abc"]
    with refused("tokenizer-missing"):
        toys.sampler(guide=Regex("a"), tokenizer=None)
    with refused("plugins-incompatible: guide=regex"):
        toys.sampler(guide=[Regex("a"), Choices(("b",))])
    with refused("plugins-incompatible: stop=prophet"):
        toys.sampler(guide="regex", stop="prophet")


def test_a_refused_schema_of_a_file_is_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for schema in ('{"type": "strng"}', '{"type": "object", "properties": {"a": {"oneOf": []}}}'):
        file.write_text(schema)
        with refused(f"form-invalid: guide.json_schema.schema={short(str(file))}"):
            JsonSchema(str(file)).expressions()


@each("name", ["true.json", "false-friends.json", "{x}.json", "null", "[v1].json", "1"])
def test_files_of_schemas(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are called."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('{"type": "integer"}')
    assert JsonSchema(name).schema == '{"type": "integer"}'
    Path(name).write_text('{"type": "integer"')
    with refused(f"json-invalid: guide.json_schema.schema={name}"):
        JsonSchema(name)


@each(
    ("make", "said"),
    [
        (lambda: Choices([]).expressions(), "option-missing: guide=choices, guide.choices.choices=[Ada"),
        (lambda: Choices("yes"), "option-type: guide.choices.choices, 'yes'"),
        (lambda: Choices(("a", "")), "form-invalid: guide.choices.choices"),
        (lambda: Choices([True, False]), "option-type: guide.choices.choices"),
        (lambda: Choices((1.5,)), "option-type: guide.choices.choices"),
        (lambda: Regex(""), "option-type: guide.regex.pattern"),
        (lambda: JsonSchema().expressions(), "option-missing: guide=json_schema"),
        (lambda: JsonSchema("nowhere.json"), "file-unreadable"),
        (lambda: JsonSchema("{"), "json-invalid: guide.json_schema.schema"),
        (lambda: JsonSchema('{"type": "what"}').expressions(), "form-invalid"),
        (lambda: JsonSchema({"type": "integer", "minimum": 3}).expressions(), "form-invalid: 'minimum'"),
        (lambda: JsonSchema({"type": "object", "required": ["a"]}).expressions(), "form-invalid: 'a'"),
        (lambda: JsonSchema({"properties": {'a"b': {}}}).expressions(), "form-invalid"),
        (lambda: JsonSchema({"type": "string", "pattern": "a|b"}).expressions(), "form-invalid"),
        (lambda: JsonSchema({"type": "string", "format": "email"}).expressions(), "form-invalid: 'email'"),
        (lambda: JsonSchema({"allOf": [{"enum": [1]}, {"enum": [2]}]}).expressions(), "form-invalid"),
        (lambda: JsonSchema({}).expressions(), "form-invalid"),
        (lambda: JsonSchema({"type": "array", "items": {"title": "a"}}).expressions(), "form-invalid"),
        (lambda: JsonSchema("true").expressions(), "form-invalid"),
        (lambda: JsonSchema({"properties": {"a": 5}}).expressions(), "form-invalid"),
        (lambda: JsonSchema({"anyOf": []}).expressions(), "form-invalid"),
        (lambda: JsonSchema({"anyOf": [{"typ": 1}]}).expressions(), "form-invalid: at anyOf.0 has the keyword 'typ'"),
        (lambda: JsonSchema({"enum": [float("inf")]}).expressions(), "json-invalid"),
        (lambda: JsonSchema({"type": "object", "additionalProperties": False}).expressions(), "form-invalid"),
        (lambda: JsonSchema('{"type": "null"}', whitespace="[").expressions(), "form-invalid: whitespace='['"),
        (lambda: Regex(("a", "")), "option-type: guide.regex.pattern=['a', '']"),
        (lambda: Choices([[["a"]]]), "option-type: ['a'], lists of texts"),
        (lambda: JsonSchema({"type": "string", "pattern": "[a"}).expressions(), "form-invalid: '[a'"),
        (lambda: JsonSchema("[" * 10**5).expressions(), "file-unreadable: guide.json_schema.schema"),
        (lambda: JsonSchema({"a": {1}}).expressions(), "form-invalid"),
    ],
)
def test_wrong_settings(make: Any, said: str) -> None:
    with refused(said):
        make()


def test_a_schema_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "boolean"}')
    assert JsonSchema(str(file)) == JsonSchema({"type": "boolean"}) == JsonSchema('{"type": "boolean"}')

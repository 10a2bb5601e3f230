"""JSON schemas as users give them, and keywords that a regular expression would not enforce."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from dllm_sampler.errors import UserError, short
from dllm_sampler.guides.forms.automaton import byte_automaton, quoted
from dllm_sampler.host.reading import load_json

OPTION = "guide.json_schema.schema"


def schema_text(given: Any) -> str:
    """Return a schema as JSON, from a file, from JSON, or from a mapping."""
    if not isinstance(given, str):
        try:
            text = json.dumps(_plain(given))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError("form-invalid", f"{OPTION} is not JSON ({error}). Correct it.") from None
    elif isinstance(_json(given), dict | bool) or (given.lstrip().startswith("{") and not _is_file(given)):
        text = given
    else:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise UserError(
                "file-unreadable",
                f"{OPTION}={short(given)} is neither a schema nor a readable file ({reason}). Name a file, or give an"
                ' object, for example {"type": "integer"}.',
            ) from None
    try:
        with suppress(RecursionError):  # refused by `check_schema`
            json.dumps(load_json(text), allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        name = schema_name(given, text)
        raise UserError("json-invalid", f"{name} cannot be read as JSON ({error}). Correct it.") from None
    return text


def schema_name(given: Any, text: str) -> str:
    """Return the name of a schema in errors: the option, with the file if `text` was read from one."""
    return OPTION if text is given or not isinstance(given, str) else f"{OPTION}={short(given)}"


def _json(text: str) -> Any:
    """Return the value of a text that is JSON, or None for other texts and for null."""
    try:
        return load_json(text)
    except ValueError:
        return None


def _is_file(given: str) -> bool:
    try:
        return Path(given).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # no path at all
        return False


def _plain(value: Any) -> Any:
    """Return mappings and sequences of a configuration as plain JSON values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# Keywords that the library turns into an expression. It ignores others, or reads them as something else.
KNOWN = {
    "type", "properties", "required", "additionalProperties", "enum", "const", "items", "prefixItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "allOf", "$ref", "$defs",
    "definitions", "title", "description", "default", "examples", "$schema", "$id", "$comment",
}  # fmt: skip
FORMATS = {"date", "time", "date-time", "uuid"}
# The library keeps only one of two keywords in a group, or reads them as something else.
ALONE = (
    {"enum", "const", "$ref", "anyOf", "allOf", "properties", "items", "prefixItems", "pattern", "format"},
    {"enum", "const", "$ref", "anyOf", "allOf", "minLength"}, {"enum", "const", "$ref", "anyOf", "allOf", "maxLength"},
    {"$ref", "anyOf", "allOf", "type"}, {"pattern", "format", "minLength"}, {"pattern", "format", "maxLength"},
    {"prefixItems", "minItems"}, {"prefixItems", "maxItems"},
)  # fmt: skip
KINDS = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None), "object": dict,
    "array": list,
}  # fmt: skip
MEANING = {"type", "properties", "enum", "const", "anyOf", "allOf", "$ref", "prefixItems"}  # a schema needs one of them


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


OBJECTS, LISTS = "an object of schemas", "a list of schemas"
SHAPES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {  # kinds of values: their test, and their keywords
    OBJECTS: (lambda one: isinstance(one, Mapping), ("properties", "$defs", "definitions")),
    LISTS: (lambda one: isinstance(one, list), ("anyOf", "allOf", "prefixItems")),
    "a list of values": (lambda one: isinstance(one, list), ("enum",)),
    "a list of names": (_texts, ("required",)),
    f"{', '.join(map(json.dumps, KINDS))}, or a list of these, each as text in quotes": (
        lambda one: (isinstance(one, str) and one in KINDS) or (_texts(one) and all(name in KINDS for name in one)),
        ("type",),
    ),
    "a name, as text in quotes": (lambda one: isinstance(one, str), ("format",)),
    'a reference as text in quotes, for example "#/$defs/item"': (lambda one: isinstance(one, str), ("$ref",)),
    "a pattern, as text in quotes": (lambda one: isinstance(one, str), ("pattern",)),
    "a whole number of at least 0, written without a point": (
        lambda one: type(one) is int and one >= 0,
        ("minItems", "maxItems", "minLength", "maxLength"),
    ),
}
LOOSE = re.compile(r'[|."\\^$]')  # signs of a pattern that could leave its string, or match a part


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS.get(kind, object)) or (
        kind == "integer" and isinstance(value, float) and value == int(value)
    )


def check_schema(schema: Any, name: str = OPTION) -> None:
    """Refuse a schema that is malformed or contradicts itself, or a keyword that an expression would not enforce.

    The error names the first problem and its place in the schema. `name` is the schema's name in it.
    """
    if not isinstance(schema, Mapping):
        said = short(json.dumps(schema))
        raise UserError("form-invalid", f'{name} is {said}. Give an object, for example {{"type": "integer"}}.')
    for shape, (fits, words) in SHAPES.items():
        for word in words:
            if word in schema and not fits(schema[word]):
                said = short(json.dumps(schema[word]))
                raise UserError("form-invalid", f"{name} has `{word}`: {said}. Give {shape}.")
    names = schema.get("properties", {})
    unknown = sorted(str(one) for one in schema if one not in KNOWN)
    together = next((sorted(group & schema.keys()) for group in ALONE if len(group & schema.keys()) > 1), None)
    listed = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    wrong = [one for one in listed if kinds and not any(_is(one, kind) for kind in kinds)]
    required = schema.get("required", [])
    missing = [one for one in required if one not in names]
    odd = [one for one in names if json.dumps(one) != f'"{one}"']
    pattern = schema.get("pattern")
    empty = [word for word in ("enum", "type", "anyOf", "allOf") if schema.get(word) == []]
    bounds = [(f"min{what}", f"max{what}") for what in ("Items", "Length")]
    crossed = [pair for pair in bounds if pair[1] in schema and schema.get(pair[0], 0) > schema[pair[1]]]
    why = None
    if unknown:
        why = f"the keyword '{unknown[0]}', which this guide does not support. Correct or remove it."
    elif "oneOf" in schema:
        why = "`oneOf`, and this guide cannot exclude texts that match several. Use `anyOf` if they are valid."
    elif together:
        why = f"`{together[0]}` next to `{together[1]}`, and this guide keeps only one. Remove one."
    elif wrong:
        why = f"the value {short(json.dumps(wrong[0]))}, which is not of its `type`. Remove it."
    elif empty:
        why = f"an empty `{empty[0]}`, which no document meets. Add an entry."
    elif crossed:
        why = f"`{crossed[0][0]}` above `{crossed[0][1]}`, which no document meets. Lower `{crossed[0][0]}`."
    elif not MEANING & schema.keys():
        why = (
            f"no keyword that restricts the value ({short(json.dumps(schema))}). Give it a `type`, or use guide=grammar"
            " guide.grammar=json for any JSON."
        )
    elif schema.get("additionalProperties") is False and not names:
        why = "`additionalProperties`: false without `properties`, which is not supported. Add `properties`."
    elif missing:
        why = f"'{missing[0]}' in `required`, but not in `properties`. Add it there."
    elif odd:
        why = f"the property {odd[0]!r}. Name it in plain ASCII, without quotes, backslashes or control characters."
    elif isinstance(pattern, str) and LOOSE.search(pattern):
        sign = LOOSE.search(pattern)[0]  # pyright: ignore[reportOptionalSubscript]
        why = (
            f"the pattern {quoted(pattern)}, in which '{sign}' is not supported. Write it without | . \" \\ ^ $, for"
            " example [0-9] for \\d."
        )
    elif isinstance(pattern, str) and (error := _error(pattern)):
        why = f"the pattern {quoted(pattern)}, which {error}"
    elif schema.get("format", "date") not in FORMATS:
        why = f"the format {schema['format']!r}. Use one of {', '.join(sorted(FORMATS))}."
    elif len(schema.get("allOf", [])) > 1:
        why = "an `allOf` of several schemas. Merge them."
    if why:
        raise UserError("form-invalid", f"{name} has {why}")
    inner = {f"{word}.{key}": one for word in SHAPES[OBJECTS][1] for key, one in schema.get(word, {}).items()}
    inner |= {f"{word}.{at}": one for word in SHAPES[LISTS][1] for at, one in enumerate(schema.get(word, []))}
    inner |= {"items": schema["items"]} if "items" in schema else {}
    more = schema.get("additionalProperties", True)
    inner |= {} if isinstance(more, bool) else {"additionalProperties": more}
    for place, one in inner.items():
        check_schema(one, f"{name}.{place}" if " at " in name else f"{name} at {place}")


@lru_cache
def _error(pattern: str) -> str:
    """Return the reason that a pattern cannot be used, as the end of a sentence. Returns an empty text if it can.

    The pattern is built alone. A stray bracket might find its partner in the expression of the whole schema.
    """
    try:
        byte_automaton(pattern, "it")
    except UserError as error:
        return str(error).removeprefix("it ")
    return ""

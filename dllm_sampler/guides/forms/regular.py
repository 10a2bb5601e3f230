"""Guides on the form of an answer: a regular expression, a list of choices, a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.given import FREE
from dllm_sampler.core.packing import Answers
from dllm_sampler.core.protocols import Context, Guide, Whole
from dllm_sampler.core.spec import ModelSpec, learned
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms import automaton
from dllm_sampler.guides.forms.automaton import Automaton
from dllm_sampler.guides.forms.choice import choose, posterior
from dllm_sampler.guides.forms.edges import Edges, joined
from dllm_sampler.guides.forms.given import completable
from dllm_sampler.guides.forms.tokens import token_bytes


@dataclass(frozen=True)
class Form(Guide):
    """Answers of a regular language, whatever the scheduler commits together.

    The candidates of a step are tokens of one string that has the form, given what stands already: the best such
    string, or under a temperature an exact draw among all of them (positions that a step does not ask about count as
    uniform). Every part of it that a scheduler commits can be completed, so an answer that comes to its end has the
    form. Behind an end token anything may stand.

    Source: forward filtering and backward sampling of hidden Markov models, over the token automaton of constrained
    decoding (arXiv 2307.09702). The expression is compiled by outlines-core; tokens are taken as bytes.

    A list of forms is served in one batch: each prompt names its own (`forms` of `Sampler.generate`).

    Args:
        posterior: read confidence from the law of each token given what stands and that the answer has the form, so
            that what the form decides is certain; else from the model's own.
    """

    joint: ClassVar[bool] = True

    forms: int = field(init=False, default=0, repr=False, compare=False)
    posterior: bool = field(default=False, kw_only=True)
    automata: tuple[Automaton, ...] = field(init=False, default=(), repr=False, compare=False)  # of each form
    edges: Edges | None = field(init=False, default=None, repr=False, compare=False)
    shortest: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)
    mask_id: int = field(init=False, default=-1, repr=False, compare=False)
    eos_id: int = field(init=False, default=-1, repr=False, compare=False)
    drawn: bool = field(init=False, default=False, repr=False, compare=False)

    @property
    def measures(self) -> bool:
        """See `Guide.measures`."""
        return self.posterior

    def expressions(self) -> tuple[str, ...]:
        """The regular expression of the whole answer, or that of each form of a list."""
        raise NotImplementedError

    def build(self, tokens: Sequence[bytes], spec: ModelSpec) -> tuple[Automaton, ...]:
        """The automaton of each form over a model's tokens, whose bytes are `tokens`.

        Raises:
            UserError: one cannot be built.
        """
        assert spec.mask_id is not None
        numbers = spec.vocab_size, spec.eos_id, spec.mask_id
        return tuple(automaton.build(text, tokens, *numbers) for text in self.expressions())

    def bind(self, context: Context) -> Self:
        """Build the automaton over the model's tokens.

        Raises:
            UserError: it cannot be built, or the model has no tokenizer or no mask.
        """
        spec, name = context.spec, f"guide={type(self).__name__}"
        if context.tokenizer is None:
            raise UserError(f"{name} needs to know what tokens stand for, and this checkpoint has no tokenizer")
        if spec.mask_id is None:
            raise UserError(f"{name} is for models with a mask token, and this one's noise are random tokens")
        tokens = token_bytes(context.tokenizer)
        found = self.build(tokens, spec)
        shortest = tuple(one.shortest for one in found)
        if -1 in shortest:
            raise UserError(f"{name}: no text of this model's tokens has {self._name(shortest.index(-1))}")
        return learned(
            self,
            automata=found,
            edges=joined(found).to(spec.device),
            shortest=shortest,
            mask_id=spec.mask_id,
            eos_id=spec.eos_id,
            drawn=context.draws,
        )

    def check_answer(self, given: Sequence[int], form: int = 0) -> None:
        """See `Guide.check_answer`."""
        least, name = self.shortest[form], f"guide={type(self).__name__}"
        if len(given) < least:
            raise UserError(
                f"{name}: the shortest answer of {self._name(form)} has {least} tokens, and max_new_tokens is"
                f" {len(given)}"
            )
        if any(token != FREE for token in given) and not completable(self.automata[form], given, self.eos_id):
            raise UserError(f"{name}: no answer of {self._name(form)} has the given tokens where they are")

    def valid(self, tokens: Sequence[int], form: int = 0) -> bool:
        """See `Guide.valid`."""
        return self.automata[form].accepted(tokens)

    def _name(self, form: int) -> str:
        return f"form {form}" if self.forms else "that form"

    def __call__(self, logits: Tensor, canvas: Canvas, answers: Answers) -> Tensor:
        """See `Guide.__call__`: the logits of the posterior."""
        assert self.edges is not None
        return posterior(self.edges, logits, canvas, answers, self.mask_id, self.eos_id)

    def choose(self, logits: Tensor, noisy: Tensor, whole: Whole | None, canvas: Canvas, answers: Answers) -> Tensor:
        """See `Guide.choose`."""
        assert self.edges is not None
        return choose(self.edges, logits, noisy, canvas, answers, self.mask_id, self.drawn, whole, self.eos_id)


@dataclass(frozen=True)
class Regex(Form):
    """Answers that match a regular expression as a whole (Rust's syntax, without look-around and back references).

    Args:
        pattern: the expression; `(?s).*` allows everything. Or a list of expressions.
        posterior: see `Form`.
    """

    pattern: str | tuple[str, ...] = "(?s).*"

    def __post_init__(self) -> None:
        given = self.pattern
        listed = isinstance(given, list | tuple)
        if not given or not all(isinstance(one, str) and one for one in (given if listed else [given])):
            raise UserError(f"guide.pattern must be a regular expression, or a list of them, not {given!r}")
        vars(self).update(pattern=tuple(given) if listed else given, forms=len(given) if listed else 0)

    def expressions(self) -> tuple[str, ...]:
        """See `Form.expressions`."""
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern


@dataclass(frozen=True)
class Choices(Form):
    """Answers out of a list.

    Args:
        choices: the texts, or a list of such lists.
        posterior: see `Form`.
    """

    choices: tuple[str | Sequence[str], ...] = ("yes", "no")

    def __post_init__(self) -> None:
        given = self.choices
        listed = isinstance(given, list | tuple) and bool(given) and not any(isinstance(one, str) for one in given)
        for one in given if listed else [given]:
            if not isinstance(one, list | tuple) or not one or not all(isinstance(text, str) and text for text in one):
                raise UserError(
                    f"guide.choices must be a list of texts, none of them empty, or a list of such lists, not {given!r}"
                )
        found = tuple(tuple(texts) for texts in given) if listed else tuple(given)
        vars(self).update(choices=found, forms=len(found) if listed else 0)

    def expressions(self) -> tuple[str, ...]:
        """See `Form.expressions`."""
        lists = self.choices if self.forms else (self.choices,)
        return tuple("|".join(re.escape(str(one)) for one in texts) for texts in lists)


@dataclass(frozen=True)
class JsonSchema(Form):
    """JSON documents that a schema accepts, as far as outlines-core makes a regular expression of it.

    Properties come in the schema's order. References that lead back to themselves are followed `depth` times.

    Args:
        schema: a file, the schema as JSON, or a mapping. Or a list of these.
        whitespace: what may stand between the signs of a document, as a regular expression.
        depth: of recursion.
        posterior: see `Form`.
    """

    schema: str | Mapping[str, Any] | tuple[str | Mapping[str, Any], ...] = ""
    whitespace: str = "[ ]?"
    depth: int = 3

    def __post_init__(self) -> None:
        check_count("guide.depth", self.depth, 0)
        given = self.schema
        if isinstance(given, list | tuple):
            if not given or not all(given):
                raise UserError(f"guide.schema must be a schema, or a list of them, none of them empty, not {given!r}")
            vars(self).update(schema=tuple(_text(one) for one in given), forms=len(given))
        elif given:  # else a template of settings; `expressions` refuses it
            vars(self)["schema"] = _text(given)

    def expressions(self) -> tuple[str, ...]:
        """See `Form.expressions`."""
        if not self.schema:
            raise UserError("guide=json_schema needs a schema: guide.json_schema.schema=FILE, or the schema itself")
        texts = self.schema if isinstance(self.schema, tuple) else (self.schema,)
        try:
            for text in texts:
                check_schema(json.loads(str(text)))
        except RecursionError:
            raise UserError("guide.schema is nested too deeply") from None
        return tuple(automaton.expression(str(text), self.whitespace, self.depth) for text in texts)


def _text(given: Any) -> str:
    """A schema as JSON, from a file, from JSON, or from a mapping."""
    if not isinstance(given, str):
        try:
            text = json.dumps(_plain(given))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"guide.schema must be a mapping as JSON has it: {error}") from None
    elif given.lstrip().startswith(("{", "true", "false")):
        text = given
    else:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"guide.schema={given!r} is no JSON, and no file that can be read: {error}") from None
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"guide.schema is not JSON that can be read: {error}") from None
    return text


def _plain(value: Any) -> Any:
    """Mappings and sequences of a configuration as JSON knows them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# What the library turns into an expression; it ignores the rest, or reads it as something else.
KNOWN = {
    "type", "properties", "required", "additionalProperties", "enum", "const", "items", "prefixItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "allOf", "$ref", "$defs",
    "definitions", "title", "description", "default", "examples", "$schema", "$id", "$comment",
}  # fmt: skip
FORMATS = {"date", "time", "date-time", "uuid"}
# Of two keywords in a group the library keeps one, or reads them as something else.
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
LOOSE = re.compile(r'[|."\\^$]')  # of a pattern that could leave its string, or matches a part


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS.get(kind, object)) or (
        kind == "integer" and isinstance(value, float) and value == int(value)
    )


def check_schema(schema: Any) -> None:
    """Refuse what a regular expression would not keep.

    Raises:
        UserError: the first such thing.
    """
    if not isinstance(schema, Mapping):
        return
    names = schema.get("properties", {})
    unknown = sorted(str(name) for name in schema if name not in KNOWN)
    together = next((sorted(group & schema.keys()) for group in ALONE if len(group & schema.keys()) > 1), None)
    listed = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    wrong = [one for one in listed if kinds and not any(_is(one, kind) for kind in kinds)]
    required = schema.get("required", [])
    missing = [name for name in required if name not in names] if isinstance(required, list) else []
    odd = [name for name in names if json.dumps(name) != f'"{name}"']
    pattern = schema.get("pattern")
    why = None
    if unknown:
        why = f"'{unknown[0]}', which this guide cannot keep"
    elif "oneOf" in schema:
        why = "`oneOf`, of which this guide cannot keep that only one may hold: say `anyOf` if any may"
    elif together:
        why = f"`{together[0]}` next to `{together[1]}`, of which this guide keeps only one: leave one of them out"
    elif wrong:
        why = f"{json.dumps(wrong[0])} among its values, which is not of its `type`"
    elif schema.get("enum") == []:
        why = "an empty `enum`, which no document meets"
    elif not isinstance(required, list):
        why = f"`required`: {json.dumps(required)}, which is no list of names"
    elif missing:
        why = f"'{missing[0]}' among `required`, which is not among `properties`"
    elif odd:
        why = f"the property {odd[0]!r}, whose name has signs that JSON escapes"
    elif isinstance(pattern, str) and LOOSE.search(pattern):
        why = f"the pattern {pattern!r}: only letters, digits, sets of them, groups and counts can be served"
    elif schema.get("format", "date") not in FORMATS:
        why = f"the format {schema['format']!r}: there are {', '.join(sorted(FORMATS))}"
    elif len(schema.get("allOf", [])) > 1:
        why = "an `allOf` of several schemas"
    if why:
        raise UserError(f"guide.schema has {why}")
    inner = [*names.values(), *(schema.get("$defs") or {}).values(), *(schema.get("definitions") or {}).values()]
    inner += [schema.get("items"), schema.get("additionalProperties")]
    for group in ("prefixItems", "anyOf", "allOf"):
        inner += schema.get(group, [])
    for one in inner:
        check_schema(one)

"""Guides on the form of an answer: a regular expression, a list of choices, a JSON schema."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, cast

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Context, Guide, Whole
from dllm_sampler.core.spec import ModelSpec, with_bound_fields
from dllm_sampler.core.values import FREE, Canvas
from dllm_sampler.errors import UserError, as_typed, counted, invalid, short
from dllm_sampler.guides.forms import automaton
from dllm_sampler.guides.forms.automaton import Automaton, quoted
from dllm_sampler.guides.forms.choice import choose, posterior
from dllm_sampler.guides.forms.edges import Edges, joined
from dllm_sampler.guides.forms.given import completable
from dllm_sampler.guides.forms.schema import OPTION, check_schema, schema_name, schema_text
from dllm_sampler.guides.forms.tokens import token_bytes


@dataclass(frozen=True)
class Form(Guide):
    """Answers of a regular language, whatever the scheduler commits together.

    The predicted tokens of a step are those of one string that has the form and the decided tokens. It is the best such
    string, or under a temperature an exact draw among all of them. Whatever part of this string the scheduler commits,
    the rest can be completed. So an answer that comes to its end has the form. Positions that a step does not ask about
    count as uniform. After an end-of-text token any token is allowed. If other guides leave no token that fits, the
    choice is made without them. On a model without a mask token, a scheduler that revises tokens draws the block again
    in each step. Then only finished blocks bind the string.

    Source: forward filtering and backward sampling of hidden Markov models, over the token automaton of constrained
    decoding (arXiv 2307.09702). The expression is compiled by outlines-core, and tokens are taken as bytes.

    A list of forms is served in one batch. Each prompt names its own (`forms` of `Sampler.generate`).

    Args:
        posterior: read confidence from the law of each token, given the decided ones and that the answer has the form.
            Tokens that the form decides are then certain. Statistics are rounded (nine digits in float64, else five),
            so that tokens which determine each other tie. By default confidence is the model's.
    """

    joint: ClassVar[bool] = True
    keeps_excluded: ClassVar[bool] = True
    option: ClassVar[str]  # the field that has the form

    forms: int = field(init=False, default=0, repr=False, compare=False)
    posterior: bool = field(default=False, kw_only=True)
    automata: tuple[Automaton, ...] = field(init=False, default=(), repr=False, compare=False)  # of each form
    edges: Edges | None = field(init=False, default=None, repr=False, compare=False)
    mask_id: int | None = field(init=False, default=None, repr=False, compare=False)
    end_ids: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)
    redraws: bool = field(init=False, default=False, repr=False, compare=False)  # each step draws the whole block again
    bound_to: tuple[object, ModelSpec] | None = field(init=False, default=None, repr=False, compare=False)

    @property
    @override
    def measures(self) -> bool:
        return self.posterior

    def expressions(self) -> tuple[str, ...]:
        """Return the regular expression of the whole answer, or that of each form of a list."""
        raise NotImplementedError

    def typed_form(self, form: int) -> str:
        """Return the option and the value of a form, for errors."""
        given, option = getattr(self, self.option), f"guide.{named(self)}.{self.option}"
        return f"form {form} ({_typed(given[form])}) of {option}" if self.forms else f"{option}={_typed(given)}"

    def build(self, tokens: Sequence[bytes], spec: ModelSpec) -> tuple[Automaton, ...]:
        """Build the automaton of each form over a model's tokens, whose bytes are `tokens`.

        Raises:
            UserError: an automaton cannot be built.
        """
        numbers, expressions = (spec.vocab_size, spec.eos_ids, spec.mask_id), self.expressions()
        names = [self.typed_form(form) for form in range(len(expressions))]
        return automaton.build_all(expressions, tokens, *numbers, names)

    @override
    def bind(self, context: Context) -> Self:
        spec, name = context.spec, f"guide={named(self)}"
        if context.tokenizer is None:
            way = "Pass one to Sampler, or remove the guide"
            raise UserError("tokenizer-missing", f"{name} needs a tokenizer, and this model has none. {way}.")
        revises = context.scheduler is not None and context.scheduler.traits.revises
        redraws = spec.mask_id is None and revises
        if self.bound_to is not None and self.bound_to[0] is context.tokenizer and self.bound_to[1] == spec:
            return with_bound_fields(self, redraws=redraws)
        tokens = token_bytes(context.tokenizer)
        found = self.build(tokens, spec)
        shortest = tuple(one.shortest for one in found)
        if -1 in shortest:
            raise UserError(
                "form-impossible",
                f"{self.typed_form(shortest.index(-1))} needs texts that the model's vocabulary cannot spell."
                " Use another form or model.",
            )
        return with_bound_fields(
            self,
            automata=found,
            edges=joined(found).to(spec.device),
            mask_id=spec.mask_id,
            end_ids=spec.eos_ids,
            redraws=redraws,
            bound_to=(context.tokenizer, spec),
        )

    @override
    def check_answer(self, given: Sequence[int], form: int = 0) -> None:
        least, name = self.automata[form].shortest, f"guide={named(self)}"
        if len(given) < least:
            raise UserError(
                "form-impossible",
                f"{name}: {self._name(form)} needs at least {counted(least, 'token')}, and the answer has {len(given)}."
                " Raise max_new_tokens, or lengthen a gap of the infill.",
            )
        if any(token != FREE for token in given) and not completable(self.automata[form], given, self.end_ids):
            raise UserError(
                "form-impossible",
                f"{name}: {self._name(form)} allows no answer of {counted(len(given), 'token')} with the given ones."
                " Change the form, the given tokens or their places.",
            )

    @override
    def valid(self, tokens: Sequence[int], form: int = 0) -> bool:
        return self.automata[form].accepted(tokens)

    def _name(self, form: int) -> str:
        return f"form {form}" if self.forms else "the form"

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        assert self.edges is not None
        return posterior(self.edges, logits, self._open(canvas), head_rows, self.mask_id, self.end_ids)

    @override
    def choose(self, logits: Tensor, noisy: Tensor, whole: Whole | None, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        assert self.edges is not None
        return choose(self.edges, logits, noisy, self._open(canvas), head_rows, self.mask_id, whole, self.end_ids)

    def _open(self, canvas: Canvas) -> Canvas:
        """Return the canvas with noise wherever the scheduler draws again."""
        if not self.redraws:
            return canvas
        return replace(canvas, masked=canvas.masked | (canvas.in_block() & ~canvas.layout.frozen))


@dataclass(frozen=True)
class Regex(Form):
    """Answers that match a regular expression as a whole (Rust's syntax, without look-around and back references).

    The default allows everything and changes no answer whose text is UTF-8. A `^` at the beginning and a `$` at the end
    are allowed. Building takes at most 10 seconds and 4 GiB, and an automaton has at most 10,000 states.

    Args:
        pattern: the expression, or a list of expressions.
        posterior: see `Form`.
    """

    option: ClassVar[str] = "pattern"

    pattern: str | tuple[str, ...] = "(?s).*"

    def __post_init__(self) -> None:
        given = self.pattern
        listed = isinstance(given, list | tuple)
        if not given or not all(isinstance(one, str) and one for one in (given if listed else [given])):
            way = "Set a text that is not empty, or a list of such texts"
            raise invalid("guide.regex.pattern", given, way, "option-type")
        vars(self).update(pattern=tuple(given) if listed else given, forms=len(given) if listed else 0)

    @override
    def expressions(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern


@dataclass(frozen=True)
class Choices(Form):
    """Answers out of a list.

    Args:
        choices: the texts, or a list of such lists. A whole number means its digits.
        posterior: see `Form`.
    """

    option: ClassVar[str] = "choices"

    choices: Any = ()  # after __post_init__ a tuple of texts, or of such tuples

    def __post_init__(self) -> None:
        given = self.choices
        if not isinstance(given, list | tuple):
            raise invalid("guide.choices.choices", given, "Set a list, as in [Ada,Ben]", "option-type")
        listed = bool(given) and all(isinstance(one, list | tuple) for one in given)
        # An empty list is a template of settings, which `expressions` refuses.
        found = tuple(_choices(one) for one in given) if listed or not given else _choices(given)
        vars(self).update(choices=found, forms=len(found) if listed else 0)

    @override
    def expressions(self) -> tuple[str, ...]:
        if not self.choices:
            raise UserError("option-missing", "guide=choices has no texts. Set guide.choices.choices=[Ada,Ben].")
        lists = self.choices if self.forms else (self.choices,)
        return tuple("|".join(map(re.escape, texts)) for texts in lists)


def _typed(given: object) -> str:
    """Return a pattern, or a list of texts, for a message: as it was typed."""
    return quoted(given) if isinstance(given, str) else short(f"[{','.join(map(str, cast(Sequence[Any], given)))}]")


def _choices(given: Sequence[Any]) -> tuple[str, ...]:
    """Return a checked list of texts. Whole numbers become texts."""
    if not given:
        raise UserError("form-invalid", "guide.choices.choices has an empty list. Add texts, as in [Ada,Ben].")
    for one in given:
        if isinstance(one, bool) or not isinstance(one, str | int):
            said = f"guide.choices.choices has {as_typed(one)}, which is not a text here. Set texts, as in"
            raise UserError("option-type", f'{said} [Ada,"2.5"], or lists of texts, as in [[Ada,Ben],[Cal]].')
        if one == "":
            raise UserError("form-invalid", "guide.choices.choices has an empty text. Remove it.")
    return tuple(map(str, given))


WHITESPACE = "[ ]?"


@dataclass(frozen=True)
class JsonSchema(Form):
    """JSON documents that a schema accepts, by a regular expression that outlines-core makes of the schema.

    Properties come in the schema's order. Keywords that the expression would not enforce are refused by name: bounds of
    numbers, `uniqueItems`, several `allOf`, `oneOf`, formats other than `date`, `time`, `date-time` and `uuid`,
    required properties that the schema does not describe, and pairs such as `anyOf` next to `properties`. An empty
    schema (`{}`) is refused, too: any JSON is `guide=grammar guide.grammar=json`.

    Args:
        schema: a file, the schema as JSON, a mapping, or a list of any of them.
        whitespace: a regular expression of the white space between the signs of a document.
        depth: number of times that a schema's reference to itself is followed.
        posterior: see `Form`.
    """

    option: ClassVar[str] = "schema"

    schema: str | Mapping[str, Any] | tuple[str | Mapping[str, Any], ...] = ""
    whitespace: str = WHITESPACE
    depth: int = 3
    names: tuple[str, ...] = field(
        init=False, default=(OPTION,), repr=False, compare=False
    )  # of the schemas, in errors

    def __post_init__(self) -> None:
        check_count("guide.json_schema.depth", self.depth, 0)
        given = self.schema
        if isinstance(given, list | tuple):
            if not given or "" in given:
                raise invalid("guide.json_schema.schema", given, "Set a list of schemas or files", "option-type")
            texts = tuple(map(schema_text, given))
            names = (f"form {form} of {name}" for form, name in enumerate(map(schema_name, given, texts)))
            vars(self).update(schema=texts, names=tuple(names), forms=len(given))
        elif given != "":  # the default is a template of settings, which `expressions` refuses
            text = schema_text(given)
            vars(self).update(schema=text, names=(schema_name(given, text),))

    @override
    def typed_form(self, form: int) -> str:
        return self.names[form]

    @override
    def expressions(self) -> tuple[str, ...]:
        if not self.schema:
            raise UserError(
                "option-missing",
                "guide=json_schema has no schema. Set guide.schema to a file, or to the schema itself in quotes.",
            )
        texts = self.schema if isinstance(self.schema, tuple) else (self.schema,)
        if self.whitespace != WHITESPACE:  # alone: a stray bracket might find its partner in the schema's expression
            automaton.byte_automaton(self.whitespace, f"guide.json_schema.whitespace={quoted(self.whitespace)}")
        try:
            for text, name in zip(texts, self.names, strict=True):
                check_schema(json.loads(str(text)), name)
        except RecursionError:
            raise UserError(
                "form-too-large", "guide.json_schema.schema is nested too deeply. Make it flatter."
            ) from None
        return tuple(
            automaton.expression(str(text), self.whitespace, self.depth, name)
            for text, name in zip(texts, self.names, strict=True)
        )

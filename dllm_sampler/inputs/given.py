"""Given tokens of answers: a beginning, an end, tokens anywhere, gaps in a text, spans to generate again.

A given token is on the canvas from the start, like the prompt, and never changes. The model sees the given tokens and
generates the others. No end-of-text token is chosen in a gap with given tokens after it, so that the gap keeps its
length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.checks import is_whole
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import FREE
from dllm_sampler.errors import UserError, counted, short
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.prompts import BYTES, Infill, Prompt

GAP = re.compile(r"\{gap(?::([^{}]*))?\}")

Span = tuple[int, int]  # first position in an answer, from 0, and the one after the last
Piece = str | Sequence[int] | Tensor  # a part of an answer, as text or as token ids
Pinned = Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class GivenTokens:
    """The tokens of `prefix=`, `suffix=` and `pinned=`. Each has one row for all prompts, one for each, or no row."""

    prefix: tuple[list[int], ...] = ()
    suffix: tuple[list[int], ...] = ()
    pinned: tuple[list[int], ...] = ()

    @staticmethod
    def of(
        prefix: Piece | Sequence[Piece] | None,
        suffix: Piece | Sequence[Piece] | None,
        pinned: Pinned | None,
        tokenizer: PreTrainedTokenizerBase | None,
        spec: ModelSpec,
    ) -> GivenTokens:
        """Return the rows as token ids.

        Raises:
            UserError: a value is neither text nor token ids, or an id is outside the vocabulary.
        """

        def rows(name: str, value: Any, masks: bool = False) -> tuple[list[int], ...]:
            several = isinstance(value, list | tuple) and value and not all(isinstance(one, int) for one in value)
            several = several or (isinstance(value, Tensor) and value.dim() == 2)
            if value is None or not several:
                return () if value is None else (piece_ids(value, name, tokenizer, spec, masks),)
            return tuple(
                piece_ids(one, f"entry {at} of {name}", tokenizer, spec, masks) for at, one in enumerate(value, 1)
            )

        if any(isinstance(one, str) for one in (pinned if isinstance(pinned, list | tuple) else [pinned])):
            raise UserError(
                "option-type", "pinned is text. Give token ids with -1 at positions to generate, or use infill."
            )
        return GivenTokens(rows("prefix", prefix), rows("suffix", suffix), rows("pinned", pinned, True))

    def __bool__(self) -> bool:
        return bool(self.prefix or self.suffix or self.pinned)

    def length_mismatch(self, count: int) -> UserError | None:
        """Return the error if the numbers of rows do not match `count` prompts, else None."""
        for name, rows in vars(self).items():
            if len(rows) > 1 and len(rows) != count:
                said = f"{name} has {len(rows)} entries for {counted(count, 'prompt')}"
                return UserError("length-mismatch", f"{said}. Give one for each prompt, or one for all.")
        return None

    def answer(self, index: int, max_new_tokens: int) -> list[int] | None:
        """Return the answer to prompt `index`, from 0, with `FREE` at each position to generate.

        Returns None if no token is given.

        Raises:
            UserError: the given tokens do not fit the answer, or give two tokens for one position.
        """
        own: dict[str, list[int]] = {}
        for name, rows in vars(self).items():
            if index >= len(rows) > 1:
                raise UserError(
                    "length-mismatch",
                    f"{name} has {len(rows)} entries, none for prompt {index + 1}. Give one for each prompt.",
                )
            if rows:
                own[name] = rows[index if len(rows) > 1 else 0]
        if all(token == FREE for row in own.values() for token in row):
            return None
        sizes = " and ".join(_size(name, len(row)) for name, row in own.items())
        fixed = len(own.get("prefix", ())) + len(own.get("suffix", ()))
        if max(fixed, len(own.get("pinned", ()))) > max_new_tokens:
            raise UserError(
                "given-too-long",
                f"prompt {index + 1}: max_new_tokens={max_new_tokens} is too small for {sizes}. Raise max_new_tokens.",
            )
        given = [FREE] * max_new_tokens
        for name, row in own.items():
            begin = max_new_tokens - len(row) if name == "suffix" else 0
            for at, token in enumerate(row, begin):
                if FREE not in (token, given[at]) and token != given[at]:
                    raise UserError(
                        "given-conflict",
                        f"prompt {index + 1}: {name} gives token {at + 1} of the answer as {token}, and another option"
                        f" as {given[at]}. Remove one.",
                    )
                given[at] = given[at] if token == FREE else token
        return given


def _size(name: str, count: int) -> str:
    tokens = "token" if count == 1 else "tokens"
    return f"{count} pinned {tokens}" if name == "pinned" else f"a {name} of {count} {tokens}"


def piece_ids(
    piece: Any, name: str, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec, masks: bool
) -> list[int]:
    """Return the token ids of a text, or checked ids. With `masks`, mask tokens and -1 are allowed and become `FREE`.

    Raises:
        UserError: `piece` is neither, a part of a text is not in the vocabulary, or an id is not allowed.
    """
    if isinstance(piece, str):
        if tokenizer is None:
            raise UserError("tokenizer-missing", f"{name} is text, but there is no tokenizer. Give token ids.")
        ids = prompts.text_ids(piece, tokenizer, name, special=False)
    else:
        ids = piece.tolist() if isinstance(piece, Tensor) else piece
        if not isinstance(ids, list | tuple) or not all(map(is_whole, ids)):
            kinds = "token ids, with -1 at positions to generate" if "pinned" in name else "text or token ids"
            raise UserError("option-type", f"{name} is {short(repr(piece))}. Give {kinds}.")
    free = {FREE, spec.mask_id} if masks else set()
    for token in ids:
        if token not in free and not 0 <= token < spec.vocab_size:
            raise UserError(
                "token-outside-vocabulary", f"{name} has token id {token}. Give ids from 0 to {spec.vocab_size - 1}."
            )
        if token == spec.mask_id and not masks:
            way = "Remove it, or mark positions to generate by a gap of infill, as in {gap:8}."
            raise UserError("mask-token-given", f"{name} contains the mask token (id {token}). {way}")
    return [FREE if token in free else token for token in ids]


def templates(answers: str | Sequence[str], given: Prompt | Sequence[Prompt] | None) -> list[Infill]:
    """Return texts with gaps as `Infill`s, each with its prompt from `given`, if any.

    Raises:
        UserError: `answers` are not texts, or there is neither one text for each prompt nor one for all.
    """
    one = isinstance(answers, str | BYTES | Tensor) or not isinstance(answers, Iterable)
    texts: list[Any] = [answers] if one else list(answers)
    if not texts:
        raise UserError("option-type", "infill has no texts. Give at least one with a gap, as in {gap:8}.")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            way = "Give text with a gap, as in {gap:8}, or call generate(Infill([5, -1])) for token ids."
            raise UserError("option-type", f"infill: text {number} is {short(repr(text))}. {way}")
    if given is None:
        return [Infill(text) for text in texts]
    known = prompts.as_list(given)
    texts = texts * len(known) if len(texts) == 1 else texts
    if len(known) != len(texts):
        sizes = f"{counted(len(texts), 'text')} for {counted(len(known), 'prompt')}"
        raise UserError("length-mismatch", f"infill has {sizes}. Give as many prompts as texts, or one text for all.")
    return [Infill(text, prompt) for text, prompt in zip(texts, known, strict=True)]


def refined(answers: Any, spans: Span | Sequence[Span], given: Prompt | Sequence[Prompt] | None) -> list[Infill]:
    """Return answers as `Infill`s in which the tokens of `spans` are free.

    Raises:
        UserError: answers or spans are missing, a span is outside of its answer, or the numbers of prompts and answers
            differ.
    """
    rows = [_row(row, number) for number, row in enumerate(prompts.as_list(answers), 1)]
    if not rows:
        raise UserError("answer-empty", "refine has no answers. Give a result or token ids.")
    known = [None] * len(rows) if given is None else prompts.as_list(given)
    if len(known) != len(rows):
        sizes = f"{counted(len(rows), 'answer')} for {counted(len(known), 'prompt')}"
        raise UserError("length-mismatch", f"refine has {sizes}. Give one prompt for each answer.")
    return [
        Infill(_without(row, spans, number), None if prompt is None or not len(prompt) else prompt)
        for number, (row, prompt) in enumerate(zip(rows, known, strict=True), 1)
    ]


def _row(answer: Any, number: int) -> list[int]:
    ids = answer.tolist() if isinstance(answer, Tensor) else answer
    if not isinstance(ids, list | tuple) or not all(map(is_whole, ids)):
        said = f"refine: answer {number} is {short(repr(answer))}"
        raise UserError("option-type", f"{said}. Give a result, outside of a list, or token ids.")
    return list(ids)


def _without(row: Sequence[int], spans: Any, number: int) -> list[int]:
    """Return the tokens of answer `number`, with `FREE` in its spans."""
    listed = isinstance(spans, tuple | list)
    found = [spans] if listed and spans and not isinstance(spans[0], tuple | list) else spans
    if not listed or not found:
        raise UserError("span-invalid", f"span is {short(repr(spans))}. Give (first, end), or a list of these.")
    free = list(row)
    for span in found:
        pair = isinstance(span, tuple | list) and len(span) == 2 and all(map(is_whole, span))
        if not pair or not 0 <= span[0] < span[1] <= len(row):
            said = f"span {short(repr(span))} does not fit answer {number}, which has {counted(len(row), 'token')}"
            way = "Give whole numbers (first, end) with 0 <= first < end <= that number, or a list of these"
            raise UserError("span-invalid", f"{said}. {way}.")
        free[span[0] : span[1]] = [FREE] * (span[1] - span[0])
    return free


def encode_template(
    text: Any, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec, name: str, alone: bool = False
) -> list[int]:
    """Return the token ids of an answer with gaps, with `FREE` at each position to generate.

    Args:
        text: a text with gaps, or token ids with -1 at positions to generate.
        name: name of the text in errors.
        alone: true if no prompt is before the text.

    Raises:
        UserError: the text has no gap, only gaps, a gap without a length, or more tokens than the model's context, or
            `piece_ids` refuses a part of it.
    """
    if isinstance(text, str):
        given = _filled(text, tokenizer, name, alone, spec)
    else:
        given = piece_ids(text, name, tokenizer, spec, masks=True)
    if FREE not in given:
        raise UserError("gap-missing", f"{name} has no gap. Write a gap of 8 tokens as {{gap:8}}.")
    if alone and not any(token != FREE for token in given):
        raise UserError(
            "gap-without-text",
            f"{name} has only positions to generate, and no prompt comes before it. Add text beside a gap (in refine,"
            " shorten the span), or give a prompt.",
        )
    if len(given) + (not alone) > spec.max_positions:
        said = f"{name} has {len(given)} tokens with its gaps, too many{' after a prompt' * (not alone)} for the"
        raise UserError("context-exceeded", f"{said} model's context of {spec.max_positions}. Shorten it.")
    return given


def _filled(text: str, tokenizer: PreTrainedTokenizerBase | None, name: str, alone: bool, spec: ModelSpec) -> list[int]:
    """Return the tokens of a text with gaps. A text that is `alone` gets the tokenizer's special tokens around it."""
    free = sum(piece for piece in _split(text, name) if isinstance(piece, int))
    if free > spec.max_positions:  # checked before a list of this size is made
        said = f"{name} has gaps of {free} tokens, more than the model's context of {spec.max_positions}"
        raise UserError("context-exceeded", f"{said}. Shorten them.")
    parts: list[list[int]] = []
    for piece in _split(text, name):
        parts.append([FREE] * piece if isinstance(piece, int) else piece_ids(piece, name, tokenizer, spec, masks=False))
    known = next((part for part in parts if part and part[0] != FREE), None)
    if alone and known is not None and tokenizer is not None:
        # The tokenizer's special tokens, for example BERT's separator, go around the whole text.
        probe = next(piece for piece in _split(text, name) if isinstance(piece, str) and piece.strip())
        framed = list(tokenizer(probe)["input_ids"])  # pyright: ignore
        plain = list(tokenizer(probe, add_special_tokens=False)["input_ids"])  # pyright: ignore
        at = next((at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), None)
        if at is not None:
            parts = [framed[:at], *parts, framed[at + len(plain) :]]
    return [token for part in parts for token in part]


def _split(text: str, name: str) -> Iterator[str | int]:
    """Yield the pieces of a text, and as numbers the lengths of the gaps between them."""
    end = 0
    for gap in GAP.finditer(text):
        if text[end : gap.start()]:
            yield text[end : gap.start()]
        count = (gap[1] or "").strip()
        if not count.isdecimal() or int(count) < 1:
            said = f"{name} has {short(gap[0])}, a gap without a length of at least 1"
            raise UserError("gap-invalid", f"{said}. Write a gap of 8 tokens as {{gap:8}}.")
        yield int(count)
        end = gap.end()
    if text[end:]:
        yield text[end:]

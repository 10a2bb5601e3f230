"""Answers of which tokens are given: gaps in a text, a beginning, an end, tokens anywhere.

A given token stands on the canvas from the start, like the prompt, and never changes; the model sees it, and fills
what is free around it. No end token is chosen in a gap that has given tokens behind it: a gap keeps its length.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.ends import first_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import FREE
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import UserError
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.given import Fixed, piece_ids
from dllm_sampler.inputs.prompts import Infill, Prompt
from dllm_sampler.result import Result

GAP = re.compile(r"\{gap(?::([^{}]*))?\}")

Span = tuple[int, int]  # positions of an answer, from 0; the end is none of them


class Task(NamedTuple):
    """A prompt, checked: token ids, and what is given of its answer."""

    prompt: list[int]
    new_tokens: int
    given: list[int] | None = None  # `new_tokens` of them, `FREE` where one is to be generated; None: all are

    @property
    def again(self) -> Prompt:
        """A prompt that is encoded to this task."""
        return self.prompt if self.given is None else Infill(self.given, self.prompt or None)


def encode(
    given: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    plugins: Plugins,
    new_tokens: int,
    fixed: Fixed | None = None,
    first: int = 1,
) -> list[Task]:
    """Each prompt as token ids, with what is given of its answer; `first` is the number of the first prompt.

    Raises:
        UserError: a bad prompt, by its number, or given tokens that model or plug-ins cannot serve.
    """
    found, fixed = prompts.as_list(given), fixed or Fixed()
    if not found:
        raise UserError("there is no prompt: give at least one")
    spec = plugins.context.spec
    tasks = []
    for number, prompt in enumerate(found, first):
        if isinstance(prompt, Infill):
            if fixed:
                raise UserError(
                    f"prompt {number} is an Infill, which says what is given: leave prefix, suffix and pinned out"
                )
            task = _infilled(prompt, tokenizer, spec, number)
        else:
            ids = prompts.encode_one(prompt, tokenizer, spec, new_tokens, number)
            task = Task(ids, new_tokens, fixed.answer(number - 1, new_tokens))
        if task.given is not None:
            _check(task, plugins, number)
        tasks.append(task)
    return tasks


def check_forms(tasks: Sequence[Task], forms: Sequence[int], plugins: Plugins) -> None:
    """Refuse answers, each of its form, that the guides cannot serve.

    Raises:
        UserError: too short for a form, or given tokens that no answer of it has.
    """
    answers = {(tuple(task.given or [FREE] * task.new_tokens), form) for task, form in zip(tasks, forms, strict=True)}
    for answer, form in sorted(answers):
        for guide in plugins.guides:
            guide.check_answer(answer, form)


def tasks(answers: str | Sequence[str], given: Prompt | Sequence[Prompt] | None) -> list[Infill]:
    """Answers with gaps as prompts, those of `given` in front of them.

    Raises:
        UserError: another number of prompts.
    """
    texts = [answers] if isinstance(answers, str) or not isinstance(answers, Iterable) else list(answers)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError('infill takes texts with gaps, "... {gap:8} ...": for tokens use pinned')
    if given is None:
        return [Infill(text) for text in texts]
    known = prompts.as_list(given)
    texts = texts * len(known) if len(texts) == 1 else texts
    if len(known) != len(texts):
        raise UserError(f"there are {len(texts)} texts and {len(known)} prompts: give one prompt for each text")
    return [Infill(text, prompt) for text, prompt in zip(texts, known, strict=True)]


def refined(answers: Any, spans: Span | Sequence[Span], given: Prompt | Sequence[Prompt] | None) -> list[Infill]:
    """Answers with the `spans` of each taken out, as prompts.

    Raises:
        UserError: no spans, or one outside of an answer.
    """
    if isinstance(answers, Result):
        if given is not None:
            raise UserError("a result knows its prompts: leave prompts out")
        trace, known = answers.trace, answers.lengths.tolist()
        begins = trace.begin.tolist()
        rows = [row[:length] for row, length in zip(answers.tokens.tolist(), known, strict=True)]
        fronts = [ids[begin : trace.origin] for ids, begin in zip(trace.ids.tolist(), begins, strict=True)]
    else:
        rows = [_row(row, number) for number, row in enumerate(prompts.as_list(answers), 1)]
        fronts = [None] * len(rows) if given is None else prompts.as_list(given)
    if len(fronts) != len(rows):
        raise UserError(f"there are {len(rows)} answers and {len(fronts)} prompts: give one prompt for each answer")
    return [
        Infill(_without(row, spans, number), front or None)
        for number, (row, front) in enumerate(zip(rows, fronts, strict=True), 1)
    ]


def _row(answer: Any, number: int) -> list[int]:
    """The token ids of an answer."""
    try:
        return [operator.index(token) for token in answer]
    except TypeError:
        raise UserError(f"refine takes an earlier result or token ids, and answer {number} is {answer!r:.60}") from None


def _without(row: Sequence[int], spans: Any, number: int) -> list[int]:
    """An answer with its spans free."""
    found = [spans] if isinstance(spans, tuple | list) and spans and isinstance(spans[0], int) else spans
    if not isinstance(found, tuple | list) or not found:
        raise UserError(f"span must be (first, end), positions of the answer from 0, or a list of these, not {spans!r}")
    free = list(row)
    for span in found:
        whole = isinstance(span, tuple | list) and len(span) == 2 and all(type(one) is int for one in span)
        if not whole or not 0 <= span[0] < span[1] <= len(row):
            raise UserError(
                f"span {span!r} should be (first, end) with 0 <= first < end <= {len(row)}, the tokens of answer"
                f" {number}"
            )
        free[span[0] : span[1]] = [FREE] * (span[1] - span[0])
    return free


def _infilled(prompt: Infill, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec, number: int) -> Task:
    """The task of an answer with gaps."""
    given = answer(prompt.answer, tokenizer, spec, f"prompt {number}", alone=prompt.prompt is None)
    if prompt.prompt is None:
        return Task([], len(given), given)
    return Task(prompts.encode_one(prompt.prompt, tokenizer, spec, len(given), number), len(given), given)


def answer(
    text: Any, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec, name: str, alone: bool = False
) -> list[int]:
    """Token ids of an answer with gaps, `FREE` in these.

    Args:
        text: a text with gaps, or token ids, -1 where one is free.
        name: what errors call it.
        alone: there is no prompt in front of it.

    Raises:
        UserError: it has no gap, one without a length, or more tokens than the model's context.
    """
    if isinstance(text, str):
        given = _filled(text, tokenizer, name, alone, spec)
    else:
        given = piece_ids(text, name, tokenizer, spec, masks=True)
    if FREE not in given:
        raise UserError(f"{name} has no gap, so there is nothing to generate: write one as {{gap:8}}, of 8 tokens")
    if alone and not any(token != FREE for token in given):
        raise UserError(f"{name} is nothing but a gap: give text around it, or a prompt in front of it")
    context = f"the model's context of {spec.max_positions} positions"
    if len(given) > spec.max_positions:
        raise UserError(f"{name} has {len(given)} tokens with its gaps, more than {context}")
    if not alone and len(given) == spec.max_positions:
        raise UserError(f"{name} has {len(given)} tokens with its gaps, which leaves no room for a prompt in {context}")
    return given


def _filled(text: str, tokenizer: PreTrainedTokenizerBase | None, name: str, alone: bool, spec: ModelSpec) -> list[int]:
    """Tokens of a text with gaps, `FREE` in these; with the tokenizer's own around it where it stands `alone`."""
    free = sum(piece for piece in _split(text, name) if isinstance(piece, int))
    if free > spec.max_positions:  # said before a list of that many is made
        raise UserError(
            f"{name} has gaps of {free} tokens in all, more than the model's context of {spec.max_positions} positions"
        )
    parts: list[list[int]] = []
    for piece in _split(text, name):
        parts.append([FREE] * piece if isinstance(piece, int) else piece_ids(piece, name, tokenizer, spec, masks=False))
    known = next((part for part in parts if part and part[0] != FREE), None)
    if alone and known is not None and tokenizer is not None:
        # What a tokenizer puts before and behind a text (a first token, BERT's separator) goes around the whole.
        probe = next(piece for piece in _split(text, name) if isinstance(piece, str) and piece.strip())
        framed = list(tokenizer(probe)["input_ids"])  # pyright: ignore
        plain = list(tokenizer(probe, add_special_tokens=False)["input_ids"])  # pyright: ignore
        at = next((at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), None)
        if at is not None:
            parts = [framed[:at], *parts, framed[at + len(plain) :]]
    return [token for part in parts for token in part]


def _split(text: str, name: str) -> Iterator[str | int]:
    """The pieces of a text, and in their places the lengths of its gaps."""
    end = 0
    for gap in GAP.finditer(text):
        if text[end : gap.start()]:
            yield text[end : gap.start()]
        count = (gap[1] or "").strip()
        if not count.isdecimal() or int(count) < 1:
            raise UserError(
                f"{name} has {gap[0]}, and a gap is written with its number of tokens, at least 1: {{gap:8}}"
            )
        yield int(count)
        end = gap.end()
    if text[end:]:
        yield text[end:]


def _check(task: Task, plugins: Plugins, number: int) -> None:
    """Refuse given tokens that cannot be kept, or that a gap would not see.

    Raises:
        UserError: which, and why.
    """
    spec, given, start = plugins.context.spec, task.given, len(task.prompt)
    assert given is not None
    if FREE not in given:
        raise UserError(
            f"prompt {number}: all {len(given)} tokens of the answer are given, so nothing is to be generated"
        )
    first = given.index(FREE)
    last = max((at for at, token in enumerate(given) if token != FREE), default=-1)
    if plugins.scheduler.traits.initial is not None and first < last:
        raise UserError(
            f"prompt {number} has given tokens behind a gap, whose places scheduler={named(plugins.scheduler)} would"
            " move: use another scheduler, threshold say, or give a beginning alone"
        )
    if spec.encoder:
        raise UserError(
            f"prompt {number} has given tokens in its answer, and this model's decoder was made for canvases of noise"
            " alone: put a beginning into the prompt"
        )
    if not start and spec.shift and not first:
        raise UserError(
            f"prompt {number} begins with a gap, and this model predicts a token from the one before it: give text in"
            " front of the gap"
        )
    end = first_end(given, spec.eos_ids)
    if end is not None and FREE in given[end:]:
        raise UserError(
            f"prompt {number} has an end token before a gap, and an answer ends there: leave one of them out"
        )
    if first > last:
        return  # a beginning alone
    if not plugins.scheduler.traits.reads_ahead:
        raise UserError(
            f"scheduler={named(plugins.scheduler)} asks a verifier that reads from left to right, and"
            f" prompt {number} has given tokens behind a gap, which it would not see: use another scheduler, threshold"
            " say"
        )
    if spec.attention == "causal_context":
        raise UserError(
            f"this model reads from left to right up to its active block, and prompt {number} has given tokens behind a"
            " gap, which it may not see: give a beginning alone"
        )
    grid = plugins.blocks.grid
    begin = 0 if spec.prompt_block else start
    if grid is not None and (begin + first) // grid < (begin + last) // grid:
        raise UserError(
            f"this model is block-causal, a gap does not see later blocks of {grid} tokens, and prompt {number} has"
            " given tokens in one: give a beginning alone, or text behind a gap in the same block"
        )

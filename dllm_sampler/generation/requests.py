"""Checked arguments of a call, and the requests of each prompt."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.ends import first_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import row_seeds
from dllm_sampler.core.spec import ChangingLength, LeftToRightVerifier
from dllm_sampler.core.values import FREE
from dllm_sampler.engine.in_flight import Request
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import UserError, as_typed, counted, invalid
from dllm_sampler.generation.runtime import Runtime
from dllm_sampler.generation.score import reasons_against
from dllm_sampler.inputs import texts
from dllm_sampler.inputs.given import GivenTokens, Piece, Pinned, encode_template
from dllm_sampler.inputs.prompts import Infill, check_new_tokens, encode_one
from dllm_sampler.options import MOST_ROWS, Progress
from dllm_sampler.particles.one import OneRow


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of one call of `Sampler.generate`, `Sampler.stream` or `Sampler.generate_many`."""

    runtime: Runtime
    max_new_tokens: int | list[int]
    seed: int | list[int]
    stop_strings: tuple[str, ...]
    samples: int
    forms: int | list[int] | None
    given: GivenTokens
    progress: Progress | None
    max_length: int | None

    @classmethod
    def checked(
        cls,
        runtime: Runtime,
        prompts: Any,
        *,
        max_new_tokens: int | Sequence[int],
        seed: int | Sequence[int] = 0,
        stop_strings: str | Sequence[str] = (),
        samples: int = 1,
        forms: int | Sequence[int] | None = None,
        prefix: Piece | Sequence[Piece] | None = None,
        suffix: Piece | Sequence[Piece] | None = None,
        pinned: Pinned | None = None,
        progress: Progress | None = None,
        max_length: int | None = None,
    ) -> Arguments:
        """Check the arguments of a call before the first prompt is read. `Sampler.generate` describes them.

        Args:
            prompts: a list or any iterable. The length of a list is checked against the other arguments.

        Raises:
            UserError: an argument has a wrong type, value or length.
        """
        spec, listed = runtime.denoiser.spec, isinstance(prompts, Sequence)
        check_count("samples", samples, most=MOST_ROWS)
        check_count("max_length", max_length, optional=True)
        if max_length is not None:  # the context is a limit, too
            max_length = min(max_length, spec.max_positions)
        max_new_tokens, seed = whole_numbers("max_new_tokens", max_new_tokens), whole_numbers("seed", seed)
        for one in [seed] if isinstance(seed, int) else seed:
            _checked_seed(one)
        if not listed or not all(isinstance(one, Infill) for one in prompts):  # the answer of an `Infill` has a length
            for at, one in enumerate([max_new_tokens] if isinstance(max_new_tokens, int) else max_new_tokens):
                name = "max_new_tokens" if isinstance(max_new_tokens, int) else f"max_new_tokens[{at}]"
                check_new_tokens(one, spec, name)
                if max_length is not None and max_length <= one:
                    raise UserError(
                        "context-exceeded",
                        f"{name}={one} leaves no position for a prompt within max_length={max_length}. Lower"
                        " max_new_tokens, or raise max_length.",
                    )
        check_progress(progress)
        arguments = cls(
            runtime,
            max_new_tokens,
            seed,
            texts.stop_strings(stop_strings, runtime.tokenizer),
            samples,
            check_forms(forms, runtime.plugins.forms),
            GivenTokens.of(prefix, suffix, pinned, runtime.tokenizer, runtime.spec),
            progress,
            max_length,
        )
        if runtime.plugins.particles.needs_likelihood:
            arguments.check_likelihood()
        mismatch = arguments.length_mismatch(len(prompts)) if isinstance(prompts, Sized) else None
        if mismatch is not None:
            raise mismatch
        return arguments

    def length_mismatch(self, count: int, more: bool = False) -> UserError | None:
        """Return the error if a list argument does not match `count` prompts, or None. `more` prompts may follow."""
        for name, numbers, each, wanted in (
            ("max_new_tokens", self.max_new_tokens, "prompt", count),
            ("forms", self.forms, "prompt", count),
            ("seed", self.seed, "answer", count * self.samples),
        ):
            mismatch = length_mismatch(name, numbers, each, wanted, more)
            if mismatch is not None:
                return mismatch
        return None if more else self.given.length_mismatch(count)

    def requests(self, prompt: Any, index: int) -> list[Request]:
        """Return one request for each row of prompt number `index` (from 0), sample by sample.

        Raises:
            UserError: the prompt is wrong, or the model or a plug-in does not support its answer.
        """
        runtime, plugins, number = self.runtime, self.runtime.plugins, index + 1
        max_new_tokens, form = self.length_and_form(index)
        if isinstance(prompt, Infill):
            if self.given:
                names = " and ".join(f"{name}=" for name, rows in vars(self.given).items() if rows)
                raise UserError(
                    "options-conflict", f"prompt {number} is an Infill, which has its own given tokens. Remove {names}."
                )
            before = prompt.prompt
            name = f"answer {number}" if before is None else f"the answer of prompt {number}"
            given = encode_template(prompt.answer, runtime.tokenizer, runtime.spec, name, alone=before is None)
            max_new_tokens = len(given)
            ids = (
                []
                if before is None
                else encode_one(before, runtime.tokenizer, runtime.spec, len(given), f"prompt {number}", "its answer")
            )
        else:
            self.check_answer(max_new_tokens, form)
            ids = encode_one(prompt, runtime.tokenizer, runtime.spec, max_new_tokens, f"prompt {number}")
            given = self.given.answer(index, max_new_tokens)
        if self.max_length is not None and len(ids) + max_new_tokens > self.max_length:
            most = f"max_length={self.max_length}"
            has = f"has {counted(len(ids), 'token')}, too many for {most} with max_new_tokens={max_new_tokens}"
            if isinstance(prompt, Infill):
                has = f"and its answer have {len(ids) + max_new_tokens} tokens, more than {most}"
            raise UserError("context-exceeded", f"prompt {number} {has}. Raise max_length.")
        if given is not None:
            if plugins.particles.needs_likelihood:
                self.check_likelihood(given=True)
            check_given(given, len(ids), plugins, number)
            self.check_answer(max_new_tokens, form, given)
        bound, first = runtime.bound(max_new_tokens), index * self.samples
        return [
            Request(ids, max_new_tokens, seed, bound, form, given, index, sample)
            for sample in range(self.samples)
            for seed in slot_seeds(self._seed(first + sample), plugins.particles.count)
        ]

    @property
    def rows(self) -> int:
        """Number of rows of each prompt: one for each sample, or as many as the particles have."""
        return self.samples * self.runtime.plugins.particles.count

    def check_likelihood(self, given: bool = False) -> None:
        """Refuse particles that compare answers by a likelihood that is not exact.

        Args:
            given: true if some tokens of the answer are given.

        Raises:
            UserError: the likelihood would not be exact. The message has the reason.
        """
        alone = replace(self.runtime, plugins=replace(self.runtime.plugins, particles=OneRow()))
        reason = next(reasons_against(alone), None)
        if self.stop_strings:
            reason = "stop_strings may end an answer before it is complete. Remove them."
        if given:
            reason = "tokens of the answer are given, which the likelihood would count. Remove them."
        if reason is not None:
            name = named(self.runtime.plugins.particles)
            raise UserError(
                "score-inexact", f"particles={name} compares answers by their exact likelihood, but {reason}"
            )

    def length_and_form(self, index: int) -> tuple[int, int]:
        """Return the length and the form of the answer to prompt `index`, for prompts other than `Infill`."""
        length, form = self.max_new_tokens, 0 if self.forms is None else self.forms
        return length if isinstance(length, int) else length[index], form if isinstance(form, int) else form[index]

    def check_answer(self, max_new_tokens: int, form: int, given: Sequence[int] | None = None) -> None:
        """Refuse an answer whose length or given tokens do not fit the blocks or the form.

        Raises:
            UserError: the blocks do not allow the length, or no answer of the form has it or the given tokens.
        """
        plugins = self.runtime.plugins
        plugins.blocks.lookahead(max_new_tokens)
        for guide in plugins.guides:
            guide.check_answer(tuple(given or [FREE] * max_new_tokens), form)

    def _seed(self, at: int) -> int:
        return _checked_seed(self.seed + at if isinstance(self.seed, int) else self.seed[at])


def slot_seeds(seed: int, rows: int) -> list[int]:
    """Return the seeds of the `rows` rows of an answer. The first row has the answer's own seed."""
    return [seed] if rows == 1 else [seed, *row_seeds(torch.tensor([seed]), 0, rows)[0, 1:].tolist()]


def length_mismatch(name: str, numbers: object, each: str, wanted: int, more: bool = False) -> UserError | None:
    """Return the error if the list `numbers` has not length `wanted`, or None. With `more` it may be longer."""
    if not isinstance(numbers, list) or len(numbers) == wanted or (more and len(numbers) > wanted):
        return None
    there = f"is {each} {wanted}" if more else f"{'is' if wanted == 1 else 'are'} {counted(wanted, each)}"
    has = f"{name}={as_typed(numbers)} has {counted(len(numbers), 'number')}"
    return UserError(
        "length-mismatch",
        f"{has}, and there {there}. Give a list with one for each {each}, or a single number for all.",
    )


def whole_numbers(name: str, given: Any) -> int | list[int]:
    """Return a whole number or a list of whole numbers, also from numpy or a tensor.

    Raises:
        UserError: `given` is something else.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    several = isinstance(values, list | tuple | range)
    try:
        if any(isinstance(one, bool) for one in (values if several else [values])):
            raise TypeError
        return [operator.index(one) for one in values] if several else operator.index(values)
    except TypeError:
        raise invalid(name, given, "Give a whole number, or a list of them", "option-type") from None


def seeds(given: int | Sequence[int], count: int) -> list[int]:
    """Return the seed of each of `count` answers: `given + i` for answer i, or entry i of a list.

    Raises:
        UserError: a seed is not a whole number of at most 63 bits, or a list does not have one for each answer.
    """
    found = whole_numbers("seed", given)
    mismatch = length_mismatch("seed", found, "answer", count)
    if mismatch is not None:
        raise mismatch
    return [_checked_seed(one) for one in (range(found, found + count) if isinstance(found, int) else found)]


def _checked_seed(seed: int) -> int:
    if abs(seed) >= 2**63:
        raise UserError(
            "option-type", f"seed={seed} of an answer has more than 63 bits. Set seeds of at most 18 digits."
        )
    return seed


def check_progress(given: object) -> None:
    """Refuse a `progress` that is neither None nor a function."""
    if given is not None and not callable(given):
        raise invalid("progress", given, "Give a function", "function-invalid")


def check_forms(given: Any, known: int) -> int | list[int] | None:
    """Return the checked `forms`: one number below `known` for all prompts, or a list. Returns None without forms.

    Raises:
        UserError: a number is not below `known`, or only one of `forms` and a guide's list of forms is set.
    """
    if given is None and not known:
        return None
    if given is None:
        if known == 1:
            raise UserError("form-number", "The guide has a list of one form. Remove its brackets, or set forms=0.")
        raise UserError(
            "form-number", f"A guide has a list of {known} forms. Set forms= to a number from 0 to {known - 1}."
        )
    if not known:
        raise UserError(
            "option-not-applicable", f"forms={given!r} needs a guide with a list of forms. Add one, or remove forms=."
        )
    found = whole_numbers("forms", given)
    for at, one in enumerate([found] if isinstance(found, int) else found):
        if not 0 <= one < known:
            where = "forms" if isinstance(found, int) else f"forms[{at}]"
            raise invalid(where, one, f"Set a number from 0 to {known - 1}", "form-number")
    return found


def check_given(given: Sequence[int], prompt: int, plugins: Plugins, number: int) -> None:
    """Refuse given tokens that the model or the scheduler does not support at their positions.

    Args:
        given: tokens of the answer, with `FREE` at positions to generate.
        prompt: number of tokens before the answer.
        number: number of the prompt in the call, for the message.

    Raises:
        UserError: the given tokens are not supported.
    """
    spec = plugins.context.spec
    if FREE not in given:
        size = counted(len(given), "token")
        raise UserError(
            "nothing-to-generate", f"prompt {number}: its answer of {size} is given as a whole. Raise max_new_tokens."
        )
    first = given.index(FREE)
    last = max((at for at, token in enumerate(given) if token != FREE), default=-1)
    if plugins.scheduler.traits.has(ChangingLength) and first < last:
        raise UserError(
            "given-unsupported",
            f"scheduler={named(plugins.scheduler)} moves given tokens after a gap of prompt {number}. Use another"
            " scheduler, for example threshold.",
        )
    if spec.encoder:
        raise UserError(
            "given-unsupported",
            f"prompt {number} fixes tokens of its answer (prefix, suffix, infill or pinned), which this model does not"
            " support. Put them into the prompt.",
        )
    if not prompt and spec.shift and not first:
        raise UserError(
            "given-unsupported",
            f"prompt {number} begins with a gap. Put text before it, since this model predicts no first token.",
        )
    end = first_end(given, spec.eos_ids)
    if end is not None and FREE in given[end:]:
        raise UserError(
            "given-conflict",
            f"prompt {number} has an end-of-text token (id {given[end]}) before a gap of its answer. Remove the token,"
            " or the gap.",
        )
    if first > last:
        return  # only a beginning is given
    if plugins.scheduler.traits.has(LeftToRightVerifier):
        raise UserError(
            "given-unsupported",
            f"scheduler={named(plugins.scheduler)} sees no given tokens after a gap of prompt {number}. Use another"
            " scheduler, for example threshold.",
        )
    if spec.attention == "causal_context":
        raise UserError(
            "given-unsupported",
            f"This causal model cannot see given tokens after a gap of prompt {number}. Give only a beginning.",
        )
    grid = plugins.blocks.grid
    begin = prompt if spec.blocks_from == "text" else 0
    if grid is not None and (begin + first) // grid < (begin + last) // grid:
        raise UserError(
            "given-unsupported",
            f"This block-causal model cannot see given tokens after the gap's block of {grid} tokens (prompt {number})."
            " Give only a beginning, or tokens in the gap's block.",
        )

"""A run of `dllm-sample`: load the model, denoise the prompts, print the answers."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from dllm_sampler import config
from dllm_sampler.cli import inputs, threads
from dllm_sampler.cli.compose import Settings
from dllm_sampler.cli.inputs import Forms, Prompt, Request
from dllm_sampler.cli.live import Screen, render
from dllm_sampler.cli.options import ELSEWHERE, Options
from dllm_sampler.cli.output import Records, Totals, listed
from dllm_sampler.cli.terminal import show
from dllm_sampler.core.ends import first_end
from dllm_sampler.core.naming import named
from dllm_sampler.engine.graphs import networks
from dllm_sampler.errors import NotFiniteError, RowError, UserError, counted
from dllm_sampler.generation.batch import SAME, warn_of_bias
from dllm_sampler.generation.requests import Arguments, check_forms
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.given import GAP, GivenTokens, encode_template
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.kernels.backend import warn
from dllm_sampler.options import SamplerOptions
from dllm_sampler.result import Answer, Commits, Result
from dllm_sampler.sampler import Sampler

if TYPE_CHECKING:
    from dllm_sampler.generation.speculative import SpeculativeSampler
    from dllm_sampler.result import Speculation


def run(asked: Request) -> int:
    """Run a request and return the exit status. Answers go to stdout, the summary to stderr.

    Raises:
        UserError: a mistake in the input that needs the model to be found. No answer was printed.
        NotFiniteError: the model or a guide returned NaN. Answers until then were printed.
        KeyboardInterrupt: from Ctrl-C, after finished answers were printed.
    """
    options = asked.settings.options
    total = max(1, len(asked.prompts)) * options.samples
    with _records(asked) or nullcontext() as records:  # reports a file that cannot be written before the model loads
        sampler = load(asked.settings)
        deer = None if options.target is None else verified(sampler, options)
        if deer is not None:
            both = [*networks(sampler.denoiser), deer.target.model]
            threads.choose(options.threads, threads.parameters(both), str(sampler.device))
        try:
            totals = respond(sampler, deer, options, asked.prompts, asked.forms, records)
        except KeyboardInterrupt:
            if records:
                print(records.left(total), file=sys.stderr)
            raise
    if records and records.there:
        print(records.left(total), file=sys.stderr)
    if not totals.samples:
        return 0
    if said := totals.shortcomings():
        print(said, file=sys.stderr)
    print(totals.line(str(sampler.device)), file=sys.stderr)
    return 0


def _records(asked: Request) -> Records | None:
    """Return the records that `output=` writes, or None without `output=`."""
    options = asked.settings.options
    if options.output is None:
        return None
    said = {name: value for name, value in vars(options).items() if name not in ELSEWHERE}
    whole = [asked.settings.model, asked.settings.plugins, said, asked.forms and asked.forms.values]
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]
    return Records(options.output, options.prompts_file, options.samples, digest)


def respond(
    sampler: Sampler,
    deer: SpeculativeSampler | None,
    options: Options,
    given: list[Prompt],
    own: Forms | None,
    records: Records | None,
) -> Totals:
    """Answer prompts, print the answers to stdout, and return the figures of the run.

    Args:
        own: forms that the prompts name, if any.

    Raises:
        UserError: a prompt is wrong. No answer was printed.
    """
    # every prompt is checked before the first answer is printed
    asked = asks(given, options)
    if deer is None:
        _check_stream(sampler, options)
        spec, tokenizer = sampler.spec, sampler.tokenizer
        if options.infill is not None:  # reports mistakes as infill=, not for each prompt
            encode_template(options.infill, tokenizer, spec, "infill", alone=not given)
        arguments = Arguments.checked(
            sampler.runtime, asked, max_new_tokens=options.max_new_tokens, forms=_forms(own, options, sampler),
            prefix=options.prefix, suffix=options.suffix,
        )  # fmt: skip
        requests = [arguments.requests(prompt, index)[0] for index, prompt in enumerate(asked)]
        forms = [one.form for one in requests] if sampler.plugins.forms else None
        # Reuse the encoded prompts.
        rows: list[Any] = [
            one.prompt if one.given is None else Infill(one.given, one.prompt or None) for one in requests
        ]
    else:
        check_forms(options.forms, 0)
        forms, rows = None, prompts.encode(asked, sampler.tokenizer, deer.spec, options.max_new_tokens)
    totals = Totals(options.prefix is None and options.suffix is None, options.infill is not None)
    # The prompt in a record: messages, token ids, or the typed text.
    typed = given or [options.infill or ""]
    given = [_said(one, text) for one, text in zip(asked, typed, strict=True)]
    if records and options.resume:
        records.resume(given)
    there = records.there if records else set()
    missing = [number for number in range(len(rows) * options.samples) if number not in there]
    if deer is None:
        warn_of_bias(sampler.plugins, options.samples)
    several = len(rows) * options.samples > 1 or sampler.plugins.particles.count > 1
    if deer is None and not options.stream and several:
        found = _in_flight(sampler, options, rows, forms, missing)
    else:
        found = _batches(sampler, deer, options, given, rows, forms, missing, records)
    silent = records is not None and records.replaces_answers
    # On a terminal the answers themselves show the progress. stdout is left alone: the bar is for stderr.
    quiet = options.stream or len(missing) <= options.batch_size or not sys.stderr.isatty() or sys.stdout.isatty()
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False, disable=quiet) as bar:
        progress = bar.add_task("denoising", total=len(missing))
        for first, result, seconds in found:
            totals.add(first, result, seconds)
            try:
                if records:
                    size = range(first, first + len(result.lengths))
                    records.write(first, [given[number // options.samples] for number in size], result, seconds)
            finally:  # an answer that cannot be written is shown at least
                if not silent and not (isinstance(result, Result) and "not_finite" in result.finish_reason):
                    show_answers(result)
            bar.advance(progress, len(result.lengths))
    return totals


def _spans(numbers: Iterable[int]) -> list[range]:
    """Return ascending numbers as ranges of neighbours."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _batches(
    sampler: Sampler,
    deer: SpeculativeSampler | None,
    options: Options,
    given: list[Prompt],
    rows: list[Any],
    forms: list[int] | None,
    missing: list[int],
    records: Records | None,
) -> Iterator[tuple[int, Result | Speculation, float]]:
    """Answer in batches. Yields the number of each batch's first sample, the answers and their seconds."""
    for span in _spans(missing):
        for first in range(span.start, span.stop, options.batch_size):
            part = range(first, min(first + options.batch_size, span.stop))
            at = [number // options.samples for number in part]
            batch, named = [rows[prompt] for prompt in at], None if forms is None else [forms[prompt] for prompt in at]
            if deer is None:
                texts = [given[prompt] for prompt in at]
                result, seconds = _denoise(sampler, options, first, texts, batch, named, records)
            else:
                result, seconds = _verify(deer, options, first, batch)
            yield first, result, seconds


def check(sampler: Sampler, options: Options) -> None:
    """Refuse settings under which no prompt could be answered.

    Raises:
        UserError: there is such a setting.
    """
    spec, tokenizer = sampler.spec, sampler.tokenizer
    asks([], options)
    _check_stream(sampler, options)
    GivenTokens.of(options.prefix, options.suffix, None, tokenizer, spec)
    if options.infill is None:
        prompts.check_new_tokens(options.max_new_tokens, spec)
    else:
        encode_template(options.infill, tokenizer, spec, "infill")
    if options.block_length is not None:
        try:
            sampler.plugins.with_block_length(options.block_length)
        except UserError as error:
            raise UserError(error.code, f"{error} Or set block_length=null.") from error


def _check_stream(sampler: Sampler, options: Options) -> None:
    """Refuse `stream=true` with particles, whose rows cannot be shown."""
    if options.stream and sampler.plugins.particles.count > 1:
        name = named(sampler.plugins.particles)
        raise UserError(
            "option-not-applicable",
            f"stream=true does not work with particles={name}, which decodes several rows. Remove one.",
        )


def asks(given: Sequence[Prompt], options: Options) -> list[Any]:
    """Return the prompts for the sampler. With `chat` texts become messages, and texts with gaps become `Infill`.

    Raises:
        UserError: `prefix`, `suffix` or gaps conflict with `chat`, `infill` or each other.
    """
    found: list[Any] = []
    ends = [f"{name}=" for name in ("prefix", "suffix") if getattr(options, name) is not None]
    if ends and options.infill is not None:
        both = " and ".join(ends)
        raise UserError("options-conflict", f"infill= excludes {both}. Write all of the answer's text in infill=.")
    for number, prompt in enumerate(given, 1):
        gaps = isinstance(prompt, str) and GAP.search(prompt) is not None
        if gaps and (options.chat or options.infill is not None):
            other = "chat=true" if options.chat else "infill="
            raise UserError("gap-unexpected", f"prompt {number} has a gap, which conflicts with {other}. Remove one.")
        if gaps and ends:
            raise UserError(
                "gap-unexpected",
                f"prompt {number} has a gap, which conflicts with {' and '.join(ends)}. Write the text in the prompt.",
            )
        asked = inputs.as_chat(prompt) if options.chat else prompt
        if gaps:
            found.append(Infill(str(prompt)))
        else:
            found.append(asked if options.infill is None else Infill(options.infill, asked))
    return found or [Infill(options.infill or "")]


def _said(asked: Any, typed: Prompt) -> Prompt:
    if not isinstance(asked, Infill):
        return asked
    return typed if asked.prompt is None else cast(Prompt, asked.prompt)


def load(chosen: Settings, like: Sampler | None = None) -> Sampler:
    """Return the sampler that the settings describe. It reuses the model of `like` if there is one."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = chosen.options
    # built before the model is loaded, so that mistakes are reported at once
    plugins = {group: config.build(group, spec) for group, spec in chosen.plugins.items()}
    make = partial(Sampler.from_pretrained, chosen.model, dtype=options.dtype, device=options.device)
    if like is not None:
        make = partial(Sampler, like.denoiser, tokenizer=like.tokenizer)
    given: SamplerOptions = {**options.of_sampler(), **plugins}  # type: ignore[typeddict-item]
    sampler = make(**given)
    threads.choose(options.threads, threads.parameters(networks(sampler.denoiser)), str(sampler.device))
    return sampler


def verified(sampler: Sampler, options: Options) -> SpeculativeSampler:
    """Return the sampler of speculative decoding with `target=`, whose drafter is `sampler`."""
    # transformers' modelling code takes seconds to import
    from dllm_sampler.generation.speculative import SpeculativeSampler

    return SpeculativeSampler(
        sampler,
        options.target,
        draft_length=options.draft_length,
        scheduled=options.draft_scheduled,
        separator=options.separator,
    )


def _verify(deer: SpeculativeSampler, options: Options, first: int, rows: list[list[int]]) -> tuple[Speculation, float]:
    """Draft and verify one batch. Returns the answers and the seconds that they took."""
    begun = time.perf_counter()
    try:
        result = deer.generate(
            rows, max_new_tokens=options.max_new_tokens, seed=options.seed + first, stop_strings=stop_strings(options)
        )
    except NotFiniteError as error:
        raise NotFiniteError(error.step, [first + row for row in error.rows]) from error
    return result, time.perf_counter() - begun


def _forms(said: Forms | None, options: Options, sampler: Sampler) -> int | Sequence[int] | None:
    """Return the numbers of the prompts' forms, from `forms=` or the prompts file. Returns None without forms."""
    known, given = sampler.plugins.forms, options.forms
    if given is None and said is not None:
        single = any(guide.joint or guide.vetoes for guide in sampler.plugins.guides)
        numbers = said.numbers(known or int(single))
        given = numbers if known else None
    return given


def _denoise(
    sampler: Sampler,
    options: Options,
    first: int,
    given: list[Prompt],
    rows: list[Any],
    forms: list[int] | None,
    records: Records | None,
) -> tuple[Result, float]:
    """Return the answers of one batch and their seconds. After Ctrl-C the unfinished canvas is printed."""
    steps = sampler.stream(
        rows,
        max_new_tokens=options.max_new_tokens,
        block_length=options.block_length,
        seed=options.seed + first,  # a row's seed does not depend on the batch it is in
        stop_strings=stop_strings(options),
        forms=forms,
    )
    labels = [str(first + row + 1) for row in range(len(rows))]
    ends, delay = sampler.spec.eos_ids, options.stream_delay
    screen = Screen(Console(stderr=True), labels, sampler.tokenizer, delay, ends) if options.stream else None
    commits: Commits | None = None
    begun, shown = time.perf_counter(), 0.0
    try:
        with screen or nullcontext():
            for commits in steps:
                shown += screen.show(commits) if screen else 0.0
    except KeyboardInterrupt:
        if commits is not None:
            quiet = records is not None and records.replaces_answers
            _interrupted(commits, sampler, sys.stderr if quiet else sys.stdout)
        raise
    except RowError as error:
        numbers = [(first + number - 1) // options.samples + 1 for number in error.prompts]
        raise RowError(error.code, error.template, error.rows, numbers) from error.__cause__
    except NotFiniteError as error:
        if records:
            records.write(first, given, error.result, time.perf_counter() - begun - shown)
        elif commits is not None:  # not written to a file, so printed on stderr
            _interrupted(commits, sampler, sys.stderr)
        raise NotFiniteError(error.step, [first + row for row in error.rows]) from error
    assert commits is not None and commits.result is not None
    return commits.result, time.perf_counter() - begun - shown


def _interrupted(commits: Commits, sampler: Sampler, file: TextIO) -> None:
    """Print the canvas of an interrupted batch, noise as blocks. A finished row ends with its end-of-text token."""
    ends, missing = sampler.spec.eos_ids, 0
    for tokens, masked, steps in commits.rows():
        first = first_end(tokens, ends)
        ended = len(tokens) if first is None else first
        end = len(tokens) if any(masked[:ended]) else ended
        missing += sum(masked[:end])
        show(render(tokens[:end], masked[:end], steps[:end], sampler.tokenizer).plain, file)
    were = "was" if missing == 1 else "were"
    print(f"stopped in step {commits.step}: {counted(missing, 'token')} {were} not committed yet", file=sys.stderr)


def _in_flight(
    sampler: Sampler, options: Options, rows: list[Any], forms: list[int] | None, missing: list[int]
) -> Iterator[tuple[int, Result, float]]:
    """Answer prompts in flight. Yields each sample's number, its answer, and the seconds since the one before.

    Answers are yielded in the order of the prompts. After an error, finished answers are yielded in any case.

    Raises:
        NotFiniteError: the model returned NaN for a prompt. The others have been answered.
    """
    samples, wanted = options.samples, set(missing)
    for span in _spans(dict.fromkeys(number // samples for number in missing)):
        answers = sampler.generate_many(
            rows[span.start : span.stop],
            batch_size=options.batch_size,
            max_new_tokens=options.max_new_tokens,
            block_length=options.block_length,
            seed=options.seed + span.start * samples,
            stop_strings=stop_strings(options),
            forms=None if forms is None else forms[span.start : span.stop],
            samples=samples,
            batching=options.batching,
        )
        order = iter(range(span.start * samples, span.stop * samples))
        early: dict[int, tuple[Answer, float]] = {}
        following, bad, differ, last, begun = next(order), None, False, None, time.perf_counter()
        try:
            for answer in answers:
                number = (span.start + answer.index) * samples + answer.sample
                early[number] = answer, time.perf_counter() - begun
                if answer.finish_reason == "not_finite":
                    bad = bad or NotFiniteError(answer.nfe, [span.start + answer.index + 1])
                while following in early:
                    one, seconds = early.pop(following)
                    differ |= last is not None and last.index == one.index and not torch.equal(last.tokens, one.tokens)
                    last = one
                    if following in wanted:  # otherwise an earlier run wrote this sample
                        yield following, Result.stack([one]), seconds
                    following = next(order, -1)
                begun = time.perf_counter()
        except (Exception, KeyboardInterrupt):
            for number, (one, seconds) in sorted(early.items()):
                if number in wanted:
                    yield number, Result.stack([one]), seconds
            left = {number // samples + 1 for number in (following, *order) if number not in early}
            if following >= 0:
                print(f"stopped: no answer to prompt{'s' * (len(left) > 1)} {listed(sorted(left))}", file=sys.stderr)
            raise
        if bad is not None:
            raise bad
        if samples > 1 and not differ and not sampler.plugins.context.draws:
            warn(SAME.format(samples))


def stop_strings(options: Options) -> Sequence[str]:
    """Return the texts at which an answer ends."""
    return [options.stop_strings] if isinstance(options.stop_strings, str) else options.stop_strings or ()


def show_answers(result: Result | Speculation) -> None:
    """Print the answers, or their token ids without a tokenizer."""
    texts = result.texts
    if texts is None:  # no tokenizer: the ids themselves
        pairs = zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
        texts = [" ".join(map(str, tokens[:length])) for tokens, length in pairs]
    for text in texts:
        show(text)

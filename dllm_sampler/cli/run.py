"""A run of `dllm-sample`: load the model, denoise the prompts, print the answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO, cast

import transformers
from rich.console import Console
from rich.progress import Progress

from dllm_sampler import config, prompts
from dllm_sampler.cli.compose import Settings
from dllm_sampler.cli.inputs import Forms, Prompt
from dllm_sampler.cli.live import Screen, render
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.output import Records, Totals, listed
from dllm_sampler.cli.request import Request
from dllm_sampler.errors import NotFiniteError, RowError
from dllm_sampler.result import Answer, Commits, Result
from dllm_sampler.sampler import Sampler

if TYPE_CHECKING:
    from dllm_sampler.result import Speculation
    from dllm_sampler.speculative.deer import SpeculativeSampler


def run(asked: Request) -> int:
    """Do what a command line asks for; answers go to stdout, figures to stderr.

    Raises:
        UserError: any mistake in the input; nothing was printed then.
        KeyboardInterrupt: after printing what was done.
    """
    options, given = asked.settings.options, asked.prompts
    sampler = load(asked.settings)
    deer = None if options.target is None else verified(sampler, options)
    # every prompt is checked before the first answer is printed
    rows = prompts.encode(given, sampler.tokenizer, (deer or sampler.denoiser).spec, options.max_new_tokens)
    forms = _forms(asked.forms, options, sampler, len(rows))
    totals = Totals()
    many = len(rows) > options.batch_size  # there is progress to show
    # On a terminal the answers themselves show the progress. stdout is left alone: the bar is for stderr.
    quiet = options.stream or not many or not sys.stderr.isatty() or sys.stdout.isatty()
    bar = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False, disable=quiet)
    with bar, Records(options.output, options.prompts_file) if options.output else nullcontext() as records:
        if len(rows) > 1 and deer is None and not options.stream:
            several = Several(given, rows, forms, totals, records)
            for _ in bar.track(several.run(sampler, options), total=len(rows), description="denoising"):
                pass
            rows = []
        for first in bar.track(range(0, len(rows), options.batch_size), description="denoising"):
            batch = slice(first, first + options.batch_size)
            if deer is None:
                named = None if forms is None else forms[batch]
                result, seconds = _denoise(sampler, options, first, given[batch], rows[batch], named, records)
            else:
                result, seconds = _verify(deer, options, first, rows[batch])
            _answer(result)
            totals.add(first, result, seconds)
            if records:
                records.write(first, given[batch], result, seconds)
    if said := totals.shortcomings():
        print(said, file=sys.stderr)
    print(totals.line(str(sampler.device)), file=sys.stderr)
    return 0


@dataclass
class Several:
    """Several prompts. Answers come out in the order of the prompts; those that are early wait."""

    given: list[Prompt]
    rows: list[list[int]]
    forms: list[int] | None
    totals: Totals
    records: Records | None

    def run(self, sampler: Sampler, options: Options) -> Iterator[None]:
        """Yields after each answer. Whatever ends it, answers that are done come out.

        Raises:
            NotFiniteError: the model returned NaN for a prompt; the others have been answered.
        """
        answers = sampler.generate_many(
            self.rows,
            batch_size=options.batch_size,
            max_new_tokens=options.max_new_tokens,
            block_length=options.block_length,
            seed=options.seed,
            stop_strings=_stop_strings(options),
            forms=self.forms,
            batching=cast(Literal["in_flight", "static"], options.batching),
        )
        early: dict[int, tuple[Answer, float]] = {}
        following, bad, begun = 0, None, time.perf_counter()
        try:
            for answer in answers:
                early[answer.index] = answer, time.perf_counter() - begun
                if answer.finish_reason == "not_finite":
                    bad = bad or NotFiniteError(answer.nfe, [answer.index + 1])
                while following in early:
                    self._done(*early[following])
                    del early[following]
                    following += 1
                yield
                begun = time.perf_counter()
        except BaseException:
            for index in sorted(early):
                self._done(*early[index])
            missing = [index + 1 for index in range(following, len(self.rows)) if index not in early]
            if missing:
                print(f"stopped: no answer to prompt {listed(missing)}", file=sys.stderr)
            raise
        if bad is not None:
            raise bad

    def _done(self, answer: Answer, seconds: float) -> None:
        result = Result.stack([answer])
        self.totals.add(answer.index, result, seconds)
        if self.records:
            self.records.write(answer.index, [self.given[answer.index]], result, seconds)
        if answer.finish_reason != "not_finite":  # that is no answer
            _answer(result)


def load(chosen: Settings) -> Sampler:
    """The sampler that the settings describe."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = chosen.options
    # built before the model is loaded: a mistake in them should not wait for gigabytes
    plugins = {group: config.build(group, spec) for group, spec in chosen.plugins.items()}
    return Sampler.from_pretrained(
        chosen.model,
        dtype=None if options.dtype == "auto" else options.dtype,
        device=options.device,
        compat=options.compat,
        max_steps=options.max_steps,
        poll_every=options.poll_every,
        backend=options.backend,
        cuda_graph=options.cuda_graph,
        compile=options.compile,
        scheduler=plugins["scheduler"],
        blocks=plugins["blocks"],
        stop=plugins["stop"],
        cache=plugins["cache"],
        guide=plugins["guide"],
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )


def verified(sampler: Sampler, options: Options) -> SpeculativeSampler:
    """The target of the options, with the sampler as its drafter."""
    from dllm_sampler.speculative.deer import SpeculativeSampler  # transformers' modelling code takes seconds to import

    return SpeculativeSampler(
        sampler,
        options.target,
        draft_length=options.draft_length,
        scheduled=options.draft_scheduled,
        separator=options.separator,
    )


def _verify(deer: SpeculativeSampler, options: Options, first: int, rows: list[list[int]]) -> tuple[Speculation, float]:
    """One batch, drafted and verified, and the seconds it took."""
    begun = time.perf_counter()
    try:
        result = deer.generate(
            rows,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed + first,
            stop_strings=_stop_strings(options),
        )
    except NotFiniteError as error:
        raise NotFiniteError(error.step, [first + row for row in error.rows]) from error
    return result, time.perf_counter() - begun


def _forms(said: Forms | None, options: Options, sampler: Sampler, rows: int) -> list[int] | None:
    """The form of each prompt, by the options or by what the prompts' file said; None: no guide has a list of forms."""
    known, given = sampler.plugins.forms, options.forms
    if given is None and said is not None:
        single = any(guide.joint or guide.vetoes for guide in sampler.plugins.guides)
        numbers = said.numbers(known or int(single))
        given = numbers if known else None
    return prompts.forms(given, known, rows, 1)


def _stop_strings(options: Options) -> Sequence[str]:
    return [options.stop_strings] if isinstance(options.stop_strings, str) else options.stop_strings or ()


def _denoise(
    sampler: Sampler,
    options: Options,
    first: int,
    given: list[Prompt],
    rows: list[list[int]],
    forms: list[int] | None,
    records: Records | None,
) -> tuple[Result, float]:
    """One batch and the seconds it took. Interrupted, it prints the canvas as far as it got."""
    steps = sampler.stream(
        rows,
        max_new_tokens=options.max_new_tokens,
        block_length=options.block_length,
        seed=options.seed + first,  # a row's seed does not depend on the batch it is in
        stop_strings=_stop_strings(options),
        every=1 if options.stream else options.poll_every,
        forms=forms,
    )
    labels = [str(first + row + 1) for row in range(len(rows))]
    eos, delay = sampler.denoiser.spec.eos_id, options.stream_delay
    screen = Screen(Console(stderr=True), labels, sampler.tokenizer, delay, eos) if options.stream else None
    commits: Commits | None = None
    begun, shown = time.perf_counter(), 0.0
    try:
        with screen or nullcontext():
            for commits in steps:
                shown += screen.show(commits) if screen else 0.0
    except KeyboardInterrupt:
        if commits is not None:
            _interrupted(commits, sampler, sys.stdout)
        raise
    except RowError as error:
        raise RowError(error.template, error.rows, [first + number for number in error.prompts]) from error.__cause__
    except NotFiniteError as error:
        if records:
            records.write(first, given, error.result, time.perf_counter() - begun - shown)
        elif commits is not None:  # no file to keep it: shown, but not as an answer
            _interrupted(commits, sampler, sys.stderr)
        raise NotFiniteError(error.step, [first + row for row in error.rows]) from error
    assert commits is not None and commits.result is not None
    return commits.result, time.perf_counter() - begun - shown


def _answer(result: Result | Speculation) -> None:
    texts = result.texts
    if texts is None:  # no tokenizer: the ids themselves
        pairs = zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
        texts = [" ".join(map(str, tokens[:length])) for tokens, length in pairs]
    for text in texts:
        print(text, flush=True)


def _interrupted(commits: Commits, sampler: Sampler, file: TextIO) -> None:
    """The canvas of a batch that was cut short, noise shown as blocks; a row that had ended, up to its end token."""
    rows = zip(commits.tokens.tolist(), commits.masked.tolist(), commits.step_map.tolist(), strict=True)
    eos, missing = sampler.denoiser.spec.eos_id, 0
    for tokens, masked, steps in rows:
        ended = tokens.index(eos) if eos in tokens else len(tokens)
        end = len(tokens) if any(masked[:ended]) else ended
        missing += sum(masked[:end])
        print(render(tokens[:end], masked[:end], steps[:end], sampler.tokenizer).plain, file=file, flush=True)
    print(f"stopped in step {commits.step}: {missing} tokens were not written yet", file=sys.stderr)

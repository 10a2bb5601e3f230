"""One batch, step by step: the checks between two steps, and the result after the last one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import is_random
from dllm_sampler.core.recorder import Recorder, aligned
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine.decide import Generation, Group
from dllm_sampler.engine.groups import Groups, meeting
from dllm_sampler.engine.in_flight import Request
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NoEffectWarning, NotFiniteError, RowError, UserError
from dllm_sampler.generation.requests import Arguments
from dllm_sampler.generation.runtime import Runtime
from dllm_sampler.generation.score import row_scores
from dllm_sampler.inputs import prompts, texts
from dllm_sampler.inputs.prompts import Infill, Prompt
from dllm_sampler.kernels.backend import warn
from dllm_sampler.options import Progress
from dllm_sampler.particles.one import OneRow
from dllm_sampler.result import Commits, Ends, Result, Rows, Trace, summarise

SAME = (
    "samples={}: the answers to each prompt are the same, since decoding is greedy. Set a temperature, for example"
    " temperature=1."
)


def steps(
    runtime: Runtime, prompt: Prompt | Sequence[Prompt], *, every: int, max_new_tokens: int, **arguments: Any
) -> Iterator[Commits]:
    """Check the arguments of `Sampler.generate` or `Sampler.stream`, and return the steps of the batch.

    Args:
        every: transfer one step in `every` to the host, with 0 only the last.
        arguments: arguments of `Arguments.checked`.
    """
    rows, plugins = prompts.as_list(prompt), runtime.plugins
    if not rows:
        raise UserError("prompt-missing", "The prompt is missing. Give at least one.")
    if not all(isinstance(one, Infill) for one in rows):
        prompts.check_new_tokens(max_new_tokens, runtime.spec)  # one number, not a list
    asked = Arguments.checked(runtime, rows, max_new_tokens=max_new_tokens, **arguments)
    requests = [request for index, one in enumerate(rows) for request in asked.requests(one, index)]
    made = iterate_steps(runtime, requests, asked.stop_strings, every, asked.rows)
    return _warned(made, plugins)


def final_result(steps: Iterator[Commits], progress: Progress | None) -> Result:
    """Take every step of a batch and return its result. `progress` is called after each step that is transferred."""
    last: Commits | None = None
    for last in steps:
        if progress is not None:
            free = last.there if last.given is None else last.there & ~last.given
            progress(last.step, int((free & ~last.masked).sum()), int(free.sum()))
    assert last is not None and last.result is not None
    return last.result


def iterate_steps(
    runtime: Runtime, requests: Sequence[Request], stop_strings: Sequence[str], every: int, samples: int = 1
) -> Iterator[Commits]:
    """Yield the steps of one batch. One in `every` is transferred to the host, with 0 only the last.

    Args:
        samples: each `samples` consecutive requests have the same prompt.

    Raises:
        NotFiniteError: the model returned NaN. The error's `result` has the answers so far.
        RowError: a plug-in failed in some rows, for example a reward. The message has the numbers of their prompts.
    """
    plugins, engine, reader = runtime.plugins, runtime.engine(samples), Reader(runtime, stop_strings)
    canvas = runtime.canvas(requests, engine.multiple, cuts=plugins.stop.cuts)
    bound = runtime.bound(canvas.layout.longest)
    watch = watcher(reader, engine, requests)
    for request in requests:
        request.state = "running"
    try:
        for step, state in enumerate(engine.run(canvas, bound), 1):
            if watch is not None:
                watch(state)
            last = state.finished or step == bound
            for request in requests if last else ():
                request.state = "done"
            if last or (every and step % every == 0):
                result = reader.result(state.canvas, state.recorder, requests, state.group) if last else None
                yield _view(state, step, result)
            if last:
                return
    except RowError as error:
        raise error.numbered([request.index + 1 for request in requests]) from error.__cause__
    except NotFiniteError as error:
        count = plugins.particles.count
        groups = {(row - 1) // count for row in error.rows}
        for request in (one for group in groups for one in requests[group * count : (group + 1) * count]):
            request.state, request.is_finite = "done", False
        failed = NotFiniteError(error.step, sorted({requests[row - 1].index + 1 for row in error.rows}))
        failed.state = error.state
        failed.result = reader.result(error.state.canvas, error.state.recorder, requests, error.state.group)
        raise failed from None


def warn_of_copies(plugins: Plugins, found: Result, samples: int) -> None:
    """Warn if the answers to each prompt are the same because nothing is drawn."""
    if samples > 1 and not plugins.context.draws and samples_identical(found.tokens, samples):
        warn(SAME.format(samples))


def warn_of_bias(plugins: Plugins, samples: int) -> None:
    """Warn if answers are biased to likely tokens, because the scheduler ranks drawn tokens by confidence."""
    traits, drawn = plugins.scheduler.traits, plugins.judge == "draw" and is_random(plugins.guides)
    if samples > 1 and drawn and traits.ranks_by_confidence and not traits.draws_order:
        other = ", or set scheduler.position_temperature=1" * hasattr(plugins.scheduler, "position_temperature")
        warn(
            f"samples={samples}: the answers to a prompt differ less than the model's own draws, because"
            f" scheduler={named(plugins.scheduler)} chooses positions by the confidence of the tokens that it drew. Use"
            f" scheduler=leftright for answers without this bias{other}."
        )


def warn_of_forwards(plugins: Plugins, result: Result) -> bool:
    """Warn if an answer took more forwards than `scheduler.steps`. Returns True if one did."""
    steps, made = plugins.scheduler.total_steps, int(result.trace.nfe.max())
    if steps is None or made <= steps:
        return False
    warnings.warn(
        f"steps={steps} of scheduler={named(plugins.scheduler)} was exceeded: it made {made} forwards to commit all"
        " tokens. Each block takes at least one, so longer blocks may need fewer.",
        NoEffectWarning,
        stacklevel=4,
    )
    return True


def _warned(steps: Iterator[Commits], plugins: Plugins) -> Iterator[Commits]:
    """Yield the steps of a batch. Warn at the last step if there were more than `scheduler.steps`."""
    for step in steps:
        if step.result is not None:
            warn_of_forwards(plugins, step.result)
        yield step


def samples_identical(tokens: Tensor, samples: int) -> bool:
    """Return True if all `samples` consecutive answers `[B, N]` to each prompt are the same."""
    each = tokens.view(-1, samples, tokens.shape[1])
    return bool((each == each[:, :1]).all())


def watcher(reader: Reader, engine: Engine, lanes: Sequence[Request | None]) -> Callable[[Generation], None] | None:
    """Return a function to call between two steps, for stop strings and particles, or None without these."""
    groups = Groups(engine, lanes) if engine.plugins.particles.count > 1 else None
    if groups is None and not reader.stop_strings:
        return None

    def watch(state: Generation) -> None:
        if reader.stop_strings:
            reader.stop(engine, state)
        if groups is not None:
            groups(state)

    return watch


@dataclass(frozen=True)
class Reader:
    """A reader that checks stop strings during a generation and builds its result.

    Args:
        runtime: the parts of the sampler.
        stop_strings: texts that end an answer.
    """

    runtime: Runtime
    stop_strings: Sequence[str]

    def stop(self, engine: Engine, state: Generation) -> None:
        """Finish the rows whose text before the first mask contains a stop string. Reads the device."""
        canvas = state.canvas
        answer, noise = canvas.requested(), canvas.masked
        if engine.plugins.scheduler.traits.revises:  # a token in the block may still change
            noise = noise | (canvas.in_block() & ~canvas.done[:, None])
        # One read for all rows. -1 is a token that is not final yet.
        known = canvas.ids.masked_fill(noise, -1).gather(1, answer)
        head = canvas.layout.given_end - canvas.layout.first
        rows = torch.cat([head[:, None], known], 1).tolist()
        known_ids = [row[: row.index(-1)] if -1 in row else row for _, *row in rows]
        heads = None if canvas.layout.given is None else [row[0] for row in rows]  # given tokens do not end an answer
        found = texts.stopped(known_ids, self.runtime.tokenizer, self.stop_strings, heads)
        hit = [not done and stopped for done, stopped in zip(state.done, found, strict=True)]
        if any(hit):
            state.canvas = replace(canvas, done=canvas.done | torch.tensor(hit, device=canvas.done.device))
            engine.ask_and_poll(state)

    def result(
        self, canvas: Canvas, recorder: Recorder, requests: Sequence[Request] = (), group: Group | None = None
    ) -> Result:
        """Return the answers so far, one for each row of the canvas, or with `group` one for each prompt."""
        failed = frozenset(row for row, request in enumerate(requests) if not request.is_finite)
        if group is None:
            return self._rows(canvas, recorder, failed)
        canvas = replace(canvas, done=canvas.done & ~group.waiting)
        return chosen(self.runtime, requests, self._rows(canvas, recorder, failed), canvas, recorder, group)

    def _rows(self, canvas: Canvas, recorder: Recorder, failed: frozenset[int]) -> Result:
        """Return a result with all rows. The logits of the `failed` rows are not finite."""
        spec, tokenizer = self.runtime.spec, self.runtime.tokenizer
        trace = Trace.of(canvas, recorder, spec.mask_id, spec.pad_id, tokenizer)
        masked = aligned(canvas, canvas.masked, False).cpu()
        form = torch.zeros_like(canvas.step) if canvas.layout.form is None else canvas.layout.form
        found = (canvas.done, recorder.stuck, recorder.rejected, form)
        done, stuck, rejected, form = (one.cpu().clone() for one in found)
        known = _given(canvas)
        given = None if known is None else aligned(canvas, known, False).cpu()
        ends = Ends(masked, done, stuck, rejected, form, given, failed)
        return summarise(trace, ends, spec, tokenizer, self.stop_strings, self.runtime.plugins.guides)


def chosen(
    runtime: Runtime, requests: Sequence[Request], rows: Result, canvas: Canvas, recorder: Recorder, group: Group
) -> Result:
    """Return as each prompt's answer the row of its group that the particles rate highest.

    Incomplete rows are only chosen if all rows of the group are incomplete. The first row wins on a tie. Ratings are
    compared to nine decimals.
    """
    particles, prompts = runtime.plugins.particles, requests[:: runtime.plugins.particles.count]
    count, nfe, likelihood = particles.count, rows.nfe + group.nfe.cpu(), None
    if particles.needs_likelihood:
        plugins, decoded = replace(runtime.plugins, particles=OneRow()), rows.trace.decoded.tolist()
        pairs = [(one.prompt, ids[: one.max_new_tokens]) for one, ids in zip(requests, decoded, strict=True)]
        scores = row_scores(replace(runtime, plugins=plugins), pairs, len(pairs))
        likelihood, nfe = scores.log_p.view(-1, count).to(canvas.ids.device), nfe + scores.nfe
    every = torch.ones(len(prompts), dtype=torch.bool, device=canvas.ids.device)
    try:
        rated = particles.rate(meeting(particles, canvas, recorder, every, every), group.carry, likelihood).cpu()
    except RowError as error:
        raise error.numbered([request.index + 1 for request in requests]) from error.__cause__
    ended = rows.complete.view(-1, count)
    winners = torch.where(ended | ~ended.any(1, keepdim=True), rated.round(decimals=9), -torch.inf).argmax(1)
    answers = rows.row(*(winners + torch.arange(len(prompts)) * count).tolist())
    rows = replace(rows, nfe=nfe)
    found = [
        Rows(rows, number * count, winner, ratings, request.meetings)
        for number, (request, winner, ratings) in enumerate(zip(prompts, winners.tolist(), rated.tolist(), strict=True))
    ]
    computed = (rows.trace.rows + group.computed.cpu()).view(-1, count).sum(1)
    trace = replace(answers.trace, rows=computed, seeds=torch.tensor([request.seed for request in prompts]))
    return replace(answers, nfe=nfe.view(-1, count).sum(1), trace=trace, rows=found)


def _view(state: Generation, step: int, result: Result | None) -> Commits:
    canvas = state.canvas
    answer = canvas.requested()

    def cut(tensor: Tensor) -> Tensor:
        return tensor.gather(1, answer).cpu()

    tokens, masked, step_map = cut(canvas.ids), cut(canvas.masked), cut(state.recorder.step_map)
    known = _given(canvas)
    given = None if known is None else cut(known)
    sizes = None if state.recorder.born is None else (canvas.end - canvas.layout.first).cpu()
    open_end = (canvas.stop - canvas.layout.first).cpu()
    return Commits(step, tokens, masked, step_map, state.recorder.nfe.cpu().clone(), result, given, sizes, open_end)


def _given(canvas: Canvas) -> Tensor | None:
    """Return `[B, L+1] bool` given tokens of answers, or None if no row has given tokens."""
    if canvas.layout.given is None:
        return None
    column = canvas.columns()
    return canvas.layout.frozen & (column >= canvas.layout.first[:, None]) & (column < canvas.layout.given[:, None])

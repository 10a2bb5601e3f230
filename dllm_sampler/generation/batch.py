"""One batch, step by step: what the host looks at between two steps, and what it makes of the last one."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Guide, is_random
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.trace import Recorder, Trace, aligned
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine import layout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NotFiniteError, RowError
from dllm_sampler.inputs import infill, prompts
from dllm_sampler.inputs.given import Fixed
from dllm_sampler.inputs.infill import Task
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.kernels.backend import warn
from dllm_sampler.options import MOST_ROWS, Progress
from dllm_sampler.result import Answer, Commits, Ends, Result, summarise

if TYPE_CHECKING:
    from dllm_sampler.sampler import Sampler

SAME = "samples={}: the answers to each prompt are the same, since nothing is drawn; set temperature=1, say"

ALIKE = (
    "samples={}: the answers to a prompt differ less than the model's own draws, because scheduler={} chooses positions"
    " by the confidence of the tokens that it drew. Use scheduler=random_order or scheduler=leftright for answers"
    " without this bias."
)


def result(steps: Iterator[Commits], progress: Progress | None) -> Result:
    """Take every step of a batch and return its result; `progress` is told of each step that is seen."""
    last: Commits | None = None
    for last in steps:
        if progress is not None:
            free = last.there if last.given is None else last.there & ~last.given
            progress(last.step, int((free & ~last.masked).sum()), int(free.sum()))
    assert last is not None and last.result is not None
    return last.result


def warn_of_copies(plugins: Plugins, found: Result, samples: int) -> None:
    """Warn where the answers to each prompt are the same because nothing is drawn."""
    if samples > 1 and not plugins.context.draws and alike(found.tokens, samples):
        warn(SAME.format(samples))


def warn_of_bias(plugins: Plugins, samples: int) -> None:
    """Warn where likely tokens come more often than they are drawn: an unlikely one waits and is drawn again."""
    if samples > 1 and plugins.scheduler.traits.ranks_by_confidence and is_random(plugins.guides):
        warn(ALIKE.format(samples, named(plugins.scheduler)))


def warn_of_steps(plugins: Plugins, tasks: Iterable[Task]) -> int:
    """Warn where the blocks of an answer take more forwards than `scheduler.steps`. Returns these; 0: no warning."""
    steps, blocks = plugins.scheduler.total_steps, plugins.blocks
    if steps is None or blocks.several or plugins.scheduler.traits.initial is not None:
        return 0  # blocks that are open at once share forwards, and an answer may become shorter
    added = plugins.scheduler.added_steps
    total, planned, count = max(
        (planned + added * count, planned, count)
        for planned, count in (
            layout.planned_steps(len(task.prompt), task.new_tokens, task.given, steps, blocks, plugins.context.spec)
            for task in tasks
        )
    )
    if total <= steps:
        return 0
    least = "at least " * (blocks.sizes_on_open and not blocks.ends(1 << 16))
    why = "since each takes one forward or more" if planned > steps else "which share them"
    more = f" and {added} on top" if added else ""
    warnings.warn(
        f"scheduler.steps={steps} is too few for {least}{count} block{'s' * (count != 1)}, {why}{more}: {least}{total}"
        " are planned. For fewer forwards, use longer blocks.",
        UserWarning,
        stacklevel=4,
    )
    return total


def warn_of_forwards(plugins: Plugins, result: Result, planned: int) -> int:
    """Warn where an answer took more forwards than `scheduler.steps` and than were planned. Returns the most so far."""
    steps, made = plugins.scheduler.total_steps, int(result.nfe.max())
    if steps is None or made <= max(steps, planned):
        return planned
    warnings.warn(
        f"scheduler.steps={steps} was exceeded: scheduler={named(plugins.scheduler)} made {made} forwards until all was"
        " committed. For fewer forwards, use longer blocks or a scheduler with a fixed number, scheduler=fixed.",
        UserWarning,
        stacklevel=4,
    )
    return made


def _checked(commits: Iterator[Commits], plugins: Plugins, planned: int) -> Iterator[Commits]:
    """The steps of a batch, with a warning at the last if there were more than planned."""
    for step in commits:
        if step.result is not None:
            warn_of_forwards(plugins, step.result, planned)
        yield step


def alike(tokens: Tensor, samples: int) -> bool:
    """Whether all `samples` answers `[B, N]` to each prompt are the same, side by side."""
    each = tokens.view(-1, samples, tokens.shape[1])
    return bool((each == each[:, :1]).all())


def steps(
    sampler: Sampler,
    plugins: Plugins,
    given: Prompt | Sequence[Prompt],
    *,
    new_tokens: int,
    seed: int | Sequence[int],
    stops: str | Sequence[str],
    samples: int,
    forms: int | Sequence[int] | None,
    fixed: Fixed,
    every: int,
) -> Iterator[Commits]:
    """Check the arguments of `Sampler.generate` or `Sampler.stream`, and start the loop."""
    found = prompts.stop_strings(stops, sampler.tokenizer)
    check_count("samples", samples, most=MOST_ROWS)
    tasks = infill.encode(given, sampler.tokenizer, plugins, new_tokens, fixed)
    wrong = fixed.uneven(len(tasks))
    if wrong is not None:
        raise wrong
    tasks = [task for task in tasks for _ in range(samples)]
    own = prompts.forms(forms, plugins.forms, len(tasks), samples)
    infill.check_forms(tasks, own or [0] * len(tasks), plugins)
    planned = warn_of_steps(plugins, tasks[::samples])
    made = commits(sampler, plugins, tasks, prompts.seeds(seed, len(tasks)), found, every, samples, own)
    return _checked(made, plugins, planned)


def commits(
    sampler: Sampler,
    plugins: Plugins,
    tasks: Sequence[Task],
    seeds: Sequence[int],
    stops: tuple[str, ...],
    every: int,
    samples: int = 1,
    forms: Sequence[int] | None = None,
) -> Iterator[Commits]:
    """The steps of one batch; one in `every` is transferred, with 0 only the last."""
    engine, spec = sampler.engine(plugins, samples), sampler.spec
    rows, new_tokens, given = zip(*tasks, strict=True)
    canvas = layout.canvas(
        rows, new_tokens, seeds, spec, plugins.blocks, sampler.noise, plugins.stop.cuts, engine.multiple, forms=forms,
        given=None if all(one is None for one in given) else given, initial=plugins.scheduler.traits.initial,
    )  # fmt: skip
    bound = sampler.max_steps or plugins.bound(canvas.longest)
    return Reader(spec, sampler.tokenizer, stops, plugins.guides).commits(engine, canvas, bound, every)


@dataclass(frozen=True)
class Reader:
    """Reads texts and results out of a generation.

    Args:
        stop_strings: texts that end an answer.
        guides: they say which answers are valid.
    """

    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase | None
    stop_strings: Sequence[str]
    guides: Sequence[Guide] = ()

    def commits(self, engine: Engine, canvas: Canvas, bound: int, every: int) -> Iterator[Commits]:
        """The steps of a batch, at most `bound`; one in `every` is transferred, with 0 only the last.

        Raises:
            NotFiniteError: the model returned NaN; its `result` holds what was done.
            RowError: a plug-in has met something it cannot use, with the prompt's number.
        """
        try:
            for step, state in enumerate(engine.run(canvas, bound), 1):
                self.stop(engine, state)
                last = state.finished or step == bound
                if last or (every and step % every == 0):
                    yield _view(state, step, self.result(state.canvas, state.recorder) if last else None)
                if last:
                    return
        except RowError as error:
            raise error.numbered([row // engine.samples + 1 for row in range(len(canvas.ids))]) from error.__cause__
        except NotFiniteError as error:
            error.result = self.result(error.state.canvas, error.state.recorder, {row - 1 for row in error.rows})
            raise

    def stop(self, engine: Engine, state: Generation) -> None:
        """Finish the rows whose text up to the first mask contains a stop string (a host read, between steps)."""
        if not self.stop_strings:
            return
        canvas = state.canvas
        answer, noise = canvas.asked(), canvas.masked
        if engine.plugins.scheduler.traits.revises:  # what stands in the block may still become something else
            noise = noise | (canvas.in_block() & ~canvas.done[:, None])
        # One read for all, between two steps and only with stop strings: -1 where a row's text is not known yet.
        known = canvas.ids.masked_fill(noise, -1).gather(1, answer)
        head = torch.zeros_like(canvas.first) if canvas.given is None else canvas.given - canvas.first
        rows = torch.cat([head[:, None], known], 1).tolist()
        texts = [row[: row.index(-1)] if -1 in row else row for _, *row in rows]
        heads = None if canvas.given is None else [row[0] for row in rows]  # what is given stays
        found = prompts.stopped(texts, self.tokenizer, self.stop_strings, heads)
        hit = [not done and stopped for done, stopped in zip(state.done, found, strict=True)]
        if any(hit):
            state.canvas = replace(canvas, done=canvas.done | torch.tensor(hit, device=canvas.done.device))
            engine.ask(state)

    def result(self, canvas: Canvas, recorder: Recorder, failed: Collection[int] = ()) -> Result:
        """The answers as they stand; for the rows `failed` the model returned no finite statistics."""
        trace = Trace.of(canvas, recorder, self.spec.mask_id, self.spec.pad_id, self.tokenizer)
        masked = aligned(canvas, canvas.masked, False).cpu()
        form = torch.zeros_like(canvas.step) if canvas.form is None else canvas.form
        found = (canvas.done, recorder.stuck, recorder.rejected, form)
        done, stuck, rejected, form = (one.cpu().clone() for one in found)
        known = _given(canvas)
        given = None if known is None else aligned(canvas, known, False).cpu()
        ends = Ends(masked, done, stuck, rejected, form, given, frozenset(failed))
        return summarise(trace, ends, self.spec, self.tokenizer, self.stop_strings, self.guides)

    def answer(self, result: Result, at: int, index: int, sample: int = 0, *, new_tokens: int) -> Answer:
        """Row `at` of a result as the answer to prompt `index`."""
        return Answer(
            index,
            sample,
            result.finish_reason[at],
            result.tokens[at, :new_tokens],
            int(result.lengths[at]),
            None if result.texts is None else result.texts[at],
            int(result.nfe[at]),
            result.trace.row(at).unpadded(new_tokens),
            int(result.rejections[at]),
            None if result.valid is None else bool(result.valid[at]),
            None if result.gaps is None else result.gaps[at],
        )


def _view(state: Generation, step: int, result: Result | None) -> Commits:
    canvas = state.canvas
    answer = canvas.asked()

    def cut(tensor: Tensor) -> Tensor:
        return tensor.gather(1, answer).cpu()

    tokens, masked, step_map = cut(canvas.ids), cut(canvas.masked), cut(state.recorder.step_map)
    known = _given(canvas)
    given = None if known is None else cut(known)
    sizes = None if state.recorder.born is None else (canvas.end - canvas.first).cpu()
    open_end = (canvas.stop - canvas.first).cpu()
    return Commits(step, tokens, masked, step_map, canvas.nfe.cpu().clone(), result, given, sizes, open_end)


def _given(canvas: Canvas) -> Tensor | None:
    """`[B, L+1] bool` tokens of answers that were given; None: no row has one."""
    if canvas.given is None:
        return None
    column = canvas.columns()
    return canvas.frozen & (column >= canvas.first[:, None]) & (column < canvas.given[:, None])

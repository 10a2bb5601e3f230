"""One batch, step by step: what the host looks at between two steps, and what it makes of the last one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler import prompts
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.trace import Recorder, Trace, aligned
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.errors import NotFiniteError, RowError
from dllm_sampler.result import Answer, Commits, Ends, Result, summarise


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
        known = canvas.ids.masked_fill(noise, -1).gather(1, answer).tolist()
        texts = prompts.decode([row[: row.index(-1)] if -1 in row else row for row in known], self.tokenizer, ())
        hit = [
            not done and any(stop in text for stop in self.stop_strings)
            for done, text in zip(state.done, texts, strict=True)
        ]
        if any(hit):
            state.canvas = replace(canvas, done=canvas.done | torch.tensor(hit, device=canvas.done.device))
            engine.ask(state)

    def result(self, canvas: Canvas, recorder: Recorder, failed: Collection[int] = ()) -> Result:
        """The answers as they stand; for the rows `failed` the model returned no finite statistics."""
        trace = Trace.of(canvas, recorder, self.spec.mask_id, self.spec.pad_id, self.tokenizer)
        masked = aligned(canvas, canvas.masked, False).cpu()
        form = torch.zeros_like(canvas.step) if canvas.form is None else canvas.form
        known = (canvas.done, recorder.stuck, recorder.rejected, form)
        done, stuck, rejected, form = (one.cpu().clone() for one in known)
        ends = Ends(masked, done, stuck, rejected, form, frozenset(failed))
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
        )


def _view(state: Generation, step: int, result: Result | None) -> Commits:
    canvas = state.canvas
    answer = canvas.asked()

    def cut(tensor: Tensor) -> Tensor:
        return tensor.gather(1, answer).cpu()

    tokens, masked, step_map = cut(canvas.ids), cut(canvas.masked), cut(state.recorder.step_map)
    return Commits(step, tokens, masked, step_map, canvas.nfe.cpu().clone(), result)

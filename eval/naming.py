"""How errors name the samples of a task: by their numbers, and by file and line where they come from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import RowError, UserError
from dllm_sampler.eval.tasks.base import Sample, Task
from dllm_sampler.inputs import prompts


@contextmanager
def numbered(samples: Sequence[Sample]) -> Iterator[None]:
    """Where a plug-in names prompts by their place in a call, name them by the numbers of these samples."""
    try:
        yield
    except RowError as error:
        numbers = [samples[number - 1].index + 1 for number in error.prompts]
        raise RowError(error.code, error.template, error.rows, numbers) from error.__cause__


def check_prompts(
    task: Task,
    given: Callable[[Sequence[Sample]], Sequence[Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    spec: ModelSpec,
    max_new_tokens: int,
) -> None:
    """Refuse prompts from a file that the model cannot take, before any is answered.

    Args:
        task: samples that it makes itself are not looked at.
        given: the prompts of samples, as the sampler gets them.
        tokenizer: the model's.
        spec: the model's.
        max_new_tokens: length of the canvas behind each prompt.

    Raises:
        UserError: naming file, line, and what is wrong.
    """
    sources = {sample.index: where for sample in task.samples() if (where := task.source(sample)) is not None}
    found = [sample for sample in task.samples() if sample.index in sources]
    for sample, prompt in zip(found, given(found) if found else (), strict=True):
        try:
            prompts.encode([prompt], tokenizer, spec, max_new_tokens, sample.index + 1)
        except UserError as error:
            raise UserError(error.code, f"{sources[sample.index]}: {error}") from error

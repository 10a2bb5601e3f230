"""A wrapper of a user's task. An exception or an invalid result of its main methods becomes a `UserError`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dllm_sampler.core.checks import is_whole
from dllm_sampler.errors import UserError, first_line, short
from dllm_sampler.eval.tasks.base import Answer, Sample, Task


def _is_prompt(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return isinstance(value, str)
    return all(map(is_whole, value)) or all(isinstance(one, Mapping) for one in value)


class Asked:
    """The task of task=`name`, a user's, with checks of what its methods return. Other attributes are the task's."""

    def __init__(self, task: Task, name: str):
        self.task, self.called = task, f"task={name}"
        self._samples: Sequence[Sample] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def prompt(self, sample: Sample, tokenizer: Any) -> Any:
        """Return the prompt of a sample.

        Raises:
            UserError: the task raised an exception, or did not return a prompt.
        """
        found = self._of("prompt()", lambda: self.task.prompt(sample, tokenizer))
        if not _is_prompt(found):
            said = f"{self.called}: prompt() returned {short(repr(found))}. Make it text, messages or token ids."
            raise UserError("task-result", said)
        return found

    def samples(self) -> Sequence[Sample]:
        """Return the samples. The task's method is called once.

        Raises:
            UserError: the task raised an exception, or did not return a list of valid samples.
        """
        if self._samples is None:
            found = self._of("samples()", self.task.samples)
            if not isinstance(found, Sequence) or not found or not all(isinstance(one, Sample) for one in found):
                raise UserError(
                    "task-result",
                    f"{self.called}: samples() returned {short(repr(found))}. Return a list of at least one Sample.",
                )
            for place, one in enumerate(found):
                self._check(place, one)
            self._samples = found
        return self._samples

    def _check(self, place: int, sample: Sample) -> None:
        if sample.index != place:
            raise UserError(
                "task-result", f"{self.called}: sample {place + 1} has index {sample.index!r}. Set index={place}."
            )
        given = sample.prompt
        try:
            json.dumps(given)
            right = _is_prompt(given)
        except (TypeError, ValueError):
            right = False
        if not right:
            raise UserError(
                "task-result",
                f"{self.called}: the prompt of sample {place + 1} is {short(repr(given))}. Make it text, messages or"
                " token ids, with values that JSON has.",
            )

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return the grades of an answer.

        Raises:
            UserError: the task raised an exception, or the grades are not numbers with its `score` from 0 to 1.
        """
        given = self._of(f"grade() of sample {sample.index + 1}", lambda: self.task.grade(sample, answer))
        score = self.task.score
        try:
            found = {str(name): float(value) for name, value in given.items()}
        except (AttributeError, TypeError, ValueError):
            found = {}
        if not all(map(math.isfinite, found.values())) or not 0 <= found.get(score, -1) <= 1:
            raise UserError(
                "task-result",
                f"{self.called}: grade() of sample {sample.index + 1} returned {short(repr(given))}."
                f" Return a mapping of names to finite numbers, with {score!r} from 0 to 1.",
            )
        return found

    def together(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> Mapping[str, float]:
        """Return the measures of all answers together.

        Raises:
            UserError: the task raised an exception, or did not return numbers by name.
        """
        given = self._of("together()", lambda: self.task.together(samples, answers))
        try:
            return {str(name): float(value) for name, value in given.items()}
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                "task-result",
                f"{self.called}: together() returned {short(repr(given))}. Return a mapping of names to numbers.",
            ) from None

    def _of(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            kind = type(error).__name__
            said = f"{kind} ({first_line(error)})" if str(error).strip() else kind
            raise UserError("function-failed", f"{self.called}: {what} raised {said}. Correct the task.") from error

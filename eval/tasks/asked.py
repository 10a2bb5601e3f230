"""A wrapper of a user's task: its exceptions and invalid results become a `UserError`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dllm_sampler.errors import UserError, short
from dllm_sampler.eval.tasks.base import Answer, Sample, Task


class Asked:
    """The task of task=`name`, a user's, with checked methods. All other attributes are those of the task."""

    def __init__(self, task: Task, name: str):
        self.task, self.called = task, f"task={name}"
        self._samples: Sequence[Sample] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

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
        each = list(given) if isinstance(given, Sequence) else [None]
        messages = bool(each) and all(isinstance(one, Mapping) for one in each)
        if not isinstance(given, str) and not all(type(one) is int for one in each) and not messages:
            raise UserError(
                "task-result",
                f"{self.called}: the prompt of sample {place + 1} is {short(repr(given))}. Give text, messages or ids.",
            )
        try:
            json.dumps(given)
        except (TypeError, ValueError):
            raise UserError("task-result", f"{self.called}: prompt {place + 1} is not JSON. Use text.") from None

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
                f" Return a mapping with {score!r} from 0 to 1.",
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
            raise UserError(
                "function-failed", f"{self.called}: {what} raised {type(error).__name__} ({error}). Correct the task."
            ) from error

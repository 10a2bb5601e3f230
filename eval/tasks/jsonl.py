"""Prompts and answers of a user's own file, graded by a metric of the user's choice."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from dllm_sampler.cli.inputs import Prompt, prompt, records
from dllm_sampler.core.functions import function
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval.tasks.base import Answer, Sample, Task, digest
from dllm_sampler.paths import expanded


def exact_match(text: str, answer: str) -> float:
    """1 where the text is the answer, but for white space at the ends."""
    return float(text.strip() == answer.strip())


def contains(text: str, answer: str) -> float:
    """1 where the answer stands somewhere in the text."""
    return float(answer in text)


def regex(text: str, answer: str) -> float:
    """1 where the regular expression `answer` matches somewhere in the text."""
    return float(re.search(answer, text) is not None)


METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "contains": contains, "regex": regex}


@dataclass(frozen=True)
class Line:
    """A line of the file: where it stands, its prompt, its answer (None: it has none), and all that it says."""

    where: str
    prompt: Prompt
    answer: Any
    fields: Mapping[str, Any]


@dataclass
class Jsonl(Task):
    """The lines of a JSON Lines file, each with a prompt and an answer.

    Args:
        file: its path. A line is an object with `prompt` (a text or token ids) or `messages`, as in a `prompts_file`,
            and `answer`: a text, or a list of texts of which each is right.
        metric: `exact_match`, `contains` or `regex`; or `package.module:function`, called as
            `function(text=..., answer=..., prompt=..., ids=..., line=...)`, which returns the score, a number from 0
            to 1, or a mapping of names to numbers with `score` among them.
        count: how many lines, from the first; None: all.
        seed: the samples do not depend on it.

    Raises:
        UserError: the file or a line of it cannot be used, or the metric cannot be had.
    """

    name: ClassVar[str] = "jsonl"

    file: str | None = None
    metric: str = "exact_match"
    count: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if self.file is None:
            raise UserError("task=jsonl needs a file: say task.file=FILE.jsonl")
        if self.metric not in METRICS and ":" not in self.metric:
            raise unknown("task.metric", self.metric, [*METRICS, "package.module:function"])
        if self.metric in METRICS:
            for line in self.lines:
                self._check(line)
        else:
            _ = self.call

    @cached_property
    def lines(self) -> Sequence[Line]:
        """The file's, at most `count`."""
        assert self.file is not None
        try:
            with expanded("task.file", self.file).open(encoding="utf-8") as opened:
                found = records(opened, self.file)
        except OSError as error:
            raise UserError(f"cannot read task.file {self.file}: {error.strerror}") from None
        if not found:
            raise UserError(f"task.file {self.file} has no lines")
        lines = []
        for where, record in found[: self.count]:
            if not isinstance(record, dict):
                raise UserError(f'{where} should be an object like {{"prompt": ..., "answer": ...}}')
            lines.append(Line(where, prompt(record, where), record.get("answer"), record))
        return lines

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The function that `metric` names."""
        return function("task.metric", self.metric)

    @property
    def content(self) -> str:
        """See `Task.content`: the file, and the module of a metric of the user's own."""
        assert self.file is not None
        module = None if self.metric in METRICS else sys.modules.get(self.call.__module__)
        code = getattr(module, "__file__", None)
        return digest(Path(self.file).expanduser(), *([Path(code)] if code else []))

    def samples(self) -> Sequence[Sample]:
        """See `Task.samples`."""
        return [Sample(index, line.prompt) for index, line in enumerate(self.lines)]

    def source(self, sample: Sample) -> str:
        """See `Task.source`."""
        return self.lines[sample.index].where

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """`score`, and what else a metric of the user's own says."""
        line = self.lines[sample.index]
        if self.metric in METRICS:
            right = [line.answer] if isinstance(line.answer, str) else line.answer
            return {"score": max(METRICS[self.metric](answer.text, one) for one in right)}
        try:
            given = self.call(
                text=answer.text, answer=line.answer, prompt=line.prompt, ids=list(answer.ids), line=dict(line.fields)
            )
        except Exception as error:  # whatever the user's function raises
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"{line.where}: task.metric={self.metric} raised {said}") from error
        return self._scores(given, line.where)

    def _scores(self, given: Any, where: str) -> dict[str, float]:
        """What the user's function returned, checked."""
        named = given if isinstance(given, Mapping) else {"score": given}
        try:
            found = {str(name): float(value) for name, value in named.items()}
        except (TypeError, ValueError):
            found = {}
        if not all(map(math.isfinite, found.values())) or not 0 <= found.get("score", -1) <= 1:
            raise UserError(
                f"{where}: task.metric={self.metric} returned {given!r}: it should be a score from 0 to 1, or a"
                " mapping of names to numbers with 'score' among them"
            )
        return found

    def _check(self, line: Line) -> None:
        """Refuse an answer that none of the metrics here can use."""
        right = [line.answer] if isinstance(line.answer, str) else line.answer
        if not isinstance(right, list) or not right or not all(isinstance(one, str) for one in right):
            raise UserError(
                f'{line.where}: "answer" should be a text, or a list of texts, for task.metric={self.metric}'
            )
        if self.metric == "regex":
            for one in right:
                try:
                    re.compile(one)
                except re.error as error:
                    raise UserError(f'{line.where}: "answer" is no regular expression: {error}') from None
